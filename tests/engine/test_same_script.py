"""Unusual things that scripts do with a model: the result equals torch's, or the plain model's."""

import copy
import os
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.helpers.both_engines import APIS, train_all
from tests.helpers.forked_ranks import on_one_rank, run_ranks, simulating
from tests.helpers.unsharded_copy import DIM, blocks, compare, data, shard_each, squares
from workbench import engine
from workbench.base.ports import LOOPBACK, reserved_port
from workbench.engine import fully_shard
from workbench.events import Kind

# ---- modules as objects


@pytest.mark.parametrize("api", APIS, ids=["ours", "torch's"])
@on_one_rank
def test_a_part_of_a_container_and_another_object_of_the_class_are_plain(api):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.ReLU())
    api.fully_shard(model[0])
    api.fully_shard(model)
    part, new = model[:2], type(model[0])(4, 5, bias=False)
    assert (type(part), type(new)) == (nn.Sequential, nn.Linear)
    assert part[0] is model[0]
    assert new.weight.shape == (5, 4)
    assert new.bias is None
    assert type(model + nn.Sequential(nn.ReLU())) is nn.Sequential


@on_one_rank
def test_a_shallow_copy_shares_everything():
    linear = fully_shard(nn.Linear(3, 2))
    twin = copy.copy(linear)
    assert type(twin) is type(linear)
    twin(torch.ones(1, 3)).sum().backward()
    assert twin.weight is linear.weight
    assert linear.weight.grad.to_local().tolist() == [[1, 1, 1]] * 2


@pytest.mark.parametrize("api", APIS, ids=["ours", "torch's"])
@on_one_rank
def test_a_tuple_of_modules_is_returned_as_a_tuple(api):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pair = (model[0], model[1])
    assert api.fully_shard(pair) is pair
    assert api.fully_shard.state(model[0]) is api.fully_shard.state(model[1])


class TakesTheNames(nn.Linear):
    """Its attributes have names that an engine might use."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self._states = self._own_units = self._one_mesh = self._units = "mine"


@on_one_rank
def test_attributes_of_the_users_stay_the_users():
    model = fully_shard(TakesTheNames())
    model.set_requires_gradient_sync(True)
    model.set_gradient_divide_factor(1)
    model.set_all_reduce_hook(lambda shard: None)
    model(torch.ones(1, DIM)).sum().backward()
    assert model._states == model._own_units == model._one_mesh == model._units == "mine"


class RecordsAssignments(nn.Linear):
    """Records assignments to its attributes, as recurrent layers do."""

    def __setattr__(self, name: str, value: object) -> None:
        vars(self).setdefault("seen", []).append((name, isinstance(value, DTensor)))
        super().__setattr__(name, value)


def watched(api: ModuleType) -> list[tuple[str, bool]]:
    model = RecordsAssignments(DIM, DIM, bias=False)
    api.fully_shard(model)
    vars(model)["seen"].clear()
    squares(model, 0).backward()
    return model.seen


def test_a_module_with_setattr_sees_parameter_changes():
    changes = [("weight", False), ("weight", True)]  # full for forward and backward, then shards
    assert run_ranks(2, watched, engine) == run_ranks(2, watched, fsdp) == [changes] * 2


# ---- meshes


@simulating
def test_under_torchrun_the_process_group_need_not_be_made():
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(reserved_port())}
    os.environ.update(place, TORCHELASTIC_RUN_ID="1")  # only in this process, which ends with the test
    model = fully_shard(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    assert dist.is_initialized()


def beside_a_tensor_of_the_users() -> None:
    found = []
    for api in APIS:
        weight = api.fully_shard(nn.Linear(DIM, 4)).weight
        mine = distribute_tensor(torch.ones(4, DIM), init_device_mesh("cpu", (2,)), [Shard(0)])
        assert weight.device_mesh == mine.device_mesh
        found.append((weight.device_mesh.mesh_dim_names, (weight.detach() * 0 + mine).to_local().tolist()))
    assert found[0] == found[1]


def test_the_default_mesh_is_the_one_a_script_makes():
    run_ranks(2, beside_a_tensor_of_the_users)


def between_forward_and_backward(api: ModuleType) -> list[object]:
    model = nn.Sequential(nn.Linear(DIM, 8), nn.Linear(8, DIM))
    for child in model:
        api.fully_shard(child, reshard_after_forward=2)
    api.fully_shard(model)
    model(data(0))
    meshes = [p.device_mesh for p in model.parameters()]
    return [
        (m.mesh.tolist(), m.mesh_dim_names, str(p.placements)) for m, p in zip(meshes, model.parameters(), strict=True)
    ]


def test_parameters_over_fewer_ranks_are_placed_as_in_torch():
    assert run_ranks(4, between_forward_and_backward, engine) == run_ranks(4, between_forward_and_backward, fsdp)


# ---- outputs and modes


class ReturnsViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, 2 * DIM)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.linear(x)
        return both[:, :DIM], both[:, DIM:]


class WritesToInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = ReturnsViews(), ReturnsViews(), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.first(x)
        left += right
        left, right = self.second(left)
        right *= 2
        return self.last(left + right)


@pytest.mark.parametrize("world_size", [1, 2])
def test_writing_to_a_view_keeps_the_backward_hook(world_size):
    """The write drops the view's hooks; torch warns of wrong gradients there."""
    record = run_ranks(world_size, compare, WritesToInput, shard_each, squares)[0]
    assert record.count(Kind.BACKWARD) == {"first": 1, "second": 1, "last": 1}


def inference(reshard: bool, first: int) -> None:
    """Evaluate in inference mode before every step from ``first`` on; training must not be affected."""

    def shard(model: nn.Module) -> None:
        for child in model:
            fully_shard(child, reshard_after_forward=reshard)
        fully_shard(model)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        if step >= first:
            with torch.inference_mode():
                assert model(data(step + 10)).is_inference()
        return squares(model, step)

    compare(blocks, shard, loss, steps=4)


@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("reshard", [True, False])
def test_forwards_in_inference_mode_between_steps(reshard, first):
    run_ranks(2, inference, reshard, first)


def compiled() -> None:
    """As torch does it: hooks stay eager, and the code between them is compiled."""
    plain = blocks(2)
    model = shard_each(copy.deepcopy(plain))
    for block in model:
        block.compile(backend="eager")
    for step in range(3):
        losses = [squares(m, step) for m in (plain, model)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0])
    for param in plain.parameters():
        dist.all_reduce(param.grad)
    for value, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(value.grad.full_tensor(), wanted.grad / 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler reads .grad
def test_compiled_blocks():
    run_ranks(2, compiled)


@on_one_rank
def test_inputs_are_moved_to_the_device_that_computes():
    state = shard_each(blocks(2))._get_fsdp_state()
    args, kwargs = (torch.ones(2), 3), {"more": [torch.zeros(1), None]}
    same = state._on_device(args, kwargs)
    assert same[0] is args
    assert same[1] is kwargs
    state._comm_ctx.device = torch.device("meta")
    (moved, number), more = state._on_device(args, kwargs)
    assert (moved.device.type, number, more["more"][0].device.type, more["more"][1]) == ("meta", 3, "meta", None)


# ---- a separate call of an inner module


def inner_alone() -> None:
    model = shard_each(blocks(2))
    squares(model, 0).backward()
    model.zero_grad()
    comms = model._get_fsdp_state()._comm_ctx.comms
    with torch.no_grad():
        before = model[0](data(1))
    assert not comms._read  # the shards may be written now
    with torch.no_grad():
        for param in model[0].parameters():
            param.mul_(2)
        dist.barrier()
        assert not torch.equal(model[0](data(1)), before)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    squares(model, 1).backward()


def test_an_inner_module_can_be_evaluated_alone_and_its_shards_written():
    run_ranks(2, inner_alone)


@on_one_rank
def test_an_event_covers_one_optimizer_step():
    model = shard_each(blocks(2))
    root = model._get_fsdp_state().root_ctx
    model.set_post_optim_event(None)  # as a script without streams does on the CPU
    assert root.post_optim_event is None
    model.set_post_optim_event(SimpleNamespace(wait=lambda: None))
    assert root.post_optim_event is not None
    model(data(0))
    assert model._get_fsdp_state().root_ctx.post_optim_event is None  # else the next forward ignores the next step


# ---- frozen parameters of other dtypes


class Quantised(nn.Module):
    """Frozen integers and bfloat16 next to trained parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(7 * DIM, dtype=torch.int8).view(7, DIM), requires_grad=False)
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(7, DIM)
        self.gain = nn.Parameter(torch.linspace(0.5, 1, DIM).bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = nn.functional.linear(self.up(x), self.table.float() / 35)
        return x + self.down(wide) * self.gain.float()


def make_quantised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Quantised(), Quantised())


def shard_with(api: ModuleType, model: nn.Module) -> None:
    for child in model:
        api.fully_shard(child)
    api.fully_shard(model)


def one_step(model: nn.Module, step: int) -> None:
    squares(model, step).backward()


def quantised() -> dict[str, object]:
    record = train_all(make_quantised, shard_with, one_step)
    return {
        "gathers": record.count(Kind.ALL_GATHER),
        "reductions": record.count(Kind.REDUCE_SCATTER),
        "gathered": record.payload(Kind.ALL_GATHER),
        "reduced": record.payload(Kind.REDUCE_SCATTER),
    }


def test_frozen_parameters_of_other_dtypes_have_an_all_gather_of_theirs_and_no_reduction():
    trained = 2 * (2 * 3 * DIM + 2 * 3 + 2 * 3 * 7 + 2 * 3)  # elements; two blocks; rows in pairs of three
    frozen = 2 * (2 * 4 * DIM * 1 + 2 * 3 * 2)  # bytes; int8 table, bfloat16 gain
    assert (
        run_ranks(2, quantised)
        == [
            {
                "gathers": {"0": 6, "1": 6},  # trained, int8 and bfloat16, in forward and in backward
                "reductions": {"0": 1, "1": 1},
                "gathered": 2 * (4 * trained + frozen),
                "reduced": 4 * trained,
            }
        ]
        * 2
    )


def staging() -> list[object]:
    os.environ.pop("WORKBENCH_COMM", None)  # only in this process, which ends with the test
    model = make_quantised()
    shard_with(engine, model)
    squares(model, 0).backward()
    keys = model._get_fsdp_state()._comm_ctx.comms._reducers
    dist.barrier()  # rank 0 hosts the store
    return sorted((str(dtype), reducer.num_bytes > 0) for (_, dtype), reducer in keys.items())


def test_no_memory_is_shared_for_frozen_parameters():
    staged = [("torch.bfloat16", False), ("torch.float32", True), ("torch.int8", False)]
    assert run_ranks(2, staging) == [staged] * 2


def own_comm(api: ModuleType) -> list[str]:
    seen = set()

    class Gather:
        def allocate(self, size, *, dtype, device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor, input_tensor, group, async_op=False) -> object:
            seen.add(str(output_tensor.dtype))
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)

    model = make_quantised()
    api.fully_shard(model)
    model.set_custom_all_gather(Gather())
    squares(model, 0)
    dist.barrier()  # rank 0 hosts the store
    return sorted(seen)


def test_one_object_of_the_users_gathers_all_dtypes_of_a_mesh():
    assert run_ranks(2, own_comm, engine) == [["torch.bfloat16", "torch.float32", "torch.int8"]] * 2


# ---- setters


def half_reduced(api: ModuleType, reset: Callable[[nn.Module], None]) -> list[object]:
    """Run two micro-batches with replicas, the first without an all-reduce, and ``reset`` in between."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = api.fully_shard(nn.Linear(DIM, DIM), mesh=mesh)
    model.set_requires_all_reduce(False)
    squares(model, 0).backward()
    reset(model)
    squares(model, 1).backward()
    return [None if p.grad is None else p.grad.to_local().tolist() for p in model.parameters()]


def syncs(model: nn.Module) -> None:
    model.set_requires_gradient_sync(True)


def test_asking_for_sync_asks_for_both_steps_of_the_reduction():
    ours, theirs = (run_ranks(2, half_reduced, api, syncs) for api in APIS)
    assert ours == theirs
    assert ours[0] == ours[1] != [None, None]
