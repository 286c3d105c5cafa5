"""Which keys count at a version is a function of the creator's entries, whatever they say."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltapost.algorithms.key_history import KeyHistory, Speakers
from deltapost.errors import DeltapostError, ForkedHistory, MalformedMessage, SignatureRefused
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.records import Manifest
from deltapost.serialization.registry import KeyEntry, SignedKeyEntry, read_entry
from fixtures.pipeline import learner_signing_key
from fixtures.registry import CREATOR, signed_entry

OLD, NEW, OTHER = (learner_signing_key(name).public for name in ("old", "new", "other"))


def manifest(admission: Literal["open", "registered"] = "registered") -> Manifest:
    return Manifest(
        arithmetic=1,
        run="tiny",
        parameters=(),
        fragments=(("a",),),
        genesis=(ObjectRef(sha256=bytes(32), size=1),),
        algorithm={},
        admission=admission,
        creator_key=CREATOR.public,
    )


def history(
    *changes: tuple[str, str, bytes | None, int], admission: Literal["open", "registered"] = "registered"
) -> KeyHistory:
    found = KeyHistory(manifest(admission))
    for action, learner, key, version in changes:
        entry, signed = signed_entry(
            manifest(admission),
            number=found.number + 1,
            previous=found.head,
            action=action,
            learner=learner,
            public_key=key,
            from_version=version,
        )
        found.add(entry, signed.sha256)
    return found


def test_in_a_registered_run_nobody_speaks_for_an_id_without_an_entry() -> None:
    assert history().speakers("ann", 7) == Speakers((), owner=False)


def test_in_an_open_run_an_id_without_an_entry_is_its_owners() -> None:
    assert history(admission="open").speakers("ann", 7) == Speakers((), owner=True)


def test_an_added_key_counts_from_its_version_on() -> None:
    keys = history(("add", "ann", OLD, 3))

    assert [keys.speakers("ann", version).keys for version in (2, 3, 9)] == [(), (OLD,), (OLD,)]
    assert keys.speakers("bob", 3).keys == ()


@pytest.mark.parametrize("admission", ["open", "registered"])
def test_a_rotated_key_counts_at_once_and_the_old_one_until_its_version(
    admission: Literal["open", "registered"],
) -> None:
    keys = history(("add", "ann", OLD, 0), ("rotate", "ann", NEW, 5), admission=admission)

    assert [keys.speakers("ann", version).keys for version in (4, 5)] == [(OLD, NEW), (NEW,)]


def test_an_owner_whose_key_is_rotated_counts_until_then() -> None:
    keys = history(("rotate", "ann", NEW, 5), admission="open")

    assert keys.speakers("ann", 4) == Speakers((NEW,), owner=True)
    assert keys.speakers("ann", 5) == Speakers((NEW,), owner=False)


def test_a_revoked_id_is_nobodys_from_its_version_on_in_an_open_run_too() -> None:
    keys = history(("revoke", "ann", None, 5), admission="open")

    assert keys.speakers("ann", 4) == Speakers((), owner=True)
    assert keys.speakers("ann", 5) == Speakers((), owner=False)


def test_an_id_that_is_added_again_counts_from_then_and_not_in_between() -> None:
    keys = history(("add", "ann", OLD, 0), ("revoke", "ann", None, 3), ("add", "ann", NEW, 6))

    assert [keys.speakers("ann", version).keys for version in (2, 3, 5, 6)] == [(OLD,), (), (), (NEW,)]


VERSIONS = st.integers(0, 12)
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["add", "rotate", "revoke"]),
        st.sampled_from(["ann", "bob"]),
        VERSIONS,
        st.integers(0, 2),
    ),
    max_size=8,
)


@given(CHANGES, VERSIONS)
@settings(max_examples=100, deadline=None)
def test_whatever_was_entered_the_newest_entry_that_has_begun_decides(
    raw: list[tuple[str, str, int, int]], version: int
) -> None:
    changes = [
        (action, learner, None if action == "revoke" else (OLD, NEW, OTHER)[key], start)
        for action, learner, start, key in raw
    ]
    keys = history(*changes)

    begun = [change for change in changes if change[1] == "ann" and change[3] <= version]
    expected = begun[-1][2] if begun else None
    speakers = keys.speakers("ann", version)

    assert speakers.keys[:1] == ((expected,) if expected is not None else ())
    assert len(speakers.keys) <= 2
    assert not speakers.owner


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_no_altered_byte_of_an_entry_is_ever_read_as_the_creators(data: st.DataObject) -> None:
    entry, signed = signed_entry(manifest())
    raw = bytearray(signed.to_bytes())
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))

    with pytest.raises(DeltapostError):
        read_entry(bytes(raw), manifest(), number=1, previous=manifest().sha256)
    assert read_entry(signed.to_bytes(), manifest(), number=1, previous=manifest().sha256) == entry


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"number": 2}, id="a gap"),
        pytest.param({"previous": bytes(32)}, id="another history"),
        pytest.param({"run": "other"}, id="another run"),
        pytest.param({"manifest": bytes(32)}, id="another manifest"),
    ],
)
def test_an_entry_of_the_creator_for_another_place_is_refused(fields: dict[str, Any]) -> None:
    _, signed = signed_entry(manifest(), **fields)

    with pytest.raises(ForkedHistory, match="registry/0000000001"):
        read_entry(signed.to_bytes(), manifest(), number=1, previous=manifest().sha256)


def test_an_entry_that_another_key_signed_is_refused() -> None:
    _, signed = signed_entry(manifest(), signer=learner_signing_key("mallory"))

    with pytest.raises(SignatureRefused, match="creator"):
        read_entry(signed.to_bytes(), manifest(), number=1, previous=manifest().sha256)


def test_a_signature_of_a_message_is_none_of_an_entry() -> None:
    entry, _ = signed_entry(manifest())
    data = entry.to_bytes()
    crossed = SignedKeyEntry(entry=data, signature=CREATOR.sign("message", data))

    with pytest.raises(SignatureRefused):
        read_entry(crossed.to_bytes(), manifest(), number=1, previous=manifest().sha256)


@pytest.mark.parametrize(("action", "key"), [("add", None), ("rotate", None), ("revoke", OLD)])
def test_only_a_revocation_names_no_key(action: str, key: bytes | None) -> None:
    with pytest.raises(MalformedMessage, match="public_key"):
        KeyEntry.from_arguments(
            run="tiny",
            manifest=bytes(32),
            number=1,
            previous=bytes(32),
            action=action,
            learner="ann",
            public_key=key,
            from_version=0,
        )
