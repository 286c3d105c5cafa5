"""Golden vectors: rounds whose inputs are integers of a formula, closed to records whose SHA-256 is known.

Every delta format (and all in one round) × merge × commit format, twice: five learners, then four whose
contributions are final, one of them all zeros. Nothing here rounds a float to make an input: bits, codes and
scales come from `scrambled`, so that any language can make them again. `UPDATE_GOLDEN=1 pytest
tests/outer_step/test_vectors.py` writes their file anew, with numpy alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from deltapost.adapters import Backend, kernels
from deltapost.adapters.native import NativeBackend
from deltapost.algorithms import ARITHMETIC_VERSION, Contribution, FragmentState, RoundResult
from deltapost.algorithms.diloco import DiLoCo, Median, Merge, NormClipped, Rda, TrimmedMean, WeightedMean
from deltapost.algorithms.sealing import round_record
from deltapost.serialization import DType, ParameterSpec, Schema, TensorBytes, pack
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.records import Claim, Manifest, SealContent

FILE: Final = Path(__file__).with_name("vectors.json")
FORMATS: Final = ("F32", "F16", "BF16", "F8_E4M3", "F4")
#: What the deltas are; in a round of mixed ones each learner has another format.
DELTAS: Final = (*FORMATS, "mixed")
RULES: Final[dict[str, Merge]] = {
    "rda": Rda(),
    "weighted_mean": WeightedMean(),
    "norm_clipped": NormClipped(),
    "norm_clipped_rda": NormClipped(Rda()),
    "trimmed_mean": TrimmedMean(1),
    "median": Median(),
}
COMMITS: Final = (None, *FORMATS)
#: A scalar, nothing, one element, whole blocks of 4096 and of 32, one more, one less; all dtypes.
SMALL: Final = (
    ParameterSpec("a.embed", "BF16", (33,)),
    ParameterSpec("b", "F32", ()),
    ParameterSpec("c", "F16", (4096,)),
    ParameterSpec("d", "F32", (0, 3)),
    ParameterSpec("e", "F32", (3, 1400)),
    ParameterSpec("f", "BF16", (4095,)),
    ParameterSpec("g", "F16", (1,)),
    ParameterSpec("h", "F32", (32,)),
)
#: Enough blocks for three threads as they are shared by default, in C and in torch.
WIDE: Final = (ParameterSpec("w", "F32", (100 * 4096 + 17,)),)
WHAT: Final = ("anchor", "outer", "update", "record")


@dataclass(frozen=True)
class Case:
    """One history of two rounds."""

    delta: str
    rule: str
    commit: str | None
    specs: tuple[ParameterSpec, ...] = SMALL

    @property
    def name(self) -> str:
        return f"{self.delta} {self.rule} {self.commit}" + (" wide" if self.specs is WIDE else "")


CASES: Final = tuple(Case(delta, rule, commit) for delta in DELTAS for rule in RULES for commit in COMMITS)
WIDE_CASES: Final = (
    Case("F4", "rda", "BF16", WIDE),
    Case("F8_E4M3", "trimmed_mean", "F8_E4M3", WIDE),
    Case("mixed", "norm_clipped_rda", "F4", WIDE),
)


def scrambled(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """For i = 0, 1 …, modulo 2³²: h ← 2654435761·i + 2246822519·seed; h ← h ⊕ h≫15; h ← 739982445·h;
    h ← h ⊕ h≫12; h ← 695872825·h; h ← h ⊕ h≫15."""
    h = np.arange(count, dtype=np.uint32) * np.uint32(2654435761)
    h += np.uint32(2246822519 * seed % 2**32)
    h ^= h >> 15
    h *= np.uint32(739982445)
    h ^= h >> 12
    h *= np.uint32(695872825)
    h ^= h >> 15
    return h


@cache
def floats(dtype: DType, shape: tuple[int, ...], seed: int, field: int) -> TensorBytes:
    """Of each h: sign bit 31, exponent field `field` + bits 23–26, mantissa the low bits. Where bits 27–30
    are 0 a zero, where they are 1 a subnormal. BF16 is the upper half; F16 has the field bits 23–26 and as
    mantissa bits 5–14.
    """
    h = scrambled(prod(shape), seed)
    kind, low = h >> 27 & 15, h >> 23 & 15
    if dtype == "F16":
        half = np.where(kind == 0, 0, np.where(kind == 1, 0, low) << 10 | h >> 5 & 0x3FF) | h >> 31 << 15
        return TensorBytes(dtype, shape, half.astype("<u2").tobytes())
    exponent = np.where(kind == 1, 0, field + low)
    bits = np.where(kind == 0, 0, exponent << 23 | h & 0x7FFFFF).astype(np.uint32) | h >> 31 << 31
    data = bits.astype("<u4") if dtype == "F32" else (bits >> 16).astype("<u2")
    return TensorBytes(dtype, shape, data.tobytes())


@cache
def delta(spec: ParameterSpec, dtype: str, seed: int) -> Mapping[str, TensorBytes]:
    """A payload's entries of one tensor. Codes are the low bytes of h, E4M3's NaNs the codes before them.

    F8's scale has the exponent field 105 + seed mod 4, or 1 for each seventh seed: products are subnormal.
    E8M0 bytes are 105 + bits 8–10, or 1 where bits 27–30 are 1. The codes of F4's padding are no zeros.
    """
    if dtype in ("F32", "F16", "BF16"):
        return {spec.name: floats(dtype, spec.shape, seed, 104)}  # type: ignore[arg-type]
    scale = f"{spec.name}.scale"
    if dtype == "F8_E4M3":
        codes = (scrambled(spec.elements, seed) & 255).astype(np.uint8)
        codes -= (codes & 127) == 127
        field = 1 if seed % 7 == 0 else 105 + seed % 4
        return {
            spec.name: TensorBytes("F8_E4M3", spec.shape, codes.tobytes()),
            scale: TensorBytes("F32", (), (field << 23).to_bytes(4, "little")),
        }
    blocks = -(-spec.elements // 32)
    nibbles = (scrambled(16 * blocks, seed) & 255).astype(np.uint8)
    h = scrambled(blocks, seed + 1)
    scales = np.where(h >> 27 & 15 == 1, 1, 105 + (h >> 8 & 7)).astype(np.uint8)
    return {
        spec.name: TensorBytes("F4", (32 * blocks,), nibbles.tobytes()),
        scale: TensorBytes("F8_E8M0", (blocks,), scales.tobytes()),
    }


def zeros(entries: Mapping[str, TensorBytes]) -> dict[str, TensorBytes]:
    """The same entries with every code 0; scales stay."""
    return {
        name: one if name.endswith(".scale") else replace(one, data=bytes(len(one.data)))
        for name, one in entries.items()
    }


def contributions(case: Case, version: int) -> list[Contribution]:
    learners, final = (5, False) if version == 6 else (4, True)
    given = []
    for learner in range(learners):
        dtype = FORMATS[learner] if case.delta == "mixed" else case.delta
        tensors: dict[str, TensorBytes] = {}
        for index, spec in enumerate(case.specs):
            entries = delta(spec, dtype, 1000 * version + 20 * learner + index)
            nothing = (spec.name == "f" and learner == 3) or (final and learner == 2)
            tensors |= zeros(entries) if nothing else entries
        given.append(
            Contribution(
                f"learner-{learner}", 60 + version, 7 + learner, 900 + 77 * learner, 0.25, final, tensors
            )
        )
    return given


def first_state(case: Case) -> FragmentState:
    theta, outer = {}, {}
    for index, spec in enumerate(case.specs):
        theta[spec.name] = floats(spec.dtype, spec.shape, 100 + index, 112)
        outer[f"momentum.{spec.name}"] = floats("F32", spec.shape, 200 + index, 104)
        if spec.dtype != "F32" or case.commit is not None:
            outer[f"master.{spec.name}"] = floats("F32", spec.shape, 300 + index, 112)
    return FragmentState(6, theta, outer)


def found(case: Case, backend: Backend) -> list[str]:
    """SHA-256 (hex) of anchor, outer state, update (of nothing if there is none) and record, in the end."""
    config = DiLoCo(sync_every=10, fragments=1, in_flight=1, commit_dtype=case.commit, merge=RULES[case.rule])
    aggregator = config.aggregator(Schema(case.specs), [spec.name for spec in case.specs], backend)
    state, previous, objects = first_state(case), hashlib.sha256(b"the record of version 6").digest(), []
    for version in (6, 7):
        given = contributions(case, version)
        result = aggregator.close_round(state, given)
        state = result.state
        objects = [pack(state.theta), pack(state.outer), pack(result.update) if result.update else b""]
        previous = record_sha256(version, given, result, previous, objects)
    return [hashlib.sha256(data).hexdigest() for data in objects] + [previous.hex()]


def record_sha256(
    version: int, given: list[Contribution], result: RoundResult, previous: bytes, objects: list[bytes]
) -> bytes:
    """Of the record that the round's seal leads to. What a seal has from messages is made up here."""
    anchor, outer, update = (ref(data) for data in objects)
    claims = tuple(
        Claim(
            learner=one.learner,
            envelope=hashlib.sha256(f"{version} {one.learner}".encode()).digest(),
            payload=ref(pack(one.tensors)),
            local_step=one.local_step,
            steps=one.steps,
            tokens=one.tokens,
            step_seconds=one.step_seconds,
            loss=None,
            metrics={},
            final=one.final,
        )
        for one in given
    )
    seal = SealContent(
        run="golden",
        fragment=0,
        version=version + 1,
        generation=0,
        claims=claims,
        answers=(),
        unverified={},
        over_quota={},
        degraded=False,
    )
    # Of the manifest a record holds nothing but its hash and the arithmetic version.
    manifest = Manifest.model_construct(arithmetic=ARITHMETIC_VERSION)
    return round_record(
        manifest=manifest,
        manifest_sha256=hashlib.sha256(b"the manifest").digest(),
        seal=seal,
        previous=previous,
        result=result,
        checkpoint=True,
        anchor=anchor,
        outer=outer,
        update=update if objects[2] else None,
    ).sha256


def ref(data: bytes) -> ObjectRef:
    return ObjectRef(sha256=hashlib.sha256(data).digest(), size=len(data))


@cache
def golden() -> dict[str, list[str]]:
    known: dict[str, Any] = json.loads(FILE.read_text())
    assert known.pop("arithmetic") == ARITHMETIC_VERSION
    return known


def differing(case: Case, backend: Backend) -> list[str]:
    """Which of anchor, outer, update and record are not the recorded ones."""
    return [
        what
        for what, one, other in zip(WHAT, found(case, backend), golden()[case.name], strict=True)
        if one != other
    ]


def write() -> None:
    """Writes the file anew, with numpy alone."""
    reference = NativeBackend(level="numpy")
    lines = [f' "{case.name}": {json.dumps(found(case, reference))}' for case in (*CASES, *WIDE_CASES)]
    FILE.write_text(f'{{\n "arithmetic": {ARITHMETIC_VERSION},\n' + ",\n".join(lines) + "\n}\n")


@contextmanager
def shared_by_threads(case: Case) -> Iterator[None]:
    """In here each thread takes a block of a small case, which one thread would do alone by default."""
    before = kernels.BLOCKS_PER_THREAD
    kernels.BLOCKS_PER_THREAD = before if case.specs is WIDE else 1
    try:
        yield
    finally:
        kernels.BLOCKS_PER_THREAD = before
