"""When a round may be sealed, and what the seal holds: decided from values alone."""

from __future__ import annotations

import itertools

import pytest

from deltapost.algorithms.sealing import Ready, Waiting, readiness, seal_content
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.messages import ContributionMessage, SignedMessage, sign_message
from deltapost.serialization.verdicts import Verdict
from fixtures.pipeline import RUN, learner_signing_key, plain_config


def decide(
    accepted: str,
    *,
    live: str | None,
    newcomers: str = "",
    passed: str = "",
    quorum: int = 3,
    minimum: int = 1,
    since: float | None = None,
    grace: float = 0.0,
) -> Ready | Waiting:
    return readiness(
        accepted=set(accepted),
        passed=set(passed),
        newcomers=set(newcomers),
        live=None if live is None else set(live),
        config=plain_config(quorum_size=quorum, min_quorum=minimum),
        seconds_since_quorum=since,
        grace_seconds=grace,
    )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        pytest.param(decide("abc", live="abcd", since=0.0), Ready(False), id="quorum, no grace"),
        pytest.param(decide("abc", live="abcd", since=5.0, grace=4.0), Ready(False), id="grace is over"),
        pytest.param(decide("abc", live="abc", since=0.0, grace=9.0), Ready(False), id="all live reported"),
        pytest.param(
            decide("abc", live="abcd", passed="d", since=0.0, grace=9.0), Ready(False), id="the rest passed"
        ),
        pytest.param(decide("abc", live=""), Ready(False), id="quorum without news of members"),
        pytest.param(decide("ab", live="ab"), Ready(True), id="fewer live than the quorum"),
        pytest.param(decide("a", live="ab", passed="b"), Ready(True), id="the other passed"),
        pytest.param(decide("ab", live=""), Ready(True), id="who contributed has left, as all others"),
        pytest.param(decide("abc", live="abc", newcomers="c"), Ready(True), id="all reported, one is new"),
        pytest.param(
            decide("abcd", live="abcde", newcomers="d", since=0.0), Ready(False), id="quorum of old"
        ),
    ],
)
def test_a_round_is_ready(found: Ready | Waiting, expected: Ready) -> None:
    assert found == expected


@pytest.mark.parametrize(
    ("found", "words"),
    [
        pytest.param(decide("", live="abc"), "no accepted", id="nothing accepted"),
        pytest.param(decide("", live="a", passed="a"), "no accepted", id="all passed"),
        pytest.param(decide("ab", live="abc"), "waiting for c", id="a live learner is missing"),
        pytest.param(decide("abc", live="abcd", since=1.0, grace=4.0), "grace", id="grace is open"),
        pytest.param(decide("a", live="a", minimum=2), "at least 2", id="below the minimum"),
        pytest.param(decide("ab", live=None), "not known yet", id="no quorum and no news of members"),
        pytest.param(
            decide("a", live="", minimum=2), "nobody else is live", id="all left, below the minimum"
        ),
        pytest.param(decide("abc", live="abcd", newcomers="c"), "2 of 3", id="a newcomer does not count"),
    ],
)
def test_a_round_waits_and_says_why(found: Ready | Waiting, words: str) -> None:
    assert isinstance(found, Waiting)
    assert words in found.reason


def test_an_open_grace_window_says_when_to_look_again() -> None:
    found = decide("abc", live="abcd", since=1.5, grace=4.0)

    assert isinstance(found, Waiting)
    assert found.seconds == 2.5


def envelope(learner: str, tokens: int = 10) -> SignedMessage:
    message = ContributionMessage(
        run=RUN,
        learner=learner,
        fragment=0,
        version=4,
        payload=ObjectRef(sha256=bytes(32), size=1),
        local_step=1,
        steps=1,
        tokens=tokens,
        step_seconds=0.0,
    )
    return sign_message(message, learner_signing_key(learner))


def test_a_seal_is_the_same_in_whatever_order_its_verdicts_come() -> None:
    rows: list[tuple[SignedMessage, Verdict]] = [
        (envelope("bob"), "accepted"),
        (envelope("ada"), "accepted"),
        (envelope("ada", 11), "conflict"),
        (envelope("eve"), "zero_steps"),
    ]

    sealed = {
        seal_content(
            run=RUN,
            fragment=0,
            head=4,
            generation=0,
            rows=order,
            unverified={"malformed": 1},
            over_quota={},
            quorum_size=3,
        ).to_bytes()
        for order in itertools.permutations(rows)
    }

    assert len(sealed) == 1


def test_a_seal_lists_participants_by_learner_and_says_when_they_are_fewer_than_the_quorum() -> None:
    content = seal_content(
        run=RUN,
        fragment=0,
        head=4,
        generation=0,
        rows=[(envelope("bob"), "accepted"), (envelope("ada"), "accepted")],
        unverified={},
        over_quota={},
        quorum_size=3,
    )

    assert [claim.learner for claim in content.claims] == ["ada", "bob"]
    assert content.version == 5
    assert content.degraded
