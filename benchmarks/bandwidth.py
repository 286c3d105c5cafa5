"""The limit that memory sets: bytes that must be touched once, over what STREAM's triad moves in a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Elements of each of the triad's three arrays: a hundred megabytes each, far beyond any cache.
TRIAD_ELEMENTS = 25_000_000
#: The triad reads two float32 and writes one for each element, as STREAM counts.
TRIAD_BYTES = 12

#: Bits of an element as payloads have it, the scales of F4 among them.
DELTA_BITS = {"F4": 4.25, "F8_E4M3": 8.0, "BF16": 16.0, "F32": 32.0}


@dataclass(frozen=True)
class Limit:
    """Bytes that pass through memory once, and the triad that was measured in turns with the work."""

    touched: float
    triad_elements: int

    def rate(self, medians: Mapping[str, float]) -> float:
        """The triad's bytes per second."""
        return TRIAD_BYTES * self.triad_elements / medians["triad"]

    def seconds(self, medians: Mapping[str, float]) -> float:
        """What the bytes would take."""
        return self.touched / self.rate(medians)


def close_bytes(elements: int, learners: int, delta: str, commit: str) -> float:
    """What a close must touch once: each payload byte; anchor, momentum and master in and out; the update."""
    state = 2 * (4 + 4 + 4) * elements
    return learners * DELTA_BITS[delta] / 8 * elements + state + DELTA_BITS[commit] / 8 * elements


def encode_bytes(elements: int, delta: str) -> float:
    """What an encode must touch once: values in, residual in and out, codes out."""
    return (4 + 2 * 4 + DELTA_BITS[delta] / 8) * elements
