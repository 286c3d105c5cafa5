"""join(): finds or creates the run, proves who the learner is, and brings the model to the newest anchors."""

from __future__ import annotations

import os
from typing import Any, Literal

from deltapost.adapters import wrap_model
from deltapost.algorithms.diloco import DiLoCo
from deltapost.algorithms.partition import ByBytes, Partition
from deltapost.errors import ConfigurationError
from deltapost.events import events
from deltapost.learner.announcing import RunAnnouncer
from deltapost.learner.claiming import claim_id
from deltapost.learner.courier import Courier
from deltapost.learner.creating import check_fit, create_run, find_plan
from deltapost.learner.files import DirectoryLock
from deltapost.learner.following import Follower
from deltapost.learner.history import History
from deltapost.learner.inbox import Inbox
from deltapost.learner.journal import Journal
from deltapost.learner.members import largest_session
from deltapost.learner.presence import Presence
from deltapost.learner.publishing import Publisher
from deltapost.learner.session import Run
from deltapost.learner.settings import LearnerSettings
from deltapost.points import fail_from_environment
from deltapost.serialization.names import check_id, commits_stream
from deltapost.serialization.signing import SigningKey
from deltapost.settings import reveal
from deltapost.stores import ObjectStore, open_store
from deltapost.streams import START, MessageLog, open_log

logger = events(__name__)


def join(
    run: str,
    model: Any,
    algorithm: DiLoCo | None = None,
    *,
    learner: str,
    partition: Partition | None = None,
    admission: Literal["open", "registered"] | None = None,
    store: str | ObjectStore | None = None,
    redis_url: str | MessageLog | None = None,
    **settings: Any,
) -> Run:
    """Joins a run, creating it from `model`'s parameters if there is none, and aligns the model with it.

    `model` is a torch module, or a mapping of names to torch tensors or numpy arrays; its parameters are
    overwritten by the run's newest anchor. `algorithm`, `partition` and `admission` are needed only to create
    the run. `learner` is this learner's id in the run: 1 to 64 of a-z, 0-9 and '-'. In an `open` run (the
    default) it belongs to the first who joins by it; in a `registered` one to the key that the run's creator
    registered for it with `deltapost learner add`.

    Where `store`, `redis_url` and the other `settings` (see LearnerSettings) are not given, they come from
    `DELTAPOST_STORE`, `DELTAPOST_REDIS_URL` … and the file that `DELTAPOST_CONFIG` names.

    Raises ConfigurationError, SchemaMismatch (the model does not fit the run, naming the parameter),
    RunMismatch, SignatureRefused (the learner id belongs to another key, or is not registered), RunFinished
    (the model then holds the run's last anchors).
    """
    check_id("run", run)
    check_id("learner", learner)
    if algorithm is not None and not isinstance(algorithm, DiLoCo):
        raise ConfigurationError(
            f"algorithm is {type(algorithm).__name__}",
            hint="pass a deltapost.DiLoCo, or none to take the run's",
        )
    config = LearnerSettings.read(
        store=store if isinstance(store, str) else ("memory://given" if store is not None else None),
        redis_url=redis_url
        if isinstance(redis_url, str)
        else ("memory://given" if redis_url is not None else None),
        **settings,
    )
    config.prepare_state()
    opened_store = open_store(config.store) if store is None or isinstance(store, str) else store
    log = open_log(reveal(config.redis_url)) if redis_url is None or isinstance(redis_url, str) else redis_url
    key = SigningKey.load_or_create(config.key_file(learner))
    wrapped = wrap_model(model)
    log.ping()  # before anything is created
    plan = find_plan(opened_store, run)
    created = plan is None
    if plan is None:
        if algorithm is None:
            raise ConfigurationError(
                f"run {run!r} does not exist in the store, or may not be read",
                hint="pass an algorithm, such as DiLoCo.streaming(), to create it",
            )
        plan = create_run(
            opened_store,
            run,
            wrapped,
            algorithm,
            key,
            partition=partition or ByBytes(),
            admission=admission or "open",
            aggregator_key=config.pinned_aggregator_key(),
        )
    check_fit(plan, wrapped, algorithm, admission)
    claim_id(opened_store, plan, learner, key)
    directory = config.state_dir / "runs" / run / learner
    directory.mkdir(parents=True, exist_ok=True)
    lock = DirectoryLock(directory, what=f"learner {learner!r} of run {run!r}")
    try:
        history = History(
            directory / "history", manifest_sha256=plan.manifest_sha256, fragments=len(plan.fragments)
        )
        journal = Journal(directory / "journal")
        follower = Follower(
            opened_store, plan, history, wrapped.backend, aggregator_key=config.pinned_aggregator_key()
        )
        publisher = Publisher(
            opened_store, log, plan, key, learner, journal, fail_from_environment(os.environ)
        )
        commits = log.bounds(commits_stream(run))
        announcer = RunAnnouncer(log, plan, key)
        announcer.announce(needed=created)
        inbox = Inbox()
        courier = Courier(
            run=run,
            learner=learner,
            log=log,
            follower=follower,
            journal=journal,
            publisher=publisher,
            inbox=inbox,
            announcer=announcer,
            position=commits.last_id if commits is not None else START,
            poll_seconds=config.poll_seconds,
            repost_seconds=config.repost_seconds,
        )
        presence = Presence(
            log,
            key,
            run,
            learner,
            session=history.next_session(largest_session(log, run, learner)),
            alive_seconds=config.learner_lease_seconds / 3,
        )
        joined = Run(
            plan=plan,
            learner=learner,
            model=wrapped,
            publisher=publisher,
            follower=follower,
            journal=journal,
            inbox=inbox,
            courier=courier,
            presence=presence,
            directory_lock=lock,
        )
        joined.start()
    except BaseException:
        lock.release()
        raise
    logger.info("joined", extra={"run": run, "learner": learner, "versions": joined.versions})
    return joined
