"""Many rows in one call are written as each alone would be, on both databases: values, order, repetitions."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import select

from deltapost.errors import DeltapostError, LedgerError, NonFinite
from deltapost.ledger.engine import Ledger
from deltapost.ledger.tables import ContributionRow
from deltapost.ledger.writing import upsert
from fixtures.pipeline import RUN, Pipeline

NOW = datetime(2026, 12, 1, 5, 59, 59, 999_999, tzinfo=UTC)


@pytest.fixture
def pipeline(ledger: Ledger) -> Pipeline:
    return Pipeline(ledger)


def row(envelope: str, learner: str = "a", **values: Any) -> dict[str, Any]:
    return {
        "run": RUN,
        "envelope": hashlib.sha256(envelope.encode()).digest(),
        "fragment": 0,
        "version": 0,
        "learner": learner,
        "message": bytes(range(256)),
        "payload_size": 2**53 + 1,
        "step_seconds": 5e-324,
        "loss": None,
        "metrics": None,
        "final": True,
        "verdict": "late",
        "detail": None,
        "deliveries": 1,
        "received_at": NOW,
        **values,
    }


def write(ledger: Ledger, *rows: dict[str, Any]) -> None:
    with ledger.write() as session:
        upsert(session, ContributionRow, rows, replace=("verdict", "detail"), count="deliveries")


def written(ledger: Ledger) -> dict[str, ContributionRow]:
    with ledger.read() as session:
        return {found.learner: found for found in session.scalars(select(ContributionRow))}


def test_every_value_comes_back_as_it_was_given(pipeline: Pipeline) -> None:
    strange = 'it\'s "quoted" \\x00 \\\\ {} \u2603 \U0001f600\n\x00'
    metrics = {"largest": 1.7976931348623157e308, "tenth": 0.1, "negative_zero": -0.0, "least": 5e-324}
    given = [
        row("1", "a", metrics=metrics, detail=strange),
        row("2", "b", loss=0.1 + 0.2, final=False, message=None, payload_size=None, step_seconds=None),
        row("3", "c", message=b"", metrics={}, detail=""),
    ]

    write(pipeline.ledger, *given)

    found = written(pipeline.ledger)
    for name in given[0].keys() - {"detail", "metrics"}:
        assert getattr(found["a"], name) == given[0][name], name
    # Postgres keeps JSON's numbers as decimals: a large one comes back as an integer.
    assert {name: float(value) for name, value in (found["a"].metrics or {}).items()} == metrics
    assert found["a"].detail == strange.replace("\n", "\ufffd").replace("\x00", "\ufffd")
    for learner, values in zip("bc", given[1:], strict=True):
        assert {name: getattr(found[learner], name) for name in values} == values


def test_what_is_there_is_replaced_and_counted_however_often_one_call_has_it(pipeline: Pipeline) -> None:
    write(pipeline.ledger, row("1", detail="before"))

    write(
        pipeline.ledger,
        row("1", verdict="missing", detail="then", loss=3.0),
        row("2", "b"),
        row("1", verdict="accepted", detail="now"),
        row("1", verdict="corrupt", detail="last"),
    )

    found = written(pipeline.ledger)
    assert (found["a"].verdict, found["a"].detail, found["a"].deliveries) == ("corrupt", "last", 4)
    assert found["a"].loss is None  # only what is named is replaced
    assert found["b"].deliveries == 1


def test_rows_are_written_in_their_order(pipeline: Pipeline) -> None:
    """A learner's slot is taken by one accepted envelope at a time: it is given back before it is taken."""
    write(pipeline.ledger, row("1", verdict="accepted"))

    write(pipeline.ledger, row("1", verdict="late"), row("2", verdict="accepted"))

    with pytest.raises(LedgerError, match="refused a row"):
        write(pipeline.ledger, row("3", verdict="accepted"), row("2", verdict="late"))


def test_a_number_that_is_not_finite_is_refused_by_name(pipeline: Pipeline) -> None:
    for values in ({"loss": float("nan")}, {"metrics": {"x": float("inf")}}):
        with pytest.raises(DeltapostError) as refused:
            write(pipeline.ledger, row("1", **values))
        assert isinstance(refused.value, NonFinite)
    assert written(pipeline.ledger) == {}


def test_hundreds_of_rows_are_one_call(pipeline: Pipeline) -> None:
    rows = [row(f"{number}", f"learner-{number:04d}", steps=number) for number in range(700)]

    write(pipeline.ledger, *rows)

    found = written(pipeline.ledger)
    assert [found[learner].steps for learner in sorted(found)] == list(range(700))
