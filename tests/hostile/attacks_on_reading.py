"""Attacks on whoever reads: messages, payloads and documents of strangers. Run by test_memory.py."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import msgpack

from deltapost.adapters.native import NativeBackend
from deltapost.algorithms.admission import check_payload
from deltapost.codecs import get
from deltapost.errors import MalformedMessage, MalformedPayload, SchemaMismatch
from deltapost.limits import MAX_DOCUMENT_BYTES, MAX_HEADER_BYTES, MAX_MESSAGE_BYTES
from deltapost.serialization.messages import read_message
from deltapost.serialization.payload import unpack
from deltapost.serialization.records import Attestation, Manifest, Record
from deltapost.serialization.schema import ParameterSpec
from hostile.measuring import Attack, run

DOCUMENT = MAX_DOCUMENT_BYTES - 64
_REF = {"sha256": bytes(32), "size": 1}


def refused(read: Callable[[bytes], object], data: bytes, times: int = 1) -> Attack:
    """Reading `data` ends in the one error, each of so many times."""

    def attack() -> None:
        for _ in range(times):
            try:
                read(data)
            except (MalformedMessage, MalformedPayload, SchemaMismatch):
                continue
            raise AssertionError("it was read")

    return attack


def header(text: bytes, *, length: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def json_header(entries: Any) -> bytes:
    text = json.dumps(entries, separators=(",", ":")).encode()
    return header(text[:MAX_HEADER_BYTES].ljust(min(len(text), MAX_HEADER_BYTES)))


def empty_entries(count: int) -> bytes:
    entry = '"%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = "{" + ",".join(entry % number for number in range(count)) + "}"
    return header(text.encode())


def array_of(item: bytes, size: int = DOCUMENT) -> bytes:
    count = (size - 5) // len(item)
    return b"\xdd" + struct.pack(">I", count) + item * count


def map_of(size: int = DOCUMENT) -> bytes:
    count = (size - 5) // 6
    body = b"".join(b"\xa4" + b"%04x" % (number % 65_536) + b"\x00" for number in range(count))
    return b"\xdf" + struct.pack(">I", count) + body


def nested(width: int, opening: bytes) -> bytes:
    """Arrays in arrays, each with `width` short texts before the next: all of them alive at once."""
    level = opening + struct.pack(">I", width + 1) + b"\xa2ab" * width
    return level * (DOCUMENT // len(level)) + b"\xc0"


def record_with(**fields: Any) -> bytes:
    plain = {
        "format": 1,
        "arithmetic": 1,
        "run": "r",
        "manifest": bytes(32),
        "fragment": 0,
        "version": 1,
        "previous": bytes(32),
        "generation": 0,
        "checkpoint": True,
        "degraded": False,
        "participants": [],
        "cosine": None,
        "answers": [],
        "unverified": {},
        "over_quota": {},
        "anchor": _REF,
        "outer": _REF,
        "update": None,
        **fields,
    }
    packed: bytes = msgpack.packb({key: plain[key] for key in sorted(plain)}, use_bin_type=True)
    assert len(packed) <= MAX_DOCUMENT_BYTES, len(packed)
    return packed


def largest_record() -> Attack:
    """No attack: the largest record there can be, for comparison."""
    answer = {"envelope": bytes(32), "learner": "l" * 12, "verdict": "late", "version": 0}
    claim = {
        "cosine": 0.5,
        "envelope": bytes(32),
        "final": False,
        "learner": "l",
        "local_step": 1,
        "loss": None,
        "metrics": {},
        "norm": 1.0,
        "payload": _REF,
        "step_seconds": 1.0,
        "steps": 1,
        "tokens": 1,
        "weight": 1.0,
    }
    data = record_with(participants=[claim] * 10_000, answers=[answer] * 50_000)
    return lambda: Record.from_bytes(data)


SPEC = ParameterSpec("w", "F32", (4,))


def check(data: bytes) -> object:
    return check_payload(data, [SPEC], get("F32"))


ATTACKS: dict[str, Callable[[], Attack]] = {
    "payload_header_of_2_to_the_64": lambda: refused(unpack, header(b"{}", length=2**64 - 1)),
    "payload_header_of_2_to_the_63": lambda: refused(unpack, header(b"{}", length=2**63)),
    "payload_of_400000_empty_entries": lambda: refused(check, empty_entries(400_000)),
    "payload_of_a_full_header_of_empty_entries": lambda: refused(check, empty_entries(17_500), 3),
    "payload_header_nested_deeply": lambda: refused(unpack, header(b'{"w":' + b"[" * 900_000)),
    "payload_header_of_digits": lambda: refused(unpack, header(b'{"w":' + b"9" * 1_000_000 + b"}")),
    "payload_offsets_of_2_to_the_40": lambda: refused(
        unpack,
        json_header({"w": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}),
    ),
    "message_of_16_kib_of_empty_maps": lambda: refused(read_message, b"\x80" * MAX_MESSAGE_BYTES, 500),
    "message_of_an_array_of_2_to_the_32": lambda: refused(read_message, b"\xdd\xff\xff\xff\xff" * 100, 500),
    "message_with_bytes_of_2_to_the_32": lambda: refused(read_message, b"\xc6\xff\xff\xff\xff" * 100, 500),
    "message_nested_deeply": lambda: refused(read_message, b"\x91" * MAX_MESSAGE_BYTES, 500),
    "message_of_1_gib": lambda: refused(read_message, bytes(64 * 1024 * 1024), 16),
    "record_of_empty_maps": lambda: refused(Record.from_bytes, array_of(b"\x80")),
    "record_of_small_maps": lambda: refused(Record.from_bytes, array_of(b"\x81\xa0\xc0")),
    "record_of_short_texts": lambda: refused(Record.from_bytes, array_of(b"\xa2ab")),
    "record_of_nested_texts": lambda: refused(Record.from_bytes, nested(100_000, b"\xdd")),
    "record_of_one_map": lambda: refused(Record.from_bytes, map_of()),
    "record_of_wrong_participants": lambda: refused(
        Record.from_bytes, record_with(participants=[1] * 130_000, answers=["a"] * 130_000)
    ),
    "record_of_empty_participants": lambda: refused(
        Record.from_bytes, record_with(participants=[{"learner": "a"}] * 130_000)
    ),
    "record_over_quota_of_wrong_ids": lambda: refused(
        Record.from_bytes, record_with(over_quota={f"{number}_": 1 for number in range(130_000)})
    ),
    "record_with_counts_for_fields": lambda: refused(
        Record.from_bytes, record_with(**{f"z{number}": 1 for number in range(130_000)})
    ),
    "record_with_counts_for_metrics": lambda: refused(
        Record.from_bytes,
        record_with(participants=[{"metrics": {f"z{number}": 1 for number in range(130_000)}}]),
    ),
    "record_of_deep_arrays": lambda: refused(Record.from_bytes, b"\x91" * DOCUMENT),
    "manifest_of_wrong_parameters": lambda: refused(Manifest.from_bytes, array_of(b"\x91\x80")),
    "attestation_of_8_mib": lambda: refused(Attestation.from_bytes, array_of(b"\xa2ab")),
    "the_largest_record": largest_record,
}

if __name__ == "__main__":
    NativeBackend()
    run(ATTACKS)
