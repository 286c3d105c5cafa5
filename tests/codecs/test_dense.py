"""Dense codecs write any shape, read back what they wrote, and refuse what no encoder writes."""

from __future__ import annotations

import math
import struct

import pytest

from deltapost import codecs
from deltapost.adapters.native import NativeBackend
from deltapost.errors import ConfigurationError, InvalidTensor, MalformedPayload, NonFinite
from deltapost.serialization import ParameterSpec, TensorBytes
from outer_step.tensors import BACKENDS, ODD_SHAPES, f32, rough

NATIVE = NativeBackend()
#: Largest error of a format, as a part of the largest magnitude.
PRECISION = {"F32": 0.0, "F16": 2**-11, "BF16": 2**-8, "F8_E4M3": 2**-4, "F4": 2**-2}


@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
@pytest.mark.parametrize("name", codecs.NAMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_shape_survives_every_codec_within_its_precision(
    name: str, shape: tuple[int, ...], backend: str
) -> None:
    codec, spec = codecs.get(name), ParameterSpec("w", "F32", shape)
    value = BACKENDS[backend].load(rough(shape, 5, 3))

    entries = codec.encode("w", value)
    codec.check(spec, entries)
    back = codec.decode(spec, entries, BACKENDS[backend])

    assert {entry: (tensor.dtype, tensor.shape) for entry, tensor in entries.items()} == codec.entries(spec)
    assert back.shape == shape
    original, found = (struct.unpack(f"<{spec.elements}f", v.to_bytes("F32").data) for v in (value, back))
    largest = max(map(abs, original), default=0.0)
    assert max((abs(a - b) for a, b in zip(original, found, strict=True)), default=0.0) <= (
        PRECISION[name] * largest
    )


@pytest.mark.parametrize("name", codecs.NAMES)
def test_encoding_what_was_decoded_gives_the_same_bytes(name: str) -> None:
    codec, spec = codecs.get(name), ParameterSpec("w", "F32", (3, 5, 7))
    entries = codec.encode("w", NATIVE.load(rough(spec.shape, 6, 8)))

    assert codec.encode("w", codec.decode(spec, entries, NATIVE)) == entries


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", codecs.NAMES)
def test_a_nan_is_refused_with_the_tensors_name(name: str, backend: str) -> None:
    with pytest.raises(NonFinite, match=f"tensor 'w' as {name}"):
        codecs.get(name).encode("w", BACKENDS[backend].load(f32(1.0, math.nan)))


def test_a_delta_too_large_for_half_precision_says_what_holds_it() -> None:
    with pytest.raises(NonFinite, match="BF16"):
        codecs.get("F16").encode("w", NATIVE.load(f32(1e6)))


def check(name: str, data: bytes, scale: bytes) -> None:
    """Checks one tensor of raw codes and scale."""
    if name == "F8_E4M3":
        tensors = {
            "w": TensorBytes("F8_E4M3", (len(data),), data),
            "w.scale": TensorBytes("F32", (), scale),
        }
        shape: tuple[int, ...] = (len(data),)
    else:
        tensors = {
            "w": TensorBytes("F4", (2 * len(data),), data),
            "w.scale": TensorBytes("F8_E8M0", (len(scale),), scale),
        }
        shape = (2 * len(data),)
    codecs.get(name).check(ParameterSpec("w", "F32", shape), tensors)


def scale_bits(pattern: int) -> bytes:
    return struct.pack("<I", pattern)


@pytest.mark.parametrize(
    ("codes", "pattern", "error", "words"),
    [
        (b"\x7f", 0x3F800000, NonFinite, "codes hold a NaN"),
        (b"\x01\xff", 0x3F800000, NonFinite, "codes hold a NaN"),
        (b"\x01", 0x7F800000, NonFinite, "scale"),
        (b"\x01", 0x7FC00000, NonFinite, "scale"),
        (b"\x01", 0xFF800000, NonFinite, "scale"),
        (b"\x01", 0x00000000, MalformedPayload, "power of two"),
        (b"\x01", 0x80000000, MalformedPayload, "power of two"),
        (b"\x01", 0xBF800000, MalformedPayload, "power of two"),
        (b"\x01", 0x3F800001, MalformedPayload, "power of two"),
        (b"\x01", 0x00400000, MalformedPayload, "power of two"),
        (b"\x01", 0x7E967699, MalformedPayload, "power of two"),  # 1e38
        (b"\x78", 0x7F000000 - (8 - 1 << 23), NonFinite, "float32's range"),  # 256 · 2¹²⁰
        (b"\xf8", 0x7F000000, NonFinite, "float32's range"),
    ],
)
def test_f8_payloads_that_no_encoder_writes_are_refused(
    codes: bytes, pattern: int, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=f"'w'.*{words}"):
        check("F8_E4M3", codes, scale_bits(pattern))


@pytest.mark.parametrize(
    ("codes", "pattern"),
    [
        (b"\x80\x00\x7e", 0x3F800000),
        (b"\x77", 0x7F000000 - (8 - 1 << 23)),  # 240 · 2¹²⁰
        (b"\x7e", 0x00800000),
        (b"", 0x3F800000),
    ],
)
def test_f8_payloads_at_the_edge_of_the_rules_are_admitted(codes: bytes, pattern: int) -> None:
    check("F8_E4M3", codes, scale_bits(pattern))


@pytest.mark.parametrize(
    ("scale", "error"),
    [(255, NonFinite), (254, MalformedPayload), (253, MalformedPayload), (0, MalformedPayload)],
)
def test_f4_block_scales_that_no_encoder_writes_are_refused(scale: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="'w'"):
        check("F4", bytes(32), bytes([127, scale]))


@pytest.mark.parametrize("scale", [1, 127, 252])
def test_f4_block_scales_of_encoders_are_admitted(scale: int) -> None:
    check("F4", b"\x88" * 16, bytes([scale]))


@pytest.mark.parametrize(
    ("name", "pattern"), [("F16", 0x7C00), ("F16", 0xFC01), ("BF16", 0x7F80), ("BF16", 0xFFC0)]
)
def test_infinities_and_nans_of_half_formats_are_refused(name: str, pattern: int) -> None:
    tensor = TensorBytes(name, (2,), struct.pack("<2H", 0x1234, pattern))  # type: ignore[arg-type]

    with pytest.raises(NonFinite, match="'w'"):
        codecs.get(name).check(ParameterSpec("w", "F32", (2,)), {"w": tensor})


def test_an_entry_of_another_shape_than_the_parameter_is_not_decoded() -> None:
    with pytest.raises(InvalidTensor, match="'w'"):
        codecs.get("F32").decode(ParameterSpec("w", "F32", (2, 1)), {"w": f32(1.0, 2.0)}, NATIVE)


def test_an_unknown_codec_is_answered_with_the_known_names() -> None:
    with pytest.raises(ConfigurationError, match="F32, F16, BF16, F8_E4M3, F4"):
        codecs.get("F6")
