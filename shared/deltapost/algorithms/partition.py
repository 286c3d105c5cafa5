"""Partition: which parameters make up which fragment, as a function of the schema alone.

Every parameter is in exactly one fragment and no fragment is empty, so equal schemas give equal plans on
every machine and in every release that reads the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, TypeAlias

from deltapost.errors import ConfigurationError, MalformedMessage
from deltapost.limits import MAX_FRAGMENTS
from deltapost.serialization import ParameterSpec, Schema

__all__ = ["ByBytes", "ByPattern", "Partition", "Strided", "from_fields"]

#: The first whole number between separators: `model.layers.11.mlp.weight` is in block (`model.layers.`, 11).
_BLOCK: Final = re.compile(r"(?P<stack>(?:[^./]*[./])*?)(?P<index>[0-9]{1,9})[./]")


@dataclass(frozen=True)
class ByBytes:
    """The largest tensor first into the lightest fragment, ties by name: fragments of about equal bytes.

    >>> schema = Schema((ParameterSpec("a", "F32", (6,)), ParameterSpec("b", "F32", (4,)),
    ...                  ParameterSpec("c", "F32", (3,))))
    >>> ByBytes().fragments(schema, 2)
    (('a',), ('b', 'c'))
    """

    def fragments(self, schema: Schema, count: int) -> tuple[tuple[str, ...], ...]:
        """`count` fragments of parameter names, each sorted. Raises ConfigurationError if one were empty."""
        _check_count(schema, count)
        return _finished(_deal_by_bytes(schema.parameters, [[] for _ in range(count)]), self)

    def to_fields(self) -> dict[str, object]:
        return {"kind": "by_bytes"}


@dataclass(frozen=True)
class Strided:
    """Transformer blocks dealt round the fragments in their order; what is in no block goes by bytes.

    A block is everything below one number in the name (`layers.3.…`), so that each fragment holds early and
    late blocks alike (Streaming DiLoCo, Douillard et al. 2025, section 3.1).

    >>> schema = Schema(tuple(ParameterSpec(f"layers.{i}.w", "F32", (2,)) for i in range(3)))
    >>> Strided().fragments(schema, 2)
    (('layers.0.w', 'layers.2.w'), ('layers.1.w',))
    """

    def fragments(self, schema: Schema, count: int) -> tuple[tuple[str, ...], ...]:
        """`count` fragments of parameter names, each sorted. Raises ConfigurationError if one were empty."""
        _check_count(schema, count)
        blocks: dict[tuple[str, int], list[ParameterSpec]] = {}
        rest: list[ParameterSpec] = []
        for spec in schema.parameters:
            if found := _BLOCK.match(spec.name):
                blocks.setdefault((found["stack"], int(found["index"])), []).append(spec)
            else:
                rest.append(spec)
        dealt: list[list[ParameterSpec]] = [[] for _ in range(count)]
        for turn, block in enumerate(sorted(blocks)):
            dealt[turn % count].extend(blocks[block])
        return _finished(_deal_by_bytes(rest, dealt), self)

    def to_fields(self) -> dict[str, object]:
        return {"kind": "strided"}


@dataclass(frozen=True)
class ByPattern:
    """One shell-style pattern a fragment (`*` any text, `?` one character, `[abc]`), for experts.

    A parameter belongs to the first pattern that matches its whole name. Fragments beyond the patterns take
    what none matched, by bytes.

    >>> schema = Schema((ParameterSpec("experts.0.w", "F32", (2,)), ParameterSpec("experts.1.w", "F32", (2,)),
    ...                  ParameterSpec("router", "F32", (2,))))
    >>> ByPattern(("experts.0.*", "experts.1.*")).fragments(schema, 3)
    (('experts.0.w',), ('experts.1.w',), ('router',))
    """

    patterns: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.patterns) <= MAX_FRAGMENTS or not all(self.patterns):
            raise ConfigurationError(
                f"a partition by pattern has {len(self.patterns)} patterns, some of them perhaps empty",
                hint=f"give 1 to {MAX_FRAGMENTS} patterns, one for each fragment",
            )

    def fragments(self, schema: Schema, count: int) -> tuple[tuple[str, ...], ...]:
        """`count` fragments of parameter names, each sorted.

        Raises ConfigurationError if one were empty, or a parameter in none.
        """
        _check_count(schema, count)
        if count < len(self.patterns):
            raise ConfigurationError(f"{len(self.patterns)} patterns need as many fragments, not {count}")
        matched: list[list[ParameterSpec]] = [[] for _ in self.patterns]
        rest: list[ParameterSpec] = []
        for spec in schema.parameters:
            fits = (
                group
                for group, glob in zip(matched, self.patterns, strict=True)
                if fnmatchcase(spec.name, glob)
            )
            next(fits, rest).append(spec)
        if rest and count == len(self.patterns):
            raise ConfigurationError(
                f"parameter {rest[0].name!r} matches none of the {count} patterns",
                hint="add a fragment for what no pattern matches, or make the last pattern '*'",
            )
        others = _deal_by_bytes(rest, [[] for _ in range(count - len(self.patterns))])
        return _finished([*matched, *others], self)

    def to_fields(self) -> dict[str, object]:
        return {"kind": "by_pattern", "patterns": list(self.patterns)}


Partition: TypeAlias = ByBytes | Strided | ByPattern


def from_fields(fields: Mapping[str, object]) -> Partition:
    """What `to_fields` wrote, read strictly. Raises MalformedMessage."""
    match dict(fields):
        case {"kind": "by_bytes", **others} if not others:
            return ByBytes()
        case {"kind": "strided", **others} if not others:
            return Strided()
        case {"kind": "by_pattern", "patterns": list() | tuple() as patterns, **others} if not others:
            if (
                patterns
                and len(patterns) <= MAX_FRAGMENTS
                and all(isinstance(p, str) and p for p in patterns)
            ):
                return ByPattern(tuple(patterns))
    raise MalformedMessage(
        f"a partition's fields are none that this release knows: kind {fields.get('kind')!r:.40}",
        hint="by_bytes, strided, or by_pattern with a list of patterns",
    )


def _check_count(schema: Schema, count: int) -> None:
    if not 1 <= count <= MAX_FRAGMENTS:
        raise ConfigurationError(f"a run has 1 to {MAX_FRAGMENTS} fragments, not {count}")
    if count > len(schema.parameters):
        raise ConfigurationError(
            f"{count} fragments cannot be made of {len(schema.parameters)} parameters",
            hint="every fragment holds at least one whole parameter",
        )


def _deal_by_bytes(
    parameters: Iterable[ParameterSpec], fragments: Sequence[list[ParameterSpec]]
) -> Sequence[list[ParameterSpec]]:
    """Adds each parameter, largest first, to the fragment that is lightest then (bytes, then count)."""
    weights = [(sum(spec.nbytes for spec in held), len(held)) for held in fragments]
    for spec in sorted(parameters, key=lambda spec: (-spec.nbytes, spec.name)):
        lightest = min(range(len(fragments)), key=lambda index: (weights[index], index))
        fragments[lightest].append(spec)
        nbytes, held = weights[lightest]
        weights[lightest] = (nbytes + spec.nbytes, held + 1)
    return fragments


def _finished(
    fragments: Sequence[Sequence[ParameterSpec]], partition: Partition
) -> tuple[tuple[str, ...], ...]:
    for index, specs in enumerate(fragments):
        if not specs:
            raise ConfigurationError(
                f"fragment {index} of {len(fragments)} would hold no parameter under {partition}",
                hint="use fewer fragments, or ByBytes, which fills every one",
            )
    return tuple(tuple(sorted(spec.name for spec in specs)) for specs in fragments)
