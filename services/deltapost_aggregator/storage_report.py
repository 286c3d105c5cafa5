"""StorageReport: what a run keeps, what would go, and what a day more will cost at the present pace.

Counts and bytes are of one listing of the run's prefix. The pace is the ledger's: the rounds of the last day.
Requests are those that rounds cause: uploads by learners and aggregator, read-backs, and one reading of the
anchor (or update) by each participant; record and attestation come to it with their announcement. Looks for
the next record come on top: one for each fragment and PROBE_SECONDS while it is silent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from deltapost.algorithms.retention import Retain
from deltapost.audit.history import BucketHistory
from deltapost.ledger import upkeep
from deltapost.ledger.engine import Ledger
from deltapost.limits import PROBE_SECONDS
from deltapost.serialization.signing import SigningKey
from deltapost.stores import UnfinishedUpload, UploadsStore
from deltapost_aggregator import retention
from deltapost_aggregator.garbage import Judge, Swept, sweep

#: Foreign keys that are listed by name; all are counted.
LISTED_FOREIGN = 20

#: Documents that the aggregator writes for a round (record, attestation), and objects of a checkpoint
#: (anchor, outer state); an update comes on top.
_DOCUMENTS = 2
_STATES = 2

#: What each participant reads of a round: its anchor (or update).
_FOLLOWED = 1


@dataclass(frozen=True)
class Forecast:
    """What a day at the present pace adds, and where it ends under the policy. Bytes are of payload data."""

    rounds_per_day: float
    bytes_per_day: float
    puts_per_day: float
    gets_per_day: float
    idle_looks_per_day: float
    #: Bytes at which the run settles with the policy; None: it grows for ever.
    settles_at_bytes: float | None


@dataclass(frozen=True)
class StorageReport:
    """What a collection did, or (a plan) would do."""

    run: str
    planned: bool
    policy: str | None
    #: Per fragment: the version through which rounds are let go.
    released_through: dict[int, int]
    swept: Swept
    uploads: list[UnfinishedUpload]
    forecast: Forecast

    def to_plain(self) -> dict[str, Any]:
        """As JSON-ready values."""
        gone = self.swept.gone()
        return {
            "run": self.run,
            "planned": self.planned,
            "retain": self.policy or "all",
            "released_through": self.released_through,
            "areas": {
                area: {judgement: asdict(tally) for judgement, tally in sorted(tallies.items())}
                for area, tallies in sorted(self.swept.tallies.items())
            },
            "gone": asdict(gone),
            "foreign": {
                "objects": len(self.swept.foreign),
                "keys": self.swept.foreign[:LISTED_FOREIGN],
            },
            "uploads": [asdict(upload) for upload in self.uploads],
            "forecast": asdict(self.forecast),
        }


def collect(
    ledger: Ledger,
    history: BucketHistory,
    *,
    plan: bool,
    retain: Retain | None,
    key: SigningKey | None,
    idle_seconds: float,
    poll_seconds: float,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> StorageReport:
    """Collects everything that may go, or with `plan` only says what; `key` signs what `retain` lets go.

    Harmless beside running aggregators: the predicate is theirs. Raises what the bucket cannot be read for.
    """
    released = {}
    for fragment in range(history.fragments):
        new = None
        if retain is not None:
            new = retention.planned(ledger, history, fragment, retain, at_once=True)
            if new is not None and not plan:
                assert key is not None
                new = retention.note(history, new, key)
        released[fragment] = new or history.released(fragment)
    standing = {fragment: note for fragment, note in released.items() if note is not None}
    judge = Judge(history, standing)
    # By base version first, so that each record is read once, whoever's deltas come between.
    objects = sorted(history.store.list(f"{history.run}/"), key=lambda info: info.key.split("/")[-3:])
    swept = Swept()
    for done, info in enumerate(objects, start=1):
        swept.merge(sweep(history, judge, [info], delete=not plan))
        progress(done, len(objects))
    uploads = []
    if isinstance(history.store, UploadsStore):
        for upload in history.store.unfinished(f"{history.run}/", idle_seconds=idle_seconds):
            uploads.append(upload)
            if not plan:
                history.store.abort(upload)
    return StorageReport(
        run=history.run,
        planned=plan,
        policy=str(retain) if retain is not None else None,
        released_through={fragment: note.through for fragment, note in standing.items()},
        swept=swept,
        uploads=uploads,
        forecast=forecast(
            upkeep.pace(ledger, history.run, checkpoint_every=history.checkpoint_every),
            history.fragments,
            retain,
            poll_seconds,
        ),
    )


def forecast(pace: upkeep.Pace, fragments: int, retain: Retain | None, poll_seconds: float) -> Forecast:
    """What the pace leads to.

    Under `rounds=K` each fragment keeps K rounds, a quarter more until a span is worth letting go, and the
    state before the first; under `days=D` as many as D days bring. Records stay and are left out.
    """
    written = pace.rounds * _DOCUMENTS + pace.checkpoints * _STATES + pace.updates
    settles = None
    if retain is not None and pace.rounds:
        per_round = (pace.delta_bytes + pace.state_bytes) / pace.rounds
        kept = (
            retain.rounds * fragments
            if retain.rounds is not None
            else pace.per_day(pace.rounds) * (retain.days or 0.0)
        )
        settles = (kept * 1.25) * per_round + fragments * pace.state_bytes / max(pace.checkpoints, 1)
    return Forecast(
        rounds_per_day=pace.per_day(pace.rounds),
        bytes_per_day=pace.per_day(pace.stored_bytes),
        puts_per_day=pace.per_day(pace.participants + written),
        gets_per_day=pace.per_day(pace.participants + written + _FOLLOWED * pace.participants),
        idle_looks_per_day=fragments * 86_400 / max(poll_seconds, PROBE_SECONDS),
        settles_at_bytes=settles,
    )
