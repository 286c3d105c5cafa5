"""Codecs: how one tensor of a delta or an update becomes entries of a payload, and a value again.

`get("F4")` finds a codec by the name that a run's manifest carries. Today these are the dense formats F32,
F16, BF16, F8_E4M3 and F4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from deltapost.adapters import Backend, Value
from deltapost.codecs.dense import DENSE_DTYPES, DenseCodec
from deltapost.errors import ConfigurationError
from deltapost.serialization.schema import ParameterSpec
from deltapost.serialization.tensor import DType, TensorBytes

__all__ = ["NAMES", "Codec", "get"]


class Codec(Protocol):
    """One way to write tensors. Frozen, without state: what a learner keeps between rounds is its own."""

    @property
    def name(self) -> str:
        """The name in manifests."""

    def entries(self, spec: ParameterSpec) -> dict[str, tuple[DType, tuple[int, ...]]]:
        """What a payload must hold for this parameter: {entry name: (dtype, shape)}."""

    def encode(self, name: str, value: Value) -> dict[str, TensorBytes]:
        """The entries for a value. Raises NonFinite, naming the tensor."""

    def check(self, spec: ParameterSpec, entries: Mapping[str, TensorBytes]) -> None:
        """Passes only entries that decode to finite numbers by the codec's rules.

        The entries have the dtypes and shapes that `entries` says. Raises NonFinite for NaNs, infinities
        and products past float32, MalformedPayload for other illegal values; both name the parameter.
        """

    def decode(self, spec: ParameterSpec, entries: Mapping[str, TensorBytes], backend: Backend) -> Value:
        """The float32 value of checked entries, on `backend`."""


_CODECS: Final[dict[str, Codec]] = {dtype: DenseCodec(dtype) for dtype in DENSE_DTYPES}

#: What `get` knows.
NAMES: Final = tuple(_CODECS)


def get(name: str) -> Codec:
    """The codec of that name. Raises ConfigurationError, listing the names there are.

    >>> get("F4").entries(ParameterSpec("w", "F32", (3,)))
    {'w': ('F4', (32,)), 'w.scale': ('F8_E8M0', (1,))}
    """
    try:
        return _CODECS[name]
    except (KeyError, TypeError):  # TypeError: a manifest may hold anything, lists and maps too
        raise ConfigurationError(
            f"there is no codec {name!r:.40}", hint=f"one of {', '.join(NAMES)}"
        ) from None
