"""deltapost: contributions over Redis streams, anchors in object storage, rounds in a SQL ledger."""

__version__ = "0.1.0"
