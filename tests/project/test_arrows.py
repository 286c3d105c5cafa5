"""The import arrows of the design hold, for imports inside functions too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "deltapost": ROOT / "shared" / "deltapost",
    "deltapost.migrations": ROOT / "migrations",
    "deltapost_aggregator": ROOT / "services" / "deltapost_aggregator",
    "deltapost_ledger": ROOT / "services" / "deltapost_ledger",
}

#: A module may import from its own layer and from those before it; parts of one layer only where named.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "limits", "root"}),
    frozenset({"serialization", "settings", "points", "events"}),
    frozenset({"adapters"}),
    frozenset({"codecs"}),
    frozenset({"algorithms"}),
    frozenset({"stores", "streams"}),
    frozenset({"ledger", "migrations"}),
    frozenset({"audit", "learner"}),
    frozenset({"integrations", "deltapost_aggregator", "deltapost_ledger", "cli"}),
)

#: Imports inside one layer: the ledger brings its migrations, the command starts services by name.
WITHIN_A_LAYER = frozenset(
    {
        ("limits", "errors"),
        ("settings", "serialization"),
        ("ledger", "migrations"),
        ("migrations", "ledger"),
        ("cli", "integrations"),
        ("cli", "deltapost_aggregator"),
        ("cli", "deltapost_ledger"),
    }
)

#: Parts that take values and return values.
PURE = frozenset({"errors", "limits", "serialization", "codecs", "algorithms"})

#: What a pure part may not import.
CLOCK_AND_CHANCE = frozenset({"random", "secrets", "tenacity", "time", "uuid"})
NETWORK = frozenset(
    {"asyncio", "boto3", "botocore", "http", "httpx", "redis", "requests", "socket", "ssl", "urllib"}
)
DATABASE = frozenset({"alembic", "psycopg", "sqlalchemy", "sqlite3"})
SURROUNDINGS = frozenset(
    {"getpass", "logging", "platform", "pydantic_settings", "signal", "subprocess", "sys"}
)
CONCURRENCY = frozenset({"concurrent", "multiprocessing", "selectors", "threading"})
IMPURE = CLOCK_AND_CHANCE | NETWORK | DATABASE | SURROUNDINGS | CONCURRENCY

#: What a pure part may not use of the modules it may import: `datetime.now`, `os.environ` and their like.
IMPURE_ATTRIBUTES = frozenset({"now", "utcnow", "today", "environ", "environb", "getenv", "getpid", "uname"})


def modules() -> dict[str, Path]:
    """Every module of the distribution, by its import name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def part_of(module: str) -> str:
    """The part that a module of ours belongs to: `deltapost.ledger.tables` to `ledger`."""
    top, _, rest = module.partition(".")
    return top if top != "deltapost" else rest.partition(".")[0] or "root"


def imports(module: str) -> Iterator[tuple[str, int]]:
    """Every module that `module` imports anywhere but for types only, with the line."""
    path = MODULES[module]
    tree = ast.parse(path.read_text(), filename=str(path))
    for node in _running(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                above = package[: len(package) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield (inner if inner in MODULES else base), node.lineno


def _running(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from (other, *_running(other))
        else:
            yield from (child, *_running(child))


def ours(module: str) -> Iterator[tuple[str, int]]:
    """The imports of `module` that stay inside the distribution."""
    return (
        (name, line)
        for name, line in imports(module)
        if name.partition(".")[0] in {m.partition(".")[0] for m in PACKAGES}
    )


def layer_of(part: str) -> int:
    return next(index for index, layer in enumerate(LAYERS) if part in layer)


def allowed(here: str, there: str) -> bool:
    """Whether a module of part `here` may import one of part `there`."""
    # The package's own first module only says its version and where public names are found.
    if "root" in (here, there) or here == there:
        return True
    return layer_of(there) < layer_of(here) or (here, there) in WITHIN_A_LAYER


def in_parts(parts: frozenset[str]) -> list[str]:
    return sorted(module for module in MODULES if part_of(module) in parts)


def test_every_part_of_the_distribution_has_its_place_in_the_layers() -> None:
    placed = set().union(*LAYERS)

    assert {part_of(module) for module in MODULES} - placed == set()


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_run_from_earlier_layers_to_later_ones_only(module: str) -> None:
    against = [
        f"{module}:{line} imports {name}"
        for name, line in ours(module)
        if not allowed(part_of(module), part_of(name))
    ]

    assert against == []


def test_the_first_module_loads_nothing_of_the_library_before_a_name_is_asked_for() -> None:
    tree = ast.parse(MODULES["deltapost"].read_text())
    at_once = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    at_once |= {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}

    assert {
        name for name in at_once if name and name.startswith("deltapost.") and part_of(name) not in PURE
    } == set()


@pytest.mark.parametrize("module", in_parts(PURE))
def test_pure_parts_reach_no_clock_environment_network_database_or_logger(module: str) -> None:
    reached = [
        f"line {line} imports {name}" for name, line in imports(module) if name.split(".")[0] in IMPURE
    ]
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Attribute) and node.attr in IMPURE_ATTRIBUTES:
            reached.append(f"line {node.lineno} uses {ast.unparse(node)}")

    assert reached == []


@pytest.mark.parametrize("module", in_parts(frozenset({"learner", "integrations"})))
def test_a_learner_never_imports_the_ledger_or_a_service(module: str) -> None:
    forbidden = {"ledger", "migrations", "deltapost_aggregator", "deltapost_ledger"}

    assert [
        name for name, _ in imports(module) if part_of(name) in forbidden or name.startswith("sqlalchemy")
    ] == []


@pytest.mark.parametrize("module", in_parts(frozenset({"deltapost_aggregator", "deltapost_ledger"})))
def test_services_never_import_each_other_nor_a_learner(module: str) -> None:
    forbidden = {"deltapost_aggregator", "deltapost_ledger", "learner"} - {part_of(module)}

    assert [name for name, _ in ours(module) if part_of(name) in forbidden] == []


def test_the_aggregator_runs_where_neither_torch_nor_mlx_nor_a_learner_can_be_imported() -> None:
    # Given an interpreter in which importing one of them fails
    services = [name for name in MODULES if part_of(name) == "deltapost_aggregator"]
    program = (
        "import sys, importlib\n"
        "for absent in ('torch', 'mlx', 'mlx.core', 'deltapost.learner'): sys.modules[absent] = None\n"
        f"for module in {services!r}: importlib.import_module(module)\n"
        "from deltapost.adapters.native import NativeBackend\n"
    )

    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert (ran.returncode, ran.stderr) == (0, "")
