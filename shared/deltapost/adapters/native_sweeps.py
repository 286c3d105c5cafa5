"""NativeSweeps: a round's passes in C, every tensor of a fragment in one call, threads over its blocks.

The bytes are those of `ValueSweeps` on any exact backend. Memory above the state it returns: sums of four
bytes for each learner and 4096 elements, and what a thread keeps of one block.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from ctypes import byref
from typing import Any, Final, cast

import numpy as np

from deltapost.adapters import kernels
from deltapost.adapters.buffers import Integers, Outputs
from deltapost.adapters.floats import Floats, to_float32
from deltapost.adapters.kernels import FORMATS, NO_EXPONENT, Deltas, Kernels, Merging, Stepping
from deltapost.adapters.microscaling import F4_BLOCK, f8_exponent, padded
from deltapost.adapters.native import NativeBackend
from deltapost.adapters.protocols import Backend
from deltapost.adapters.reduction import BLOCK
from deltapost.adapters.sweeps import Combination, Merged, Outer, Stepped, Sweeps
from deltapost.errors import NonFinite
from deltapost.serialization.schema import MASTER_PREFIX, MOMENTUM_PREFIX, SCALE_SUFFIX, ParameterSpec
from deltapost.serialization.tensor import BITS, ParameterDType, QuantizedDType, TensorBytes, element_bytes

#: What `close.c` says is not finite of a tensor, in the order in which it is looked at.
_BAD_UPDATE: Final = 4
_FLAGS: Final = ((1, "momentum"), (2, "master"), (_BAD_UPDATE, "update"), (8, "anchor"))


def native_sweeps(
    backend: Backend,
    specs: Sequence[ParameterSpec],
    theta: Mapping[str, TensorBytes],
    outer: Mapping[str, TensorBytes],
    deltas: Sequence[Mapping[str, TensorBytes]],
    commit: str | None,
) -> Sweeps | None:
    """The passes in C over checked inputs; None for another backend, or where there is no build."""
    if not isinstance(backend, NativeBackend) or (found := backend.kernels) is None:
        return None
    # The settings were checked: there are no other codecs.
    dtype = cast(ParameterDType | QuantizedDType | None, commit)
    return NativeSweeps(found, backend.threads, specs, theta, outer, deltas, dtype)


class NativeSweeps:
    """See `adapters.sweeps.Sweeps`."""

    def __init__(
        self,
        found: Kernels,
        threads: int | None,
        specs: Sequence[ParameterSpec],
        theta: Mapping[str, TensorBytes],
        outer: Mapping[str, TensorBytes],
        deltas: Sequence[Mapping[str, TensorBytes]],
        commit: ParameterDType | QuantizedDType | None,
    ) -> None:
        self._kernels = found
        self._threads = threads
        self._specs = specs
        self._theta = theta
        self._outer = outer
        self._commit = commit
        self._learners = len(deltas)
        self._elements = np.array([spec.elements for spec in specs], np.int64)
        self._first_block = np.concatenate([[0], np.cumsum(-(-self._elements // BLOCK))]).astype(np.int64)
        self._blocks = int(self._first_block[-1])
        self._held: list[Any] = []
        self._deltas = self._table_of(deltas)
        self._master = Outputs([4 * spec.elements for spec in specs])

    def squares(self) -> list[list[float]]:
        sums = np.empty((self._learners, self._blocks), np.float32)

        def work(_part: int, begin: int, end: int) -> None:
            self._kernels.squares(byref(self._deltas), begin, end, sums.ctypes.data, self._blocks)

        kernels.share(self._blocks, self._threads, work)
        return self._totals(sums)

    def merge(self, combinations: Sequence[Combination], norms: Sequence[float]) -> list[Merged]:
        merging = Merging(
            units=self._keep(
                np.array([to_float32(1 / norm) if norm > 0 else 0.0 for norm in norms], np.float32)
            ),
            base=self._keep(self._master.addresses),
        )
        rows = [one.coefficients for one in combinations]
        if all(row is not None for row in rows):
            coefficients = [[to_float32(value) for value in row or ()] for row in rows]
            merging.coefficients = self._keep(np.array(coefficients, np.float32))
        else:
            merging.trim = combinations[0].trim
        sums = np.empty((2 + self._learners, self._blocks), np.float32)

        def work(_part: int, begin: int, end: int) -> None:
            arguments = (byref(merging), begin, end, sums.ctypes.data, self._blocks)
            if self._kernels.merge(byref(self._deltas), *arguments):
                raise MemoryError("no memory for the blocks of a merge")

        kernels.share(self._blocks, self._threads, work)
        return [Merged(row[0], row[1], tuple(row[2:])) for row in self._totals(sums)]

    def step(self, factors: Sequence[float | None], outer: Outer) -> Stepped:
        keeps_master = [spec.dtype != "F32" or self._commit is not None for spec in self._specs]
        momentum = Outputs([4 * spec.elements for spec in self._specs])
        # A master that is the anchor needs no bytes of its own.
        anchors = Outputs(
            [
                element_bytes(spec.dtype, spec.shape) if kept else 0
                for spec, kept in zip(self._specs, keeps_master, strict=True)
            ]
        )
        anchors.addresses = np.where(keeps_master, anchors.addresses, self._master.addresses)
        codes, scales = self._update_outputs()
        masters = [self._outer.get(MASTER_PREFIX + one.name, self._theta[one.name]) for one in self._specs]
        stepping = Stepping(
            factors=self._keep(np.array([factor or 0.0 for factor in factors], np.float32)),
            has_factor=self._keep(np.array([_kind(factor) for factor in factors], np.uint8)),
            learning_rate=to_float32(outer.lr),
            momentum=to_float32(outer.beta),
            is_final=outer.final,
            commit=-1 if self._commit is None else FORMATS[self._commit],
            dtypes=self._keep(np.array([FORMATS[spec.dtype] for spec in self._specs], np.int32)),
            master=self._keep(self._addresses(masters)),
            master_formats=self._keep(np.array([FORMATS[one.dtype] for one in masters], np.int32)),
            old_anchor=self._keep(self._addresses([self._theta[one.name] for one in self._specs])),
            momentum_in=self._keep(
                self._addresses([self._outer[MOMENTUM_PREFIX + one.name] for one in self._specs])
            ),
            master_out=self._keep(self._master.addresses),
            momentum_out=self._keep(momentum.addresses),
            anchor_out=self._keep(anchors.addresses),
            update_out=self._keep(codes.addresses),
            update_scales=self._keep(scales.addresses),
        )
        largest = self._run(self._kernels.step, stepping)
        if self._commit == "F8_E4M3":
            self._publish_f8(stepping, largest, scales)
        theta: dict[str, TensorBytes] = {}
        state: dict[str, TensorBytes] = {}
        for index, (spec, kept) in enumerate(zip(self._specs, keeps_master, strict=True)):
            master = TensorBytes("F32", spec.shape, self._master.view(index))
            theta[spec.name] = TensorBytes(spec.dtype, spec.shape, anchors.view(index)) if kept else master
            state[MOMENTUM_PREFIX + spec.name] = TensorBytes("F32", spec.shape, momentum.view(index))
            if kept:
                state[MASTER_PREFIX + spec.name] = master
        return Stepped(theta, state, self._update_entries(codes, scales))

    def _publish_f8(self, stepping: Stepping, largest: Floats, scales: Outputs) -> None:
        self._refuse(np.where(np.isfinite(largest), 0, _BAD_UPDATE))
        exponents = [f8_exponent(float(one)) for one in largest]
        given = [NO_EXPONENT if exponent is None else exponent for exponent in exponents]
        stepping.exponents = self._keep(np.array(given, np.int32))
        for index, exponent in enumerate(exponents):
            scales.write(index, struct.pack("<f", 2.0 ** (exponent or 0)))
        self._run(self._kernels.publish, stepping)

    def _run(self, kernel: Any, stepping: Stepping) -> Floats:
        """Runs a kernel of the third sweep; returns the largest magnitude of each tensor's update, for F8.

        Raises NonFinite.
        """
        parts = kernels.threads_for(self._blocks, self._threads)
        flags = np.zeros((parts, len(self._specs)), np.uint8)
        largest = np.zeros((parts, len(self._specs)), np.uint32)

        def work(part: int, begin: int, end: int) -> None:
            own = Stepping.from_buffer_copy(stepping)
            own.flags, own.largest = flags[part].ctypes.data, largest[part].ctypes.data
            kernel(byref(self._deltas), byref(own), begin, end)

        kernels.share(self._blocks, self._threads, work)
        self._refuse(np.bitwise_or.reduce(flags, axis=0))
        return np.asarray(largest.max(axis=0).view(np.float32))

    def _refuse(self, flags: np.ndarray[Any, np.dtype[Any]]) -> None:
        for spec, bits in zip(self._specs, flags.tolist(), strict=True):
            for flag, what in _FLAGS:
                if bits & flag:
                    raise NonFinite(f"the {what} of {spec.name!r} is not finite")

    def _update_outputs(self) -> tuple[Outputs, Outputs]:
        match self._commit:
            case None:
                sizes = [(0, 0)] * len(self._specs)
            case "F4":
                sizes = [(padded(one.elements) // 2, padded(one.elements) // F4_BLOCK) for one in self._specs]
            case "F8_E4M3":
                sizes = [(spec.elements, 4) for spec in self._specs]
            case other:
                sizes = [(BITS[other] // 8 * spec.elements, 0) for spec in self._specs]
        return Outputs([codes for codes, _ in sizes]), Outputs([scales for _, scales in sizes])

    def _update_entries(self, codes: Outputs, scales: Outputs) -> dict[str, TensorBytes] | None:
        if self._commit is None:
            return None
        entries: dict[str, TensorBytes] = {}
        for index, spec in enumerate(self._specs):
            scale_name = spec.name + SCALE_SUFFIX
            if self._commit == "F4":
                count = padded(spec.elements)
                entries[spec.name] = TensorBytes("F4", (count,), codes.view(index))
                entries[scale_name] = TensorBytes("F8_E8M0", (count // F4_BLOCK,), scales.view(index))
                continue
            entries[spec.name] = TensorBytes(self._commit, spec.shape, codes.view(index))
            if self._commit == "F8_E4M3":
                entries[scale_name] = TensorBytes("F32", (), scales.view(index))
        return entries

    def _table_of(self, deltas: Sequence[Mapping[str, TensorBytes]]) -> Deltas:
        entries = [[tensors[spec.name] for tensors in deltas] for spec in self._specs]
        scales = [[tensors.get(spec.name + SCALE_SUFFIX) for tensors in deltas] for spec in self._specs]
        shape = (len(self._specs), len(deltas))
        formats = np.array([[FORMATS[one.dtype] for one in row] for row in entries], np.int32)
        return Deltas(
            pieces=len(self._specs),
            learners=len(deltas),
            elements=self._keep(self._elements),
            first_block=self._keep(self._first_block),
            data=self._keep(self._addresses([one for row in entries for one in row]).reshape(shape)),
            scales=self._keep(self._addresses([one for row in scales for one in row]).reshape(shape)),
            formats=self._keep(formats),
        )

    def _totals(self, sums: Floats) -> list[list[float]]:
        totals = np.zeros((len(self._specs), len(sums)), np.float64)
        self._kernels.add_blocks(
            len(self._specs),
            self._first_block.ctypes.data,
            len(sums),
            sums.ctypes.data,
            self._blocks,
            totals.ctypes.data,
        )
        found: list[list[float]] = totals.tolist()
        return found

    def _addresses(self, tensors: Sequence[TensorBytes | None]) -> Integers:
        """Where each tensor's bytes begin; the tensors are held for as long as this object is."""
        arrays = [None if one is None else np.frombuffer(one.data, np.uint8) for one in tensors]
        self._held.extend(arrays)
        return np.array([0 if one is None or not one.size else one.ctypes.data for one in arrays], np.int64)

    def _keep(self, array: np.ndarray[Any, np.dtype[Any]]) -> int:
        """The address of an array that is held for as long as this object is."""
        whole = np.ascontiguousarray(array)
        self._held.append(whole)
        address: int = whole.ctypes.data
        return address


def _kind(factor: float | None) -> int:
    """As `close.c` has it: 0 no factor, 1 this one, 2 the merged delta is +0."""
    if factor is None:
        return 0
    return 1 if factor else 2
