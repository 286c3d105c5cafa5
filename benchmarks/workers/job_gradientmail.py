"""A learner of `bench-job` by gradientmail's `Session`, with default settings: it also closes rounds."""

import itertools

import gradientmail
import torch
from gradientmail.events import FragmentAligned, SnapshotPublished
from job_shared import GIVEN, Model, say, step, wait_for_go


def told(event):
    """Its rounds are numbered over all fragments."""
    if isinstance(event, SnapshotPublished):
        say("uploaded", event.fragment, event.round)
    elif isinstance(event, FragmentAligned):
        say("aligned", event.fragment, event.round)


def trained(_batch):
    step(model)
    return 1


torch.set_num_threads(1)
model = Model()
session = gradientmail.Session(
    model,
    algorithm=gradientmail.DiLoCo(
        sync_every=GIVEN["sync_every"],
        fragments=GIVEN["fragments"],
        in_flight=GIVEN["in_flight"],
        quorum_size=GIVEN["quorum_size"],
    ),
    mailbox=gradientmail.S3Mailbox(GIVEN["bucket"], GIVEN["run"], endpoint_url=GIVEN["endpoint"]),
    node_id=GIVEN["learner"],
    callbacks=(told,),
)
session.join()
wait_for_go()
session.run(trained, itertools.count())
