"""A learner joins, publishes, aligns, dies and comes back: its model always holds a committed anchor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sqlalchemy import select

import deltapost
from deltapost import Receipt
from deltapost.errors import (
    StoreUnavailable,
)
from deltapost.ledger.tables import ContributionRow, ParticipantRow
from deltapost.serialization.names import (
    envelope_stream,
    members_stream,
)
from fixtures.pipeline import learner_signing_key
from fixtures.served import CLAIMS, SYNC_EVERY, Served, algorithm, eventually, small_model


def test_a_learner_that_moves_down_moves_the_anchor_down(served: Served) -> None:
    """Sign and scale of the pseudo-gradient: θ from 1.0 to 0.9, lr 1, no momentum: the anchor is 0.9."""
    model = small_model(1.0)
    with served.join(model, algorithm()) as run:
        for parameter in model.values():
            parameter[:] = 0.9
        run.publish_contribution(0, 0, anchor=run.anchor(0), theta=model, **CLAIMS)

        assert run.wait_for(0, 1, timeout=10)

    np.testing.assert_allclose(model["a"], 0.9, rtol=1e-6)
    assert run.versions == [1, 0]


def test_a_loop_of_steps_publishes_each_fragment_once_in_sync_every_steps(served: Served) -> None:
    model = small_model()
    with served.join(model, algorithm()) as run:
        receipts = []
        for _ in range(4 * SYNC_EVERY):
            for parameter in model.values():
                parameter -= 0.25
            run.count_step(tokens=8)
            posted = run.publish_due(loss=1.0, metrics={"grad_norm": 0.5})
            for receipt in posted:
                assert run.wait_for(receipt.fragment, receipt.version + 1, timeout=10)
            receipts += posted

        assert [(r.fragment, r.version) for r in receipts] == [
            (fragment, version) for version in range(4) for fragment in (0, 1)
        ]
        assert run.versions == [4, 4]
        assert run.bytes_sent == sum(receipt.payload_bytes for receipt in receipts)
    with served.ledger.read() as session:
        rows = session.scalars(select(ParticipantRow).order_by(ParticipantRow.version)).all()
    assert {(row.loss, row.metrics["grad_norm"]) for row in rows if row.metrics} == {(1.0, 0.5)}
    assert [row.steps for row in rows if row.fragment == 0] == [2, 4, 4, 4]
    # Every step of the 14 up to the last publish is committed once, and the two after it are the model's own.
    np.testing.assert_allclose(model["a"], -0.25 * (14 + 2), rtol=1e-6)


def test_slow_rounds_of_one_fragment_starve_no_other(served: Served) -> None:
    # Given one publication at a time, and rounds that outlast the next fragment's turn
    with served.join(small_model(), algorithm(in_flight=1)) as run:
        published: list[Receipt] = []
        since = 0
        for _ in range(6 * SYNC_EVERY):
            run.count_step(tokens=8)
            since += 1
            if since > SYNC_EVERY // 2 and published:
                assert run.wait_for(published[-1].fragment, published[-1].version + 1, timeout=10)
            if found := run.publish_due(loss=1.0):
                published, since = [*published, *found], 0

    # Then the turn that a fragment was owed comes before the other's next one
    turns = [receipt.fragment for receipt in published]
    assert len(turns) >= 6
    assert turns == [0, 1] * (len(turns) // 2) + [0] * (len(turns) % 2)


def test_what_a_learner_publishes_is_found_by_its_receipt_in_sql(served: Served) -> None:
    model = small_model()
    with served.join(model, algorithm()) as run:
        receipt = deltapost.publish_contribution(run, 1, 0, delta=small_model(0.5), **CLAIMS)
        assert run.wait_for(1, 1, timeout=10)

    assert served.store.head(receipt.key).size == receipt.payload_bytes
    with served.ledger.read() as session:
        row = session.get(ContributionRow, ("tiny", bytes.fromhex(receipt.envelope)))
        assert row is not None
        assert (row.verdict, row.answered_version, row.learner) == ("accepted", 1, "ada")


def test_repeating_a_publish_posts_the_same_bytes_and_changes_nothing(served: Served) -> None:
    served.stop()
    model = small_model()
    with served.join(model, algorithm()) as run:
        first = run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)
        again = run.publish_contribution(0, 0, delta=small_model(0.75), **{**CLAIMS, "tokens": 99})

        assert (again.envelope, again.key, again.repeated) == (first.envelope, first.key, True)
        entries = served.log.read(envelope_stream("tiny", 0), "0-0", limit=10)
        assert len({entry.data for entry in entries}) == 1
        served.start()
        assert run.wait_for(0, 1, timeout=10)
        answered = run.publish_contribution(0, 0, delta=small_model(0.75), **CLAIMS)
    assert (answered.envelope, answered.repeated) == (first.envelope, True)

    def deliveries() -> list[int]:
        with served.ledger.read() as session:
            return [row.deliveries for row in session.scalars(select(ContributionRow))]

    eventually(lambda: deliveries() == [2])


def test_torch_and_numpy_learners_share_a_run_and_its_bytes(served: Served) -> None:
    arrays = small_model()
    tensors = {name: torch.zeros(value.shape) for name, value in arrays.items()}
    settings = algorithm(quorum_size=2, delta_dtype="F4", commit_dtype="F8_E4M3")
    with served.join(arrays, settings) as one, served.join(tensors, learner="bob") as two:
        for version in range(3):
            one.publish_contribution(0, version, delta=small_model(0.3), **CLAIMS)
            two.publish_contribution(0, version, delta=small_model(0.7), **CLAIMS)
            assert one.wait_for(0, version + 1, timeout=10)
            assert two.wait_for(0, version + 1, timeout=10)

        assert one.anchor(0) == two.anchor(0)
        # Both followed by the small updates, not by whole anchors.
        assert one.bytes_received == two.bytes_received
    np.testing.assert_array_equal(arrays["a"], tensors["a"].numpy())


def test_a_torch_model_is_aligned_in_place_so_that_optimizer_state_survives(served: Served) -> None:
    model = torch.nn.Linear(3, 2)
    weight, pointer = model.weight, model.weight.data_ptr()
    optimizer = torch.optim.AdamW(model.parameters())
    with served.join(model, algorithm(fragments=1, in_flight=1), run="torch-run") as run:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        run.publish_contribution(0, 0, anchor=run.anchor(0), theta=model, **CLAIMS)
        assert run.wait_for(0, 1, timeout=10)

    assert model.weight is weight
    assert model.weight.data_ptr() == pointer
    assert optimizer.state[weight]["step"] == 1


def test_a_bfloat16_model_follows_a_master_finer_than_itself(served: Served) -> None:
    model = torch.nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    step = torch.full((4, 4), 2.0**-10)
    with served.join(model, algorithm(fragments=1, in_flight=1), run="half") as run:
        for version in range(4):
            run.publish_contribution(0, version, delta={"weight": step}, **CLAIMS)
            assert run.wait_for(0, version + 1, timeout=10)

    assert set(model.weight.flatten().tolist()) == {1 - 2.0**-8}


def test_a_killed_learner_posts_its_journal_again_and_learns_what_became_of_it(served: Served) -> None:
    served.stop()
    run = served.join(small_model(), algorithm())
    receipt = run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)
    run._courier.stop()  # as killed: no goodbye
    run._presence.stop()
    run._directory_lock.release()
    served.log.trim(envelope_stream("tiny", 0), "9999999999999-0")  # and the stream lost it
    served.store.delete(receipt.key)  # and the bucket too

    with served.join(small_model(), repost_seconds=0.1) as again:
        again.count_step(tokens=1)
        again.count_step(tokens=1)
        assert again.due() == []  # fragment 0 has its turn at step 2, and is published for its version
        eventually(lambda: served.log.length(envelope_stream("tiny", 0)) > 0)
        served.start()
        assert again.wait_for(0, 1, timeout=10)
        eventually(lambda: again._journal.unanswered() == [])
        entry = again._journal.find(0, 0)

    assert entry is not None
    assert (entry.verdict, entry.answered) == ("accepted", True)


def test_a_session_is_numbered_above_all_before_it_even_on_another_disk(
    served: Served, tmp_path: Any
) -> None:
    key = tmp_path / "ada.key"
    learner_signing_key("ada").save(key)
    served.join(small_model(), algorithm(), signing_key_file=str(key)).leave()
    served.join(small_model(), signing_key_file=str(key)).leave()

    with served.join(small_model(), signing_key_file=str(key), state_dir=tmp_path / "other") as third:
        assert third._presence.session == 3


def test_a_learner_that_joins_late_starts_from_the_newest_anchor(served: Served) -> None:
    with served.join(small_model(), algorithm()) as first:
        for version in range(5):
            for fragment in (0, 1):
                first.publish_contribution(fragment, version, delta=small_model(0.5), **CLAIMS)
                assert first.wait_for(fragment, version + 1, timeout=10)
        model = small_model(77.0)
        with served.join(model, learner="bob") as late:
            assert late.versions == [5, 5]
            assert late.local_step == 5 * SYNC_EVERY
            assert late.due() == []
            np.testing.assert_array_equal(model["b"], np.full(7, -2.5, np.float32))


def test_an_outer_step_of_final_contributions_is_taken_whole(served: Served) -> None:
    model = small_model(1.0)
    with served.join(model, algorithm(outer_lr=0.1, outer_momentum=0.9)) as run:
        for parameter in model.values():
            parameter[:] = 0.5
        run.count_step(tokens=4)
        receipts = run.publish_final(loss=0.1)
        assert [receipt.fragment for receipt in receipts] == [0, 1]
        for receipt in receipts:
            assert run.wait_for(receipt.fragment, 1, timeout=10)

    np.testing.assert_allclose(model["b"], 0.5)


def test_a_refused_contribution_leaves_the_slot_for_another(served: Served) -> None:
    with served.join(small_model(), algorithm()) as run:
        refused = run.publish_contribution(0, 0, delta=small_model(0.5), **{**CLAIMS, "tokens": 0})
        eventually(lambda: (entry := run._journal.find(0, 0)) is not None and entry.refused)

        receipt = run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)

        assert receipt.envelope != refused.envelope
        assert run.wait_for(0, 1, timeout=10)
    with served.ledger.read() as session:
        verdicts = {row.verdict for row in session.scalars(select(ContributionRow))}
    assert verdicts == {"zero_weight", "accepted"}


def test_a_barrier_waits_for_its_commit(served: Served) -> None:
    model = small_model()
    settings = deltapost.DiLoCo.standard(sync_every=2, outer_lr=1.0, outer_momentum=0.0)
    with served.join(model, settings) as run:
        for step in range(1, 7):
            for parameter in model.values():
                parameter -= 1.0
            run.count_step(tokens=8)
            run.publish_due()
            aligned = run.align()
            assert [one.version for one in aligned] == ([step // 2] if step % 2 == 0 else [])
            assert all(one.merged for one in aligned)

    np.testing.assert_array_equal(model["a"], np.full((4, 5), -6.0, np.float32))


def test_a_contribution_journalled_while_the_store_is_down_is_posted_later(served: Served) -> None:
    with served.join(small_model(), algorithm(), repost_seconds=0.1) as run:
        put = served.store.put

        def down(*_arguments: Any, **_keywords: Any) -> bool:
            raise StoreUnavailable("the store is down")

        run._publisher._store.put = down  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable):
            run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)
        assert len(run._journal.unanswered()) == 1
        run._publisher._store.put = put  # type: ignore[method-assign]

        assert run.wait_for(0, 1, timeout=10)


def test_a_redis_that_forgot_everything_loses_nothing(served: Served) -> None:
    with served.join(small_model(), algorithm(), repost_seconds=0.2) as run:
        run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)
        assert run.wait_for(0, 1, timeout=10)
        for stream in (envelope_stream("tiny", 0), envelope_stream("tiny", 1), members_stream("tiny")):
            served.log.trim(stream, "9999999999999-0")

        run.publish_contribution(0, 1, delta=small_model(0.5), **CLAIMS)

        assert run.wait_for(0, 2, timeout=10)
