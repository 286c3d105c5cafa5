"""The one home of object keys, stream names and ids: built and parsed here, nowhere else.

Keys below a store's prefix (`V`: the version a round *produces*; `B`: its *base* version, V - 1)::

    RUN/manifest                       RUN/aggregator
    RUN/genesis/FRAGMENT/SHA256
    RUN/learners/LEARNER               RUN/registry/NUMBER
    RUN/deltas/LEARNER/FRAGMENT/B/SHA256
    RUN/anchors/FRAGMENT/B/SHA256      RUN/updates/FRAGMENT/B/SHA256      RUN/outer/FRAGMENT/B/SHA256
    RUN/records/FRAGMENT/V             RUN/attestations/FRAGMENT/V
    RUN/retention/FRAGMENT/V           (what was let go on purpose, through version V)
    RUN/end

Numbers are zero-padded, so that a listing is in order. A key that came from somebody else is only ever
compared with one built here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from deltapost.errors import MalformedMessage
from deltapost.limits import MAX_ID_LENGTH

ID_PATTERN: Final = rf"[a-z0-9-]{{1,{MAX_ID_LENGTH}}}"
_ID: Final = re.compile(ID_PATTERN)
_FRAGMENT: Final = re.compile(r"[0-9]{4}")
_VERSION: Final = re.compile(r"[0-9]{10}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")

#: Base versions whose keys share all digits but the last two.
BLOCK_VERSIONS: Final = 100

RUNS_STREAM: Final = "deltapost:runs"


def check_id(kind: Literal["run", "learner"], value: object) -> str:
    """`value`, if it is a valid run or learner id; else MalformedMessage."""
    if not isinstance(value, str) or _ID.fullmatch(value) is None:  # callers outside pass anything
        raise MalformedMessage(
            f"{kind} id {value!r:.80} is not valid",
            hint="use 1 to 64 of the characters a-z, 0-9 and '-'",
        )
    return value


def _digest(sha256: bytes) -> str:
    if len(sha256) != 32:
        raise ValueError(f"a SHA-256 has 32 bytes, not {len(sha256)}")
    return sha256.hex()


def _numbers(fragment: int, version: int) -> str:
    if not 0 <= fragment <= 9_999 or not 0 <= version <= 9_999_999_999:
        raise ValueError(f"fragment {fragment} or version {version} is out of range")
    return f"{fragment:04d}/{version:010d}"


ObjectArea = Literal["deltas", "updates", "anchors", "outer"]
OBJECT_AREAS: Final[tuple[ObjectArea, ...]] = ("deltas", "updates", "anchors", "outer")


def manifest_key(run: str) -> str:
    return f"{check_id('run', run)}/manifest"


def aggregator_object_key(run: str) -> str:
    """Where the first aggregator that serves a run leaves its public key, if the manifest pins none."""
    return f"{check_id('run', run)}/aggregator"


def end_key(run: str) -> str:
    return f"{check_id('run', run)}/end"


def genesis_key(run: str, fragment: int, sha256: bytes) -> str:
    return f"{check_id('run', run)}/genesis/{fragment:04d}/{_digest(sha256)}"


def learner_key(run: str, learner: str) -> str:
    return f"{check_id('run', run)}/learners/{check_id('learner', learner)}"


def learners_prefix(run: str) -> str:
    """What the keys of the run's learners begin with; a learner's id follows."""
    return f"{check_id('run', run)}/learners/"


def registry_key(run: str, number: int) -> str:
    """The entry of that number in the run's registry of learner keys; the first is 1."""
    if not 1 <= number <= 9_999_999_999:
        raise ValueError(f"number {number} is out of range")
    return f"{check_id('run', run)}/registry/{number:010d}"


def delta_key(run: str, learner: str, fragment: int, base: int, sha256: bytes) -> str:
    who = f"{check_id('run', run)}/deltas/{check_id('learner', learner)}"
    return f"{who}/{_numbers(fragment, base)}/{_digest(sha256)}"


def anchor_key(run: str, fragment: int, base: int, sha256: bytes) -> str:
    return f"{check_id('run', run)}/anchors/{_numbers(fragment, base)}/{_digest(sha256)}"


def update_key(run: str, fragment: int, base: int, sha256: bytes) -> str:
    return f"{check_id('run', run)}/updates/{_numbers(fragment, base)}/{_digest(sha256)}"


def outer_key(run: str, fragment: int, base: int, sha256: bytes) -> str:
    return f"{check_id('run', run)}/outer/{_numbers(fragment, base)}/{_digest(sha256)}"


def block_prefix(run: str, area: ObjectArea, fragment: int, block: int, *, learner: str | None = None) -> str:
    """What the keys of the objects of BLOCK_VERSIONS base versions begin with; deltas are one learner's."""
    place = f"{check_id('run', run)}/{area}"
    if area == "deltas":
        place += f"/{check_id('learner', learner)}"
    return f"{place}/{_numbers(fragment, block * BLOCK_VERSIONS)[:-2]}"


def record_key(run: str, fragment: int, version: int) -> str:
    return f"{check_id('run', run)}/records/{_numbers(fragment, version)}"


def attestation_key(run: str, fragment: int, version: int) -> str:
    return f"{check_id('run', run)}/attestations/{_numbers(fragment, version)}"


def retention_key(run: str, fragment: int, through: int) -> str:
    """Where the aggregators note that the objects of rounds through this version were let go."""
    return f"{check_id('run', run)}/retention/{_numbers(fragment, through)}"


def envelope_stream(run: str, fragment: int) -> str:
    """The fragment's stream of envelopes. The braces are literal: a Redis Cluster hash tag."""
    return f"deltapost:{{{check_id('run', run)}/{fragment}}}"


def members_stream(run: str) -> str:
    return f"deltapost:{{{check_id('run', run)}}}:members"


def commits_stream(run: str) -> str:
    return f"deltapost:{{{check_id('run', run)}}}:commits"


def epoch_key(stream: str) -> str:
    """The key beside a stream, under the same hash tag, that names the stream's present life."""
    return f"{stream}:epoch"


Area = Literal[
    "manifest",
    "aggregator",
    "end",
    "genesis",
    "learners",
    "registry",
    "deltas",
    "anchors",
    "updates",
    "outer",
    "records",
    "attestations",
    "retention",
]


@dataclass(frozen=True)
class ParsedKey:
    """A key's parts. `version` is what the key carries: a base for objects, the version made for records.

    `number` is an entry's in the registry.
    """

    area: Area
    run: str
    learner: str | None = None
    fragment: int | None = None
    version: int | None = None
    sha256: bytes | None = None
    number: int | None = None


def parse_key(key: str) -> ParsedKey | None:
    """The parts of one of the keys above, or None when it is not exactly one of them."""
    run, _, rest = key.partition("/")
    parts = rest.split("/")
    if _ID.fullmatch(run) is None:
        return None
    match parts:
        case ["manifest" | "aggregator" | "end" as area]:
            return ParsedKey(area, run)
        case ["learners", learner] if _ID.fullmatch(learner):
            return ParsedKey("learners", run, learner=learner)
        case ["registry", number] if _VERSION.fullmatch(number) and int(number):
            return ParsedKey("registry", run, number=int(number))
        case ["genesis", fragment, digest] if _FRAGMENT.fullmatch(fragment) and _DIGEST.fullmatch(digest):
            return ParsedKey("genesis", run, fragment=int(fragment), sha256=bytes.fromhex(digest))
        case ["deltas", learner, *numbers] if _ID.fullmatch(learner) and (found := _object(numbers)):
            return ParsedKey("deltas", run, learner, *found)
        case ["anchors" | "updates" | "outer" as area, *numbers] if found := _object(numbers):
            return ParsedKey(area, run, None, *found)
        case ["records" | "attestations" | "retention" as area, fragment, version]:
            if _FRAGMENT.fullmatch(fragment) and _VERSION.fullmatch(version):
                return ParsedKey(area, run, None, int(fragment), int(version))
    return None


def _object(numbers: list[str]) -> tuple[int, int, bytes] | None:
    match numbers:
        case [fragment, version, digest]:
            if _FRAGMENT.fullmatch(fragment) and _VERSION.fullmatch(version) and _DIGEST.fullmatch(digest):
                return int(fragment), int(version), bytes.fromhex(digest)
    return None
