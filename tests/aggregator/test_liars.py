"""Whatever rule a run chose, it reaches the aggregator, and one NaN and one 1e30 end as verdicts only."""

from __future__ import annotations

import numpy as np
import pytest

from deltapost.algorithms.diloco import Median, Merge, NormClipped, Rda, TrimmedMean, WeightedMean
from deltapost.ledger.engine import Ledger
from deltapost.serialization import TensorBytes, pack, unpack
from deltapost.serialization.names import anchor_key
from fixtures.pipeline import LEARNERS, RUN, Pipeline, arrays, healthy, plain_config

# Arithmetic does not depend on the database.
pytestmark = pytest.mark.parametrize("migrated_url", ["sqlite"], indirect=True)

RULES = (WeightedMean(), Rda(), NormClipped(Rda()), TrimmedMean(2), Median())


def with_one_value(value: float) -> bytes:
    """A payload in which one element is `value`."""
    bad = arrays(99)
    bad["b.weight"][3] = value
    return pack({name: TensorBytes("F32", array.shape, array.tobytes()) for name, array in bad.items()})


@pytest.mark.parametrize("merge", RULES, ids=str)
def test_of_five_learners_one_sends_a_nan_and_one_1e30_and_the_round_closes_without_them(
    ledger: Ledger, merge: Merge
) -> None:
    # Given a run with this rule (hivemind PR#379)
    pipeline = Pipeline(ledger, config=plain_config(merge=merge), learners=(*LEARNERS, "nan", "huge"))

    # When the liars post before the honest
    lies = [pipeline.post("nan", with_one_value(np.nan)), pipeline.post("huge", with_one_value(1e30))]
    healthy(pipeline)
    pipeline.run_to(1)

    # Then both are answered, and the anchor is finite
    record = pipeline.record(1)
    assert [record.verdicts()[lie.sha256] for lie in lies] == ["non_finite", "non_finite"]
    assert [one.learner for one in record.participants] == sorted(LEARNERS)
    counts_once = isinstance(merge, TrimmedMean | Median)
    assert ({one.weight for one in record.participants} == {1.0}) == counts_once
    anchor = unpack(pipeline.store.get(anchor_key(RUN, 0, 0, record.anchor.sha256)).data)
    assert all(np.isfinite(np.frombuffer(tensor.data, "<f4")).all() for tensor in anchor.values())


@pytest.mark.parametrize("merge", [TrimmedMean(1), Median()], ids=str)
def test_a_flipped_delta_does_not_move_an_element_past_the_honest_ones(ledger: Ledger, merge: Merge) -> None:
    config = plain_config(merge=merge, quorum_size=4, outer_lr=1.0, outer_momentum=0.0)
    pipeline = Pipeline(ledger, config=config, learners=(*LEARNERS, "liar"))
    honest = [arrays(number + 1) for number in range(len(LEARNERS))]

    pipeline.post("liar", {name: -1e3 * array for name, array in honest[0].items()})
    healthy(pipeline)
    pipeline.run_to(1)

    anchor = unpack(pipeline.store.get(anchor_key(RUN, 0, 0, pipeline.record(1).anchor.sha256)).data)
    for name, before in arrays(0).items():
        moved = before - np.frombuffer(anchor[name].data, "<f4").reshape(before.shape)
        sent = np.stack([delta[name] for delta in honest])
        assert (moved >= sent.min(axis=0) - 1e-5).all()
        assert (moved <= sent.max(axis=0) + 1e-5).all()
