"""A mutant: one mechanism of one row of the promise table, taken out of the text, and who has to notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: The killer that plays seeds of the simulator until one fails.
SIMULATOR = "simulator"
#: Seeds after which a mutant that no story noticed has survived.
MAX_SEEDS = 500

AGGREGATOR = "services/deltapost_aggregator"
LIBRARY = "shared/deltapost"


@dataclass(frozen=True)
class Mutant:
    """`old` occurs once in `file`; with `new` in its place the mechanism is gone."""

    row: int
    name: str
    file: str
    old: str
    new: str
    #: `simulator`, or what pytest is given: a file, or a test in it.
    killer: str

    def apply(self, root: Path) -> None:
        """Changes the copy of the tree below `root`."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: the old text occurs {text.count(self.old)} times in {self.file}")
        path.write_text(text.replace(self.old, self.new))
