"""Finishing: an operator who wants the run to end, and what has to be so once it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltapost.errors import DeltapostError
from deltapost.learner.journal import Journal
from deltapost.ledger import ending
from fixtures.pipeline import RUN
from simulator.scheduling import Process

if TYPE_CHECKING:
    from simulator.world import World

ASK_AGAIN_SECONDS = 5.0


def finish(world: World, process: Process) -> None:
    """`deltapost run finish --wait`, again whenever the ledger fails or forgot that it was asked."""
    world.history.end_is_wanted = True
    while True:
        try:
            if ending.request(world.ledger, RUN) == "finished":
                return
        except DeltapostError as error:
            world.note(f"{process.name}: {error}")
        process.sleep(ASK_AGAIN_SECONDS)


def over_for(world: World, learner: str, versions: list[int] | None) -> None:
    """A learner heard that the run has ended; `versions`: what its model holds, if it trained till then."""
    if not world.history.end_is_wanted or len(world.history.ends) < len(world.plan.fragments):
        world.fail(f"{learner} believes that the run has ended")
        return
    tips = [world.history.tip(fragment) for fragment in range(len(world.plan.fragments))]
    if versions is not None and versions != tips:
        world.fail(f"{learner} ended with versions {versions}, the run with {tips}")
    # A store that did not answer delays answers: whoever has none yet joins again, and reads them then.
    journal = Journal(world.state_directory(learner) / "runs" / RUN / learner / "journal")
    world.slot_of(learner).over = not journal.unanswered()


def unfinished(world: World) -> str:
    """What is missing to the end of the run; empty once it is over for everybody."""
    if not world.history.run_ended:
        return f"the run has not ended, but for fragments {sorted(world.history.ends)}"
    for slot in world.slots:
        if slot.name in world.names and not slot.over:
            return f"{slot.name} has not heard that the run has ended, and how its contributions did"
    return world.checks.behind()
