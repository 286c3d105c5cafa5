"""A learner of `bench-job` by `deltapost.join`, with default settings."""

import torch
from job_shared import GIVEN, Model, say, step, wait_for_go

import deltapost
from deltapost.serialization.names import parse_key
from deltapost.stores import open_store


class Told:
    """The store, which says when a delta is there."""

    def __init__(self, inner):
        self._inner = inner

    def put(self, key, data, **keywords):
        created = self._inner.put(key, data, **keywords)
        parsed = parse_key(key)
        if parsed is not None and parsed.area == "deltas":
            say("uploaded", parsed.fragment, parsed.version)
        return created

    def __getattr__(self, name):
        return getattr(self._inner, name)


torch.set_num_threads(1)
model = Model()
algorithm = deltapost.DiLoCo(
    sync_every=GIVEN["sync_every"],
    fragments=GIVEN["fragments"],
    in_flight=GIVEN["in_flight"],
    quorum_size=GIVEN["quorum_size"],
)
run = deltapost.join(
    GIVEN["run"],
    model,
    algorithm,
    learner=GIVEN["learner"],
    store=Told(open_store(GIVEN["store"])),
    redis_url=GIVEN["redis_url"],
    state_dir=GIVEN["state_dir"],
)
wait_for_go()
while True:
    step(model)
    run.count_step(tokens=1)
    run.publish_due()
    for aligned in run.align():
        say("aligned", aligned.fragment, aligned.version - 1)
