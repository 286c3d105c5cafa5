"""Mutants: each mechanism of the promise table taken out in turn, to see who notices."""

from __future__ import annotations

from mutants.content import MUTANTS as CONTENT
from mutants.edges import MUTANTS as EDGES
from mutants.mutant import Mutant
from mutants.protocol import MUTANTS as PROTOCOL

#: Rows of the promise table whose part does not exist yet: top-k (16) and the dashboard (21).
ROWS_TO_COME = frozenset({16, 21})

ALL: tuple[Mutant, ...] = tuple(sorted((*PROTOCOL, *CONTENT, *EDGES), key=lambda mutant: mutant.row))
