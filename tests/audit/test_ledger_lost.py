"""A ledger that is dropped or restored under a live aggregator is brought back by it: adopted, not forked."""

from __future__ import annotations

from deltapost.ledger.engine import Ledger
from deltapost.serialization.records import Record
from deltapost_aggregator import discovery
from deltapost_aggregator.discovery import Discovery
from fixtures.histories import FRAGMENTS, ROUNDS, ScriptedRun, copy, history, restore


class Live(ScriptedRun):
    """Workers, members reader and discovery of one process that is never restarted."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.discovery = Discovery(self.pipeline.context().services, lambda _plan: None)
        self.look()

    def look(self) -> None:
        self.pipeline.clock.sleep(discovery.LEDGER_SECONDS)
        self.discovery.step(0.0)

    def records(self) -> list[list[bytes]]:
        return [self.pipeline.records(fragment) for fragment in range(FRAGMENTS)]

    def adopt(self, version: int) -> None:
        for fragment in range(FRAGMENTS):
            self.step_to(version, fragment)

    def goes_on(self, before: list[list[bytes]]) -> None:
        """Plays one round more; what was there is untouched, and the chain runs through."""
        version = len(before[0])
        self.play(range(version, version + 1))
        for fragment, records in enumerate(self.records()):
            assert records[:-1] == before[fragment]
            read = [Record.from_bytes(data) for data in records]
            assert [record.previous for record in read[1:]] == [record.sha256 for record in read[:-1]]
            assert len({envelope for record in read for envelope in record.verdicts()}) == sum(
                len(record.verdicts()) for record in read
            )


def test_dropped_mid_run_it_is_admitted_again_and_every_record_adopted(ledger: Ledger) -> None:
    live = Live(ledger)
    live.play()
    before, records = history(ledger), live.records()

    restore(ledger, {})
    live.look()
    live.adopt(ROUNDS)

    assert history(ledger) == before
    live.goes_on(records)


def test_restored_from_an_old_copy_mid_run_its_live_owner_adopts_what_came_after(ledger: Ledger) -> None:
    # Given a copy from the middle of a round: envelopes judged, nothing sealed
    live = Live(ledger)
    live.play(range(1))
    for fragment in range(FRAGMENTS):
        live.post(1, fragment, ("ada",))
        live.workers[fragment].step()
    backup = copy(ledger)
    live.play(range(1, ROUNDS))
    before, records = history(ledger), live.records()

    restore(ledger, backup)
    live.look()
    live.adopt(ROUNDS)

    assert {name: rows for name, rows in history(ledger).items() if name != "learners"} == {
        name: rows for name, rows in before.items() if name != "learners"
    }
    live.goes_on(records)
