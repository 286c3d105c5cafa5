"""The ledger's schema, revision by revision. `deltapost.ledger.revisions` runs them; no ini file is needed.

A revision is never edited once released: it says what a database at that revision holds.
"""

from pathlib import Path
from typing import Final

#: Where env.py and versions/ lie, in a checkout and in an installed wheel alike.
DIRECTORY: Final = Path(__file__).parent
