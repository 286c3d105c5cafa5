"""`make golden-all`: the kernels built in every way that this machine can, each closing the golden vectors.

Compiler and optimisation must not matter, nor the processor: gcc and clang, from -O0 to -march=native, and
aarch64 under qemu-user with a whole Python, so that numpy's code for it is run too. One build rounds a·b + c
once and has to differ: else the vectors would see nothing. What was not run, and for lack of what, is said
plainly; the exit code is 1 if anything that ran has other bytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outer_step import pythons
from outer_step.pythons import BUILD, ROOT

SOURCES: Final = [
    ROOT / "shared/deltapost/adapters/kernels" / name for name in ("close.c", "encode.c", "level.c")
]
#: As pyproject.toml has them, but for the optimisation.
FLAGS: Final = (
    "-std=c11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
)
CROSS, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64"
#: Debian's Python for aarch64 and what numpy loads beside it; unpacked below build/, not installed.
DEBIAN: Final = ("python3", "libstdc++6")
WHEELS: Final = ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")


@dataclass(frozen=True)
class Build:
    """A compiler with its flags. `differs`: it has to give other bytes."""

    compiler: str
    flags: tuple[str, ...]
    differs: bool = False

    def __str__(self) -> str:
        return f"{self.compiler} {' '.join(self.flags)}"


BUILDS: Final = (
    Build("gcc", ("-O0",)),
    Build("gcc", ("-O2", "-march=native")),
    Build("gcc", ("-O3",)),
    Build("clang", ("-O0",)),
    Build("clang", ("-O3",)),
    Build("clang", ("-O2", "-march=native")),
    Build("gcc", ("-O2", "-march=native", "-ffp-contract=fast"), differs=True),
)


class NotHere(Exception):
    """Something that a run needs is not on this machine; says what."""


def compiled(build: Build) -> Path:
    """The library that a build makes."""
    if shutil.which(build.compiler) is None:
        raise NotHere(f"no {build.compiler}")
    library = BUILD / "golden" / str(build).replace(" ", "") / "_baseline.abi3.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    command = [
        build.compiler,
        *FLAGS,
        *build.flags,
        "-fPIC",
        "-shared",
        "-o",
        str(library),
        *map(str, SOURCES),
    ]
    subprocess.run(command, check=True)
    return library


def close(
    python: Sequence[str | Path], packages: Path | None, *words: str | Path, quiet: bool = False
) -> bool:
    """Whether everything that this Python can load has the bytes; prints what it says.

    CalledProcessError: it did not come to an end.
    """
    command = [*python, "-m", "outer_step.close_vectors", *words, *sys.argv[1:]]
    done = subprocess.run(
        command,
        env=pythons.environment(packages),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if not quiet:
        print("  " + done.stdout.rstrip().replace("\n", "\n  "), flush=True)
    if done.returncode and " differences" not in done.stdout:
        raise subprocess.CalledProcessError(done.returncode, [str(word) for word in command])
    return done.returncode == 0


def here() -> bool:
    return close([sys.executable], None, "--torch", "--wide")


def built(build: Build) -> bool:
    same = close([sys.executable], None, "--library", compiled(build), "--without-numpy", quiet=build.differs)
    if build.differs:
        print(
            "  has other bytes, as it has to" if not same else "  HAS THE SAME BYTES: the vectors see nothing"
        )
    return same != build.differs


def other_python(version: str, path: Path) -> bool:
    try:
        packages = pythons.packages(version)
    except RuntimeError as error:
        raise NotHere(str(error)) from None
    return close([path], packages, "--wide")


def aarch64() -> bool:
    """C and numpy for aarch64, in Debian's Python for it."""
    for tool in (QEMU, CROSS, "apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise NotHere(f"no {tool}")
    root = foreign_root()
    python = next((root / "usr/bin").glob("python3.[0-9][0-9]"))
    version = python.name.removeprefix("python")
    try:
        packages = pythons.packages(version, WHEELS)
    except RuntimeError as error:
        raise NotHere(str(error)) from None
    library = compiled(Build(CROSS, ("-O3",)))
    return close([QEMU, "-L", root, python], packages, "--library", library)


def foreign_root() -> Path:
    """DEBIAN's packages for arm64 and all they need, unpacked; apt is given folders of its own."""
    work = BUILD / "golden" / "arm64"
    root = work / "root"
    if (work / "whole").exists():
        return root
    for folder in ("state/lists/partial", "cache/archives/partial", "root"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    (work / "state" / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "Dir::State": work / "state",
        "Dir::State::status": work / "state" / "status",
        "Dir::Cache": work / "cache",
    }
    apt = ["apt-get", "-q"] + [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    wanted = ["install", "-y", "--download-only", "--no-install-recommends", *DEBIAN]
    for words in (["update"], wanted):
        done = subprocess.run([*apt, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotHere(f"no Python for arm64 from apt: {done.stderr[-300:]}")
    for package in (work / "cache" / "archives").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    (work / "whole").touch()
    return root


def main() -> int:
    runs: dict[str, Callable[[], bool]] = {"what is installed here": here}
    runs |= {str(build): lambda build=build: built(build) for build in BUILDS}  # type: ignore[misc]
    runs |= {
        f"Python {version}": lambda version=version, path=path: other_python(version, path)  # type: ignore[misc]
        for version, path in pythons.others().items()
    }
    runs["aarch64 under qemu-user"] = aarch64
    verdicts: dict[str, str] = {}
    for name, run in runs.items():
        print(f"{name}:", flush=True)
        try:
            verdicts[name] = "passed" if run() else "FAILED"
        except NotHere as error:
            verdicts[name] = f"NOT RUN: {error}"
            print(f"  not run: {error}")
        except subprocess.CalledProcessError as error:
            verdicts[name] = f"FAILED: {error}"
    print("", *(f"{name}: {verdict}" for name, verdict in verdicts.items()), sep="\n")
    return 1 if any(verdict.startswith("FAILED") for verdict in verdicts.values()) else 0


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.exit(main())
