"""Shares: how many fragments of each run each aggregator is to hold. Pure: all who see the same agree."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def shares(fragments: Mapping[str, int], serving: Mapping[str, Collection[str]]) -> dict[str, dict[str, int]]:
    """By aggregator and run, so that each run's shares add up to its fragments and nobody has too many.

    Runs that fewest aggregators serve are dealt first, fragment by fragment, to whoever has least so far
    (ties by name). A run that nobody serves has no shares.

    >>> shares({"x": 4, "y": 4}, {"ada": {"x", "y"}, "bob": {"x"}})
    {'ada': {'y': 4}, 'bob': {'x': 4}}
    """
    servers = {run: sorted(name for name, runs in serving.items() if run in runs) for run in fragments}
    loads = dict.fromkeys(sorted(serving), 0)
    dealt: dict[str, dict[str, int]] = {name: {} for name in loads}
    for run in sorted(fragments, key=lambda run: (len(servers[run]), run)):
        for _ in range(fragments[run] if servers[run] else 0):
            name = min(servers[run], key=lambda name: (loads[name], name))
            loads[name] += 1
            dealt[name][run] = dealt[name].get(run, 0) + 1
    return dealt
