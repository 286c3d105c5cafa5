"""What the learners of both sides share: the model, the step, and how they tell the parent what happened."""

import json
import sys
import threading
import time

import torch

#: What the parent asks for: the learner's name, fragments, parameters, step seconds, H, and where things are.
GIVEN = json.loads(sys.argv[1])
_SAYING = threading.Lock()


class Model(torch.nn.Module):
    """One tensor for each fragment."""

    def __init__(self):
        super().__init__()
        size = GIVEN["parameters"] // GIVEN["fragments"]
        names = [f"t{number}" for number in range(GIVEN["fragments"])]
        self.tensors = torch.nn.ParameterDict({name: torch.zeros(size) for name in names})


def step(model):
    """A training step: it takes its time and moves the parameters."""
    time.sleep(GIVEN["step_seconds"])
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.001)


def say(what, fragment=0, number=0):
    """One line for the parent; the clock is the same in every process of a machine."""
    with _SAYING:
        print(json.dumps([what, time.monotonic(), fragment, number]), flush=True)


def wait_for_go():
    """Until all learners are there."""
    say("ready")
    sys.stdin.readline()
