"""The ledger service answers over real HTTP what the ledger holds, and in words what it does not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from sqlalchemy import text

from deltapost.ledger import Ledger, open_ledger
from deltapost_ledger import create_app
from fixtures.ledger_rows import (
    contribution_row,
    fragment_row,
    learner_row,
    participant_row,
    round_row,
    run_row,
    sha,
    unverified_row,
)


@pytest.fixture
def filled(ledger: Ledger) -> Ledger:
    """A run of two fragments with three rounds of the first one."""
    with ledger.write() as session:
        session.add(run_row(next_sequence=4, aggregator_key=sha("key")))
        session.flush()
        session.add_all([fragment_row(0, head=3), fragment_row(1, waiting_reason="no contribution yet")])
        session.add_all([learner_row("ann"), learner_row("bob")])
        session.flush()
        session.add_all(round_row(version) for version in (1, 2, 3))
        session.flush()
        session.add_all([participant_row("ann"), participant_row("bob", metrics={"accuracy": 0.5})])
        session.add(contribution_row("one", answered_version=1))
        detail = "<script>alert('x')</script>'; DROP TABLE runs; --"
        session.add(contribution_row("two", verdict="corrupt", detail=detail, answered_version=1))
        session.add(unverified_row())
    return ledger


@pytest.fixture
def http(ledger: Ledger) -> Iterator[httpx.Client]:
    """A client of the service, which serves `ledger` from a thread on a port of its own."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(create_app(ledger), log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}") as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()


def test_it_lists_runs_and_where_their_fragments_stand(filled: Ledger, http: httpx.Client) -> None:
    (run,) = http.get("/runs").json()["runs"]
    detail = http.get("/runs/tiny").json()

    assert run == {
        "run": "tiny",
        "state": "active",
        "fragments": 2,
        "learners": 2,
        "rounds": 3,
        "manifest_sha256": sha("manifest").hex(),
        "aggregator_key": sha("key").hex(),
        "created_at": "2026-11-30T16:00:00.123456Z",
    }
    heads = detail.pop("heads")
    assert detail == run
    assert [(head["fragment"], head["head"], head["waiting_reason"]) for head in heads] == [
        (0, 3, None),
        (1, 0, "no contribution yet"),
    ]


def test_it_pages_rounds_newest_first(filled: Ledger, http: httpx.Client) -> None:
    first = http.get("/runs/tiny/rounds", params={"limit": 2, "fragment": 0}).json()
    second = http.get("/runs/tiny/rounds", params={"limit": 2, "before": first["next_before"]}).json()
    none = http.get("/runs/tiny/rounds", params={"fragment": 1}).json()

    assert [row["version"] for row in first["rounds"]] == [3, 2]
    assert [row["version"] for row in second["rounds"]] == [1]
    assert second["next_before"] is None
    assert none == {"rounds": [], "next_before": None}
    assert second["rounds"][0] | {"committed_at": None} == {
        "run": "tiny",
        "round": 0,
        "fragment": 0,
        "version": 1,
        "sequence": 1,
        "participants": 2,
        "degraded": False,
        "cosine": 0.5,
        "accepted": 1,
        "late": 0,
        "rejected": 1,
        "unverified": 3,
        "quorum_seconds": 1.5,
        "grace_seconds": 0.5,
        "close_seconds": 0.25,
        "sync_seconds": 0.125,
        "bytes_in": 2_000,
        "update_size": 600,
        "anchor_size": 4_000,
        "record_sha256": sha("record 0 1").hex(),
        "committed_at": None,
    }


def test_it_tells_a_round_with_participants_and_verdicts(filled: Ledger, http: httpx.Client) -> None:
    answer = http.get("/runs/tiny/rounds/0/1")
    told = answer.json()

    assert [(row["learner"], row["weight"], row["metrics"]) for row in told["merged"]] == [
        ("ann", 819_200.0, None),
        ("bob", 819_200.0, {"accuracy": 0.5}),
    ]
    assert {row["envelope"]: row["verdict"] for row in told["envelopes"]} == {
        sha("one").hex(): "accepted",
        sha("two").hex(): "corrupt",
    }
    assert told["unverified_by_reason"] == [{"reason": "bad_signature", "learner": "", "count": 3}]
    assert told["anchor_sha256"] == sha("anchor").hex()
    assert told["outer_sha256"] is None
    assert told["owner"] == "host-1"


def test_what_a_stranger_wrote_stays_json(filled: Ledger, http: httpx.Client) -> None:
    answer = http.get("/runs/tiny/rounds/0/1")

    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    details = [row["detail"] for row in answer.json()["envelopes"] if row["detail"]]
    assert details == ["<script>alert('x')</script>'; DROP TABLE runs; --"]


def test_it_lists_learners(filled: Ledger, http: httpx.Client) -> None:
    ann, bob = http.get("/runs/tiny/learners").json()["learners"]

    assert (ann["learner"], ann["merged"], ann["public_key"]) == ("ann", 1, sha("ann").hex())
    assert (bob["learner"], bob["tokens"], bob["left"]) == ("bob", 6_400, False)


def test_what_is_not_there_is_named(filled: Ledger, http: httpx.Client) -> None:
    for path in ("/runs/nobody", "/runs/nobody/rounds", "/runs/nobody/learners", "/runs/nobody/rounds/0/1"):
        answer = http.get(path)
        assert (answer.status_code, answer.json()["detail"]) == (404, "this ledger has no run 'nobody'")

    answer = http.get("/runs/tiny/rounds/1/7")
    assert answer.status_code == 404
    assert answer.json()["detail"] == "run 'tiny' has no committed version 7 of fragment 1"


@pytest.mark.parametrize(
    "path",
    [
        "/runs/Tiny",
        "/runs/'; DROP TABLE runs; --",
        "/runs/%00",
        "/runs/%ff%fe",
        "/runs/tiny%0a",
        "/runs/{{7*7}}",
        "/runs/" + "r" * 65,
        "/runs/tiny/rounds/-1/1",
        "/runs/tiny/rounds/0/0",
        "/runs/tiny/rounds/0/99999999999999999999",
        "/runs/tiny/rounds?limit=0",
        "/runs/tiny/rounds?limit=100000",
        "/runs/tiny/rounds?before=x",
        "/runs/tiny/rounds?fragment=1%27%20OR%201=1",
    ],
)
def test_what_is_no_id_or_number_is_refused_in_words(filled: Ledger, http: httpx.Client, path: str) -> None:
    answer = http.get(path)

    assert answer.status_code == 422
    assert answer.json()["detail"][0]["msg"]
    assert len(http.get("/runs").json()["runs"]) == 1


def test_nothing_can_be_written(filled: Ledger, http: httpx.Client) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert http.request(method, "/runs/tiny").status_code == 405


def test_it_is_healthy_and_ready(ledger: Ledger, http: httpx.Client) -> None:
    assert http.get("/healthz").json()["healthy"] is True
    ready = http.get("/readyz")
    assert (ready.status_code, ready.json()["ready"]) == (200, True)
    assert http.get("/runs").json() == {"runs": []}


@pytest.fixture
def ledger_without_schema(ledger_url: str) -> Iterator[Ledger]:
    opened = open_ledger(ledger_url)
    yield opened
    opened.close()


class TestWithoutSchema:
    """The schema was taken down under a running service."""

    @pytest.fixture
    def ledger(self, ledger_without_schema: Ledger) -> Ledger:
        return ledger_without_schema

    def test_it_is_healthy_but_not_ready_and_says_the_command(self, http: httpx.Client) -> None:
        assert http.get("/healthz").status_code == 200
        for path in ("/readyz", "/runs"):
            answer = http.get(path)
            assert answer.status_code == 503
            assert "deltapost ledger migrate" in (answer.json().get("reason") or answer.json()["detail"])


class TestWithoutDatabase:
    """Postgres is not there."""

    @pytest.fixture
    def ledger(self) -> Iterator[Ledger]:
        opened = open_ledger("postgresql://user:sesame@127.0.0.1:1/ledger")
        yield opened
        opened.close()

    def test_it_says_what_is_missing_without_the_password(self, http: httpx.Client) -> None:
        for path in ("/readyz", "/runs", "/runs/tiny/rounds/0/1"):
            answer = http.get(path)
            assert answer.status_code == 503
            assert "127.0.0.1:1/ledger is not available" in answer.text
            assert "sesame" not in answer.text


def test_it_goes_on_by_itself_once_the_database_is_back(
    filled: Ledger, http: httpx.Client, request: pytest.FixtureRequest
) -> None:
    # Given a service that has pooled connections, which then all end
    assert http.get("/runs").status_code == 200
    if filled.dialect == "postgresql":
        with filled.write() as session:
            session.execute(
                text(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            )
    else:
        filled.close()

    assert http.get("/runs").status_code == 200
