"""The SQL ledger: an index of the bucket's records, and the state of the protocol that makes them.

`open_ledger` gives a `Ledger`; `tables` holds the schema, `revisions` moves a database to it, `queries` reads
it for people. Learners never import this package.
"""

from deltapost.ledger.engine import Ledger, open_ledger

__all__ = ["Ledger", "open_ledger"]
