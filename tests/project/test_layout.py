"""The repository is laid out as the design says, in modules one can read in a sitting."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOP_LEVEL = frozenset(
    {
        ".ci",
        ".gitignore",
        "LICENSE",
        "Makefile",
        "README.md",
        "benchmarks",
        "constraints.txt",
        "docker",
        "docs",
        "migrations",
        "pyproject.toml",
        "services",
        "shared",
        "tests",
    }
)

#: Lines of one file of code; a longer one is more than one idea.
MAX_LINES = 400


def ignored() -> list[str]:
    """What version control leaves out, as patterns of names."""
    return [".git", *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split())]


def code() -> list[Path]:
    """The files of Python code, relative to the repository's root."""
    folders = (ROOT / name for name in sorted(TOP_LEVEL) if (ROOT / name).is_dir())
    found = (path.relative_to(ROOT) for folder in folders for path in folder.rglob("*.py"))
    return [
        path for path in found if not any(fnmatch(part, glob) for part in path.parts for glob in ignored())
    ]


def project() -> dict[str, object]:
    tool: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return tool


def test_the_top_level_holds_only_what_the_design_names() -> None:
    names = {path.name for path in ROOT.iterdir()}

    assert {name for name in names - TOP_LEVEL if not any(fnmatch(name, glob) for glob in ignored())} == set()


def test_no_file_of_code_is_longer_than_one_idea() -> None:
    lines = {str(path): len((ROOT / path).read_text().splitlines()) for path in code()}

    assert {path: count for path, count in lines.items() if count > MAX_LINES} == {}


def test_every_module_says_first_what_it_promises() -> None:
    silent = [
        str(path)
        for path in code()
        if path.parts[0] in {"shared", "services", "migrations"}
        and (text := (ROOT / path).read_text())
        and not text.startswith('"""')
    ]

    assert silent == []


def test_every_package_is_in_the_wheel() -> None:
    # Given the folders that packages lie in, and the packages that the build lists
    settings = project()
    homes = settings["package-dir"]
    assert isinstance(homes, dict)
    found = {
        ".".join((package, *path.parent.relative_to(folder).parts))
        for package, folder in homes.items()
        for path in code()
        if path.name == "__init__.py" and path.is_relative_to(folder)
    }

    assert sorted(found) == settings["packages"]


def test_every_typed_package_says_so_in_the_wheel() -> None:
    settings = project()
    data, homes = settings["package-data"], settings["package-dir"]
    assert isinstance(data, dict)
    assert isinstance(homes, dict)

    for package in ("deltapost", "deltapost_aggregator", "deltapost_ledger"):
        assert "py.typed" in data[package]
        assert (ROOT / homes[package] / "py.typed").is_file()
