"""`deltapost demo`: four learners train a real model through Valkey, a bucket, an aggregator and a ledger."""
