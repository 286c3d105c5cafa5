"""Mutations of messages and payloads: what a sender could write by mistake, by a bug, or on purpose.

Every function is a function of the given `random.Random`, so a seed names its mutation.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import msgpack

from deltapost.serialization.messages import ContributionMessage
from deltapost.serialization.signing import SigningKey

#: What stands where something else is expected.
STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**53 + 1,
    2**64 - 1,
    -(2**63),
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x" * 300,
    "../..",
    "\x00",
    b"",
    b"\xff" * 32,
    [],
    [[[[]]]],
    {},
    {"sha256": b"", "size": -1},
    {"": {"": {}}},
    msgpack.ExtType(5, b"x"),
    msgpack.Timestamp(1, 2),
)


def bytes_changed(random: Random, data: bytes) -> bytes:
    """One to four byte-level mutations: bits flipped; bytes added, removed, doubled, cut off, exchanged."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(changed) + 1)
        length = random.choice((1, 1, 2, 8, 64))
        match random.randrange(6):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << random.randrange(8)
            case 1:
                changed[at:at] = random.randbytes(length)
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = changed[at : at + length]
            case 4:
                del changed[at:]
            case _:
                changed[at : at + length] = random.choice((b"\xff", b"\x00", b"\xc1", b"\x80")) * length
    return bytes(changed)


def message_changed(random: Random, message: ContributionMessage, key: SigningKey) -> bytes:
    """A frame whose body has another field, value, type, order or number form, signed all the same."""
    plain = message.model_dump()
    pairs = sorted(plain.items())
    at = random.randrange(len(pairs))
    name = pairs[at][0]
    match random.randrange(6):
        case 0 | 1:
            pairs[at] = (name, random.choice(STRANGE))
        case 2:
            del pairs[at]
        case 3:
            pairs.insert(at, (name, random.choice(STRANGE)))
        case 4:
            pairs.append((random.choice(("zzz", "", "kind ", "v" * 200)), random.choice(STRANGE)))
        case _:
            random.shuffle(pairs)
    packer = msgpack.Packer(use_bin_type=True, use_single_float=random.random() < 0.2)
    body = packer.pack_map_pairs(pairs)
    frame: bytes = msgpack.packb([1, body, key.sign("message", body)], use_bin_type=True)
    return frame


def payload_changed(random: Random, payload: bytes) -> bytes:
    """A payload with another header: keys twice, dtypes, shapes and offsets that lie, lengths that do."""
    (length,) = struct.unpack("<Q", payload[:8])
    header, data = json.loads(payload[8 : 8 + length]), payload[8 + length :]
    name = random.choice(sorted(header))
    field = random.choice(("dtype", "shape", "data_offsets"))
    odd = (
        -1,
        0,
        1,
        2**40,
        2**63,
        0.5,
        None,
        True,
        "F32",
        "F8_E4M3",
        "I8",
        "BOOL",
        [],
        [2**31] * 4,
        [0, 2**40],
    )
    match random.randrange(7):
        case 0 | 1:
            header[name][field] = random.choice(odd)
        case 2:
            header[name][field] = [random.choice(odd), random.choice(odd)]
        case 3:
            header[random.choice(("__metadata__", "x", "", "a/../b", name + ".scale"))] = header.pop(name)
        case 4:
            del header[name][field]
        case 5:
            return (
                struct.pack("<Q", random.choice((0, 1, length - 1, length + 8, 2**63, 2**64 - 1)))
                + payload[8:]
            )
        case _:  # a lie that adds up: only the manifest shows it
            header[name]["shape"] = random.choice((header[name]["shape"][::-1], [1, *header[name]["shape"]]))
    text = json.dumps(header)
    if random.random() < 0.3:
        text = text[:-1] + ", " + json.dumps({name: header.get(name)})[1:]
    written = text.encode()
    return struct.pack("<Q", len(written)) + written + data[: random.choice((len(data), len(data), 3))]


def values_changed(random: Random, payload: bytes) -> bytes:
    """A payload of the right form whose numbers are NaN, infinite, tiny or huge here and there."""
    odd = (
        b"\x00\x00\xc0\x7f",
        b"\x00\x00\x80\xff",
        b"\x01\x00\x00\x00",
        b"\xff\xff\x7f\x7f",
        b"\x00\x00\x00\x80",
    )
    changed = bytearray(payload)
    for _ in range(random.randint(1, 3)):
        at = len(changed) - 4 * random.randint(1, 6)
        changed[at : at + 4] = random.choice(odd)
    return bytes(changed)


PAYLOAD_MUTATIONS: tuple[Callable[[Random, bytes], bytes], ...] = (
    bytes_changed,
    payload_changed,
    values_changed,
)
