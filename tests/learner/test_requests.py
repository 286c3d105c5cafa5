"""A round costs three requests to the store for each participant, and eight, while nothing is lost."""

from __future__ import annotations

import pytest
from sqlalchemy import func, select

from deltapost.learner import courier
from deltapost.ledger.tables import LearnerRow
from deltapost_aggregator import fleet
from fixtures.requests import CountedStore
from fixtures.served import CLAIMS, Served, algorithm, eventually, small_model

LEARNERS = ("ada", "bob", "cyd")
ROUNDS = 5
#: Threads of an aggregator that ask the store by a timer of their own, not for a round.
BESIDE = ("housekeeping",)


def members_seen(served: Served) -> int:
    """Learners whose first message the aggregator has read, and whose keys it therefore knows."""
    with served.ledger.read() as session:
        seen = select(func.count()).where(LearnerRow.last_seen_at.is_not(None))
        return session.scalars(seen).one()


@pytest.mark.parametrize("commit_dtype", [None, "BF16"])
def test_a_round_costs_three_requests_a_learner_and_eight(
    served: Served, monkeypatch: pytest.MonkeyPatch, commit_dtype: str | None
) -> None:
    # Given a run that goes on, faster than anybody's time to look whether something was lost
    served.stop()
    for module, name in (
        (courier, "PROBE_SECONDS"),
        (courier, "END_PROBE_SECONDS"),
        (fleet, "PROBE_SECONDS"),
    ):
        monkeypatch.setattr(module, name, 600.0)
    store = CountedStore(served.store, beside=BESIDE)
    served.store = store  # type: ignore[assignment]
    served.start()
    config = algorithm(fragments=1, in_flight=1, quorum_size=len(LEARNERS), commit_dtype=commit_dtype)
    runs = [served.join(small_model(), config, learner=learner, repost_seconds=600.0) for learner in LEARNERS]

    for version in range(1 + ROUNDS):
        if version == 1:  # the first has its own: keys are read, and a session's first upload is read back
            eventually(lambda: members_seen(served) == len(LEARNERS))
            store.asked.clear()
        for run in runs:
            run.publish_contribution(0, version, delta=small_model(0.5), **CLAIMS)
        for run in runs:
            assert run.wait_for(0, version + 1, timeout=30)

    # Then each round asked for what has to be written, read back and read, and for nothing else
    found = {name: count / ROUNDS for name, count in store.asked.items() if name != "get registry"}
    for run in runs:
        run.leave()
    learners = len(LEARNERS)
    expected = {
        "put deltas": learners,
        "get deltas": learners,
        **{f"{verb} {area}": 1 for area in ("outer", "records", "attestations") for verb in ("put", "get")},
        "put anchors": 1,
        "get anchors": 1 + learners,
    }
    if commit_dtype is not None:  # the update is one object more; learners read it instead of the anchor
        expected |= {"put updates": 1, "get updates": 1 + learners, "get anchors": 1}
    assert found == expected
    assert sum(found.values()) == 3 * learners + 8 + (0 if commit_dtype is None else 2)
