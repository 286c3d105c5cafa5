"""Creating a run: manifest and genesis anchors, create-once, from the first learner's model.

Whoever is first creates; everyone else finds the run there and must fit it.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from deltapost.adapters import Model
from deltapost.algorithms import ARITHMETIC_VERSION
from deltapost.algorithms.diloco import DiLoCo
from deltapost.algorithms.partition import Partition
from deltapost.algorithms.plan import RunPlan
from deltapost.errors import (
    AccessDenied,
    ConfigurationError,
    NonFinite,
    NotReadable,
    ObjectConflict,
    ObjectMissing,
    SchemaMismatch,
)
from deltapost.events import events
from deltapost.limits import MAX_DOCUMENT_BYTES
from deltapost.serialization import ParameterSpec, Schema, TensorBytes, pack
from deltapost.serialization.documents import ObjectRef
from deltapost.serialization.names import genesis_key, manifest_key
from deltapost.serialization.records import Manifest, Parameter
from deltapost.serialization.signing import SigningKey
from deltapost.stores import ObjectStore

logger = events(__name__)


def find_plan(store: ObjectStore, run: str) -> RunPlan | None:
    """The run's plan, from its manifest; None when there is no such run, or none that may be read."""
    try:
        data = store.get(manifest_key(run), length=MAX_DOCUMENT_BYTES + 1).data
    except (ObjectMissing, NotReadable):
        return None
    return RunPlan.of(Manifest.from_bytes(data))


def create_run(
    store: ObjectStore,
    run: str,
    model: Model,
    algorithm: DiLoCo,
    key: SigningKey,
    *,
    partition: Partition,
    admission: Literal["open", "registered"] = "open",
    aggregator_key: bytes | None = None,
) -> RunPlan:
    """Creates the run with the model's present parameters as its genesis anchor.

    When another learner was faster, its run is returned: check that it fits. Raises ConfigurationError when
    this learner may not create runs.
    """
    try:
        return _create_run(store, run, model, algorithm, key, partition, admission, aggregator_key)
    except NotReadable:  # another learner's, and it may not be read: allowed to create, and not to join
        raise
    except AccessDenied as error:
        raise ConfigurationError(
            f"run {run!r} is not there, or may not be read, and this learner may not create it: {error}",
            hint="start with the run's creator, or correct the run's name or the learner's rights",
        ) from error


def _create_run(
    store: ObjectStore,
    run: str,
    model: Model,
    algorithm: DiLoCo,
    key: SigningKey,
    partition: Partition,
    admission: Literal["open", "registered"],
    aggregator_key: bytes | None,
) -> RunPlan:
    schema = Schema(tuple(model.specs()))
    fragments = partition.fragments(schema, algorithm.fragments)
    genesis = []
    for index, names in enumerate(fragments):
        data = pack({name: _genesis_tensor(model, schema[name]) for name in sorted(names)})
        sha256 = hashlib.sha256(data).digest()
        store.put(genesis_key(run, index, sha256), data)
        genesis.append(ObjectRef(sha256=sha256, size=len(data)))
    manifest = Manifest(
        arithmetic=ARITHMETIC_VERSION,
        run=run,
        parameters=tuple(
            Parameter(name=spec.name, dtype=spec.dtype, shape=spec.shape) for spec in schema.parameters
        ),
        fragments=tuple(tuple(sorted(names)) for names in fragments),
        genesis=tuple(genesis),
        algorithm=algorithm.to_fields(),
        admission=admission,
        creator_key=key.public,
        aggregator_key=aggregator_key,
    )
    plan = RunPlan.of(manifest)
    try:
        if store.put(manifest_key(run), manifest.to_bytes()):
            logger.info("run_created", extra={"run": run, "manifest": manifest.sha256.hex()})
    except ObjectConflict:
        existing = find_plan(store, run)
        if existing is None:
            raise
        return existing
    return plan


def _genesis_tensor(model: Model, spec: ParameterSpec) -> TensorBytes:
    value = model.load(spec.name)
    if not value.is_finite():
        raise NonFinite(f"the model's parameter {spec.name!r} is not finite: no run can start from it")
    return value.to_bytes(spec.dtype)


def check_fit(plan: RunPlan, model: Model, algorithm: DiLoCo | None, admission: str | None = None) -> None:
    """Raises SchemaMismatch or ConfigurationError naming the first thing in which model and run differ."""
    ours = {spec.name: spec for spec in model.specs()}
    theirs = {spec.name: spec for spec in plan.schema.parameters}
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours:
            raise SchemaMismatch(f"run {plan.run!r} has the parameter {name!r}, the model does not")
        if name not in theirs:
            raise SchemaMismatch(f"the model has the parameter {name!r}, run {plan.run!r} does not")
        if ours[name] != theirs[name]:
            raise SchemaMismatch(
                f"parameter {name!r}: run {plan.run!r} has {theirs[name].dtype} {theirs[name].shape}, "
                f"the model {ours[name].dtype} {ours[name].shape}"
            )
    if admission not in (None, plan.manifest.admission):
        raise ConfigurationError(
            f"run {plan.run!r} was created with admission {plan.manifest.admission!r}, "
            f"this learner asks for {admission!r}"
        )
    if algorithm is not None and algorithm != plan.config:
        run_fields, given = plan.config.to_fields(), algorithm.to_fields()
        differing = next(name for name in given if given[name] != run_fields.get(name))
        raise ConfigurationError(
            f"run {plan.run!r} was created with {differing} = {run_fields.get(differing)!r}, "
            f"this learner asks for {given[differing]!r}",
            hint="leave the algorithm out to take the run's, or choose another run name",
        )
