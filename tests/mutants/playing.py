"""What runs inside a mutated copy: seeds until one fails. Prints one line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deltapost
from mutants.mutant import ROOT
from simulator.running import run_seed


def main() -> None:
    """`python -m mutants.playing SEEDS`."""
    seeds = int(sys.argv[1])
    if not Path(deltapost.__file__).is_relative_to(ROOT):
        sys.exit(f"{deltapost.__file__} is not of the copy in {ROOT}")
    for seed in range(seeds):
        outcome = run_seed(seed)
        if outcome.failure is not None:
            print(json.dumps({"seeds": seed + 1, "failure": outcome.failure}))
            return
    print(json.dumps({"seeds": seeds, "failure": None}))


if __name__ == "__main__":
    main()
