"""Names of the steps between which a process may die: what tests kill, pause or fail at.

The services and the learner call `reach(name)` at each; outside tests it does nothing. `DELTAPOST_FAIL_AT`
names one in the environment of a real process, as MODE:POINT or MODE:POINT:N for the Nth time through:

    kill   the process kills itself there (SIGKILL)
    stop   it stops itself there (SIGSTOP) and goes on when somebody continues it
    lost   the reply to what it did last is lost: the retryable error of that store, stream or ledger
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from deltapost.errors import (
    ConfigurationError,
    DeltapostError,
    LedgerUnavailable,
    StateUnavailable,
    StoreUnavailable,
    StreamUnavailable,
)

Reach: TypeAlias = Callable[[str], None]

LEARNER_POINTS: Final = ("learner.journaled", "learner.payload_put", "learner.xadd_sent")

#: In the order in which an undisturbed round passes them.
ROUND_POINTS: Final = (
    "intake.read",
    "intake.payload_checked",
    "intake.tx_sent",
    "intake.tx_done",
    "seal.tx_sent",
    "seal.tx_done",
    "close.inputs_fetched",
    "objects.partial",
    "objects.verified",
    "record.noted",
    "record.before_put",
    "record.put_sent",
    "record.read_back",
    "attest.before_put",
    "attest.put_sent",
    "round.tx_sent",
    "round.tx_done",
    "announce.before",
    "announce.sent",
    "trim.before",
)

#: Passed only when something went wrong before.
RECOVERY_POINTS: Final = (
    "probe.before_ahead",
    "adopt.record_read",
    "adopt.tx_done",
    "seal.lost_detected",
    "seal.generation_tx",
    "seal.reopen_tx",
    "stream.reset_sent",
    "stream.position_tx",
)

#: Passed for each object that is collected, beside the rounds.
GARBAGE_POINTS: Final = ("gc.checked", "gc.delete_sent")

#: Passed once by each fragment of a run that is finished: the first where its last version is no checkpoint,
#: the last two by the last fragment's owner only.
END_POINTS: Final = (
    "end.anchor_put",
    "end.before_put",
    "end.put_sent",
    "end.attested",
    "end.tx_done",
    "end.run_put",
    "end.run_tx_done",
)

#: Those of a run that goes on.
POINTS: Final = (*LEARNER_POINTS, *ROUND_POINTS, *RECOVERY_POINTS, *GARBAGE_POINTS)

MODES: Final = ("kill", "stop", "lost")


def nothing(_point: str) -> None:
    """Goes on: what `reach` is in production."""


def at(point: str, times_through: int, act: Callable[[], None]) -> Reach:
    """What acts at the point, once: the given time that it is reached."""
    left = times_through

    def reach(here: str) -> None:
        nonlocal left
        if here == point:
            left -= 1
            if left == 0:
                act()

    return reach


def lost_reply(point: str) -> DeltapostError:
    """The error of a caller that never hears of the operation before the point."""
    area, _, step = point.partition(".")
    kind: type[DeltapostError] = StoreUnavailable
    if "tx" in step.split("_"):
        kind = LedgerUnavailable
    elif area in ("announce", "stream", "trim") or step in ("read", "xadd_sent"):
        kind = StreamUnavailable
    elif step == "journaled":
        kind = StateUnavailable
    return kind(f"the reply was lost at {point}")


def fail_from_environment(environment: Mapping[str, str]) -> Reach:
    """`nothing`, or what fails this process as `DELTAPOST_FAIL_AT` says. Raises ConfigurationError."""
    wanted = environment.get("DELTAPOST_FAIL_AT", "")
    if not wanted:
        return nothing
    mode, _, rest = wanted.partition(":")
    point, _, count = rest.partition(":")
    if mode not in MODES or point not in (*POINTS, *END_POINTS) or not (count or "1").isdecimal():
        raise ConfigurationError(
            f"DELTAPOST_FAIL_AT={wanted!r} is not MODE:POINT or MODE:POINT:N",
            hint=f"modes: {', '.join(MODES)}; points: {', '.join((*POINTS, *END_POINTS))}",
        )

    def act() -> None:
        if mode == "lost":
            raise lost_reply(point)
        os.kill(os.getpid(), signal.SIGKILL if mode == "kill" else signal.SIGSTOP)

    return at(point, int(count or "1"), act)
