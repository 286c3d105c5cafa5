"""Reading a run's history from the bucket alone: verified on the way, nothing taken on trust.

`history` reads records with their attestations, `rebuild` makes the SQL ledger again from them.
"""
