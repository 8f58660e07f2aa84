"""What the engine takes from torch's inside: each piece does what the engine relies on, or a test here fails."""

import ast
import copy
import re
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.engine.ranks import on_one_rank, run_ranks
from workbench.engine import _torch
from workbench.engine._torch import (
    TESTED_TORCH,
    dtensor_like,
    local_of,
    parameter_of,
    queue_backward_final_callback,
    set_local,
    set_parameter,
)

REPOSITORY = Path(__file__).parents[2]


def test_the_installed_torch_is_one_that_was_tested():
    assert torch.__version__.startswith(TESTED_TORCH)


def test_the_package_asks_for_a_torch_that_was_tested():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (wanted,) = (d for d in project["dependencies"] if d.startswith("torch"))
    lowest = re.search(r">=(\d+\.\d+)", wanted).group(1)
    major, minor = lowest.split(".")
    assert lowest in TESTED_TORCH
    assert wanted.endswith(f"<{major}.{int(minor) + 1}") or len(TESTED_TORCH) > 1


def test_every_private_piece_has_a_test_here():
    wrapped = {node.name for node in ast.parse(Path(_torch.__file__).read_text()).body if hasattr(node, "name")}
    here = Path(__file__).read_text()
    assert {name for name in wrapped if here.count(name) < 2} == set()


def sharded(rows: int = 3) -> DTensor:
    """A DTensor [rows, 2] over all ranks, uneven on two."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    full = torch.arange(rows * 2.0).view(rows, 2)
    local = list(full.chunk(mesh.size()))[mesh.get_local_rank()].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())


@on_one_rank
def test_the_final_callback_runs_once_all_gradients_are_there():
    x = torch.ones(2, requires_grad=True)
    seen = []

    def hook(grad):
        queue_backward_final_callback(lambda: seen.append(x.grad.tolist()))
        assert not seen
        return grad

    y = x * 2
    y.register_hook(hook)
    (y.sum() + (x * 3).sum()).backward()
    assert seen == [[5, 5]]
    x.grad = None
    (x * 2).sum().backward()
    assert seen == [[5, 5]]  # it was for that backward only


@on_one_rank
def test_no_final_callback_outside_of_backward():
    with pytest.raises(RuntimeError):
        queue_backward_final_callback(lambda: None)


def checks_of_dtensors() -> None:
    reference = nn.Parameter(sharded())
    local = torch.full_like(local_of(reference), 7)
    made = dtensor_like(reference, local)
    assert isinstance(made, DTensor)
    assert local_of(made) is local
    assert not made.requires_grad
    assert (made.shape, made.stride(), made.dtype) == (reference.shape, reference.stride(), reference.dtype)
    assert (made.placements, made.device_mesh) == (reference.placements, reference.device_mesh)
    assert torch.equal(made.full_tensor(), torch.full((3, 2), 7.0))
    reference.grad = made  # as the engine does with every gradient
    torch.optim.SGD([reference], lr=1).step()
    assert torch.equal(reference.full_tensor(), torch.arange(6.0).view(3, 2) - 7)

    storage = torch.zeros(6)
    view = storage[: local.numel()].view(local.shape)
    view.copy_(local_of(reference))
    set_local(reference, view)
    assert local_of(reference) is view
    with torch.no_grad():
        reference.mul_(2)
    assert torch.equal(storage[: local.numel()].view(local.shape), reference.to_local())
    assert torch.equal(reference.full_tensor(), (torch.arange(6.0).view(3, 2) - 7) * 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_tensor_inside_of_a_dtensor(world_size):
    run_ranks(world_size, checks_of_dtensors)


def conversions() -> None:
    module = nn.Linear(2, 3, bias=False)
    set_parameter(module, "weight", nn.Parameter(sharded()))
    param, local = module.weight, local_of(module.weight)
    module.double()
    assert module.weight is param  # torch swaps what is inside: the engine looks at both
    assert local_of(param) is not local
    assert local_of(param).dtype == torch.float64


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_conversion_keeps_the_parameter_and_exchanges_what_it_wraps(world_size):
    run_ranks(world_size, conversions)


def test_a_parameter_is_exchanged_where_modules_look_for_it():
    module = nn.Linear(2, 2)
    plain = nn.Parameter(torch.ones(2, 2))
    assert parameter_of(module, "weight") is module.weight
    set_parameter(module, "weight", plain)
    assert module.weight is parameter_of(module, "weight") is plain
    assert parameter_of(module, "no such") is None
    assert dict(module.named_parameters())["weight"] is plain
    assert list(module.state_dict()) == ["weight", "bias"]  # in the old place
    assert copy.deepcopy(module)(torch.ones(1, 2)).shape == (1, 2)


@on_one_rank
def test_a_parameter_can_be_emptied_and_filled_again_under_autograds_saved_tensors():
    full = torch.ones(4)
    view = full.view(2, 2)
    param = nn.Parameter(view.data)
    y = (param * param).sum() + nn.functional.linear(torch.ones(1, 2), param).sum()
    version = param._version
    param.data = full.new_empty(0)
    full.untyped_storage().resize_(0)
    assert full.untyped_storage().nbytes() == 0
    assert param.tolist() == []
    full.untyped_storage().resize_(4 * 4)
    full.fill_(3)
    param.data = view
    assert param._version == version  # what autograd saved does not look changed
    y.backward()
    assert torch.equal(param.grad, torch.full((2, 2), 2 * 3 + 1.0))
