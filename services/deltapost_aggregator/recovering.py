"""Recovering: the state at a fragment's head, computed again from its newest checkpoint; nothing written.

Between checkpoints the bucket holds no state, only what it follows from: the payloads that the records since
name. So whoever lost it (a restart, a takeover, a record of another owner that was adopted) closes those
rounds again, one in each step of the fragment's worker: the lease is renewed in between, others get their
turns, a stop is heard, and memory is that of one round. Every round must lead to its record, to the byte.

Failure modes. A payload, checkpoint or record that is gone is HistoryError, naming what to restore: nothing
else in the bucket holds what it held. An owner that has the state in memory goes on without. A store that
does not answer is raised as it is: the next step goes on where this one stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeAlias

from deltapost.algorithms import FragmentState
from deltapost.algorithms.anchors import genesis_state
from deltapost.algorithms.checkpoints import checkpoint_of
from deltapost.errors import HistoryError, NonFinite, ObjectMissing
from deltapost.events import events
from deltapost.ledger import rounds
from deltapost.ledger.runs import Standing
from deltapost.serialization import unpack
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.names import anchor_key, genesis_key, outer_key
from deltapost.serialization.records import Record, SealContent
from deltapost.serialization.tensor import Buffer
from deltapost_aggregator.context import RunContext

logger = events(__name__)

#: A version's state and the hash of its record.
Known: TypeAlias = tuple[bytes, FragmentState]


class Closed(Protocol):
    """What closing a round again comes to."""

    @property
    def record(self) -> Record: ...
    @property
    def state(self) -> FragmentState: ...


class StillRecovering(Exception):
    """No error: one more round was closed again, and `head` is not reached yet. Do the step again."""

    def __init__(self, version: int, head: int) -> None:
        super().__init__(f"version {version} of {head} was computed again")


class Recovery:
    """Leads one fragment's state to its head. `compute` closes a round from the state before it."""

    def __init__(
        self,
        context: RunContext,
        fragment: int,
        get_object: Callable[[str, ObjectRef], Buffer],
        compute: Callable[[Standing, SealContent], Closed],
    ) -> None:
        self._context = context
        self._fragment = fragment
        self._get_object = get_object
        self._compute = compute

    def start(self, head: Standing, held: Known | None) -> Known:
        """Where to begin: the newest of what is held and the last checkpoint. Raises HistoryError."""
        run, fragment, plan = self._context.run, self._fragment, self._context.plan
        version = checkpoint_of(head.head, plan.config.checkpoint_every)
        usable = held is not None and version <= held[1].version <= head.head
        if held is not None and usable and held[0] == self._sha256(held[1].version):
            return held
        if version == 0:
            genesis = plan.manifest.genesis[fragment]
            theta = unpack(self._get_object(genesis_key(run, fragment, genesis.sha256), genesis))
            return plan.manifest_sha256, genesis_state(plan.specs(fragment), theta)
        record = self._record(version)
        wanted = [
            (anchor_key(run, fragment, record.base, record.anchor.sha256), record.anchor),
            (outer_key(run, fragment, record.base, record.outer.sha256), record.outer),
        ]
        transfers = self._context.services.transfers
        anchor, outer = transfers.each([partial(self._get_object, *one) for one in wanted])
        return record.sha256, FragmentState(version=version, theta=unpack(anchor), outer=unpack(outer))

    def step(self, head: Standing, known: Known) -> Known:
        """The state one version further. Raises HistoryError, naming version and object; StoreError."""
        sha256, state = known
        record = self._record(state.version + 1)
        before = replace(head, head=state.version, head_sha256=sha256)
        try:
            closed = self._compute(before, record.seal_content())
        except (ObjectMissing, HistoryError, NonFinite) as error:
            raise self._lost(record, head.head, str(error)) from error
        if closed.record != record:
            raise self._lost(record, head.head, f"it leads to {_difference(closed.record, record)}")
        if record.version == head.head and record.sha256 != head.head_sha256:
            raise self._lost(record, head.head, "the ledger's head is another record than its row of it")
        logger.info(
            "round_closed_again",
            extra={
                "run": record.run,
                "fragment": record.fragment,
                "version": record.version,
                "head": head.head,
            },
        )
        return record.sha256, closed.state

    def _sha256(self, version: int) -> bytes:
        return self._record(version).sha256 if version else self._context.plan.manifest_sha256

    def _record(self, version: int) -> Record:
        run, fragment = self._context.run, self._fragment
        record = rounds.record_of(self._context.services.ledger, run, fragment, version)
        if record is None:
            raise HistoryError(
                f"the ledger lacks record {version} of fragment {fragment} of run {run!r}",
                hint="rebuild it from the bucket: deltapost ledger rebuild",
            )
        return record

    def _lost(self, record: Record, head: int, reason: str) -> HistoryError:
        start = checkpoint_of(head, self._context.plan.config.checkpoint_every)
        return HistoryError(
            f"the state of fragment {record.fragment} of run {record.run!r} at version {head} is computed "
            f"from checkpoint {start} on, and round {record.version} cannot be closed again: {reason}",
            hint="restore what it names from a copy of the bucket: the state is nowhere else",
        )


def _difference(found: Record, expected: Record) -> str:
    """The first object in which two records of one round differ."""
    for name in ("anchor", "outer", "update"):
        got, wanted = getattr(found, name), getattr(expected, name)
        if got != wanted:
            return (
                f"the {name} {got.sha256.hex()[:16] if got else None}…, "
                f"its record names {wanted.sha256.hex()[:16] if wanted else None}…"
            )
    return "another record"
