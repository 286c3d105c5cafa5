"""The aggregator: consumes envelopes, closes rounds, commits anchors, keeps the ledger.

Reading order: `worker` (one fragment's loop), `intake` (entries to verdicts), `closer` (seal to record),
`announcer`; around them `context`, `members`, `discovery`, `service`, `health`.
"""
