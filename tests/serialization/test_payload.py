"""Payload bytes are deterministic, readable by safetensors, and read back strictly or not at all."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltapost.errors import InvalidTensor, MalformedPayload, SchemaMismatch
from deltapost.limits import MAX_HEADER_BYTES
from deltapost.serialization import TensorBytes, digest, element_bytes, pack, unpack, unpack_expected
from deltapost.serialization.tensor import DTYPES

SAMPLE = {
    "w": TensorBytes("F32", (2, 3), bytes(range(24))),
    "a": TensorBytes("F8_E4M3", (3,), b"abc"),
    "a.scale": TensorBytes("F32", (), b"\0\0\x80\x3f"),
    "q": TensorBytes("F4", (32,), bytes(16)),
    "q.scale": TensorBytes("F8_E8M0", (1,), b"\x7f"),
    "empty": TensorBytes("BF16", (0, 3), b""),
    "half": TensorBytes("BF16", (1,), b"\x80\x3f"),
}


def payload(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A payload with whatever header; text and bytes are taken as they are."""
    raw = (
        header
        if isinstance(header, bytes)
        else (header.encode() if isinstance(header, str) else json.dumps(header).encode())
    )
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@st.composite
def tensors(draw: st.DrawFn) -> TensorBytes:
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    if dtype == "F4":
        shape = (*shape, 2)
    size = element_bytes(dtype, shape)
    return TensorBytes(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


names = st.text(min_size=1, max_size=20).filter(lambda name: name.isprintable() and name != "__metadata__")


@given(st.dictionaries(names, tensors(), max_size=6))
def test_what_is_packed_is_unpacked_and_packs_to_the_same_bytes(given_: dict[str, TensorBytes]) -> None:
    data = pack(given_)

    assert unpack(data) == given_
    assert pack(dict(reversed(given_.items()))) == data
    assert pack(unpack(memoryview(data))) == data


def test_the_bytes_are_these() -> None:
    data = pack({"b": TensorBytes("F16", (1,), b"hh"), "a": TensorBytes("F32", (), b"ffff")})

    header = (
        b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},'
        b'"b":{"dtype":"F16","shape":[1],"data_offsets":[4,6]}}'
    )
    assert data == struct.pack("<Q", 112) + header.ljust(112) + b"ffffhh"
    assert digest(pack(SAMPLE)).hex() == "ee1fc1e85a55e9f7043ad9a1a54a05580a26ff3e70c47cb1021eeb42cc888d4c"


def test_every_tensor_starts_at_a_multiple_of_its_elements_size() -> None:
    data = pack(SAMPLE)
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])

    assert start % 8 == 0
    sizes = {"F32": 4, "BF16": 2}
    assert all((start + e["data_offsets"][0]) % sizes.get(e["dtype"], 1) == 0 for e in header.values())


def test_unpacking_copies_nothing() -> None:
    data = pack({"w": TensorBytes("U8", (10_000_000,), bytes(10_000_000))})
    tracemalloc.start()
    unpack(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 100_000


def test_safetensors_reads_our_payloads_in_memory_and_from_a_file(tmp_path: Path) -> None:
    data = pack(SAMPLE)

    theirs = {
        name: (e["dtype"], tuple(e["shape"]), bytes(e["data"])) for name, e in safetensors.deserialize(data)
    }

    assert theirs == {name: (t.dtype, t.shape, t.data) for name, t in SAMPLE.items()}
    path = tmp_path / "payload.safetensors"
    path.write_bytes(data)
    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == set(SAMPLE)
        assert file.get_tensor("half").tolist() == [1.0]
        # torch packs two F4 elements into one of its own.
        assert file.get_tensor("q").view(torch.uint8).numel() == 16
        assert file.get_tensor("q.scale").view(torch.uint8).tolist() == [127]


def test_payloads_that_safetensors_writes_are_read() -> None:
    from safetensors.torch import save

    data = save({"x": torch.tensor([1.0, 2.0]), "h": torch.ones(3, dtype=torch.bfloat16)})

    assert unpack(data)["x"] == TensorBytes("F32", (2,), struct.pack("<2f", 1.0, 2.0))


def test_an_f4_tensor_of_two_by_eight_is_eight_bytes() -> None:
    given_ = {"w": TensorBytes("F4", (2, 8), bytes(range(8)))}

    assert unpack(pack(given_)) == given_


HOSTILE: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "too few"),
    "seven bytes": (b"1234567", "too few"),
    "a header of 2^64 - 1": (b"\xff" * 8 + b"{}", "18446744073709551615"),
    "a header of 2^63": (struct.pack("<Q", 2**63) + b"{}", "9223372036854775808"),
    "a header above the cap": (struct.pack("<Q", MAX_HEADER_BYTES + 1), "more than"),
    "a header past the end": (payload("{}", length=3), "the payload has"),
    "no JSON": (payload("{nope}"), "no JSON"),
    "not UTF-8": (payload(b'{"\xff":1}'), "no JSON"),
    "nothing": (payload(""), "does not start"),
    "leading space": (payload(" {}"), "does not start"),
    "a list": (payload("[]"), "does not start"),
    "trailing junk in the header": (payload("{}x"), "no JSON"),
    "deep nesting": (payload('{"a":' + "[" * 200_000), "no JSON"),
    "an integer of many digits": (payload('{"a":' + "9" * 100_000 + "}"), "no JSON"),
    "metadata": (payload({"__metadata__": {"a": "b"}}), "metadata"),
    "a repeated entry": (payload('{"w":1,"w":2}'), "'w' twice"),
    "a repeated field": (payload('{"w":{"dtype":"F32","dtype":"F32"}}'), "'dtype' twice"),
    "an unprintable name": (payload({"../../x\n": entry()}, bytes(4)), "unprintable"),
    "a lone surrogate": (payload('{"\\ud800":{}}'), "unprintable"),
    "an empty name": (payload({"": entry()}, bytes(4)), "characters"),
    "an entry that is a number": (payload({"w": 3}), "'w'"),
    "a missing field": (payload({"w": {"dtype": "F32", "shape": [1]}}), "'w'"),
    "another field": (payload({"w": entry() | {"strides": [1]}}, bytes(4)), "'w'"),
    "an unknown dtype": (payload({"w": entry("F33")}, bytes(4)), "'F33'"),
    "a dtype that is a list": (payload({"w": entry(["F32"])}, bytes(4)), "'w'"),
    "a shape that is text": (payload({"w": entry(shape="1")}, bytes(4)), "'w'"),
    "a size that is true": (payload({"w": entry(shape=[True])}, bytes(4)), "True"),
    "a size that is a float": (payload('{"w":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}'), "1.0"),
    "a size with an exponent": (payload('{"w":{"dtype":"F32","shape":[1e0],"data_offsets":[0,4]}}'), "1e0"),
    "a size that is NaN": (payload('{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}'), "NaN"),
    "a negative size": (payload({"w": entry(shape=[-1])}, bytes(4)), "-1"),
    "a huge size": (payload({"w": entry(shape=[0, 2**60])}), "'w'"),
    "a product that overflows": (payload({"w": entry(shape=[2**40, 2**40])}, bytes(4)), "'w'"),
    "many dimensions": (payload({"w": entry(shape=[1] * 64)}, bytes(4)), "64 dimensions"),
    "offsets of one": (payload({"w": entry(offsets=[4])}, bytes(4)), "'w'"),
    "offsets that are true": (payload({"w": entry(offsets=[False, 4])}, bytes(4)), "'w'"),
    "negative offsets": (payload({"w": entry(offsets=[-4, 0])}, bytes(4)), "'w'"),
    "reversed offsets": (payload({"w": entry(offsets=[4, 0])}, bytes(4)), "'w'"),
    "offsets of another size": (payload({"w": entry(offsets=[0, 8])}, bytes(8)), "'w' spans 8"),
    "half a byte": (payload({"w": entry("F4", [3], [0, 2])}, bytes(2)), "whole bytes"),
    "an overlap": (payload({"a": entry(), "b": entry()}, bytes(4)), "'b' overlaps"),
    "a partial overlap": (payload({"a": entry(), "b": entry(offsets=[2, 6])}, bytes(6)), "'b' overlaps"),
    "a hole": (payload({"a": entry(), "b": entry(offsets=[8, 12])}, bytes(12)), "'b' leaves a hole"),
    "a hole at the start": (payload({"a": entry(offsets=[4, 8])}, bytes(8)), "'a' leaves a hole"),
    "a truncated tail": (payload({"a": entry()}, bytes(3)), "cut short"),
    "trailing bytes": (payload({"a": entry()}, bytes(5)), "trailing"),
    "bytes without entries": (payload("{}", b"x"), "trailing"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_payload_is_malformed_and_says_where(case: str) -> None:
    data, words = HOSTILE[case]

    with pytest.raises(MalformedPayload, match=words):
        unpack(data)


def test_refusing_the_largest_hostile_header_is_cheap() -> None:
    one = '"%05d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    many = "{" + "".join(one % i for i in range(MAX_HEADER_BYTES // len(one % 0) - 1)).rstrip(",") + "}"
    data = payload(many)
    started = time.process_time()

    with pytest.raises(SchemaMismatch, match="missing"):
        unpack_expected(data, {"w": ("F32", (1,))})

    assert time.process_time() - started < 3  # about 0.15 s


@given(st.integers(0, 300), st.integers(0, 255))
def test_one_changed_byte_never_raises_anything_but_malformed(position: int, value: int) -> None:
    data = bytearray(pack(SAMPLE))
    data[position % len(data)] = value
    try:
        tensors = unpack(bytes(data))
    except MalformedPayload:
        return
    assert sum(len(tensor.data) for tensor in tensors.values()) == sum(len(t.data) for t in SAMPLE.values())


@given(st.binary(max_size=200))
def test_random_headers_never_raise_anything_but_malformed(raw: bytes) -> None:
    try:
        tensors = unpack(payload(b"{" + raw + b"}"))
    except MalformedPayload:
        return
    assert tensors == {}


@given(st.integers(1, 200))
def test_every_truncation_is_malformed(cut: int) -> None:
    with pytest.raises(MalformedPayload):
        unpack(pack(SAMPLE)[:-cut])


def test_entries_other_than_the_expected_are_a_mismatch_by_name() -> None:
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in SAMPLE.items()}
    data = pack(SAMPLE)

    assert unpack_expected(data, kinds) == SAMPLE
    with pytest.raises(SchemaMismatch, match="'more' is missing"):
        unpack_expected(data, {**kinds, "more": ("F32", ())})
    with pytest.raises(SchemaMismatch, match="'half' that was not expected"):
        unpack_expected(data, {name: kind for name, kind in kinds.items() if name != "half"})
    with pytest.raises(SchemaMismatch, match=r"'w' is F32 of shape \[2, 3\], expected F32 of shape \[3, 2\]"):
        unpack_expected(data, {**kinds, "w": ("F32", (3, 2))})
    with pytest.raises(SchemaMismatch, match=r"'half' is BF16 .* expected F16"):
        unpack_expected(data, {**kinds, "half": ("F16", (1,))})


def test_what_would_not_be_read_is_not_written() -> None:
    with pytest.raises(InvalidTensor, match="__metadata__"):
        pack({"__metadata__": SAMPLE["w"]})
    with pytest.raises(InvalidTensor, match="more fragments"):
        pack({f"{i:0500d}": SAMPLE["empty"] for i in range(2000)})
