"""Whatever a sender writes ends in a verdict: ten thousand mutated messages and payloads, real intake."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from deltapost.ledger import runs
from deltapost.ledger.engine import open_ledger
from deltapost.ledger.tables import ContributionRow, UnverifiedRow
from deltapost.serialization.messages import sign_message
from deltapost.serialization.names import envelope_stream, members_stream
from deltapost.streams import START
from deltapost_aggregator.members import MembersReader
from fixtures.pipeline import LEARNERS, RUN, Pipeline, arrays, healthy, learner_signing_key, plain_config
from hostile.mutating import PAYLOAD_MUTATIONS, bytes_changed, message_changed

MUTANTS = 50
SENDERS = tuple(f"sender-{number}" for number in range(MUTANTS))
DTYPES = ("F32", "BF16", "F8_E4M3", "F4")


def post_mutant(pipeline: Pipeline, random: Random, sender: str) -> None:
    """A mutated frame, or a true envelope of a mutated payload; some of them twice."""
    key = learner_signing_key(sender)
    payload = pipeline.payload(arrays(random.randrange(100)))
    kind = random.randrange(4)
    if kind >= 2:
        payload = random.choice(PAYLOAD_MUTATIONS)(random, payload)
    message = pipeline.message(sender, payload, version=random.choice((0, 0, 0, 1)))
    if random.random() < 0.9:
        pipeline.put(message, payload)
    frame = sign_message(message, key).frame
    if kind == 0:
        frame = bytes_changed(random, frame)
    elif kind == 1:
        frame = message_changed(random, message, key)
    for _ in range(random.choice((1, 1, 1, 2))):
        pipeline.log.append(envelope_stream(RUN, 0), frame)
    pipeline.log.append(members_stream(RUN), bytes_changed(random, frame))


def check_batch(path: Path, dtype: str, seed: int) -> None:
    """Posts mutants and three honest learners; all is decided, counted and merged as it should be."""
    ledger = open_ledger(f"sqlite:///{path}")
    config = plain_config(delta_dtype=dtype, quorum_size=2 * MUTANTS)
    pipeline = Pipeline(ledger, config=config, learners=(*LEARNERS, *SENDERS))
    random = Random(seed)
    for sender in SENDERS:
        post_mutant(pipeline, random, sender)
    healthy(pipeline)

    worker = pipeline.worker()
    MembersReader(pipeline.context()).step()
    pipeline.settle(worker, steps=20)

    # Only verdicts came out, the position is at the end, and every entry is accounted for once
    entries = pipeline.log.read(envelope_stream(RUN, 0), START, limit=1_000)
    assert runs.standing(ledger, RUN, 0).position == entries[-1].id
    with ledger.read() as session:
        deliveries = session.scalar(select(func.sum(ContributionRow.deliveries))) or 0
        unverified = session.scalar(select(func.sum(UnverifiedRow.count))) or 0
        accepted = set(
            session.scalars(select(ContributionRow.learner).where(ContributionRow.verdict == "accepted"))
        )
    assert deliveries + unverified == len(entries)
    assert accepted >= set(LEARNERS)
    ledger.close()


SEEDS = st.tuples(st.sampled_from(DTYPES), st.integers(0, 2**32))
COMMON = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def _fuzz(migrated_sqlite: Path, case: tuple[str, int]) -> None:
    dtype, seed = case
    with TemporaryDirectory() as directory:
        check_batch(Path(shutil.copy(migrated_sqlite, directory)), dtype, seed)


@settings(COMMON, max_examples=1_000 // MUTANTS)
@given(SEEDS)
def test_a_thousand_mutants_come_out_as_verdicts(migrated_sqlite: Path, case: tuple[str, int]) -> None:
    _fuzz(migrated_sqlite, case)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(COMMON, max_examples=10_000 // MUTANTS)
@given(SEEDS)
def test_ten_thousand_mutants_come_out_as_verdicts(migrated_sqlite: Path, case: tuple[str, int]) -> None:
    _fuzz(migrated_sqlite, case)


def test_the_mutants_reach_every_kind_of_refusal(migrated_sqlite_url: str) -> None:
    """Fuzzing that only ever meets the first check shows little."""
    ledger = open_ledger(migrated_sqlite_url)
    pipeline = Pipeline(ledger, config=plain_config(quorum_size=500), learners=(*LEARNERS, *SENDERS))
    for seed in range(4):
        for sender in SENDERS:
            post_mutant(pipeline, Random(f"{seed} {sender}"), sender)
    pipeline.settle(pipeline.worker())

    with ledger.read() as session:
        verdicts = set(session.scalars(select(ContributionRow.verdict)))
        reasons = set(session.scalars(select(UnverifiedRow.reason)))
    ledger.close()
    assert verdicts >= {"accepted", "malformed", "schema", "missing", "non_finite", "ahead", "conflict"}
    assert reasons >= {"malformed", "bad_signature"}
