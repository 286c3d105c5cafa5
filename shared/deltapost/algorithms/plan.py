"""RunPlan: everything a manifest says, as the values that close rounds and check payloads with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deltapost import codecs
from deltapost.adapters import Backend
from deltapost.algorithms import ARITHMETIC_VERSION, Aggregator
from deltapost.algorithms.diloco import DiLoCo
from deltapost.codecs import Codec
from deltapost.errors import ConfigurationError, MalformedMessage
from deltapost.limits import MAX_DENSE_SIZES_PER_VERSION, MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES
from deltapost.serialization import ParameterSpec, Schema
from deltapost.serialization.records import Manifest
from deltapost.serialization.tensor import DType, element_bytes


@dataclass(frozen=True)
class RunPlan:
    """A manifest, read and checked. Build it with `of`."""

    manifest: Manifest
    manifest_sha256: bytes
    schema: Schema
    fragments: tuple[tuple[str, ...], ...]
    config: DiLoCo
    delta_codec: Codec

    @classmethod
    def of(cls, manifest: Manifest) -> RunPlan:
        """ConfigurationError: another arithmetic. MalformedMessage: a plan that does not add up."""
        if manifest.arithmetic != ARITHMETIC_VERSION:
            raise ConfigurationError(
                f"run {manifest.run!r} uses arithmetic version {manifest.arithmetic}, "
                f"this release computes version {ARITHMETIC_VERSION}",
                hint="run the deltapost release that wrote it",
            )
        schema = manifest.parameter_schema
        listed = [name for names in manifest.fragments for name in names]
        if sorted(listed) != [p.name for p in schema.parameters]:
            raise MalformedMessage(
                f"run {manifest.run!r}: the fragments do not hold each of the schema's parameters once"
            )
        config = DiLoCo.from_fields(manifest.algorithm)
        if config.fragments != len(manifest.fragments):
            raise MalformedMessage(
                f"run {manifest.run!r}: the algorithm has {config.fragments} fragments, "
                f"the manifest {len(manifest.fragments)}"
            )
        plan = cls(
            manifest, manifest.sha256, schema, manifest.fragments, config, codecs.get(config.delta_dtype)
        )
        for fragment, genesis in enumerate(manifest.genesis):
            if genesis.size > plan.max_anchor_bytes(fragment):
                raise MalformedMessage(
                    f"run {manifest.run!r}: the genesis anchor of fragment {fragment} has "
                    f"{genesis.size} bytes, at most {plan.max_anchor_bytes(fragment)} fit the schema"
                )
        return plan

    @property
    def run(self) -> str:
        return self.manifest.run

    def specs(self, fragment: int) -> tuple[ParameterSpec, ...]:
        """The fragment's parameters in name order."""
        return tuple(self.schema[name] for name in sorted(self.fragments[fragment]))

    def aggregator(self, fragment: int, backend: Backend) -> Aggregator:
        """What closes this fragment's rounds on `backend`."""
        return self.config.aggregator(self.schema, list(self.fragments[fragment]), backend)

    def expected_entries(self, fragment: int) -> Mapping[str, tuple[DType, tuple[int, ...]]]:
        """Entry name to (dtype, shape) of a delta payload of this fragment."""
        return {
            entry: kind
            for spec in self.specs(fragment)
            for entry, kind in self.delta_codec.entries(spec).items()
        }

    def max_payload_bytes(self, fragment: int) -> int:
        """More than any payload that fits the schema: its tensors' bytes and a full header."""
        entries = self.expected_entries(fragment).values()
        tensors = sum(element_bytes(dtype, shape) for dtype, shape in entries)
        return min(tensors + 8 + MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES)

    def max_anchor_bytes(self, fragment: int) -> int:
        """More than any anchor that fits the schema."""
        tensors = sum(element_bytes(spec.dtype, spec.shape) for spec in self.specs(fragment))
        return min(tensors + 8 + MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES)

    def max_posted_bytes(self, fragment: int) -> int:
        """Payload bytes that one learner may announce for one version of this fragment."""
        return MAX_DENSE_SIZES_PER_VERSION * (self.dense_bytes(fragment) + MAX_HEADER_BYTES)

    def dense_bytes(self, fragment: int) -> int:
        """Bytes of this fragment in fp32."""
        return sum(4 * spec.elements for spec in self.specs(fragment))
