"""Names of the steps between which a process may die: what tests kill, pause or fail at.

The services and the learner call `reach(name)` at each; outside tests it does nothing. With
`DELTAPOST_KILL_AT=record.before_put` (or `record.before_put:2` for the second time through) a process kills
itself there with SIGKILL, which is how the recovery of real processes is tested.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from deltapost.errors import ConfigurationError

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
    "stream.reset_sent",
    "stream.position_tx",
)

POINTS: Final = (*LEARNER_POINTS, *ROUND_POINTS, *RECOVERY_POINTS)


def nothing(_point: str) -> None:
    """Goes on: what `reach` is in production."""


def kill_from_environment(environment: Mapping[str, str]) -> Reach:
    """`nothing`, or what kills this process at the point that `DELTAPOST_KILL_AT` names."""
    wanted = environment.get("DELTAPOST_KILL_AT", "")
    if not wanted:
        return nothing
    point, _, count = wanted.partition(":")
    if point not in POINTS or not (count or "1").isdecimal():
        raise ConfigurationError(
            f"DELTAPOST_KILL_AT={wanted!r} names no kill point", hint=f"one of: {', '.join(POINTS)}"
        )
    left = int(count or "1")

    def reach(here: str) -> None:
        nonlocal left
        if here == point:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return reach
