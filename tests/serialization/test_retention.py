"""Retention notes: signed by the run's key over exact bytes, and saying precisely what may be gone."""

from __future__ import annotations

import hashlib

import pytest

from deltapost.errors import SignatureRefused
from deltapost.serialization.retention import Released, RetentionNote
from deltapost.serialization.signing import SigningKey

KEY = SigningKey(hashlib.sha256(b"aggregator").digest())
RELEASED = Released(run="run", manifest=b"m" * 32, fragment=2, through=5, record=b"r" * 32, policy="rounds=3")


def test_a_note_comes_back_as_it_was_signed() -> None:
    note = RetentionNote.from_bytes(RetentionNote.make(RELEASED, KEY).to_bytes())

    assert note.verify(KEY.public) == RELEASED


@pytest.mark.parametrize(
    "change",
    [{"run": "other"}, {"fragment": 3}, {"through": 6}, {"record": b"x" * 32}, {"policy": "rounds=4"}],
)
def test_an_altered_note_is_refused(change: dict[str, object]) -> None:
    note = RetentionNote.make(RELEASED, KEY)
    altered = note.model_copy(update={"released": RELEASED.model_copy(update=change)})

    with pytest.raises(SignatureRefused):
        altered.verify(KEY.public)


def test_a_note_by_another_key_is_refused() -> None:
    other = SigningKey(hashlib.sha256(b"mallory").digest())

    with pytest.raises(SignatureRefused, match="the run's aggregator key is"):
        RetentionNote.make(RELEASED, other).verify(KEY.public)


def test_it_covers_inputs_of_the_rounds_and_the_states_before_the_last_one() -> None:
    covered = {
        area: [base for base in range(8) if RELEASED.covers(area, base)]
        for area in ("deltas", "updates", "anchors", "outer", "records", "genesis")
    }

    assert covered == {
        "deltas": [0, 1, 2, 3, 4],
        "updates": [0, 1, 2, 3, 4],
        "anchors": [0, 1, 2, 3],
        "outer": [0, 1, 2, 3],
        "records": [],
        "genesis": [],
    }
