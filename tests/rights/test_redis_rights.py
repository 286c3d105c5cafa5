"""Each role may send Redis what its part needs, and nothing else: every command of the server is tried."""

from __future__ import annotations

import re
from typing import Any

import pytest
import redis

from deltapost.errors import StreamDenied
from deltapost.serialization.names import (
    RUNS_STREAM,
    commits_stream,
    envelope_stream,
    epoch_key,
    members_stream,
)
from deltapost.streams.redis import RedisLog
from fixtures.rights import OTHER_RUN, RUN, Realm

pytestmark = pytest.mark.xdist_group("rights")

ENTRY = ("*", "m", "x")

#: Commands that each user may run at all, on whatever keys.
LEARNER = {"ping", "client|setinfo", "xadd", "xread", "xinfo|stream", "get"}
AGGREGATOR = LEARNER | {"info", "xrange", "xrevrange", "xtrim", "xsetid", "set", "evalsha", "script|load"}
MAY_RUN = {"bob": LEARNER, "ada": LEARNER, "aggregator": AGGREGATOR, "operator": {"ping", "acl|load"}}


def commands(valkey_url: str) -> dict[str, list[str]]:
    """Every command and subcommand of the server that asks for rights, with as many words as it needs."""
    found = {}
    with redis.Redis.from_url(valkey_url, protocol=2) as client:
        client.set_response_callback("COMMAND", lambda reply, **_: reply)
        waiting = [*client.execute_command("COMMAND")]
    while waiting:
        name, arity, flags, *_, subcommands = waiting.pop()
        waiting += subcommands
        words = name.decode().split("|")
        if b"no_auth" not in flags and not subcommands:
            found["|".join(words)] = [*words, *["1"] * (abs(arity) - len(words))]
    return found


@pytest.mark.parametrize("user", sorted(MAY_RUN))
def test_no_other_command_may_be_run(realm: Realm, valkey_url: str, user: str) -> None:
    every = commands(valkey_url)
    assert len(every) > 250

    allowed = set()
    with realm.redis(user) as client:
        for name, words in every.items():
            try:
                client.execute_command(*words)
            except redis.exceptions.RedisError as error:
                # EXEC wraps the refusal; DEBUG and MODULE are switched off for everybody.
                if re.search("no permissions to run the|command not allowed", str(error)):
                    continue
            except (TypeError, IndexError):
                pass  # run, with an answer that the client did not expect to these words
            allowed.add(name)

    assert allowed == MAY_RUN[user]


#: What a learner of RUN may do, by command and key.
ALLOWED: list[tuple[Any, ...]] = [
    *[("XADD", envelope_stream(RUN, fragment), *ENTRY) for fragment in (0, 10, 100, 999, 1_023)],
    ("XADD", members_stream(RUN), "MAXLEN", "~", "20000", *ENTRY),
    *[("XREAD", "STREAMS", stream, "0-0") for stream in (envelope_stream(RUN, 7), members_stream(RUN))],
    ("XREAD", "STREAMS", commits_stream(RUN), "0-0"),
    ("XINFO", "STREAM", commits_stream(RUN)),
    *[("GET", epoch_key(envelope_stream(RUN, fragment))) for fragment in (0, 10, 100, 1_023)],
    ("PING",),
]

#: What no learner of RUN may do, though it may run the command on other keys.
REFUSED: list[tuple[Any, ...]] = [
    ("XADD", commits_stream(RUN), *ENTRY),
    ("XADD", epoch_key(envelope_stream(RUN, 0)), *ENTRY),
    ("XADD", envelope_stream(OTHER_RUN, 0), *ENTRY),
    ("XADD", envelope_stream(RUN + "-2", 0), *ENTRY),
    ("XADD", members_stream(OTHER_RUN), *ENTRY),
    ("XADD", f"deltapost:{{{RUN}/1030}}", *ENTRY),
    ("XADD", f"deltapost:{{{RUN}/0}}x", *ENTRY),
    ("XADD", f"deltapost:{{{RUN}/x}}", *ENTRY),
    ("XADD", f"deltapost:{{{RUN}/0/0}}", *ENTRY),
    ("XADD", "anything", *ENTRY),
    ("XREAD", "STREAMS", RUNS_STREAM, "0-0"),
    ("XREAD", "STREAMS", commits_stream(OTHER_RUN), "0-0"),
    ("XREAD", "STREAMS", envelope_stream(RUN, 0), envelope_stream(OTHER_RUN, 0), "0-0", "0-0"),
    ("XINFO", "STREAM", envelope_stream(RUN, 0)),
    ("XINFO", "STREAM", RUNS_STREAM),
    ("GET", epoch_key(envelope_stream(OTHER_RUN, 0))),
    ("GET", epoch_key(members_stream(RUN))),
    ("GET", "anything"),
    ("SET", epoch_key(envelope_stream(RUN, 0)), "x"),
]


@pytest.mark.parametrize("user", ["ada", "bob"])
def test_a_learner_reaches_the_streams_of_its_run_and_no_other_key(realm: Realm, user: str) -> None:
    with realm.redis("aggregator") as client:
        client.xadd(commits_stream(RUN), {"m": "x"})

    with realm.redis(user) as client:
        for words in ALLOWED:
            client.execute_command(*words)
        for words in REFUSED:
            assert denied(client, words), words


def denied(client: redis.Redis, words: tuple[Any, ...]) -> bool:
    try:
        client.execute_command(*words)
    except redis.exceptions.NoPermissionError:
        return True
    return False


def test_only_a_creator_announces_runs(realm: Realm) -> None:
    with realm.redis("ada") as creator, realm.redis("bob") as learner:
        creator.execute_command("XADD", RUNS_STREAM, *ENTRY)
        with pytest.raises(redis.exceptions.NoPermissionError):
            learner.execute_command("XADD", RUNS_STREAM, *ENTRY)


def test_the_aggregator_reaches_every_stream_of_ours_and_nothing_else(realm: Realm) -> None:
    log = realm.log("aggregator")
    stream = envelope_stream("any-run", 3)
    first = log.append(stream, b"x")
    log.append(commits_stream("any-run"), b"x", max_length=10)
    assert [entry.id for entry in log.read(stream, "0-0", limit=10)] == [first]
    assert log.claim_epoch(stream, "one") == "one"
    assert log.replace_epoch(stream, old="one", new="two") == log.epoch(stream) == "two"
    assert log.trim(stream, first) == 1
    assert isinstance(log, RedisLog)
    assert log.eviction_policy() == "noeviction"
    bounds = log.bounds(stream)
    assert bounds is not None
    assert bounds.length == 0
    for forbidden in (
        lambda: log.append("another:stream", b"x"),
        lambda: log.read("another:stream", "0-0", limit=1),
        lambda: log.epoch("another:stream"),
    ):
        with pytest.raises(StreamDenied, match="ACL"):
            forbidden()


def test_nobody_gets_in_without_a_password_and_auditors_not_at_all(realm: Realm) -> None:
    with redis.Redis(port=realm.redis_port, protocol=2) as nobody:
        assert nobody.ping()
        for words in (*ALLOWED[:-1], ("COMMAND",), ("INFO",), ("KEYS", "*")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                nobody.execute_command(*words)
    for user, password in (("bob", "wrong"), ("auditor", realm.secrets()[0]), ("root", "")):
        with (
            redis.Redis(port=realm.redis_port, username=user, password=password, protocol=2) as stranger,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            stranger.ping()
