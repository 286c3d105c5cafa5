"""What may enter a round: counters, layout, values and norm, each with its own refusal."""

from __future__ import annotations

import math
import struct

import pytest

from deltapost import codecs
from deltapost.algorithms.admission import check_payload, delta_norm, judge_counters, judge_norm
from deltapost.errors import MalformedPayload, NonFinite, SchemaMismatch
from deltapost.serialization import ParameterSpec, TensorBytes, pack
from outer_step.tensors import BACKENDS, EXACT, SCHEMA, SPECS, config, delta, f32

SPEC = ParameterSpec("w", "F32", (2,))


@pytest.mark.parametrize("name", codecs.NAMES)
def test_what_a_codec_writes_is_admitted(name: str) -> None:
    tensors = delta(name, 1)

    assert check_payload(pack(tensors), SPECS, codecs.get(name)) == tensors


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        (
            {"w": f32(1.0, 2.0, 3.0)},
            SchemaMismatch,
            r"'w' is F32 of shape \[3\], expected F32 of shape \[2\]",
        ),
        ({"w": f32(1.0, 2.0, shape=(1, 2))}, SchemaMismatch, "'w'"),
        ({"w": TensorBytes("I32", (2,), bytes(8))}, SchemaMismatch, "I32"),
        ({"w": TensorBytes("I8", (8,), bytes(8))}, SchemaMismatch, "I8"),
        ({"w": f32(shape=(0, 2**40))}, SchemaMismatch, "'w'"),
        ({}, SchemaMismatch, "'w' is missing"),
        ({"w": f32(1.0, 2.0), "x": f32(1.0)}, SchemaMismatch, "'x' that was not expected"),
        ({"w": f32(1.0, math.nan)}, NonFinite, "'w'"),
        ({"w": f32(-math.inf, 0.0)}, NonFinite, "'w'"),
    ],
)
def test_a_payload_that_is_not_the_schemas_or_not_finite_is_refused_by_entry(
    tensors: dict, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        check_payload(pack(tensors), [SPEC], codecs.get("F32"))


def test_bytes_that_are_no_payload_are_malformed() -> None:
    with pytest.raises(MalformedPayload):
        check_payload(b"no payload", [SPEC], codecs.get("F32"))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-40, 3.4e38])
def test_zeros_subnormals_and_large_finite_numbers_are_admitted(value: float) -> None:
    assert check_payload(pack({"w": f32(value, 1.0)}), [SPEC], codecs.get("F32"))


@pytest.mark.parametrize(
    ("steps", "tokens", "verdict"),
    [
        (0, 10, "zero_steps"),
        (0, 0, "zero_steps"),
        (10, 0, "zero_weight"),
        (100, 1, None),
        (101, 1, "outlier"),
        (3, 3000, None),
        (3, 3001, "outlier"),
    ],
)
def test_counters_are_judged_by_the_runs_caps(steps: int, tokens: int, verdict: str | None) -> None:
    assert judge_counters(steps, tokens, config(max_steps=100, max_tokens_per_step=1000)) == verdict


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("name", codecs.NAMES)
def test_the_admitted_norm_is_the_one_the_round_records(name: str, backend: str) -> None:
    from outer_step.tensors import contribution, first_state

    tensors = delta(name, 2)
    result = (
        config()
        .aggregator(SCHEMA, SCHEMA.names, BACKENDS[backend])
        .close_round(first_state(), [contribution("a", tensors)])
    )

    norm = delta_norm(tensors, tuple(reversed(SPECS)), codecs.get(name), BACKENDS["native"])

    assert norm == result.participants[0].norm


def test_norms_are_judged_by_the_runs_cap() -> None:
    assert judge_norm(1e18, config()) is None
    assert judge_norm(2.0, config(max_delta_norm=2.0)) is None
    assert judge_norm(2.1, config(max_delta_norm=2.0)) == "outlier"
    assert judge_norm(math.inf, config()) == "non_finite"
    huge = {"w": TensorBytes("F32", (2,), struct.pack("<2f", 1e30, 0.0))}
    assert delta_norm(huge, [SPEC], codecs.get("F32"), BACKENDS["native"]) == math.inf
