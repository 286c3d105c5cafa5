"""`deltapost doctor`: which arithmetic this machine runs, and whether it gives the bytes it has to."""

from __future__ import annotations

import json
import os
import platform
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import typer

from deltapost import __version__
from deltapost.cli.options import JsonOption
from deltapost.cli.progress import progress_on_stderr

if TYPE_CHECKING:
    from deltapost.adapters import Backend


def doctor(as_json: JsonOption = False) -> None:
    """Name the arithmetic in use and close rounds whose SHA-256 is known. Exit 1 when one differs.

    Example: [bold]deltapost doctor[/bold]
    """
    import numpy

    from deltapost.adapters import kernels
    from deltapost.algorithms import ARITHMETIC_VERSION

    builds = kernels.available()
    report: dict[str, Any] = {
        "deltapost": __version__,
        "arithmetic": ARITHMETIC_VERSION,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "builds": {level: str(path) for level, path in builds.items()},
        "in_use": next(iter(builds), "numpy"),
        "backends": {},
    }
    backends = _backends()
    with progress_on_stderr("closing known rounds", shown=not as_json) as progress:
        for number, (name, backend) in enumerate(backends.items()):
            progress(number, len(backends))
            report["backends"][name] = _checked(backend)
    failed = [name for name, found in report["backends"].items() if found["failed"]]
    typer.echo(json.dumps(report) if as_json else "\n".join(_lines(report)))
    if failed:
        raise typer.Exit(1)


def _backends() -> dict[str, Backend]:
    """Every exact implementation that is here, the one in use first."""
    from deltapost.adapters import kernels
    from deltapost.adapters.native import NativeBackend

    found: dict[str, Backend] = {
        f"native ({level})": NativeBackend(level=level) for level in kernels.available()
    }
    found["native (numpy)"] = NativeBackend(level="numpy")
    if find_spec("torch") is not None:
        from deltapost.adapters.torch import TorchBackend

        found["torch (cpu)"] = TorchBackend()
    return found


def _checked(backend: Backend) -> dict[str, Any]:
    from deltapost.algorithms.selfcheck import self_check

    checks = list(self_check(backend))
    return {
        "rounds": len(checks),
        "failed": [
            {"round": one.name, "expected": one.expected, "found": one.found}
            for one in checks
            if not one.passed
        ],
    }


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [
        f"deltapost {report['deltapost']}, arithmetic version {report['arithmetic']}, "
        f"Python {report['python']}, numpy {report['numpy']}, {report['processors']} × {report['machine']}",
        f"rounds are closed by: {report['in_use']}",
    ]
    if not report["builds"]:
        lines.append("no build in C is here (no compiler when it was installed): the same bytes, slower")
    for name, found in report["backends"].items():
        wrong = found["failed"]
        lines.append(
            f"{name}: {found['rounds'] - len(wrong)} of {found['rounds']} rounds have their bytes"
            + ("" if not wrong else ": DO NOT CLOSE ROUNDS HERE")
        )
        lines += [f"  {one['round']}: expected {one['expected']}, found {one['found']}" for one in wrong]
    return lines
