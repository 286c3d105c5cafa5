"""A learner's model, of torch or numpy, is read as snapshots and written in place."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from deltapost.adapters import Model, wrap_model
from deltapost.adapters.native import ArrayModel, NativeBackend
from deltapost.adapters.torch import TorchBackend, TorchModel
from deltapost.errors import ConfigurationError, SchemaMismatch
from deltapost.serialization import ParameterSpec, TensorBytes
from outer_step.tensors import f32, numbers, values_of


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.embedding = torch.nn.Embedding(3, 2)
        self.embedding.weight = self.head.weight


def test_a_modules_parameters_are_listed_by_name_and_tied_ones_once() -> None:
    assert TorchModel(Tied()).specs() == [ParameterSpec("head.weight", "F32", (3, 2))]


def test_tied_tensors_of_a_mapping_count_once_under_the_first_name() -> None:
    shared = torch.zeros(2)

    assert [spec.name for spec in TorchModel({"b": shared, "a": shared}).specs()] == ["b"]


def test_loading_is_a_snapshot_and_assigning_keeps_the_parameter_and_its_optimizer_state() -> None:
    module = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    parameter = module.weight
    model = TorchModel(module)
    before = model.load("weight")
    was = values_of(before)

    model.assign("weight", f32(5.0, -6.0, shape=(1, 2)))

    assert module.weight is parameter
    assert parameter.tolist() == [[5.0, -6.0]]
    assert parameter in optimizer.state
    assert values_of(before) == was


def test_bfloat16_and_half_parameters_keep_their_dtype() -> None:
    model = TorchModel({"b": torch.ones(2, dtype=torch.bfloat16), "h": torch.ones(2, dtype=torch.float16)})

    assert [spec.dtype for spec in model.specs()] == ["BF16", "F16"]
    model.assign("b", TorchBackend().load(f32(2.0, 3.0)).to_bytes("BF16"))
    assert values_of(model.load("b")) == [2.0, 3.0]


def test_a_transposed_parameter_is_read_and_written_in_the_order_of_its_indices() -> None:
    base = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    model = TorchModel({"w": base.t()})

    assert values_of(model.load("w")) == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    model.assign("w", f32(1, 2, 3, 4, 5, 6, shape=(3, 2)))
    assert base.tolist() == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]


def test_fortran_arrays_are_read_and_written_in_the_order_of_their_indices() -> None:
    array = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    model = ArrayModel({"w": array})

    assert values_of(model.load("w")) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    model.assign("w", f32(6, 5, 4, 3, 2, 1, shape=(2, 3)))
    assert array.tolist() == [[6.0, 5.0, 4.0], [3.0, 2.0, 1.0]]


def test_array_snapshots_do_not_follow_the_array() -> None:
    array = np.array([1.0, 2.0], np.float16)
    model = ArrayModel({"w": array})
    snapshot = model.load("w")

    array[:] = 9.0

    assert values_of(snapshot) == [1.0, 2.0]
    assert model.specs() == [ParameterSpec("w", "F16", (2,))]


@pytest.mark.parametrize(
    "model", [TorchModel({"w": torch.zeros(2)}), ArrayModel({"w": np.zeros(2, np.float32)})]
)
def test_assigning_something_else_than_the_parameter_is_refused(model: Model) -> None:
    with pytest.raises(SchemaMismatch, match=r"'w' is F32 of shape \(2,\)"):
        model.assign("w", f32(1.0, 2.0, 3.0))
    with pytest.raises(SchemaMismatch, match="BF16"):
        model.assign("w", TensorBytes("BF16", (2,), bytes(4)))
    with pytest.raises(SchemaMismatch, match="'v'"):
        model.load("v")
    assert isinstance(model, Model)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"w": torch.zeros(2, dtype=torch.float64)}, "'w' has the dtype torch.float64"),
        ({"w": torch.zeros(2, device="meta")}, "'w' is on the meta device"),
        ({"w": np.zeros(2)}, "'w' has the numpy dtype float64"),
        (torch.nn.ReLU(), "no parameters"),
        ([1, 2], "list is no model"),
        ({}, "dict is no model"),
    ],
)
def test_models_that_cannot_be_trained_through_deltapost_are_refused_by_name(
    source: object, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        wrap_model(source)


def test_a_read_only_array_is_refused() -> None:
    array = np.zeros(2, np.float32)
    array.flags.writeable = False

    with pytest.raises(ConfigurationError, match="read-only"):
        ArrayModel({"w": array})


def test_wrapping_finds_the_right_kind_of_model_and_leaves_models_alone() -> None:
    torch_model, array_model = wrap_model(Tied()), wrap_model({"w": np.zeros(2, np.float32)})

    assert isinstance(torch_model, TorchModel)
    assert isinstance(wrap_model(dict(Tied().named_parameters())), TorchModel)
    assert isinstance(array_model, ArrayModel)
    assert wrap_model(array_model) is array_model
    assert array_model.backend == NativeBackend()
    assert torch_model.backend == TorchBackend("cpu")


def test_numpy_models_and_whole_rounds_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['mlx'] = None\n"
        "import numpy as np\n"
        "from deltapost.adapters import wrap_model\n"
        "from deltapost.algorithms.diloco import DiLoCo\n"
        "from deltapost.algorithms.admission import check_payload\n"
        "wrap_model({'w': np.zeros(2, np.float32)}).load('w').norm()\n"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_learners_step_from_one_to_zero_point_nine_is_a_positive_delta() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    model = TorchModel({"w": parameter})
    anchor = model.load("w")
    with torch.no_grad():
        parameter.sub_(0.125)

    assert numbers((anchor - model.load("w")).to_bytes("F32")) == [0.125]
