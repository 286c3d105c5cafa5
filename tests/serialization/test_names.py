"""Keys and stream names are built and parsed in one place, and nothing hostile parses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltapost.errors import MalformedMessage
from deltapost.serialization import names
from deltapost.serialization.names import ParsedKey, parse_key
from deltapost.stores.keys import check_key

ids = st.from_regex(r"[a-z0-9-]{1,64}", fullmatch=True)
fragments = st.integers(0, 9_999)
versions = st.integers(0, 9_999_999_999)
digests = st.binary(min_size=32, max_size=32)

DIGEST = "ab" * 32


@given(run=ids, learner=ids, fragment=fragments, version=versions, sha256=digests)
def test_every_key_that_is_built_parses_back_to_its_parts(
    run: str, learner: str, fragment: int, version: int, sha256: bytes
) -> None:
    expected = {
        names.manifest_key(run): ParsedKey("manifest", run),
        names.end_key(run): ParsedKey("end", run),
        names.genesis_key(run, fragment, sha256): ParsedKey("genesis", run, None, fragment, None, sha256),
        names.learner_key(run, learner): ParsedKey("learners", run, learner),
        names.delta_key(run, learner, fragment, version, sha256): ParsedKey(
            "deltas", run, learner, fragment, version, sha256
        ),
        names.anchor_key(run, fragment, version, sha256): ParsedKey(
            "anchors", run, None, fragment, version, sha256
        ),
        names.update_key(run, fragment, version, sha256): ParsedKey(
            "updates", run, None, fragment, version, sha256
        ),
        names.outer_key(run, fragment, version, sha256): ParsedKey(
            "outer", run, None, fragment, version, sha256
        ),
        names.record_key(run, fragment, version): ParsedKey("records", run, None, fragment, version),
        names.attestation_key(run, fragment, version): ParsedKey(
            "attestations", run, None, fragment, version
        ),
    }
    assert {key: parse_key(key) for key in expected} == expected


@given(run=ids, learner=ids, fragment=fragments, version=versions, sha256=digests)
def test_every_key_that_is_built_is_one_that_stores_take(
    run: str, learner: str, fragment: int, version: int, sha256: bytes
) -> None:
    longest = names.delta_key(run, learner, fragment, version, sha256)
    assert check_key(longest) == longest


@given(st.text())
def test_whatever_parses_is_built_again_exactly(key: str) -> None:
    parsed = parse_key(key)
    assert parsed is None or _rebuilt(parsed) == key


def _rebuilt(parsed: ParsedKey) -> str:
    segments = [parsed.run, parsed.area, parsed.learner, parsed.fragment, parsed.version, parsed.sha256]
    return "/".join(
        f"{each:04d}" if each is parsed.fragment else f"{each:010d}" if isinstance(each, int) else str(each)
        for each in segments
        if each is not None
    )


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "run",
        "run/",
        "run//manifest",
        "/run/manifest",
        "run/manifest/",
        "run/manifest\n",
        "run/manifest\0",
        "run\0/manifest",
        "run/MANIFEST",
        "RUN/manifest",
        "run/../other/manifest",
        "../run/manifest",
        "..%2frun/manifest",
        "run/%6danifest",
        "run\\manifest",
        "r\u0443n/manifest",  # Cyrillic у
        "run/\u202emanifest",
        f"{'r' * 65}/manifest",
        "run/learners",
        "run/learners/",
        "run/learners/..",
        "run/learners/a/b",
        "run/learners/A",
        "run/records/0001/1",
        "run/records/1/0000000001",
        "run/records/0001/0000000001/",
        "run/records/0001/00000000001",
        "run/records/\u0661\u0661\u0661\u0661/0000000001",  # Arabic digits, which int() would take
        "run/records/+001/0000000001",
        f"run/anchors/0001/0000000001/{DIGEST.upper()}",
        f"run/anchors/0001/0000000001/{DIGEST[:-1]}",
        f"run/anchors/0001/{DIGEST}",
        f"run/deltas/0001/0000000001/{DIGEST}",
        f"run/deltas/../0001/0000000001/{DIGEST}",
        f"run/genesis/0001/0000000001/{DIGEST}",
        f"run/elsewhere/0001/0000000001/{DIGEST}",
        "probe/0123456789abcdef0123456789abcdef",
    ],
)
def test_a_hostile_key_parses_to_nothing(key: str) -> None:
    assert parse_key(key) is None


@pytest.mark.parametrize(
    "value",
    [
        "",
        "A",
        "a b",
        "a/b",
        "..",
        ".",
        "a.b",
        "a_b",
        "a\n",
        "a\0",
        "ä",
        "a" * 65,
        "%61",
        "{a}",
        "a:b",
        "\u202ea",
    ],
)
@pytest.mark.parametrize("kind", ["run", "learner"])
def test_an_id_outside_the_alphabet_is_refused(kind: str, value: str) -> None:
    with pytest.raises(MalformedMessage, match=f"{kind} id"):
        names.check_id(kind, value)  # type: ignore[arg-type]


@pytest.mark.parametrize("fragment", [-1, 10_000])
@pytest.mark.parametrize("version", [-1, 10_000_000_000])
def test_a_number_that_would_not_fit_its_place_is_refused(fragment: int, version: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        names.record_key("run", fragment, 0)
    with pytest.raises(ValueError, match="out of range"):
        names.record_key("run", 0, version)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_digest_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        names.anchor_key("run", 0, 0, bytes(size))


@given(run=ids, smaller=versions, larger=versions)
def test_keys_of_records_sort_as_their_versions_do(run: str, smaller: int, larger: int) -> None:
    smaller, larger = sorted((smaller, larger))
    assert (names.record_key(run, 3, smaller) < names.record_key(run, 3, larger)) == (smaller < larger)


@given(run=ids, fragment=fragments)
def test_a_stream_and_the_key_of_its_epoch_lie_in_one_cluster_slot(run: str, fragment: int) -> None:
    stream = names.envelope_stream(run, fragment)
    tag = stream[stream.index("{") : stream.index("}") + 1]
    assert tag == f"{{{run}/{fragment}}}"
    assert tag in names.epoch_key(stream)


@given(run=ids, fragment=fragments)
def test_no_two_streams_share_a_name(run: str, fragment: int) -> None:
    streams = [
        names.envelope_stream(run, fragment),
        names.members_stream(run),
        names.commits_stream(run),
        names.RUNS_STREAM,
    ]
    assert len({*streams, *map(names.epoch_key, streams)}) == 8
