"""Claiming an id: a learner proves at its start that its key speaks for its id in this run.

In an open run the first who leaves a key in `learners/ID` owns the id; in a registered one only the registry
counts. An aggregator judges every message by the same rules: this only says early, and in words, what it
would say.
"""

from __future__ import annotations

from deltapost.algorithms.key_history import KeyHistory
from deltapost.algorithms.plan import RunPlan
from deltapost.errors import ObjectConflict, SignatureRefused
from deltapost.serialization.names import learner_key
from deltapost.serialization.signing import SigningKey
from deltapost.stores import ObjectStore
from deltapost.stores.heads import reached
from deltapost.stores.registry import read_on, register


def claim_id(store: ObjectStore, plan: RunPlan, learner: str, key: SigningKey) -> None:
    """Makes sure that `key` speaks for the learner now. Raises SignatureRefused, saying what to do."""
    manifest = plan.manifest
    history = read_on(store, manifest, KeyHistory(manifest))
    known = history.entries(learner)
    if not known and manifest.admission == "registered" and key.public == manifest.creator_key:
        register(store, manifest, key, "add", learner, key.public, from_version=0)
        return
    changes = {entry.from_version for entry in known}
    begun = [version for version in changes if reached(store, plan.run, len(plan.fragments), version)]
    speakers = history.speakers(learner, max(begun, default=0))
    if key.public in speakers.keys:
        return
    if speakers.owner:
        _own(store, plan.run, learner, key)
        return
    raise _refused(plan, history, learner, key)


def _own(store: ObjectStore, run: str, learner: str, key: SigningKey) -> None:
    """Leaves the key in `learners/ID`, create-once: whoever was first owns the id."""
    try:
        store.put(learner_key(run, learner), key.public)
    except ObjectConflict:
        raise SignatureRefused(
            f"learner id {learner!r} of run {run!r} belongs to another key than {key.public.hex()[:16]}…",
            hint="use the key file it was registered with (DELTAPOST_SIGNING_KEY_FILE), or another id",
        ) from None


def _refused(plan: RunPlan, history: KeyHistory, learner: str, key: SigningKey) -> SignatureRefused:
    own, who = key.public.hex(), f"learner {learner!r} of run {plan.run!r}"
    known = history.entries(learner)
    ask = f"ask the run's creator for: deltapost learner {{}} {plan.run} {learner} {own}"
    if not known:
        return SignatureRefused(f"{who} is not registered", hint=ask.format("add"))
    newest = known[-1]
    if newest.public_key == key.public:
        return SignatureRefused(f"the key of {who} counts from version {newest.from_version} on, not yet")
    if newest.public_key is None:
        return SignatureRefused(
            f"{who} was revoked from version {newest.from_version} on", hint=ask.format("add")
        )
    return SignatureRefused(
        f"{who} is registered with the key {newest.public_key.hex()[:16]}…, this one is {own[:16]}…",
        hint="use its key file (DELTAPOST_SIGNING_KEY_FILE), or " + ask.format("rotate"),
    )
