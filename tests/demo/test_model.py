"""The demo's model: equal for equal seeds, causal, about a million parameters, and it learns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from deltapost.cli.demo.corpus import training_batch
from deltapost.cli.demo.model import (
    ModelSize,
    build_model,
    build_optimizer,
    held_out_loss,
    training_loss,
)

SMALL = ModelSize(layers=2, width=32, heads=2, context=16)


def test_the_model_has_about_a_million_parameters() -> None:
    assert 0.9e6 < sum(parameter.numel() for parameter in build_model(0).parameters()) < 1.1e6


def test_equal_seeds_give_equal_weights_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)

    one, same, other = build_model(5, SMALL), build_model(5, SMALL), build_model(6, SMALL)

    assert torch.equal(torch.rand(1), expected)
    pairs = list(zip(one.parameters(), same.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(one.byte_embedding.weight, other.byte_embedding.weight)


def test_a_new_model_knows_nothing_so_its_loss_is_that_of_256_equal_bytes() -> None:
    windows = np.arange(34, dtype=np.int64).reshape(2, 17)

    assert held_out_loss(build_model(1, SMALL), [windows]) == pytest.approx(math.log(256), rel=1e-6)


def test_no_position_sees_a_later_byte() -> None:
    # Given a model whose weights all matter, and two inputs that differ at position 9 only
    model = build_model(2, SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(3))
    one = torch.arange(16).reshape(1, 16)
    two = one.clone()
    two[0, 9] = 200

    different = (model(one) != model(two)).any(dim=-1)[0].tolist()

    assert different == [False] * 9 + [True] * 7


def test_windows_shorter_than_the_context_are_fine() -> None:
    assert build_model(1, SMALL)(torch.zeros(3, 5, dtype=torch.int64)).shape == (3, 5, 256)


def test_the_held_out_loss_weighs_every_window_alike() -> None:
    model = build_model(2, SMALL)
    with torch.no_grad():
        model.head.weight.normal_(0, 1, generator=torch.Generator().manual_seed(3))
    windows = np.random.default_rng(4).integers(0, 256, size=(5, 17))

    by_batches = held_out_loss(model, [windows[:4], windows[4:]])

    assert by_batches == pytest.approx(held_out_loss(model, [windows]), rel=1e-5)


def test_the_optimizer_holds_every_parameter_once_and_takes_a_learned_text_below_its_unigram_loss() -> None:
    # Given a text that its own last byte predicts, of 16 equally frequent bytes
    text = bytes(range(97, 113)) * 200
    model = build_model(7, SMALL)
    optimizer = build_optimizer(model, 3e-3)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len({id(parameter) for parameter in held}) == len(list(model.parameters()))

    for step in range(40):
        loss = training_loss(model, training_batch(text, seed=1, step=step, batch_size=8, context=16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert loss.item() < math.log(16) / 2
