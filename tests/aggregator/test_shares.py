"""Every aggregator computes the same shares, which add up and are as even as who serves what allows."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from deltapost_aggregator.shares import shares

RUNS = st.dictionaries(st.sampled_from("uvwxyz"), st.integers(1, 40), max_size=6)
SERVING = st.dictionaries(st.sampled_from("abcde"), st.frozensets(st.sampled_from("uvwxyz")), max_size=5)


@given(RUNS, SERVING)
@settings(max_examples=200, deadline=None)
def test_each_run_s_shares_add_up_to_its_fragments_and_only_its_servers_have_some(
    fragments: dict[str, int], serving: dict[str, frozenset[str]]
) -> None:
    dealt = shares(fragments, serving)

    for run, count in fragments.items():
        having = {name for name, runs in dealt.items() if runs.get(run)}
        assert having <= {name for name, runs in serving.items() if run in runs}
        served = any(run in runs for runs in serving.values())
        assert sum(runs.get(run, 0) for runs in dealt.values()) == (count if served else 0)


@given(RUNS, st.integers(1, 5))
def test_where_all_serve_everything_nobody_has_two_more_than_another(
    fragments: dict[str, int], count: int
) -> None:
    dealt = shares(fragments, {name: frozenset(fragments) for name in "abcde"[:count]})

    totals = [sum(runs.values()) for runs in dealt.values()]
    assert max(totals) - min(totals) <= 1


def test_who_serves_less_gets_more_of_what_it_serves() -> None:
    assert shares({"x": 4, "y": 4}, {"a": {"x", "y"}, "b": {"x"}}) == {"a": {"y": 4}, "b": {"x": 4}}


def test_what_nobody_serves_is_nobodys() -> None:
    assert shares({"x": 4}, {"a": {"y"}}) == {"a": {}}
    assert shares({"x": 4}, {}) == {}
