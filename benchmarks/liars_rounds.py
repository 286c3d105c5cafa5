"""Rounds of the demo's task with liars among the learners: real training, codec, admission and close.

Everything is in one process and without servers. Honest training is a function of anchor, learner and round,
so cells whose liars were all refused share it with the cell that has no liars.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt

import numpy as np
import torch
from numpy.typing import NDArray

from deltapost import codecs
from deltapost.adapters.native import NativeBackend
from deltapost.adapters.torch import TorchModel
from deltapost.algorithms import Contribution
from deltapost.algorithms.admission import check_payload, delta_norm, judge_counters, judge_norm
from deltapost.algorithms.anchors import genesis_state
from deltapost.algorithms.diloco import DiLoCo, Merge
from deltapost.cli.demo.corpus import held_out_batches, load_corpus, training_batch
from deltapost.cli.demo.model import ModelSize, build_model, build_optimizer, held_out_loss, training_loss
from deltapost.errors import NonFinite
from deltapost.serialization import Schema, TensorBytes, digest, pack

Arrays = dict[str, NDArray[np.float32]]

#: Honest learners and liars of a round.
HONEST, LIARS = 6, 2
#: Standard deviations that the colluding liars shift each element by (Baruch et al., 2019, arXiv:1902.06156).
SHIFT = 1.5


@dataclass(frozen=True)
class Lie:
    """What a liar sends: a delta made from the honest ones of its round, and its claim of tokens."""

    delta: Arrays
    tokens_factor: int = 1


@dataclass(frozen=True)
class Task:
    """The demo's task, cut down: its corpus and model family, two layers of 64, one fragment, a barrier."""

    rounds: int = 6
    #: Inner steps of a round (H).
    steps: int = 20
    batch_size: int = 4
    learning_rate: float = 3e-3
    #: Steps of each round over which the learning rate rises: the inner optimizer starts anew with the round.
    warmup_steps: int = 5
    size: ModelSize = field(default_factory=lambda: ModelSize(layers=2, width=64, heads=2, context=64))
    #: The limit on a delta's norm: twice the longest that an honest learner of this task sends.
    max_delta_norm: float = 100.0
    seed: int = 1

    def algorithm(self, merge: Merge, *, limits: bool = True) -> DiLoCo:
        """The demo's outer step and codecs with this merge; with `limits`, all that admission may be told."""
        told = {
            "max_tokens_per_step": self.batch_size * self.size.context,
            "weight_share_cap": 0.25,
            "max_delta_norm": self.max_delta_norm,
        }
        return DiLoCo(
            sync_every=self.steps,
            fragments=1,
            in_flight=1,
            outer_momentum=0.6,
            delta_dtype="F4",
            commit_dtype="F4",
            merge=merge,
            **(told if limits else {}),
        )


@dataclass
class Outcome:
    """How a cell ended: the held-out loss, infinite when the run diverged, and what admission said."""

    loss: float
    verdicts: Counter[str] = field(default_factory=Counter)
    #: The largest honest norm of any round.
    largest_norm: float = 0.0
    diverged_in: int | None = None


class Bench:
    """The task's learners and its held-out text."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.corpus = load_corpus(HONEST + LIARS)
        self.model = build_model(task.seed, task.size)
        self.schema = Schema(tuple(TorchModel(self.model).specs()))
        self._trained: dict[tuple[bytes, int], list[Arrays]] = {}
        self._genesis = {
            spec.name: TorchModel(self.model).load(spec.name).to_bytes("F32") for spec in self.schema
        }

    def run(self, algorithm: DiLoCo, attack: Attack | None) -> Outcome:
        """All rounds with six honest learners, and two liars when there is an `attack`."""
        backend, outcome = NativeBackend(), Outcome(inf)
        aggregator = algorithm.aggregator(self.schema, self.schema.names, backend)
        state = genesis_state(self.schema.parameters, self._genesis)
        for round_ in range(self.task.rounds):
            try:
                honest = self._train(state.theta, round_)
                sent = [Lie(delta) for delta in honest]
                if attack is not None:
                    sent += attack(honest, np.random.default_rng([self.task.seed, round_]))
                accepted = [
                    one
                    for number, lie in enumerate(sent)
                    if (one := self._admit(f"learner-{number}", lie, round_, algorithm, outcome)) is not None
                ]
                result = aggregator.close_round(state, accepted)
            except NonFinite:
                outcome.diverged_in = round_
                return outcome
            state = result.state
            honest_ids = {f"learner-{number}" for number in range(HONEST)}
            norms = [one.norm for one in result.participants if one.learner in honest_ids]
            outcome.largest_norm = max([outcome.largest_norm, *norms])
        loss = self._loss(state.theta)
        outcome.loss = loss if isfinite(loss) else inf
        return outcome

    def _train(self, theta: Mapping[str, TensorBytes], round_: int) -> list[Arrays]:
        """The honest deltas that training from this anchor leads to."""
        key = (digest(pack(theta)), round_)
        if key not in self._trained:
            self._trained[key] = [self._train_one(theta, round_, number) for number in range(HONEST)]
        return self._trained[key]

    def _train_one(self, theta: Mapping[str, TensorBytes], round_: int, number: int) -> Arrays:
        task = self.task
        self._assign(theta)
        optimizer = build_optimizer(self.model, task.learning_rate)
        rates = [group["lr"] for group in optimizer.param_groups]
        for step in range(task.steps):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * min(1.0, (step + 1) / task.warmup_steps)
            batch = training_batch(
                self.corpus.shards[number],
                seed=task.seed,
                step=round_ * task.steps + step,
                batch_size=task.batch_size,
                context=task.size.context,
            )
            optimizer.zero_grad()
            training_loss(self.model, batch).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
        trained = TorchModel(self.model)
        return {
            name: _array(tensor) - _array(trained.load(name).to_bytes("F32"))
            for name, tensor in theta.items()
        }

    def _admit(
        self, learner: str, lie: Lie, round_: int, algorithm: DiLoCo, outcome: Outcome
    ) -> Contribution | None:
        """The contribution, judged as the aggregator's intake does; None after any verdict but `accepted`."""
        task, codec, backend = self.task, codecs.get(algorithm.delta_dtype), NativeBackend()
        tokens = task.steps * task.batch_size * task.size.context * lie.tokens_factor
        verdict: str | None = judge_counters(task.steps, tokens, algorithm)
        tensors: dict[str, TensorBytes] = {}
        if verdict is None:
            for name, array in lie.delta.items():
                tensors |= codec.encode(name, backend.load(TensorBytes("F32", array.shape, array.tobytes())))
            specs = self.schema.parameters
            tensors = check_payload(pack(tensors), specs, codec)
            verdict = judge_norm(delta_norm(tensors, specs, codec, backend), algorithm)
        outcome.verdicts[verdict or "accepted"] += 1
        if verdict is not None:
            return None
        clock = (round_ + 1) * task.steps
        return Contribution(
            learner, clock, task.steps, tokens, step_seconds=0.01, final=False, tensors=tensors
        )

    def _loss(self, theta: Mapping[str, TensorBytes]) -> float:
        self._assign(theta)
        batches = held_out_batches(
            self.corpus.held_out, windows=512, batch_size=64, context=self.task.size.context
        )
        return held_out_loss(self.model, batches)

    def _assign(self, theta: Mapping[str, TensorBytes]) -> None:
        model = TorchModel(self.model)
        for name, tensor in theta.items():
            model.assign(name, tensor)


Attack = Callable[[Sequence[Arrays], np.random.Generator], list[Lie]]


def _array(tensor: TensorBytes) -> NDArray[np.float32]:
    return np.frombuffer(tensor.data, "<f4").reshape(tensor.shape)


def norm_of(delta: Arrays) -> float:
    """The norm over all tensors."""
    return sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in delta.values()))


def _mapped(honest: Sequence[Arrays], change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Arrays:
    """`change` of each tensor's honest deltas, stacked along the first dimension."""
    return {
        name: np.ascontiguousarray(change(np.stack([delta[name] for delta in honest])), np.float32)
        for name in honest[0]
    }


def _as_long_as_the_median(delta: Arrays, honest: Sequence[Arrays]) -> Arrays:
    factor = np.float32(float(np.median([norm_of(one) for one in honest])) / norm_of(delta))
    return {name: array * factor for name, array in delta.items()}


def scaled(honest: Sequence[Arrays], _chance: np.random.Generator) -> list[Lie]:
    """The honest mean, 1e6 times as long."""
    return [Lie(_mapped(honest, lambda stack: stack.mean(axis=0) * np.float32(1e6)))] * LIARS


def flipped(honest: Sequence[Arrays], _chance: np.random.Generator) -> list[Lie]:
    """The opposite of the honest mean, as long as the median honest delta."""
    return [Lie(_as_long_as_the_median(_mapped(honest, lambda stack: -stack.mean(axis=0)), honest))] * LIARS


def random(honest: Sequence[Arrays], chance: np.random.Generator) -> list[Lie]:
    """Gaussian noise, as long as the median honest delta, another from each liar."""

    def noise() -> Arrays:
        return _mapped(honest, lambda stack: chance.standard_normal(stack.shape[1:], np.float32))

    return [Lie(_as_long_as_the_median(noise(), honest)) for _ in range(LIARS)]


def colluding(honest: Sequence[Arrays], _chance: np.random.Generator) -> list[Lie]:
    """A little is enough: per element the honest mean less 1.5 standard deviations, both liars alike."""
    shift = np.float32(SHIFT)
    return [Lie(_mapped(honest, lambda stack: stack.mean(axis=0) - shift * stack.std(axis=0)))] * LIARS


def boasting(honest: Sequence[Arrays], chance: np.random.Generator) -> list[Lie]:
    """The sign-flipped delta, with a claim of 10⁶ times the tokens."""
    return [Lie(lie.delta, tokens_factor=10**6) for lie in flipped(honest, chance)]


ATTACKS: dict[str, Attack] = {
    "scaled": scaled,
    "flipped": flipped,
    "random": random,
    "colluding": colluding,
    "boasting": boasting,
}
