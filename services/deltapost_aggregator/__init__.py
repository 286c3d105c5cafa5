"""The aggregator: consumes envelopes, closes rounds, commits anchors, keeps the ledger.

Reading order: `worker` (one fragment's loop), `intake` and `payloads` (entries to verdicts), `closer`,
`computing` and `attesting` (seal to record), `announcer`; around them `context`, `members`, `discovery`,
`service`, `health`.
"""
