"""One learner of the demo: a process that trains on its own shard and speaks JSON lines on stdout.

Run as `python -m deltapost.cli.demo.learner NUMBER SETTINGS`; store, Redis and state directory come from the
environment, as for any learner.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from types import FrameType

import torch

import deltapost
from deltapost.cli.demo.corpus import load_corpus, training_batch
from deltapost.cli.demo.model import build_model, build_optimizer, training_loss
from deltapost.cli.demo.settings import DemoSettings
from deltapost.cli.logs import log_to_stderr

REPORT_SECONDS = 0.5


def say(**fields: object) -> None:
    """One progress line."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def train(number: int, settings: DemoSettings) -> None:
    """Trains until every fragment has its rounds, or SIGTERM."""
    stopped = False

    def stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the supervisor, which ends us in order
    torch.set_num_threads(1)
    model = build_model(settings.seed)
    shard = load_corpus(settings.learners).shards[number]
    learner = settings.learner_id(number)
    context = model.size.context
    with deltapost.join(settings.run, model, settings.algorithm(), learner=learner) as run:
        optimizer = build_optimizer(model, settings.learning_rate)
        rates = [group["lr"] for group in optimizer.param_groups]
        say(event="joined", versions=run.versions, step=run.local_step)
        reported, steps = 0.0, 0
        smoothed: float | None = None

        def report(event: str) -> None:
            say(
                event=event,
                step=run.local_step,
                steps=steps,
                loss=smoothed,
                versions=run.versions,
                bytes_sent=run.bytes_sent,
                bytes_received=run.bytes_received,
            )

        while not stopped and min(run.versions) < settings.rounds:
            batch = training_batch(
                shard,
                seed=settings.seed,
                step=run.local_step,
                batch_size=settings.batch_size,
                context=context,
            )
            warmth = min(1.0, (run.local_step + 1) / settings.warmup_steps)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * warmth
            loss = training_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            value = loss.item()
            smoothed = value if smoothed is None else smoothed + 0.05 * (value - smoothed)
            steps += 1
            run.count_step(tokens=settings.batch_size * context)
            run.publish_due(loss=value)
            run.align()
            if time.monotonic() - reported >= REPORT_SECONDS:
                reported = time.monotonic()
                report("progress")
        report("done")


def main() -> None:
    log_to_stderr()
    try:
        train(int(sys.argv[1]), DemoSettings.from_json(sys.argv[2]))
    except deltapost.DeltapostError as error:
        say(event="failed", reason=str(error))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
