"""DiLoCo's settings hold together, and travel as plain values without loss."""

from __future__ import annotations

from dataclasses import fields, replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltapost.algorithms.diloco import DiLoCo, Median, Merge, NormClipped, Rda, TrimmedMean, WeightedMean
from deltapost.errors import ConfigurationError

BASE = DiLoCo(sync_every=10, fragments=2, in_flight=1)


def merges() -> st.SearchStrategy[Merge]:
    means = st.sampled_from([Rda(), WeightedMean()])
    return st.one_of(
        means, st.just(Median()), st.builds(NormClipped, means), st.builds(TrimmedMean, st.integers(1, 2**53))
    )


def optional(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | strategy


@st.composite
def settings(draw: st.DrawFn) -> DiLoCo:
    in_flight = draw(st.integers(1, 5))
    fragments = draw(st.integers(in_flight, 9))
    quorum = draw(st.integers(1, 100))
    commit = draw(optional(st.sampled_from(["BF16", "F4"])))
    return DiLoCo(
        sync_every=draw(st.integers(fragments, 1000)),
        fragments=fragments,
        in_flight=in_flight,
        outer_lr=draw(st.floats(0.01, 10)),
        outer_momentum=draw(st.floats(0, 1)),
        merge=draw(merges()),
        delta_dtype=draw(st.sampled_from(["F32", "F4", "F8_E4M3"])),
        commit_dtype=commit,
        checkpoint_every=draw(st.integers(1, 256)) if commit else 1,
        overlap_steps=draw(optional(st.integers(0, 50))),
        quorum_size=quorum,
        min_quorum=draw(st.integers(1, quorum)),
        grace_seconds=draw(optional(st.floats(0, 1e4))),
        stall_after_seconds=draw(optional(st.floats(0.1, 1e4))),
        weight_share_cap=draw(optional(st.floats(0.01, 1))),
        max_delta_norm=draw(optional(st.floats(0.01, 1e6))),
    )


@given(settings())
def test_settings_come_back_from_msgpack_as_they_went(config: DiLoCo) -> None:
    packed = msgpack.packb(config.to_fields())

    assert DiLoCo.from_fields(msgpack.unpackb(packed)) == config


def test_every_setting_travels() -> None:
    assert BASE.to_fields().keys() == {"algorithm"} | {one.name for one in fields(DiLoCo)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"algorithm": "other"}, "'other'"),
        ({"surprise": 1}, "unknown.*surprise"),
        ({"outer_lr": None}, "outer_lr"),
        ({"sync_every": True}, "sync_every=True"),
        ({"sync_every": 10.0}, "sync_every=10.0"),
        ({"merge": "rda"}, "merge"),
        ({"merge": {"rule": "krum"}}, "rda, weighted_mean, norm_clipped, trimmed_mean, median"),
        ({"merge": {"rule": ["rda"]}}, "the merge is"),
        ({"merge": {"rule": "rda", "more": 1}}, r"'rda' has the settings \['more', 'rule'\], expected"),
        ({"merge": {"rule": "trimmed_mean"}}, r"'trimmed_mean'.*expected \['rule', 'trim'\]"),
        ({"merge": {"rule": "trimmed_mean", "trim": 2.0}}, "trim=2.0 is not an integer from 1"),
        ({"merge": {"rule": "norm_clipped", "base": "rda"}}, "the merge is 'rda'"),
        ({"merge": {"rule": "norm_clipped", "base": {"rule": "median"}}}, "the base Median"),
    ],
)
def test_fields_of_another_kind_are_refused(change: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        DiLoCo.from_fields({**BASE.to_fields(), **change})


def test_a_missing_field_is_refused_by_name() -> None:
    plain = BASE.to_fields()
    del plain["quorum_size"]

    with pytest.raises(ConfigurationError, match=r"missing \['quorum_size'\]"):
        DiLoCo.from_fields(plain)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"in_flight": 3}, "in_flight <= fragments <= sync_every"),
        ({"fragments": 11}, "in_flight <= fragments <= sync_every"),
        ({"in_flight": 0}, "in_flight=0"),
        ({"quorum_size": 2, "min_quorum": 3}, "min_quorum=3 is above"),
        ({"outer_lr": 0.0}, "outer_lr"),
        ({"outer_lr": float("nan")}, "finite"),
        ({"outer_momentum": 1.5}, "outer_momentum"),
        ({"outer_momentum": "0.9"}, "outer_momentum"),
        ({"weight_share_cap": 0.0}, "weight_share_cap"),
        ({"weight_share_cap": 1.1}, "weight_share_cap"),
        ({"grace_seconds": -1.0}, "grace_seconds"),
        ({"overlap_steps": -1}, "overlap_steps"),
        ({"delta_dtype": "F5"}, "F32, F16, BF16, F8_E4M3, F4"),
        ({"commit_dtype": "int8"}, "no codec 'int8'"),
        ({"commit_dtype": "F4", "checkpoint_every": 0}, "checkpoint_every=0 is not an integer from 1 to 256"),
        ({"commit_dtype": "F4", "checkpoint_every": 257}, "checkpoint_every=257"),
        ({"checkpoint_every": 2}, "checkpoint_every=2 without a commit_dtype"),
        ({"merge": Rda}, "merge is type.*Rda, WeightedMean, NormClipped, TrimmedMean, Median"),
        ({"max_delta_norm": 0}, "max_delta_norm"),
        ({"max_steps": 10**9}, "max_steps"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(change: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        replace(BASE, **change)


@pytest.mark.parametrize("trim", [0, -1, True, 1.0, "2", None, 2**53 + 1])
def test_a_trimmed_mean_says_how_many_liars_it_withstands(trim: object) -> None:
    with pytest.raises(ConfigurationError, match="the number of liars"):
        TrimmedMean(trim)  # type: ignore[arg-type]


@pytest.mark.parametrize("base", [Median(), TrimmedMean(1), NormClipped(), None, Rda])
def test_norm_clipping_has_a_mean_as_its_base(base: object) -> None:
    with pytest.raises(ConfigurationError, match=r"WeightedMean\(\) or Rda\(\)"):
        NormClipped(base)  # type: ignore[arg-type]


def test_whole_numbers_for_real_settings_compare_as_they_travel() -> None:
    config = replace(BASE, outer_lr=1, grace_seconds=2)

    assert type(config.outer_lr) is float
    assert DiLoCo.from_fields(config.to_fields()) == config


def test_presets_are_what_their_names_say_and_take_any_setting() -> None:
    standard = DiLoCo.standard(sync_every=50, quorum_size=4)
    assert (standard.fragments, standard.in_flight, standard.overlap_steps) == (1, 1, 0)
    assert (standard.merge, standard.outer_lr, standard.outer_momentum) == (WeightedMean(), 0.7, 0.9)
    assert standard.quorum_size == 4
    streaming = DiLoCo.streaming(fragments=8)
    assert (streaming.fragments, streaming.in_flight, streaming.delta_dtype) == (8, 1, "F4")
    decoupled = DiLoCo.decoupled()
    assert (decoupled.in_flight, decoupled.overlap_steps, decoupled.merge) == (4, None, Rda())
    local = DiLoCo.local_sgd(sync_every=5)
    assert (local.outer_lr, local.outer_momentum, local.merge) == (1.0, 0.0, WeightedMean())
    with pytest.raises(ConfigurationError, match="'quorum'"):
        DiLoCo.standard(quorum=3)
