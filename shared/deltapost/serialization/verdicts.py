"""The verdicts an envelope can get: one final one each, recorded with the round that answers it."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

Verdict: TypeAlias = Literal[
    "accepted",
    "conflict",
    "late",
    "stale",
    "ahead",
    "zero_steps",
    "zero_weight",
    "malformed",
    "schema",
    "corrupt",
    "missing",
    "too_large",
    "outlier",
    "non_finite",
]

#: Why an envelope was not even attributed to a learner, or not recorded one by one: counted by reason.
UnverifiedReason: TypeAlias = Literal["malformed", "unknown_learner", "bad_signature", "over_quota"]

VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)
UNVERIFIED_REASONS: Final[tuple[UnverifiedReason, ...]] = get_args(UnverifiedReason)

#: Depend on what the store held at the time: decided again at a re-delivery while no seal holds them.
REDECIDED: Final[frozenset[Verdict]] = frozenset({"missing", "corrupt"})
