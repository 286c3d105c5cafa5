"""Announcements: what the commits stream said of versions that were not followed yet, in bounded memory.

An announcement that the run's known aggregator key signed is believed as to where the head is, and its record
and attestation are kept until the version is followed. Any other only says that a look may be worth it, once.
What is dropped here, or was never announced, is read from the bucket.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from deltapost.algorithms.plan import RunPlan
from deltapost.errors import ForkedHistory, MalformedMessage, SignatureRefused
from deltapost.events import events
from deltapost.learner.chain import check_link, check_slot
from deltapost.limits import MAX_HELD_PROOF_BYTES
from deltapost.serialization.ends import read_slot
from deltapost.serialization.messages import CommitMessage
from deltapost.serialization.records import Attestation, Record

logger = events(__name__)


@dataclass(frozen=True)
class Announced:
    """What was announced of one fragment: the newest version, and announcements with a proof by version.

    `through` is None where nothing is known: then the head is looked for in the bucket.
    """

    through: int | None = None
    commits: Mapping[int, CommitMessage] = field(default_factory=dict)

    def record(
        self, plan: RunPlan, fragment: int, version: int, previous: bytes, aggregator_key: bytes | None
    ) -> Record | None:
        """The record that came with the announcement, attested by the run's key and following `previous`.

        None unless it all holds: then the bucket decides. So it does while no key is known yet.
        """
        commit = self.commits.get(version)
        if commit is None or commit.proof is None or aggregator_key is None:
            return None
        try:
            record = read_slot(commit.proof.record)
            if not isinstance(record, Record) or record.sha256 != commit.record:
                raise MalformedMessage("what came with the announcement is not the record announced")
            check_slot(plan, record, fragment, version)
            check_link(record, previous)
            Attestation.from_bytes(commit.proof.attestation).verify(record.sha256, aggregator_key)
        except (MalformedMessage, ForkedHistory, SignatureRefused) as error:
            facts = {"run": plan.run, "fragment": fragment, "version": version, "reason": str(error)}
            logger.warning("announced_record_refused", extra=facts)
            return None
        return record


#: Nothing was announced.
UNKNOWN = Announced()


class Announcements:
    """Of one run, by fragment. Used by one thread."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}
        self._rung: set[int] = set()
        self._proofs: OrderedDict[tuple[int, int], CommitMessage] = OrderedDict()
        self._bytes = 0

    def ring(self, fragment: int) -> None:
        """Somebody says that there is news: worth one look."""
        self._rung.add(fragment)

    def add(self, commit: CommitMessage) -> None:
        """Takes in an announcement that the run's aggregator signed."""
        self._newest[commit.fragment] = max(self._newest.get(commit.fragment, 0), commit.version)
        key = (commit.fragment, commit.version)
        if commit.proof is None or key in self._proofs:
            return
        self._proofs[key] = commit
        self._bytes += commit.proof.size
        while self._bytes > MAX_HELD_PROOF_BYTES:
            self._drop(next(iter(self._proofs)))

    def newest(self, fragment: int) -> int:
        """The newest version announced by the aggregator; 0 when none was."""
        return self._newest.get(fragment, 0)

    def worth_a_look(self, fragment: int, followed: int) -> bool:
        """Whether something beyond the version followed was announced."""
        return fragment in self._rung or self.newest(fragment) > followed

    def of(self, fragment: int, followed: int) -> Announced:
        """What to follow from the version followed on."""
        newest = self.newest(fragment)
        if newest <= followed:
            return UNKNOWN
        commits = {version: commit for (of, version), commit in self._proofs.items() if of == fragment}
        return Announced(newest, commits)

    def looked(self, fragment: int, followed: int) -> None:
        """The bucket has answered: what rang is done with, and so is what was announced up to there."""
        self._rung.discard(fragment)
        for key in [key for key in self._proofs if key[0] == fragment and key[1] <= followed]:
            self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        proof = self._proofs.pop(key).proof
        assert proof is not None
        self._bytes -= proof.size
