"""NativeSweeps: a round's passes in C, every tensor of a fragment in one call, threads over its blocks.

The bytes are those of `ValueSweeps` on any exact backend. Memory above the state it returns: what a thread
keeps of one block, and sums of four bytes for each learner and 4096 elements. Of inputs and outputs that are
mapped files no more than `window_bytes` are in memory at once, whatever their size and number.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import byref
from typing import Any, Final, TypeAlias, cast, get_args

import numpy as np

from deltapost.adapters import kernels
from deltapost.adapters.buffers import Outputs
from deltapost.adapters.floats import Floats, to_float32
from deltapost.adapters.kernels import FORMATS, NO_EXPONENT, Deltas, Kernels, Merging, Stepping
from deltapost.adapters.mapped import behind, release
from deltapost.adapters.microscaling import F4_BLOCK, f8_exponent, padded
from deltapost.adapters.native import NativeBackend
from deltapost.adapters.protocols import Backend
from deltapost.adapters.reduction import BLOCK
from deltapost.adapters.sweeps import Combination, Merged, Outer, Stepped, Sweeps
from deltapost.errors import NonFinite
from deltapost.serialization.schema import MASTER_PREFIX, MOMENTUM_PREFIX, SCALE_SUFFIX, ParameterSpec
from deltapost.serialization.tensor import BITS, DType, ParameterDType, QuantizedDType, TensorBytes

_Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

#: What `close.c` says is not finite of a tensor, in the order in which it is looked at.
_BAD_UPDATE: Final = 4
#: What the third sweep looks at, of each block: masters, momenta and anchors, old and new, and the update.
_STATE_BYTES_PER_BLOCK: Final = 7 * 4 * BLOCK
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
    return NativeSweeps(backend, found, specs, theta, outer, deltas, dtype)


class NativeSweeps:
    """See `adapters.sweeps.Sweeps`."""

    def __init__(
        self,
        backend: NativeBackend,
        found: Kernels,
        specs: Sequence[ParameterSpec],
        theta: Mapping[str, TensorBytes],
        outer: Mapping[str, TensorBytes],
        deltas: Sequence[Mapping[str, TensorBytes]],
        commit: ParameterDType | QuantizedDType | None,
    ) -> None:
        self._kernels = found
        self._backend = backend
        self._threads = backend.threads
        self._specs = specs
        self._theta = theta
        self._outer = outer
        self._commit = commit
        self._learners = len(deltas)
        self._elements = np.array([spec.elements for spec in specs], np.int64)
        self._first_block = np.concatenate([[0], np.cumsum(-(-self._elements // BLOCK))]).astype(np.int64)
        self._blocks = int(self._first_block[-1])
        self._held: list[Any] = []
        self._maps: list[mmap.mmap] = []
        self._deltas = self._table_of(deltas)
        self._delta_bytes = max(
            sum(BITS[delta[spec.name].dtype] * BLOCK // 8 for delta in deltas) for spec in specs
        )
        self._keeps_master = [spec.dtype != "F32" or commit is not None for spec in specs]

    def squares(self) -> list[list[float]]:
        def sweep(begin: int, end: int, sums: int, stride: int) -> None:
            self._kernels.squares(byref(self._deltas), begin, end, sums, stride)

        return self._sums(self._learners, sweep)

    def merge(self, combinations: Sequence[Combination], norms: Sequence[float]) -> list[Merged]:
        self._allocate()
        merging = Merging(
            units=self._keep(
                np.array([to_float32(1 / norm) if norm > 0 else 0.0 for norm in norms], np.float32)
            ),
            base=self._keep(self._masters),
        )
        rows = [one.coefficients for one in combinations]
        if all(row is not None for row in rows):
            coefficients = [[to_float32(value) for value in row or ()] for row in rows]
            merging.coefficients = self._keep(np.array(coefficients, np.float32))
        else:
            merging.trim = combinations[0].trim

        def sweep(begin: int, end: int, sums: int, stride: int) -> None:
            if self._kernels.merge(byref(self._deltas), byref(merging), begin, end, sums, stride):
                raise MemoryError("no memory for the blocks of a merge")

        return [Merged(row[0], row[1], tuple(row[2:])) for row in self._sums(2 + self._learners, sweep)]

    def _allocate(self) -> None:
        """Room for what the round leaves behind, laid out as it will be uploaded."""
        kept = [spec for spec, keeps in zip(self._specs, self._keeps_master, strict=True) if keeps]
        state: dict[str, tuple[DType, tuple[int, ...]]] = {
            MOMENTUM_PREFIX + spec.name: ("F32", spec.shape) for spec in self._specs
        }
        state |= {MASTER_PREFIX + spec.name: ("F32", spec.shape) for spec in kept}
        buffers = self._backend.buffers
        self._outer_out = Outputs(state, buffers)
        self._theta_out = Outputs({spec.name: (spec.dtype, spec.shape) for spec in self._specs}, buffers)
        # A master that is the anchor needs no bytes of its own.
        self._masters = np.array(
            [
                self._outer_out.address(MASTER_PREFIX + spec.name)
                if keeps
                else self._theta_out.address(spec.name)
                for spec, keeps in zip(self._specs, self._keeps_master, strict=True)
            ],
            np.int64,
        )
        self._update_out = (
            Outputs(_update_entries(self._specs, self._commit), buffers) if self._commit else None
        )
        self._watch(self._masters)

    def step(self, factors: Sequence[float | None], outer: Outer) -> Stepped:
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
            master_out=self._keep(self._masters),
            momentum_out=self._written(self._outer_out, [MOMENTUM_PREFIX + one.name for one in self._specs]),
            anchor_out=self._written(self._theta_out, [one.name for one in self._specs]),
            update_out=self._written(self._update_out, [one.name for one in self._specs]),
            update_scales=self._written(
                self._update_out if self._commit in get_args(QuantizedDType) else None,
                [one.name + SCALE_SUFFIX for one in self._specs],
            ),
        )
        largest = self._run(self._kernels.step, stepping)
        if self._commit == "F8_E4M3":
            self._publish_f8(stepping, largest)
        update = None if self._update_out is None else self._update_out.tensors()
        return Stepped(self._theta_out.tensors(), self._outer_out.tensors(), update)

    def _written(self, outputs: Outputs | None, names: Sequence[str]) -> int:
        """The table of where these tensors are written to; zeros where there are none."""
        found = [0 if outputs is None else outputs.address(name) for name in names]
        self._watch(found)
        return self._keep(np.array(found, np.int64))

    def _publish_f8(self, stepping: Stepping, largest: Floats) -> None:
        assert self._update_out is not None
        self._refuse(np.where(np.isfinite(largest), 0, _BAD_UPDATE))
        exponents = [f8_exponent(float(one)) for one in largest]
        given = [NO_EXPONENT if exponent is None else exponent for exponent in exponents]
        stepping.exponents = self._keep(np.array(given, np.int32))
        for spec, exponent in zip(self._specs, exponents, strict=True):
            self._update_out.fill(spec.name + SCALE_SUFFIX, struct.pack("<f", 2.0 ** (exponent or 0)))
        self._run(self._kernels.publish, stepping)

    def _windows(self, bytes_per_block: int) -> Iterator[tuple[int, int]]:
        """Ranges of blocks whose bytes may be in memory at once: all of them, where nothing is mapped."""
        step = self._blocks
        if self._maps:
            step = self._backend.window_bytes // bytes_per_block
        step = max(step, 1)
        for begin in range(0, self._blocks, step):
            yield begin, min(begin + step, self._blocks)
            release(self._maps)

    def _sums(self, rows: int, sweep: Callable[[int, int, int, int], None]) -> list[list[float]]:
        """[tensor][row]: the totals of what a sweep over ranges of blocks gives for each block."""
        totals = np.zeros((len(self._specs), rows), np.float64)
        for begin, end in self._windows(self._delta_bytes + 4 * BLOCK):
            sums = np.empty((rows, end - begin), np.float32)
            first = sums.ctypes.data - 4 * begin  # the kernels count blocks over all windows

            def work(
                _part: int, of: int, to: int, *, start: int = begin, at: int = first, width: int = end - begin
            ) -> None:
                sweep(start + of, start + to, at, width)

            # Blocks of many learners are worth a thread sooner.
            least = max(1, kernels.BLOCKS_PER_THREAD // self._learners)
            kernels.share(end - begin, self._threads, work, least=least)
            blocks = np.clip(self._first_block, begin, end) - begin
            self._kernels.add_blocks(
                len(self._specs), blocks.ctypes.data, rows, sums.ctypes.data, end - begin, totals.ctypes.data
            )
        found: list[list[float]] = totals.tolist()
        return found

    def _run(self, kernel: Any, stepping: Stepping) -> Floats:
        """Runs a kernel of the third sweep; returns the largest magnitude of each tensor's update, for F8.

        Raises NonFinite.
        """
        parts = kernels.threads_for(self._blocks, self._threads)
        flags = np.zeros((parts, len(self._specs)), np.uint8)
        largest = np.zeros((parts, len(self._specs)), np.uint32)
        for begin, end in self._windows(_STATE_BYTES_PER_BLOCK):

            def work(part: int, of: int, to: int, *, start: int = begin) -> None:
                own = Stepping.from_buffer_copy(stepping)
                own.flags, own.largest = flags[part].ctypes.data, largest[part].ctypes.data
                kernel(byref(self._deltas), byref(own), start + of, start + to)

            kernels.share(end - begin, self._threads, work)
        self._refuse(np.bitwise_or.reduce(flags, axis=0))
        return np.asarray(largest.max(axis=0).view(np.float32))

    def _refuse(self, flags: np.ndarray[Any, np.dtype[Any]]) -> None:
        for spec, bits in zip(self._specs, flags.tolist(), strict=True):
            for flag, what in _FLAGS:
                if bits & flag:
                    raise NonFinite(f"the {what} of {spec.name!r} is not finite")

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

    def _addresses(self, tensors: Sequence[TensorBytes | None]) -> _Integers:
        """Where each tensor's bytes begin; the tensors are held for as long as this object is."""
        arrays = [None if one is None else np.frombuffer(one.data, np.uint8) for one in tensors]
        self._held.extend(arrays)
        found = np.array([0 if one is None or not one.size else one.ctypes.data for one in arrays], np.int64)
        self._watch(found)
        return found

    def _watch(self, addresses: Iterable[int]) -> None:
        """Counts the maps behind these addresses to those that are let go of as the sweeps go on."""
        known = {id(one) for one in self._maps}
        self._maps.extend(one for one in behind(map(int, addresses)) if id(one) not in known)

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


def _update_entries(
    specs: Sequence[ParameterSpec], commit: ParameterDType | QuantizedDType
) -> dict[str, tuple[DType, tuple[int, ...]]]:
    """The entries of an update of these parameters. `codecs` has the same, for any codec."""
    entries: dict[str, tuple[DType, tuple[int, ...]]] = {}
    for spec in specs:
        scale = spec.name + SCALE_SUFFIX
        if commit == "F4":
            count = padded(spec.elements)
            entries |= {spec.name: ("F4", (count,)), scale: ("F8_E8M0", (count // F4_BLOCK,))}
            continue
        entries[spec.name] = (commit, spec.shape)
        if commit == "F8_E4M3":
            entries[scale] = ("F32", ())
    return entries
