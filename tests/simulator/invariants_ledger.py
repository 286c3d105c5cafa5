"""Invariants of the ledger: after each transaction, and once more when everything has settled.

SQL is an index: its heads are a prefix of the bucket's chains, what it calls answered is what the records
answered, and nothing in it is ahead of the bucket.
"""

from __future__ import annotations

import hashlib

from deltapost.serialization.records import SealContent
from simulator.invariants import History
from simulator.ledger import Database


class LedgerChecks:
    """Looks at the database directly, beside the code under test."""

    def __init__(self, database: Database, history: History) -> None:
        self._database = database
        self._history = history
        self._heads: dict[int, tuple[int, bool]] = {}
        self._seals: set[bytes] = set()

    def restored(self) -> None:
        """The database is another one now."""
        self._heads = {}
        self.committed()

    def committed(self) -> None:
        """A transaction was committed."""
        ask = self._database.connection.execute
        for row, sha256 in ask("SELECT rowid, content_sha256 FROM seals").fetchall():
            if sha256 not in self._seals:
                self._seals.add(sha256)
                content = ask("SELECT content FROM seals WHERE rowid = ?", (row,)).fetchone()[0]
                seal = SealContent.from_bytes(content)
                self._history.seals.setdefault((seal.fragment, seal.version), []).append(seal)
        ends = self._ends()
        for fragment, head, sha256, announced in ask(
            "SELECT fragment, head, head_sha256, announced FROM fragments"
        ).fetchall():
            if self._heads.get(fragment) != (head, fragment in ends):
                self._heads[fragment] = (head, fragment in ends)
                self._check_head(fragment, head, sha256, ends.get(fragment))
            # Above SQL's head it may be: one who announced before a restore notes it after.
            if announced > 0 and (fragment, announced) not in self._history.attested:
                self._history.fail(f"fragment {fragment} is announced up to {announced}, unattested")
        if self.finished() and not self._history.run_ended:
            self._history.fail("SQL calls the run finished, and the bucket has no end of it")

    def finished(self) -> bool:
        """Whether the run is over in SQL."""
        return self._database.connection.execute("SELECT state FROM runs").fetchall() == [("finished",)]

    def _ends(self) -> dict[int, tuple[int, bytes]]:
        rows = self._database.connection.execute("SELECT fragment, version, end_sha256 FROM fragment_ends")
        return {fragment: (version, sha256) for fragment, version, sha256 in rows}

    def _check_head(self, fragment: int, head: int, sha256: bytes, end: tuple[int, bytes] | None) -> None:
        history = self._history
        if head > history.tip(fragment):
            history.fail(f"SQL has version {head} of fragment {fragment}, the bucket {history.tip(fragment)}")
            return
        if sha256 != history.sha256(fragment, head):
            history.fail(f"SQL's head {head} of fragment {fragment} is not the bucket's record")
        if head > 0 and (fragment, head) not in history.attested:
            history.fail(f"SQL has version {head} of fragment {fragment}, which nobody attested")
        if end is not None:
            known = history.ends.get(fragment)
            if known is None or end != (known.version, known.sha256) or head != history.tip(fragment):
                history.fail(f"SQL's end of fragment {fragment}, at head {head}, is not the bucket's")
            elif (fragment, known.version) not in history.attested:
                history.fail(f"SQL has the end of fragment {fragment}, which nobody attested")
        self._check_rows(fragment, head, ended=end is not None)

    def _check_rows(self, fragment: int, head: int, *, ended: bool) -> None:
        history, ask = self._history, self._database.connection.execute
        rounds = dict(
            ask("SELECT version, record FROM rounds WHERE fragment = ? ORDER BY version", (fragment,))
        )
        if sorted(rounds) != list(range(1, head + 1)):
            history.fail(f"fragment {fragment} has rounds {sorted(rounds)} in SQL at head {head}")
        for version, record in rounds.items():
            if hashlib.sha256(record).digest() != history.sha256(fragment, version):
                history.fail(f"round {version} of fragment {fragment} in SQL is not the bucket's record")
        answered = {
            envelope: (version, verdict)
            for envelope, version, verdict in ask(
                "SELECT envelope, answered_version, verdict FROM contributions "
                "WHERE fragment = ? AND answered_version IS NOT NULL",
                (fragment,),
            )
        }
        expected = {
            envelope: (record.version, verdict)
            for record in history.records[fragment][:head]
            for envelope, verdict in record.verdicts().items()
        }
        if ended and fragment in history.ends:
            end = history.ends[fragment]
            expected |= {envelope: (end.version, verdict) for envelope, verdict in end.verdicts().items()}
        if answered != expected:
            wrong = {key.hex()[:12] for key in answered.keys() ^ expected.keys()}
            wrong |= {k.hex()[:12] for k in answered.keys() & expected.keys() if answered[k] != expected[k]}
            history.fail(
                f"SQL's answers of fragment {fragment} at head {head} differ from the records': {wrong}"
            )

    def behind(self) -> str:
        """What SQL has not caught up with yet; empty once it has converged."""
        found = {
            fragment: (head, announced)
            for fragment, head, announced in self._database.connection.execute(
                "SELECT fragment, head, announced FROM fragments"
            )
        }
        for fragment, chain in enumerate(self._history.records):
            if found.get(fragment) != (len(chain), len(chain)):
                stands = found.get(fragment)
                return (
                    f"fragment {fragment}: (head, announced) is {stands} in SQL, {len(chain)} in the bucket"
                )
        if self._history.end_is_wanted and not self.finished():
            return f"the run is not finished in SQL, which has ends of {sorted(self._ends())}"
        return ""

    def waiting(self) -> list[str]:
        """Why rounds do not close, in the ledger's own words."""
        rows = self._database.connection.execute("SELECT fragment, waiting_reason FROM fragments")
        return [f"fragment {fragment}: {reason}" for fragment, reason in rows if reason]
