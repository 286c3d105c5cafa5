"""The environment: what happens to servers, machines and processes from outside, and its end.

Nothing here goes through the boundary: these are the faults themselves.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from deltapost.serialization.names import commits_stream, envelope_stream, members_stream, parse_key
from fixtures.pipeline import RUN
from simulator.finishing import finish
from simulator.scenario import Planned

if TYPE_CHECKING:
    from simulator.world import Slot, World

OUTAGES = (1.0, 10.0, 40.0, 120.0)


def strike(world: World, one: Planned) -> None:
    """Lets one planned fault happen, if there is anything it can happen to."""
    area, _, what = one.kind.partition(".")
    detail = {
        "process": _process,
        "learner": _learner,
        "log": _log,
        "ledger": _ledger,
        "store": _store,
        "run": _run,
    }[area](world, what)
    if detail is not None:
        world.planned_strike(one, detail)
        world.note(f"{one.kind} {detail}")


def heal(world: World) -> None:
    """From here on nothing fails. What the bucket lost an operator restored or removed."""
    world.healed = world.boundary.healed = True
    world.boundary.outages.clear()
    world.boundary.failing.clear()
    for key, data in world.lost.items():
        if world.history.references(key):  # an input of a committed round: restored from a copy
            world.bucket.delete(key)
            world.bucket.put(key, data)
        elif key in world.altered:
            world.bucket.delete(key)
    for slot in world.slots:
        if slot.process is not None:
            slot.process.proceed()
        slot.leaving = False
    world.targets = [
        world.history.tip(fragment) + world.rounds_to_settle for fragment in range(len(world.plan.fragments))
    ]
    world.note("healed")


def _running(world: World, *, learners: bool) -> list[Slot]:
    return [
        slot
        for slot in world.slots
        if slot.process is not None and not slot.process.ended and (slot.name in world.names or not learners)
    ]


def _process(world: World, what: str) -> str | None:
    running = _running(world, learners=False)
    if not running:
        return None
    slot = world.chance.choice(running)
    assert slot.process is not None
    if what == "killed":
        slot.process.kill()
        return slot.name
    seconds = world.chance.choice((5.0, 20.0, 60.0, 200.0))
    slot.process.stop(seconds)
    return f"{slot.name} for {seconds:g} s"


def _learner(world: World, what: str) -> str | None:
    running = _running(world, learners=True)
    if not running:
        return None
    slot = world.chance.choice(running)
    assert slot.process is not None
    if what == "leaves":
        slot.leaving = True
        return slot.name
    slot.process.kill()
    shutil.rmtree(world.state_directory(slot.name), ignore_errors=True)
    return slot.name


def _run(world: World, _what: str) -> str:
    """Somebody wants the run to end, and asks until it has."""
    asker = world.scheduler.process("operator")
    asker.spawn("", lambda: finish(world, asker))
    return ""


def _log(world: World, what: str) -> str | None:
    streams, chance = world.streams, world.chance
    envelopes = [envelope_stream(RUN, fragment) for fragment in range(len(world.plan.fragments))]
    stream = chance.choice([*envelopes, *envelopes, members_stream(RUN), commits_stream(RUN)])
    match what:
        case "outage":
            return _outage(world, "log")
        case "emptied":
            streams.forget()
        case "rolled_back":
            if world.saved_streams is None:
                return None
            streams.roll_back(world.saved_streams)
        case "trimmed":
            bounds = streams.bounds(stream)
            if bounds is None:
                return None
            streams.trim(stream, bounds.last_id)
            return stream
        case "epoch_lost":
            streams.lose_epoch(stream)
            return stream
        case "stream_lost":
            streams.evict(stream)
            return stream
        case "clock_back":
            streams.set_clock_back(chance.choice((1, 100, 10_000)))
    return ""


def _ledger(world: World, what: str) -> str | None:
    if what == "outage":
        return _outage(world, "ledger")
    if what == "dropped":
        world.database.restore(world.database.empty)
        world.checks.restored()
        return ""
    if not world.saved:
        return None
    age = world.chance.randrange(len(world.saved))
    world.database.restore(world.saved[age])
    world.checks.restored()
    return f"to copy {age + 1} of {len(world.saved)}"


def _store(world: World, what: str) -> str | None:
    if what == "outage":
        return _outage(world, "store")
    keys = [
        info.key
        for info in world.bucket.list(f"{RUN}/deltas/")
        if not world.history.references(info.key)
        and (parsed := parse_key(info.key)) is not None
        # An object is only lost while its round is open: what records name the store keeps.
        and parsed.version is not None
        and parsed.version >= world.history.tip(parsed.fragment or 0)
    ]
    if not keys:
        return None
    key = world.chance.choice(keys)
    if what == "object_fails":
        world.boundary.failing[key] = world.scheduler.now + world.chance.choice((5.0, 90.0))
        return key
    data = world.bucket.get(key).data
    world.bucket.delete(key)
    world.history.lost.add(key)
    world.lost.setdefault(key, data)
    if what == "payload_altered":
        world.bucket.put(key, data[:-1] + bytes([data[-1] ^ 1]))
        world.altered.append(key)
    return key


def _outage(world: World, area: str) -> str:
    seconds = world.chance.choice(OUTAGES)
    world.boundary.outages[area] = world.scheduler.now + seconds
    return f"for {seconds:g} s"
