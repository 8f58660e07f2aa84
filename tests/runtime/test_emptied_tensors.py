import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.helpers.forked_ranks import on_one_rank
from tests.helpers.linted_models import memory_of
from workbench.runtime.emptied_tensors import EmptiedTensors, at, digest, held


@pytest.fixture
def emptied():
    found = EmptiedTensors().install()
    yield found
    found.remove()


def made(value):
    with torch.device("meta"):
        layer = nn.Linear(3, 2)
        layer.register_buffer("scale", torch.ones(2))
    with memory_of(value):
        return layer.to_empty(device="cpu")


def unwritten(emptied, layer):
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return [name for name, tensor in tensors.items() if emptied.is_unwritten(tensor)]


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e-40, 3e38])
def test_memory_without_values_is_unwritten(emptied, value):
    assert unwritten(emptied, made(value)) == ["weight", "bias", "scale"]


def test_zeros_of_new_pages_are_unwritten_but_for_vectors_which_may_be_biases(emptied):
    assert unwritten(emptied, made(0.0)) == ["weight", "scale"]


def test_memory_of_an_earlier_model_cannot_be_told(emptied):
    assert unwritten(emptied, made(0.25)) == []


@pytest.mark.parametrize(
    "write",
    [
        nn.init.zeros_,
        lambda tensor: tensor.data.fill_(1.0),
        lambda tensor: tensor.detach().zero_(),
        lambda tensor: tensor.detach().copy_(torch.zeros_like(tensor)),
    ],
)
def test_each_way_to_write_counts(emptied, write):
    layer = made(0.0)
    write(layer.weight)
    assert unwritten(emptied, layer) == ["scale"]


def test_a_tensor_of_another_origin_is_written(emptied):
    assert unwritten(emptied, nn.Linear(3, 2).register_parameter("none", None) or nn.Linear(2, 2)) == []
    layer = made(0.0)
    layer.scale = torch.zeros(2)
    layer.load_state_dict({"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "scale": torch.zeros(2)}, assign=True)
    assert unwritten(emptied, layer) == []


def test_a_marked_tensor_can_be_swapped(emptied):
    layer, other = made(0.0), nn.Parameter(torch.ones(2, 3))
    torch.utils.swap_tensors(layer.weight, other)
    assert unwritten(emptied, layer) == ["scale"]


@pytest.mark.parametrize("has_run", [False, True])
@on_one_rank
def test_whole_tensors_assigned_to_sharded_parameters_of_torch_are_refused_and_nothing_is_loaded(has_run):
    found = EmptiedTensors().install()
    try:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        whole = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        fully_shard(model)
        if has_run:
            model(torch.ones(3, 2)).sum().backward()
        before = model.state_dict(keep_vars=True)
        mixed = {**whole, "0.weight": nn.Parameter(model[0].weight.detach().clone())}
        for state in (whole, mixed):
            with pytest.raises(
                TypeError, match=r"parameter '0.\w+' is sharded.*nothing was loaded.*full_state_dict=True"
            ):
                model.load_state_dict(state, assign=True)
            after = model.state_dict(keep_vars=True)
            assert all(after[name] is tensor for name, tensor in before.items())
            model(torch.ones(3, 2)).sum().backward()
            assert all(isinstance(param.grad, DTensor) for param in model.parameters())
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({}, assign=True)
    finally:
        found.remove()


def test_to_empty_is_put_back():
    original = nn.Module.to_empty
    found = EmptiedTensors().install()
    assert nn.Module.to_empty is not original
    found.remove()
    assert nn.Module.to_empty is original


def test_a_digest_sees_each_bit_of_any_dtype():
    for tensor in (torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.bool)):
        other = tensor.clone()
        other[1] = 1
        assert digest(tensor) != digest(other)
    assert digest(torch.zeros(0)) == digest(torch.zeros(2, device="meta")) == 0
    assert digest(torch.ones(4, 4).t()) == digest(torch.ones(4, 4))


def test_what_a_module_holds_is_read_without_running_a_property_which_may_gather():
    layer, weight = nn.Linear(3, 2), nn.Parameter(torch.ones(2, 3))
    layer.weight, layer.plain = weight, torch.ones(1)
    layer.__class__ = type("Gathers", (nn.Linear,), {"weight": property(lambda _: pytest.fail("gathers"))})
    assert [held(layer, name) for name in ("weight", "plain", "absent")] == [weight, layer.plain, None]
    assert at((weakref.ref(layer), "weight")) is weight
