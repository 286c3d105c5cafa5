"""RunAnnouncer: tells aggregators that there is this run, when a learner joins and whenever nobody answers.

Failure modes. A stream that forgot the announcement before an aggregator read it is told again with the next
re-posted contribution; only a creator's password opens that stream, and who may not write to it keeps quiet.
"""

from __future__ import annotations

from deltapost.algorithms.plan import RunPlan
from deltapost.errors import StreamDenied
from deltapost.events import events
from deltapost.serialization.messages import RunMessage, sign_message
from deltapost.serialization.names import RUNS_STREAM
from deltapost.serialization.signing import SigningKey
from deltapost.streams import MessageLog

logger = events(__name__)

#: Entries kept in the stream on which runs are announced.
MAX_RUNS_ENTRIES = 10_000


class RunAnnouncer:
    """Announces one run under one learner's key."""

    def __init__(self, log: MessageLog, plan: RunPlan, key: SigningKey) -> None:
        self._log = log
        self._run = plan.run
        message = RunMessage(run=plan.run, manifest=plan.manifest_sha256, public_key=key.public)
        self._frame = sign_message(message, key).frame
        self._denied = False

    def announce(self, *, needed: bool = False) -> None:
        """Appends the announcement. Raises StreamUnavailable, and StreamDenied where it is `needed`."""
        if self._denied:
            return
        try:
            self._log.append(RUNS_STREAM, self._frame, max_length=MAX_RUNS_ENTRIES)
        except StreamDenied as error:
            if needed:
                raise
            self._denied = True
            logger.info("run_not_announced_again", extra={"run": self._run, "reason": str(error)})
