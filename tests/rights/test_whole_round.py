"""A whole round under exactly these rights: create, join, publish, close, follow, leave, come back."""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import deltapost
from deltapost.adapters.native import NativeBackend
from deltapost.errors import (
    AccessDenied,
    ConfigurationError,
    DeltapostError,
    NotReadable,
    StreamDenied,
)
from deltapost.learner.session import Run
from deltapost.ledger.engine import open_ledger
from deltapost.serialization.names import delta_key, envelope_stream, learner_key, manifest_key
from deltapost.stores import ObjectStore
from deltapost.streams import MessageLog, open_log
from deltapost_aggregator.context import Services
from deltapost_aggregator.health import health_app
from deltapost_aggregator.service import AggregatorService
from deltapost_aggregator.settings import AggregatorSettings
from fixtures.http_proxy import Exchange, Proxy, http_proxy
from fixtures.pipeline import AGGREGATOR_KEY
from fixtures.rights import RUN, WHOLE_RUN, Realm
from fixtures.served import CLAIMS, algorithm, eventually, small_model

pytestmark = pytest.mark.xdist_group("rights")

#: What a signed request or URL holds and nothing of ours may show.
SIGNED = ("X-Amz-Signature", "X-Amz-Credential", "Signature=", "AWS4-HMAC-SHA256", "Authorization")


@pytest.fixture
def as_s3_answers(realm: Realm) -> Iterator[Proxy]:
    """The store as learners without the right to list see S3: what is not there is refused, too."""

    def refuse_what_is_missing(exchange: Exchange) -> None:
        if exchange.method in ("GET", "HEAD"):
            exchange.change_status = lambda status: 403 if status == 404 else status
            exchange.change_body = lambda body: body.replace(b"NoSuchKey", b"AccessDenied")

    with http_proxy(realm.endpoint) as proxy:
        proxy.fault = refuse_what_is_missing
        yield proxy


@contextmanager
def serving(store: ObjectStore, log: MessageLog, ledger_url: str) -> Iterator[AggregatorService]:
    """An aggregator that has no more than its credentials give it."""
    ledger = open_ledger(ledger_url)
    services = Services(
        settings=AggregatorSettings.read(
            redis_url="memory://",
            store="memory://",
            ledger_url="sqlite:///unused",
            signing_key_file="unused",
            serve_runs=WHOLE_RUN,
            poll_seconds=0.05,
            aggregator_health_port=0,
        ),
        store=store,
        log=log,
        ledger=ledger,
        key=AGGREGATOR_KEY,
        backend=NativeBackend(),
    )
    service = AggregatorService(services)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        yield service
    finally:
        service.stop()
        thread.join(timeout=30)
        ledger.close()


def test_two_learners_and_an_aggregator_need_no_more_than_they_were_given(
    realm: Realm,
    as_s3_answers: Proxy,
    migrated_sqlite_url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="deltapost")
    caplog.set_level(logging.DEBUG, logger="deltapost_aggregator")
    models = {"ada": small_model(), "bob": small_model()}

    def join(learner: str, settings: deltapost.DiLoCo | None) -> Run:
        return deltapost.join(
            WHOLE_RUN,
            models[learner],
            settings,
            learner=learner,
            store=realm.store(learner, endpoint=as_s3_answers.endpoint),
            redis_url=realm.redis_url(learner),
            state_dir=tmp_path / learner,
            poll_seconds=0.05,
            aggregator_key=AGGREGATOR_KEY.public.hex(),
        )

    with serving(realm.store("aggregator"), realm.log("aggregator"), migrated_sqlite_url):
        # When the creator makes the run, and a learner joins that may not announce it
        with ExitStack() as stack:
            runs = [stack.enter_context(join("ada", algorithm(quorum_size=2)))]
            runs.append(stack.enter_context(join("bob", None)))
            for run in runs:
                run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)
            # Then the round closes, and both follow it
            for run in runs:
                assert run.wait_for(0, 1, timeout=60)
            eventually(lambda: not any(run._journal.unanswered() for run in runs))
        # And one that comes back finds the newest version without a listing
        with join("bob", None) as back:
            assert back.versions == [1, 0]

    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []
    assert "run_not_announced_again" in caplog.text
    verbs = {(each.method, "list-type" in each.path) for each in as_s3_answers.exchanges}
    assert verbs == {("PUT", False), ("GET", False)}
    shown = "\n".join(f"{each.getMessage()} {vars(each)}" for each in caplog.records)
    assert [secret for secret in (*realm.secrets(), *SIGNED) if secret in shown] == []


def test_a_learner_without_the_creators_rights_is_told_so(realm: Realm, tmp_path: Path) -> None:
    def join(learner: str, run: str) -> Run:
        return deltapost.join(
            run,
            small_model(),
            algorithm(),
            learner=learner,
            store=realm.store(learner),
            redis_url=realm.redis_url(learner),
            state_dir=tmp_path / learner,
        )

    # A run that is not there, and may not be made; a run of others
    with pytest.raises(ConfigurationError, match=r"may not create it.*creator"):
        join("eve", "other-run")
    with pytest.raises(ConfigurationError, match=r"may not create it"):
        join("eve", RUN)


def failures(realm: Realm) -> dict[str, Callable[[], Any]]:
    """What each user may not do, and what nobody may with wrong passwords, through our own code."""
    bob, eve = realm.store("bob"), realm.store("eve")
    key = delta_key(RUN, "ada", 0, 0, bytes(32))
    wrong = realm.store("bob", secret_access_key=realm.secrets()[-1])
    stranger = open_log(
        realm.redis_url("bob").replace(realm.redis_url("bob").split(":")[2].split("@")[0], realm.secrets()[0])
    )
    return {
        "read": lambda: bob.get(key),
        "head": lambda: eve.head(manifest_key(RUN)),
        "create": lambda: bob.put(key, b"x"),
        "create in parts": lambda: realm.store("bob", part_bytes=8 * 1024**2).put(key, bytes(9 * 1024**2)),
        "register another": lambda: bob.put(learner_key(RUN, "eve"), b"x"),
        "list": lambda: list(bob.list("")),
        "delete": lambda: bob.delete(key),
        "read with a wrong secret": lambda: wrong.get(manifest_key(RUN)),
        "append": lambda: realm.log("bob").append("deltapost:runs", b"x"),
        "bounds": lambda: realm.log("bob").bounds("deltapost:runs"),
        "trim": lambda: realm.log("bob").trim("deltapost:{first-run/0}", "1-0"),
        "log in": lambda: stranger.ping(),
        "redis down": lambda: open_log(realm.redis_url("bob").replace(str(realm.redis_port), "1")).ping(),
    }


@pytest.mark.parametrize(
    "what",
    [
        *("read", "head", "create", "create in parts", "register another", "list", "delete"),
        *("read with a wrong secret", "append", "bounds", "trim", "log in", "redis down"),
    ],
)
def test_no_error_tells_a_secret_or_a_signature(realm: Realm, what: str) -> None:
    with pytest.raises(DeltapostError) as caught:
        failures(realm)[what]()

    assert isinstance(caught.value, AccessDenied | StreamDenied) or what == "redis down"
    assert isinstance(caught.value, NotReadable) == (what in ("read", "head"))
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + str(vars(caught.value))
    assert [secret for secret in (*realm.secrets(), *SIGNED) if secret in shown] == []


async def readiness(transport: httpx.ASGITransport) -> str:
    async with httpx.AsyncClient(transport=transport, base_url="http://aggregator") as client:
        return (await client.get("/readyz")).text


@pytest.mark.parametrize("part", ["store", "stream"])
def test_readiness_and_log_of_an_aggregator_with_wrong_rights_name_them_and_tell_no_secret(
    realm: Realm, part: str, migrated_sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="deltapost")
    caplog.set_level(logging.DEBUG, logger="deltapost_aggregator")
    store = realm.store("bob" if part == "store" else "aggregator")
    log = realm.log("bob" if part == "stream" else "aggregator")

    with serving(store, log, migrated_sqlite_url) as service:
        health = service.services.health
        eventually(health.problems)
        transport = httpx.ASGITransport(app=health_app(health))
        body = asyncio.run(readiness(transport))

    assert ("s3:ListBucket" if part == "store" else "ACL") in body
    shown = body + "\n".join(f"{each.getMessage()} {vars(each)}" for each in caplog.records)
    assert [secret for secret in (*realm.secrets(), *SIGNED) if secret in shown] == []


def test_a_learner_that_is_let_in_while_the_servers_run_gets_in_and_out_again(realm: Realm) -> None:
    realm.grant("learner", "cyd", RUN)
    realm.reload()
    key = learner_key(RUN, "cyd")

    def everywhere(there: bool) -> bool:
        """Whether both servers let cyd in, or both keep it out."""
        answers = []
        for request in (
            lambda: realm.log("cyd").epoch(envelope_stream(RUN, 0)),
            lambda: realm.store("cyd").put(key, b"c" * 32),
        ):
            try:
                request()
                answers.append(True)
            except (AccessDenied, StreamDenied):
                answers.append(False)
        return answers == [there, there]

    eventually(lambda: everywhere(True))
    realm.grant("revoke", "cyd")
    realm.reload()
    eventually(lambda: everywhere(False))
