"""Every run that may be served is served, whatever else is announced; why one is not is said."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deltapost.algorithms.plan import RunPlan
from deltapost.errors import AccessDenied, ConfigurationError, LedgerUnavailable, StoreUnavailable
from deltapost.serialization.documents import encode_canonical
from deltapost.serialization.messages import RunMessage, sign_message
from deltapost.serialization.names import RUNS_STREAM, aggregator_object_key, manifest_key
from deltapost.serialization.records import Manifest
from deltapost_aggregator.context import Services
from deltapost_aggregator.discovery import Discovery
from deltapost_aggregator.service import AggregatorService
from fixtures.pipeline import AGGREGATOR_KEY, learner_signing_key
from fixtures.ports import free_ports
from fixtures.served import CLAIMS, Served, algorithm, eventually, small_model


@pytest.fixture
def idle(served: Served) -> Served:
    """Store, stream and ledger without a running aggregator."""
    served.stop()
    return served


def services_of(served: Served, **settings: Any) -> Services:
    service = served.start(**settings)
    services = service.services
    served.stop()
    return services


def discovery(
    served: Served, serve: Callable[[RunPlan], None] | None = None, **settings: Any
) -> tuple[Discovery, list[str], Services]:
    services = services_of(served, **settings)
    found: list[str] = []
    return Discovery(services, serve or (lambda plan: found.append(plan.run))), found, services


def create(served: Served, run: str, **settings: Any) -> None:
    served.join(small_model(), algorithm(), run=run, **settings).leave()


def announce(served: Served, run: str) -> None:
    key = learner_signing_key("stranger")
    message = RunMessage(run=run, manifest=bytes(32), public_key=key.public)
    served.log.append(RUNS_STREAM, sign_message(message, key).frame)


def test_a_run_created_while_the_aggregator_runs_is_picked_up(served: Served) -> None:
    with served.join(small_model(), algorithm(), run="later") as run:
        run.publish_contribution(0, 0, delta=small_model(0.5), **CLAIMS)

        assert run.wait_for(0, 1, timeout=10)


def test_only_allowed_runs_are_served(idle: Served) -> None:
    for run in ("one", "two", "three"):
        create(idle, run)
    found_by, found, _ = discovery(idle, serve_runs="one, three")

    found_by.step(0.0)

    assert sorted(found) == ["one", "three"]


def test_an_emptied_redis_loses_no_run(idle: Served) -> None:
    create(idle, "one")
    first, found, _ = discovery(idle)
    first.step(0.0)
    assert found == ["one"]
    idle.log.trim(RUNS_STREAM, "9999999999999-0")

    second, again, _ = discovery(idle)
    second.step(0.0)

    assert again == ["one"]


def test_a_failure_on_the_way_delays_a_run_and_forgets_none(idle: Served) -> None:
    for run in ("one", "two", "three"):
        create(idle, run)
    served: list[str] = []
    failures = iter([None, LedgerUnavailable("locked"), None, StoreUnavailable("down"), None])

    def serve(plan: RunPlan) -> None:
        error = next(failures, None)
        if error is not None:
            raise error
        served.append(plan.run)

    finder, _, _ = discovery(idle, serve)
    for _ in range(4):
        try:
            finder.step(0.0)
        except (LedgerUnavailable, StoreUnavailable):
            continue

    assert sorted(served) == ["one", "three", "two"]
    assert len(served) == len(set(served))


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": {"algorithm": "diloco", "merge": {"rule": {}}}},
        {"algorithm": {}},
        {"arithmetic": 99},
        {"fragments": (("a",), ("a",))},
        {"format": 2},
    ],
)
def test_a_hostile_manifest_hides_no_other_run(idle: Served, change: dict[str, Any]) -> None:
    create(idle, "model")
    plain = Manifest.from_bytes(idle.store.get(manifest_key("model")).data).model_dump()
    if change.get("algorithm"):
        change = {"algorithm": {**plain["algorithm"], **change["algorithm"]}}
    idle.store.put(manifest_key("bad"), encode_canonical({**plain, "run": "bad", **change}))
    idle.store.put(manifest_key("worse"), b"\xc1")
    for run in ("bad", "worse", "not-there", "model"):
        announce(idle, run)
    idle.log.append(RUNS_STREAM, b"garbage")
    finder, found, services = discovery(idle)

    finder.step(0.0)

    assert found == ["model"]
    assert services.health.problems() == {}


def test_an_announced_run_whose_manifest_comes_later_is_served_then(idle: Served) -> None:
    announce(idle, "one")
    finder, found, _ = discovery(idle)
    finder.step(0.0)
    assert found == []

    create(idle, "one")
    idle.log.trim(RUNS_STREAM, "9999999999999-0")
    eventually(lambda: finder.step(0.0) or found == ["one"])


def test_a_run_of_another_aggregator_key_is_refused_and_said(idle: Served) -> None:
    create(idle, "one", aggregator_key=learner_signing_key("another").public.hex())
    finder, found, services = discovery(idle, serve_runs="one")

    finder.step(0.0)

    assert found == []
    assert "aggregator key" in services.health.problems()["run one"]
    assert "DELTAPOST_SIGNING_KEY_FILE" in services.health.problems()["run one"]


def test_the_first_aggregator_of_an_unpinned_run_keeps_it_from_every_other_key(idle: Served) -> None:
    create(idle, "one", aggregator_key=None)
    finder, found, _ = discovery(idle)
    finder.step(0.0)
    assert found == ["one"]
    key = aggregator_object_key("one")
    assert idle.store.get(key).data == AGGREGATOR_KEY.public
    idle.store.delete(key)
    idle.store.put(key, learner_signing_key("another").public)

    second, refused, services = discovery(idle)
    second.step(0.0)

    assert refused == []
    assert "aggregator key" in services.health.problems()["run one"]


def test_a_ledger_beside_the_wrong_store_serves_nothing_and_says_so(idle: Served) -> None:
    create(idle, "one")
    first, _, _ = discovery(idle)
    first.step(0.0)
    idle.store.delete(manifest_key("one"))

    finder, found, services = discovery(idle)
    finder.step(0.0)

    assert found == []
    assert "is DELTAPOST_STORE right?" in services.health.problems()["run one"]


def test_run_ids_that_could_never_match_are_refused() -> None:
    from deltapost_aggregator.settings import AggregatorSettings

    with pytest.raises(ConfigurationError, match="neither a run id"):
        AggregatorSettings.read(
            redis_url="memory://",
            store="memory://",
            ledger_url="sqlite:///x",
            signing_key_file="k",
            serve_runs="Nope, a/..",
        )


def ask(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_health_and_readiness_answer_with_the_reason_in_words(idle: Served) -> None:
    (port,) = free_ports(1)
    service: AggregatorService = idle.start(aggregator_health_port=port)
    eventually(lambda: _answers(port))
    assert ask(port, "/healthz")[0] == 200
    status, body = ask(port, "/readyz")
    assert (status, "everything answers" in body) == (200, True)

    service.services.health.problem("run x fragment 0", "the store is down")
    status, body = ask(port, "/readyz")

    assert status == 503
    assert "run x fragment 0: the store is down" in body


def _answers(port: int) -> bool:
    try:
        ask(port, "/healthz")
    except OSError:
        return False
    return True


def test_a_health_port_that_is_taken_is_named_before_anything_is_served(idle: Served) -> None:
    services = services_of(idle)
    (port,) = free_ports(1)
    taken = idle.start(aggregator_health_port=port)
    assert taken
    eventually(lambda: _answers(port))
    settings = services.settings.model_copy(update={"aggregator_health_port": port})
    second = AggregatorService(
        Services(
            settings=settings,
            store=services.store,
            log=services.log,
            ledger=services.ledger,
            key=services.key,
            backend=services.backend,
        )
    )

    with pytest.raises(ConfigurationError, match="DELTAPOST_AGGREGATOR_HEALTH_PORT"):
        second.run()


def test_an_aggregator_without_a_run_is_healthy(idle: Served) -> None:
    finder, _, services = discovery(idle)
    services.health.last_read = 0.0

    finder.step(0.0)

    assert time.monotonic() - services.health.last_read < 10


def test_a_flood_of_runs_that_are_not_there_hides_no_run(idle: Served) -> None:
    create(idle, "model")
    idle.log.trim(RUNS_STREAM, "9999999999999-0")
    for number in range(1_100):
        announce(idle, f"fake-{number}")
    announce(idle, "model")
    finder, found, services = discovery(idle)

    for _ in range(12):
        finder.step(0.0)

    assert found == ["model"]
    assert services.health.problems() == {}


def test_a_run_refused_by_the_store_today_is_served_once_it_may_be(idle: Served) -> None:
    create(idle, "model")

    class Denied:
        def __init__(self) -> None:
            self.denied = True

        def __getattr__(self, name: str) -> Any:
            if name == "get" and self.denied:
                raise AccessDenied("not today")
            return getattr(idle.store, name)

    store = Denied()
    services = services_of(idle, serve_runs="model")
    found: list[str] = []
    finder = Discovery(replace(services, store=store), lambda plan: found.append(plan.run))
    finder.step(0.0)
    assert "not today" in services.health.problems()["run model"]
    store.denied = False

    eventually(lambda: finder.step(0.0) or found == ["model"])

    assert services.health.problems() == {}
