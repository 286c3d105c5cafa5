"""The ledger's schema, revision by revision. `deltapost.ledger.revisions` runs them; no ini file is needed.

A revision is never edited once released: it says what a database at that revision holds.
"""
