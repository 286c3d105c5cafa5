"""Schema: a model's named parameters with dtype and shape, sorted by name, unambiguous in every payload.

Entries of payloads and outer states are a parameter's name with a suffix (`w.scale`) or prefix
(`momentum.w`). A schema in which such an entry is itself a parameter's name is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Final

from deltapost.errors import InvalidTensor, SchemaMismatch
from deltapost.limits import MAX_NAME_LENGTH, MAX_PARAMETERS
from deltapost.serialization.tensor import PARAMETER_DTYPES, ParameterDType, element_bytes, shape_problem

#: What codecs append to a parameter's name for the entries beside its main one.
SCALE_SUFFIX: Final = ".scale"
RESERVED_SUFFIXES: Final = (SCALE_SUFFIX, ".indices", ".rows")

#: What outer states put before a parameter's name.
MASTER_PREFIX: Final = "master."
MOMENTUM_PREFIX: Final = "momentum."
RESIDUAL_PREFIX: Final = "residual."
RESERVED_PREFIXES: Final = (MASTER_PREFIX, MOMENTUM_PREFIX, RESIDUAL_PREFIX)

#: safetensors' own key for metadata, which payloads never carry.
METADATA_KEY: Final = "__metadata__"


def name_problem(name: object) -> str | None:
    """What keeps `name` from being a tensor's name, in words; None when nothing does."""
    if not isinstance(name, str):
        return f"the name is {type(name).__name__}, not text"
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        return f"the name has {len(name)} characters, not 1 to {MAX_NAME_LENGTH}"
    if not name.isprintable():
        return f"the name {name[:80]!a} has unprintable characters"
    if name == METADATA_KEY:
        return f"the name {METADATA_KEY} is safetensors' own"
    return None


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter: name, dtype (F32, F16 or BF16) and shape. Raises InvalidTensor, naming it."""

    name: str
    dtype: ParameterDType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if problem := name_problem(self.name):
            raise InvalidTensor(f"a parameter cannot be named so: {problem}")
        if self.dtype not in PARAMETER_DTYPES:
            raise InvalidTensor(
                f"parameter {self.name!r} has dtype {self.dtype!r:.40}",
                hint=f"parameters are {', '.join(PARAMETER_DTYPES)}",
            )
        if not isinstance(self.shape, tuple):
            raise InvalidTensor(
                f"parameter {self.name!r}: the shape is {type(self.shape).__name__}, not a tuple"
            )
        if problem := shape_problem(self.shape):
            raise InvalidTensor(f"parameter {self.name!r}: {problem}")

    @property
    def elements(self) -> int:
        """How many elements the parameter has."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter in its own dtype."""
        return element_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class Schema:
    """The parameters of a model. Given in any order, kept sorted by name. Raises InvalidTensor.

    >>> schema = Schema((ParameterSpec("b", "F32", (2,)), ParameterSpec("a", "BF16", ())))
    >>> schema.names, schema["b"].shape, "c" in schema
    (('a', 'b'), (2,), False)
    """

    parameters: tuple[ParameterSpec, ...]
    _by_name: dict[str, ParameterSpec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parameters = tuple(sorted(self.parameters, key=lambda spec: spec.name))
        if not 0 < len(parameters) <= MAX_PARAMETERS:
            raise InvalidTensor(f"a schema has 1 to {MAX_PARAMETERS} parameters, not {len(parameters)}")
        by_name = {spec.name: spec for spec in parameters}
        if len(by_name) < len(parameters):
            twice = next(one.name for one, other in pairwise(parameters) if one.name == other.name)
            raise InvalidTensor(f"two parameters are named {twice!r}")
        for name in by_name:
            _refuse_ambiguous(name, by_name)
        object.__setattr__(self, "parameters", parameters)
        object.__setattr__(self, "_by_name", by_name)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, sorted."""
        return tuple(self._by_name)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters in their own dtypes."""
        return sum(spec.nbytes for spec in self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __iter__(self) -> Iterator[ParameterSpec]:
        return iter(self.parameters)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> ParameterSpec:
        """The parameter of that name. Raises SchemaMismatch."""
        try:
            return self._by_name[name]
        except KeyError:
            raise SchemaMismatch(f"the schema has no parameter {name!r:.80}") from None

    def select(self, names: Iterable[str]) -> tuple[ParameterSpec, ...]:
        """The parameters of those names, in name order: a fragment's specs. Raises SchemaMismatch."""
        return tuple(self[name] for name in sorted(names))


def _refuse_ambiguous(name: str, names: dict[str, ParameterSpec]) -> None:
    entries = [name + suffix for suffix in RESERVED_SUFFIXES] + [
        prefix + name for prefix in RESERVED_PREFIXES
    ]
    for entry in entries:
        if entry in names:
            raise InvalidTensor(
                f"the parameters {name!r} and {entry!r} cannot be in one schema: deltapost itself names an "
                f"entry of {name!r} so",
                hint="rename one of them",
            )
