"""What a learner refuses to publish or to join is named before anything leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deltapost.errors import (
    ConfigurationError,
    MalformedMessage,
    NonFinite,
    SchemaMismatch,
    SignatureRefused,
)
from deltapost.serialization.names import (
    envelope_stream,
)
from fixtures.served import CLAIMS, Served, algorithm, small_model


@pytest.mark.parametrize(
    ("delta", "error", "words"),
    [
        ({"a": np.zeros((4, 5), np.float32)}, SchemaMismatch, "'b'"),
        ({"b": np.zeros((8,), np.float32)}, SchemaMismatch, "shape"),
        ({"b": np.full(7, np.nan, np.float32)}, NonFinite, "'b'"),
        ({"b": np.full(7, np.inf, np.float32)}, NonFinite, "'b'"),
    ],
)
def test_a_delta_that_cannot_be_right_is_refused_before_anything_leaves(
    served: Served, delta: dict[str, Any], error: type[Exception], words: str
) -> None:
    with served.join(small_model(), algorithm()) as run:
        with pytest.raises(error, match=words):
            run.publish_contribution(1, 0, delta=delta, **CLAIMS)

        assert run._journal.unanswered() == []
        assert list(served.store.list("tiny/deltas/")) == []
        assert served.log.length(envelope_stream("tiny", 1)) == 0


@pytest.mark.parametrize(
    "claims",
    [
        {"steps": -1},
        {"tokens": 1.5},
        {"step_seconds": float("nan")},
        {"loss": float("inf")},
        {"metrics": {"Bad Name": 1.0}},
        {"metrics": {f"m{number}": 0.0 for number in range(17)}},
    ],
)
def test_claims_out_of_range_are_refused_at_once(served: Served, claims: dict[str, Any]) -> None:
    with served.join(small_model(), algorithm()) as run:
        with pytest.raises(MalformedMessage):
            run.publish_contribution(0, 0, delta=small_model(0.5), **{**CLAIMS, **claims})

        assert run._journal.unanswered() == []


def test_exactly_one_form_of_delta_is_taken(served: Served) -> None:
    with served.join(small_model(), algorithm()) as run:
        for given in ({}, {"anchor": run.anchor(0)}, {"delta": small_model(), "theta": small_model()}):
            with pytest.raises(TypeError, match="either delta"):
                run.publish_contribution(0, 0, **given, **CLAIMS)
        with pytest.raises(ConfigurationError, match="fragment 7"):
            run.publish_contribution(7, 0, delta=small_model(), **CLAIMS)


def test_a_model_that_does_not_fit_the_run_is_named(served: Served) -> None:
    served.join(small_model(), algorithm()).leave()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"a": np.zeros((4, 5), np.float32)}, "'b'"),
        ({**small_model(), "c": np.zeros(1, np.float32)}, "'c'"),
        ({**small_model(), "b": np.zeros(8, np.float32)}, "'b'"),
        ({**small_model(), "a": np.zeros((4, 5), np.float16)}, "F16"),
    ]
    for model, words in wrong:
        with pytest.raises(SchemaMismatch, match=words):
            served.join(model, learner="bob")


def test_an_algorithm_other_than_the_runs_is_refused_with_both_values(served: Served) -> None:
    served.join(small_model(), algorithm()).leave()

    with pytest.raises(ConfigurationError, match=r"outer_lr = 1\.0, this learner asks for 0\.5"):
        served.join(small_model(), algorithm(outer_lr=0.5), learner="bob")


def test_a_run_that_does_not_exist_needs_an_algorithm(served: Served) -> None:
    with pytest.raises(ConfigurationError, match=r"does not exist.*algorithm"):
        served.join(small_model())


def test_a_learner_id_belongs_to_the_key_that_came_first(served: Served, tmp_path: Any) -> None:
    served.join(small_model(), algorithm()).leave()

    with pytest.raises(SignatureRefused, match="'ada'"):
        served.join(small_model(), state_dir=tmp_path / "elsewhere")


def test_two_processes_cannot_be_the_same_learner(served: Served) -> None:
    run = served.join(small_model(), algorithm())

    with pytest.raises(ConfigurationError, match="another process"):
        served.join(small_model())

    run.leave()
