"""The read-only endpoints: runs, their rounds with participants and verdicts, and their learners."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, HTTPException, Path, Query, Response
from sqlalchemy.orm import Session

from deltapost import __version__
from deltapost.errors import DeltapostError
from deltapost.ledger import queries
from deltapost.ledger.engine import Ledger
from deltapost.limits import MAX_COUNTER, MAX_FRAGMENTS
from deltapost.serialization.names import ID_PATTERN
from deltapost_ledger import models

RunId = Annotated[str, Path(pattern=f"^{ID_PATTERN}$", description="a run's id: a-z, 0-9 and '-'")]
FragmentIndex = Annotated[int, Path(ge=0, lt=MAX_FRAGMENTS, description="a fragment's index")]
Version = Annotated[int, Path(ge=1, le=MAX_COUNTER, description="the version that the round made")]


def build_routes(ledger: Ledger) -> APIRouter:
    """All endpoints, over one ledger. Each request reads in one transaction of its own."""
    router = APIRouter()

    @router.get("/healthz", summary="Whether the process runs")
    def healthz() -> models.Healthy:
        return models.Healthy(healthy=True, version=__version__)

    @router.get("/readyz", summary="Whether the ledger can be read", responses={503: {"model": models.Ready}})
    def readyz(response: Response) -> models.Ready:
        try:
            ledger.check_revision()
        except DeltapostError as error:
            response.status_code = 503
            return models.Ready(ready=False, reason=str(error))
        return models.Ready(ready=True, reason="the ledger answers and has this release's schema")

    @router.get("/runs", summary="Every run of this ledger")
    def runs() -> models.Runs:
        with ledger.read() as session:
            found = queries.runs(session)
        return models.Runs(runs=[models.Run.model_validate(run) for run in found])

    @router.get("/runs/{run}", summary="A run and where its fragments stand")
    def run_detail(run: RunId) -> models.RunDetail:
        with ledger.read() as session:
            summary = _known(session, run)
            fragments = queries.fragments_of(session, run)
        heads = [models.Fragment.model_validate(fragment) for fragment in fragments]
        return models.RunDetail(**models.Run.model_validate(summary).model_dump(), heads=heads)

    @router.get("/runs/{run}/rounds", summary="A run's committed rounds, newest first")
    def rounds(
        run: RunId,
        fragment: Annotated[int | None, Query(ge=0, lt=MAX_FRAGMENTS)] = None,
        before: Annotated[int | None, Query(ge=1, le=MAX_COUNTER, description="a `sequence`")] = None,
        limit: Annotated[int, Query(ge=1, le=500)] = 50,
    ) -> models.Rounds:
        with ledger.read() as session:
            _known(session, run)
            found = queries.rounds_of(session, run, fragment=fragment, before=before, limit=limit + 1)
        page = [models.Round.model_validate(row) for row in found[:limit]]
        return models.Rounds(rounds=page, next_before=page[-1].sequence if len(found) > limit else None)

    @router.get("/runs/{run}/rounds/{fragment}/{version}", summary="A round: participants and verdicts")
    def round_detail(run: RunId, fragment: FragmentIndex, version: Version) -> models.RoundDetail:
        with ledger.read() as session:
            _known(session, run)
            story = queries.find_round(session, run, fragment, version)
        if story is None:
            raise HTTPException(404, f"run {run!r} has no committed version {version} of fragment {fragment}")
        return _told(story)

    @router.get("/runs/{run}/learners", summary="A run's learners and what was merged from them")
    def learners(run: RunId) -> models.Learners:
        with ledger.read() as session:
            _known(session, run)
            found = queries.learners_of(session, run)
        return models.Learners(learners=[models.Learner.model_validate(learner) for learner in found])

    return router


def _known(session: Session, run: str) -> queries.RunSummary:
    summary = queries.find_run(session, run)
    if summary is None:
        raise HTTPException(404, f"this ledger has no run {run!r}")
    return summary


def _told(story: queries.RoundStory) -> models.RoundDetail:
    row = story.row
    return models.RoundDetail(
        **models.Round.model_validate(story.audit).model_dump(),
        generation=row.generation,
        previous_sha256=row.previous_sha256.hex(),
        attestation_sha256=row.attestation_sha256.hex(),
        anchor_sha256=_hex(row.anchor_sha256),
        update_sha256=_hex(row.update_sha256),
        outer_sha256=_hex(row.outer_sha256),
        outer_size=row.outer_size,
        owner=row.owner,
        lease_epoch=row.lease_epoch,
        merged=[models.Participant.model_validate(participant) for participant in story.participants],
        envelopes=[models.Envelope.model_validate(envelope) for envelope in story.envelopes],
        unverified_by_reason=[models.Unverified.model_validate(counted) for counted in story.unverified],
    )


def _hex(sha256: bytes | None) -> str | None:
    return None if sha256 is None else sha256.hex()
