"""A learner of a registered run joins by the key its creator registered, and is told what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

import deltapost
from deltapost.algorithms.plan import RunPlan
from deltapost.errors import ConfigurationError, ObjectMissing, SignatureRefused
from deltapost.learner.creating import find_plan
from deltapost.serialization.names import learner_key
from deltapost.serialization.signing import SigningKey
from deltapost.stores.registry import register
from fixtures.served import CLAIMS, Served, algorithm, small_model

#: An aggregator that asked a moment ago calls a new key unknown: what it refused is posted again.
QUICK = {"repost_seconds": 0.5}


def key_file(served: Served, name: str) -> tuple[Path, SigningKey]:
    path = served.directory / f"{name}.key"
    return path, SigningKey.load_or_create(path)


def plan_of(served: Served) -> RunPlan:
    plan = find_plan(served.store, "tiny")
    assert plan is not None
    return plan


def creator_key(served: Served) -> SigningKey:
    return SigningKey.load(served.directory / "state" / "keys" / "ada.key")


@pytest.fixture
def created(served: Served) -> Served:
    """A registered run that Ada created and left."""
    served.join(small_model(), algorithm(), admission="registered").leave()
    return served


def test_the_creator_is_registered_by_its_own_join_and_contributes(served: Served) -> None:
    with served.join(small_model(), algorithm(), admission="registered") as run:
        run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)

        assert run.wait_for(0, 1, timeout=10)
    with pytest.raises(ObjectMissing):
        served.store.head(learner_key("tiny", "ada"))


def test_a_learner_that_is_not_registered_is_told_the_command(created: Served) -> None:
    path, key = key_file(created, "bob")

    with pytest.raises(
        SignatureRefused, match=f"not registered.*deltapost learner add tiny bob {key.public.hex()}"
    ):
        created.join(small_model(), learner="bob", signing_key_file=str(path))


def test_once_it_is_registered_it_joins_and_contributes(created: Served) -> None:
    path, key = key_file(created, "bob")
    manifest = plan_of(created).manifest
    register(created.store, manifest, creator_key(created), "add", "bob", key.public, from_version=0)

    with created.join(small_model(), learner="bob", signing_key_file=str(path), **QUICK) as run:
        run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)

        assert run.wait_for(0, 1, timeout=10)


def test_a_rotated_learner_goes_on_with_its_new_key_at_once(created: Served) -> None:
    # Given Bob, who has contributed under his first key
    path, key = key_file(created, "bob")
    manifest, creator = plan_of(created).manifest, creator_key(created)
    register(created.store, manifest, creator, "add", "bob", key.public, from_version=0)
    with created.join(small_model(), learner="bob", signing_key_file=str(path), **QUICK) as run:
        run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)
        assert run.wait_for(0, 1, timeout=10)

    # When his key is rotated from a version on that no fragment has reached, and he starts with the new one
    new_path, new_key = key_file(created, "bob-new")
    register(created.store, manifest, creator, "rotate", "bob", new_key.public, from_version=2)
    with created.join(
        small_model(), learner="bob", signing_key_file=str(new_path), repost_seconds=0.5
    ) as run:
        for fragment in (0, 1):
            base = run.version(fragment)
            run.publish_contribution(fragment, base, delta=small_model(0.5), **CLAIMS)

            # Then rounds before that version take it as well
            assert run.wait_for(fragment, base + 1, timeout=20)

    # And once it is reached the old key is refused
    with created.join(small_model(), learner="bob", signing_key_file=str(new_path)) as run:
        assert run.version(0) == 2
    with pytest.raises(SignatureRefused, match=f"registered with the key {new_key.public.hex()[:16]}"):
        created.join(small_model(), learner="bob", signing_key_file=str(path))


def test_a_revoked_learner_is_told(created: Served) -> None:
    path, key = key_file(created, "bob")
    manifest, creator = plan_of(created).manifest, creator_key(created)
    register(created.store, manifest, creator, "add", "bob", key.public, from_version=0)
    register(created.store, manifest, creator, "revoke", "bob", None, from_version=0)

    with pytest.raises(SignatureRefused, match="revoked from version 0"):
        created.join(small_model(), learner="bob", signing_key_file=str(path))


def test_a_key_that_counts_later_is_told_from_when(created: Served) -> None:
    path, key = key_file(created, "bob")
    manifest, creator = plan_of(created).manifest, creator_key(created)
    register(created.store, manifest, creator, "add", "bob", key.public, from_version=9)

    with pytest.raises(SignatureRefused, match="from version 9 on, not yet"):
        created.join(small_model(), learner="bob", signing_key_file=str(path))


def test_in_an_open_run_an_entry_of_the_creator_outranks_whoever_comes_first(served: Served) -> None:
    served.join(small_model(), algorithm()).leave()
    path, key = key_file(served, "bob")
    manifest, creator = plan_of(served).manifest, creator_key(served)
    register(served.store, manifest, creator, "add", "bob", key.public, from_version=0)

    with pytest.raises(SignatureRefused, match="registered with the key"):
        served.join(small_model(), learner="bob")
    served.join(small_model(), learner="bob", signing_key_file=str(path)).leave()


def test_an_admission_other_than_the_runs_is_refused(created: Served) -> None:
    with pytest.raises(ConfigurationError, match=r"admission 'registered'.*asks for 'open'"):
        created.join(small_model(), algorithm(), admission="open")


def test_the_manifest_says_who_is_admitted(created: Served) -> None:
    assert plan_of(created).manifest.admission == "registered"
    assert deltapost.__version__
