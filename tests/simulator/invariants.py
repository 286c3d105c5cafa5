"""Invariants of bucket and streams: checked as each object or message is written, whoever wrote it.

The first one that does not hold is the seed's failure; the simulation ends at that turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from deltapost.algorithms.plan import RunPlan
from deltapost.errors import DeltapostError, MalformedMessage, ObjectMissing
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.ends import FragmentEnd, RunEnd, read_slot
from deltapost.serialization.messages import (
    AdviceMessage,
    CommitMessage,
    ContributionMessage,
    SignedMessage,
    read_message,
)
from deltapost.serialization.names import (
    OBJECT_AREAS,
    ParsedKey,
    anchor_key,
    commits_stream,
    delta_key,
    learner_key,
    outer_key,
    parse_key,
    record_key,
    update_key,
)
from deltapost.serialization.records import Attestation, Record, SealContent
from deltapost.serialization.retention import Released, RetentionNote
from deltapost.stores.memory import MemoryStore


class History:
    """What the bucket has recorded so far, and whether it holds together."""

    def __init__(
        self,
        bucket: MemoryStore,
        plan: RunPlan,
        aggregator_key: bytes,
        honest: frozenset[str],
        was_read: Callable[[str], bool],
        fail: Callable[[str], None],
    ) -> None:
        self._bucket = bucket
        self._plan = plan
        self._aggregator_key = aggregator_key
        self._honest = honest
        #: Whether whoever writes now has read this object, whole, since it started.
        self._was_read = was_read
        self.fail = fail
        #: Records by fragment; the one at index v - 1 made version v.
        self.records: list[list[Record]] = [[] for _ in plan.fragments]
        self.attested: set[tuple[int, int]] = set()
        #: Ends by fragment, whether somebody asked for them, and whether the run's own was written.
        self.ends: dict[int, FragmentEnd] = {}
        self.end_is_wanted = False
        self.run_ended = False
        #: What signed notes let go, by fragment.
        self.released: dict[int, Released] = {}
        #: What every seal that was ever committed to a ledger fixed, by fragment and version.
        self.seals: dict[tuple[int, int], list[SealContent]] = {}
        #: Payloads that the store lost, and those that an owner had read by then: no code prevents that.
        self.lost: set[str] = set()
        self._excused: set[str] = set()
        self._answered: dict[tuple[int, bytes], int] = {}
        self._named: set[str] = set()
        self._envelopes: dict[bytes, SignedMessage] = {}

    def tip(self, fragment: int) -> int:
        return len(self.records[fragment])

    def sha256(self, fragment: int, version: int) -> bytes:
        """The hash that stands for a version: of its record, or of the manifest at 0."""
        if version == 0:
            return self._plan.manifest_sha256
        end = self.ends.get(fragment)
        if end is not None and version == end.version:
            return end.sha256
        return self.records[fragment][version - 1].sha256

    def last(self, fragment: int) -> int:
        """The highest version whose slot is taken: by a record or by the fragment's end."""
        return self.tip(fragment) + (fragment in self.ends)

    def references(self, key: str) -> bool:
        """Whether a record names the object."""
        return key in self._named

    def appended(self, stream: str, data: bytes) -> None:
        """A message landed on a stream."""
        try:
            signed = read_message(data)
        except MalformedMessage:
            return
        if isinstance(signed.message, ContributionMessage):
            self._envelopes[signed.sha256] = signed
        if stream != commits_stream(self._plan.run):
            return
        match signed.message:
            case CommitMessage() as commit:
                self._check_announcement(signed, commit)
            case AdviceMessage():
                signed.verify(self._aggregator_key, who="the aggregator")

    def _check_announcement(self, signed: SignedMessage, commit: CommitMessage) -> None:
        signed.verify(self._aggregator_key, who="the aggregator")
        if commit.version > self.last(commit.fragment):
            self.fail(f"version {commit.version} of fragment {commit.fragment} announced before its record")
        elif commit.record != self.sha256(commit.fragment, commit.version):
            self.fail(f"another record announced for version {commit.version} of fragment {commit.fragment}")
        elif (commit.fragment, commit.version) not in self.attested:
            self.fail(f"version {commit.version} of fragment {commit.fragment} announced without attestation")

    def put(self, key: str, data: bytes) -> None:
        """An object was created."""
        parsed = parse_key(key)
        if parsed is None:
            self.fail(f"the key {key!r} is none that names.py builds")
            return
        match parsed.area:
            case "records":
                slot = read_slot(data)
                if isinstance(slot, FragmentEnd):
                    self._check_end(key, slot)
                else:
                    self._check_record(key, slot)
            case "attestations":
                self._check_attestation(key, data)
            case "end":
                self._check_run_end(RunEnd.from_bytes(data))
            case "retention":
                self._check_note(key, RetentionNote.from_bytes(data))

    def before_delete(self, key: str) -> None:
        """An object is about to be deleted by one of the processes."""
        parsed = parse_key(key)
        if parsed is None or parsed.version is None or parsed.fragment is None:
            self.fail(f"{key!r} is deleted although nothing says it may be")
        elif parsed.area not in OBJECT_AREAS:
            self.fail(f"{key!r} is deleted although it is history")
        elif key in self._named and not self._is_released(parsed):
            self.fail(f"{key!r} is deleted although a record names it")
        elif (parsed.fragment, parsed.version + 1) not in self.attested:
            self.fail(f"{key!r} is deleted although no attested record says how its round ended")

    def _is_released(self, parsed: ParsedKey) -> bool:
        released = self.released.get(parsed.fragment or 0)
        return released is not None and released.covers(parsed.area, parsed.version or 0)

    def _check_note(self, key: str, note: RetentionNote) -> None:
        try:
            released = note.verify(self._aggregator_key)
        except DeltapostError as error:
            self.fail(f"the note {key!r}: {error}")
            return
        fragment, through = released.fragment, released.through
        # The state of `through` is what the next round starts from: its record has to be there, and signed.
        if (fragment, through) not in self.attested or released.record != self.sha256(fragment, through):
            self.fail(f"{key!r} lets go of a history that is not there")
        if through % self._plan.config.checkpoint_every:
            self.fail(f"{key!r} lets go of what version {through} is computed from")
        before = self.released.get(fragment)
        if before is None or before.through < through:
            self.released[fragment] = released

    def _check_end(self, key: str, end: FragmentEnd) -> None:
        fragment, version = end.fragment, end.version
        where = f"the end of fragment {fragment}"
        if not self.end_is_wanted:
            self.fail(f"{where}, which nobody asked for")
        if key != record_key(self._plan.run, fragment, version) or version != self.tip(fragment) + 1:
            self.fail(f"{where} under {key!r} while the newest is {self.tip(fragment)}")
            return
        if end.previous != self.sha256(fragment, version - 1):
            self.fail(f"{where} does not follow the record before it")
        for answer in end.answers:
            if answer.verdict == "accepted":
                self.fail(f"{where} calls an envelope accepted")
            self._answer(fragment, answer.envelope, version, where)
        self.ends[fragment] = end

    def _check_run_end(self, end: RunEnd) -> None:
        try:
            end.verify(self._aggregator_key)
        except DeltapostError as error:
            self.fail(f"the run's end: {error}")
        expected = [(one.version, one.sha256) for _, one in sorted(self.ends.items())]
        if [(one.version, one.sha256) for one in end.ends] != expected:
            self.fail("the run's end does not name the fragments' ends")
        for fragment in range(len(self._plan.fragments)):
            if (fragment, self.last(fragment)) not in self.attested or fragment not in self.ends:
                self.fail(f"the run has ended while fragment {fragment} has not")
        self.run_ended = True

    def _answer(self, fragment: int, envelope: bytes, version: int, where: str) -> None:
        before = self._answered.get((fragment, envelope))
        if before is not None:
            self.fail(f"{where} answers {envelope.hex()[:12]}, as version {before} did")
        self._answered[fragment, envelope] = version

    def _check_record(self, key: str, record: Record) -> None:
        fragment, version = record.fragment, record.version
        where = f"record {version} of fragment {fragment}"
        if key != record_key(self._plan.run, fragment, version) or version != self.tip(fragment) + 1:
            self.fail(f"{where} under {key!r} while the newest is {self.tip(fragment)}")
            return
        if record.previous != self.sha256(fragment, version - 1):
            self.fail(f"{where} does not follow the record before it")
        if not any(record.follows(seal) for seal in self.seals.get((fragment, version), ())):
            self.fail(f"{where} is not what any seal fixed")
        self._check_participants(record, where)
        for envelope in record.verdicts():
            self._answer(fragment, envelope, version, where)
        self._check_answers(record, where)
        self.records[fragment].append(record)
        self._check_objects(record, where)

    def _check_participants(self, record: Record, where: str) -> None:
        learners = [participant.learner for participant in record.participants]
        if learners != sorted(set(learners)):
            self.fail(f"{where} merges {learners}: not one of each, in order")
        for participant in record.participants:
            signed = self._envelopes.get(participant.envelope)
            if signed is None or not isinstance(signed.message, ContributionMessage):
                self.fail(f"{where} merges an envelope that nobody posted")
                continue
            message = signed.message
            told = (message.run, message.fragment, message.version, message.learner, message.payload)
            expected = (record.run, record.fragment, record.base, participant.learner, participant.payload)
            if told != expected:
                self.fail(f"{where} merges an envelope of {told[:4]} as {expected[:4]}")
            try:
                key = self._bucket.get(learner_key(record.run, participant.learner)).data
                signed.verify(key, who=participant.learner)
            except DeltapostError as error:
                self.fail(f"{where} merges what {participant.learner} did not sign: {error}")

    def _check_answers(self, record: Record, where: str) -> None:
        for answer in record.answers:
            if answer.verdict == "accepted":
                self.fail(f"{where} calls an envelope accepted that it does not merge")
            if answer.verdict == "ahead" and answer.learner in self._honest:
                self.fail(f"{where} answers an honest envelope of {answer.learner} with ahead")
            if answer.verdict in ("late", "stale") and answer.version >= record.base:
                self.fail(f"{where} answers an envelope of its own base {answer.version} {answer.verdict}")

    def _check_objects(self, record: Record, where: str) -> None:
        run, fragment, base = record.run, record.fragment, record.base
        named: list[tuple[str, ObjectRef]] = [
            (delta_key(run, p.learner, fragment, base, p.payload.sha256), p.payload)
            for p in record.participants
        ]
        if record.checkpoint != (record.version % self._plan.config.checkpoint_every == 0):
            self.fail(f"{where} says checkpoint={record.checkpoint}")
        if record.checkpoint:
            named.append((anchor_key(run, fragment, base, record.anchor.sha256), record.anchor))
            named.append((outer_key(run, fragment, base, record.outer.sha256), record.outer))
        if record.update is not None:
            named.append((update_key(run, fragment, base, record.update.sha256), record.update))
        for key, ref in named:
            self._named.add(key)
            self._check_object(key, ref, where)

    def _check_object(self, key: str, ref: ObjectRef, where: str) -> None:
        if key in self.lost and self._was_read(key):
            self._excused.add(key)
        try:
            data = self._bucket.get(key).data
        except ObjectMissing:
            parsed = parse_key(key)
            if key in self._excused or (parsed is not None and self._is_released(parsed)):
                return
            self.fail(f"{where} names {key!r}, which is not there")
            return
        whole = len(data) == ref.size and hashlib.sha256(data).digest() == ref.sha256
        if not whole and key not in self._excused:
            self.fail(f"{where} names {key!r}, which has other bytes")

    def _check_attestation(self, key: str, data: bytes) -> None:
        parsed = parse_key(key)
        assert parsed is not None
        fragment, version = parsed.fragment or 0, parsed.version or 0
        if version > self.last(fragment):
            self.fail(f"version {version} of fragment {fragment} is attested without a record")
            return
        try:
            Attestation.from_bytes(data).verify(self.sha256(fragment, version), self._aggregator_key)
        except DeltapostError as error:
            self.fail(f"the attestation of version {version} of fragment {fragment}: {error}")
        self.attested.add((fragment, version))

    def check_all_objects(self) -> None:
        """At the end: everything that records name is there still, with its bytes."""
        for chain in self.records:
            for record in chain:
                self._check_objects(record, f"at the end, record {record.version}")
