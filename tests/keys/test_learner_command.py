"""`deltapost learner` writes what the creator says, from a version on that leaves committed rounds alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deltapost.adapters.native import ArrayModel
from deltapost.algorithms.partition import ByBytes
from deltapost.algorithms.plan import RunPlan
from deltapost.cli.main import app
from deltapost.errors import ConfigurationError, DeltapostError
from deltapost.learner.creating import create_run
from deltapost.serialization.names import learner_key, record_key, registry_key
from deltapost.serialization.signing import SigningKey
from deltapost.stores import ObjectStore, open_store
from fixtures.pipeline import learner_signing_key, plain_config
from fixtures.served import small_model

ONE, TWO = (learner_signing_key(name).public.hex() for name in ("one", "two"))


class Command:
    """The command on a directory store, with the creator's key."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = f"file://{directory / 'bucket'}"
        self.store: ObjectStore = open_store(self.url)
        self.creator = directory / "creator.key"
        key = SigningKey.load_or_create(self.creator)
        self.plan: RunPlan = create_run(
            self.store,
            "tiny",
            ArrayModel(small_model()),
            plain_config(fragments=2, in_flight=2),
            key,
            partition=ByBytes(),
            admission="registered",
        )

    def reach(self, fragment: int, head: int) -> None:
        """Records up to the head, as far as somebody who asks for keys can tell."""
        for version in range(1, head + 1):
            self.store.put(record_key("tiny", fragment, version), b"record")

    def __call__(self, *words: str, key: Path | None = None) -> dict[str, Any]:
        signer = ["--creator-key-file", str(key or self.creator)] if words[0] != "list" else []
        done = CliRunner().invoke(app, ["learner", *words, "--store", self.url, *signer, "--json"])
        if isinstance(done.exception, DeltapostError):
            raise done.exception
        assert done.exit_code == 0, done.output
        found: dict[str, Any] = json.loads(done.output)
        return found


@pytest.fixture
def learner(tmp_path: Path) -> Command:
    return Command(tmp_path)


def test_a_new_learner_counts_for_the_rounds_that_are_open(learner: Command) -> None:
    learner.reach(0, 5)
    learner.reach(1, 3)

    added = learner("add", "tiny", "bob", ONE)

    assert (added["from_version"], added["heads"], added["number"]) == (3, [5, 3], 1)


def test_a_change_of_key_counts_from_the_first_version_that_no_fragment_has_reached(learner: Command) -> None:
    learner("add", "tiny", "bob", ONE)
    learner.reach(0, 13)
    learner.reach(1, 2)

    assert learner("rotate", "tiny", "bob", TWO)["from_version"] == 14
    assert learner("revoke", "tiny", "bob")["from_version"] == 14


def test_a_version_that_is_committed_everywhere_is_refused(learner: Command) -> None:
    learner.reach(0, 5)
    learner.reach(1, 4)

    with pytest.raises(ConfigurationError, match=r"version 3 is behind.*reached version 4"):
        learner("add", "tiny", "bob", ONE, "--from-version", "3")
    assert learner("add", "tiny", "bob", ONE, "--from-version", "7")["from_version"] == 7


def test_a_change_before_an_earlier_change_is_refused(learner: Command) -> None:
    learner("add", "tiny", "bob", ONE, "--from-version", "7")

    with pytest.raises(ConfigurationError, match="changes at version 7 already"):
        learner("rotate", "tiny", "bob", TWO, "--from-version", "6")
    assert learner("rotate", "tiny", "bob", TWO)["from_version"] == 7


def test_only_the_creators_key_registers_anybody(learner: Command) -> None:
    other = learner.directory / "other.key"
    SigningKey.generate().save(other)

    with pytest.raises(ConfigurationError, match=r"did not create run 'tiny'.*--creator-key-file"):
        learner("add", "tiny", "bob", ONE, key=other)
    assert learner("list", "tiny")["entries"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rotate", "tiny", "bob", ONE), "has no key to rotate"),
        (("revoke", "tiny", "bob"), "has no key to revoke"),
        (("add", "tiny", "ann", TWO), "has the key .* already.*deltapost learner rotate tiny ann"),
        (("rotate", "tiny", "ann", ONE), "has this very key already"),
        (("add", "tiny", "bob", "zz"), "no public key of 64"),
        (("add", "nosuch", "bob", ONE), "no run 'nosuch'"),
        (("add", "tiny", "Bob!", ONE), "learner id 'Bob!' is not valid"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(
    learner: Command, words: tuple[str, ...], message: str
) -> None:
    learner("add", "tiny", "ann", ONE)

    with pytest.raises(DeltapostError, match=message):
        learner(*words)
    assert len(learner("list", "tiny")["entries"]) == 1


def test_the_list_has_every_entry_in_order(learner: Command) -> None:
    learner("add", "tiny", "bob", ONE)
    learner("add", "tiny", "ann", TWO)
    learner("revoke", "tiny", "bob")

    found = learner("list", "tiny")

    assert found["admission"] == "registered"
    assert [(e["number"], e["action"], e["learner"], e["public_key"]) for e in found["entries"]] == [
        (1, "add", "bob", ONE),
        (2, "add", "ann", TWO),
        (3, "revoke", "bob", None),
    ]
    plain = CliRunner().invoke(app, ["learner", "list", "tiny", "--store", learner.url])
    assert "revoke  bob" in plain.output
    assert "3 entries" in plain.output


def test_an_entry_that_cannot_be_read_is_named(learner: Command) -> None:
    learner.store.put(registry_key("tiny", 1), b"junk")

    with pytest.raises(DeltapostError, match=f"the object '{registry_key('tiny', 1)}'"):
        learner("list", "tiny")


def test_two_commands_at_once_both_count(learner: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second finds the number taken when it writes, and goes on behind it."""
    from deltapost.stores import registry

    read_on, raced = registry.read_on, []

    def slow(store: ObjectStore, *rest: Any) -> Any:
        history = read_on(store, *rest)
        if not raced:
            raced.append(True)
            learner("add", "tiny", "ann", TWO)
        return history

    monkeypatch.setattr(registry, "read_on", slow)
    learner("add", "tiny", "bob", ONE)

    entries = learner("list", "tiny")["entries"]
    assert [(entry["number"], entry["learner"]) for entry in entries] == [(1, "ann"), (2, "bob")]


def test_an_owner_in_an_open_run_has_a_key_to_rotate_and_none_to_add(tmp_path: Path) -> None:
    learner = Command(tmp_path)
    store = learner.store
    key = SigningKey.load(learner.creator)
    create_run(store, "free", ArrayModel(small_model()), plain_config(), key, partition=ByBytes())
    store.put(learner_key("free", "bob"), learner_signing_key("bob").public)

    with pytest.raises(ConfigurationError, match="already"):
        learner("add", "free", "bob", ONE)
    assert learner("rotate", "free", "bob", ONE)["from_version"] == 1
