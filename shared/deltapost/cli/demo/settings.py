"""DemoSettings: what one demo runs, handed to each of its processes as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from deltapost.algorithms.diloco import DiLoCo


@dataclass(frozen=True)
class DemoSettings:
    """The demo's job. The defaults fit a minute of training on two cores."""

    run: str
    learners: int = 4
    #: Rounds of each fragment after which the demo ends.
    rounds: int = 12
    fragments: int = 4
    delta_dtype: str = "F4"
    commit_dtype: str = "F4"
    #: Inner steps between two publications of a fragment (H).
    sync_every: int = 30
    learning_rate: float = 3e-3
    #: Steps over which the learning rate rises to its value.
    warmup_steps: int = 30
    outer_lr: float = 0.7
    outer_momentum: float = 0.6
    batch_size: int = 4
    seed: int = 1

    def algorithm(self) -> DiLoCo:
        """Streaming fragments without a barrier; a quorum of all but one, with adaptive grace."""
        return DiLoCo(
            sync_every=self.sync_every,
            fragments=self.fragments,
            in_flight=self.fragments,
            outer_lr=self.outer_lr,
            outer_momentum=self.outer_momentum,
            delta_dtype=self.delta_dtype,
            commit_dtype=self.commit_dtype,
            quorum_size=max(1, self.learners - 1),
        )

    def learner_id(self, number: int) -> str:
        return f"learner-{number}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DemoSettings:
        return cls(**json.loads(text))
