"""Optimizers and clipping on sharded parameters."""

import copy
import functools
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import assert_same_shards, average_grads, shard_net
from tests.helpers.small_models import batch, loss_of, make_net
from workbench.engine.unsharding import remap_optimizer

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
OPTIMIZERS = {
    "SGD with momentum": SGD,
    "SGD foreach": functools.partial(SGD, foreach=True),
    "AdamW foreach": functools.partial(ADAMW, foreach=True),
    "AdamW fused": functools.partial(ADAMW, fused=True),
    "AdamW one by one": functools.partial(ADAMW, foreach=False),
}


def trains(make_optimizer: functools.partial, clip: float | None) -> list[float]:
    plain = make_net(num_blocks=2)
    sharded = shard_net(copy.deepcopy(plain))
    optimizers = [make_optimizer(m.parameters()) for m in (plain, sharded)]
    norms = []
    for step in range(3):
        for model in (plain, sharded):
            loss_of(model, batch(dist.get_rank(), step)).backward()
        average_grads(plain)
        if clip is not None:
            expected, norm = (torch.nn.utils.clip_grad_norm_(m.parameters(), clip) for m in (plain, sharded))
            torch.testing.assert_close(norm.full_tensor(), expected)
            norms.append(expected.item())
        assert_same_shards(sharded, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_shards(sharded, plain)
    for param in sharded.parameters():
        for value in optimizers[1].state[param].values():
            # state has the size of the rank's own rows, or is a single number
            assert value.numel() == 1 or value.to_local().shape == param.to_local().shape
    return norms


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_on_shards(world_size, name):
    run_ranks(world_size, trains, OPTIMIZERS[name], None)


@pytest.mark.parametrize("clip", [0.05, 1e6])
def test_clip_grad_norm(clip):
    norms = run_ranks(2, trains, ADAMW, clip)
    assert norms[0] == norms[1]
    assert all((norm > clip) == (clip < 1) for norm in norms[0])


def collectives_of_clipping(hsdp: bool, foreach: bool) -> dict[str, int]:
    world_size = dist.get_world_size()
    shape, names = ((2, world_size // 2), ("replicate", "shard")) if hsdp else ((world_size,), ("shard",))
    plain = make_net(num_blocks=2)
    sharded = shard_net(copy.deepcopy(plain), mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    for model in (plain, sharded):
        loss_of(model, batch(dist.get_rank(), 0)).backward()
    average_grads(plain)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    with CommDebugMode() as issued:
        norm = torch.nn.utils.clip_grad_norm_(sharded.parameters(), 0.05, foreach=foreach).full_tensor()
    torch.testing.assert_close(norm, expected)
    assert_same_shards(sharded, plain)
    return {str(kind).rpartition(".")[2]: n for kind, n in issued.get_comm_counts().items() if n}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("world_size", "hsdp"), [(2, False), (4, True)])
def test_clipping_takes_one_all_reduce_over_the_shards(world_size, hsdp, foreach):
    """One all-reduce for any number of parameters; replicas have equal gradients and need none."""
    assert run_ranks(world_size, collectives_of_clipping, hsdp, foreach) == [{"all_reduce": 1}] * world_size


def optimizer_in_backward(reshard: bool | None) -> None:
    plain = make_net(num_blocks=2)
    sharded = shard_net(copy.deepcopy(plain), reshard_after_forward=reshard)
    reference = ADAMW(plain.parameters())
    optimizers = {parameter: ADAMW([parameter]) for parameter in sharded.parameters()}
    fired: Counter[torch.Tensor] = Counter()

    def step_at_once(parameter: torch.Tensor) -> None:
        fired[parameter] += 1
        assert parameter.grad.placements == parameter.placements
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in sharded.parameters():
        parameter.register_post_accumulate_grad_hook(step_at_once)
    for step in range(4):
        sync = step != 1
        sharded.set_requires_gradient_sync(sync)
        for model in (plain, sharded):
            loss_of(model, batch(dist.get_rank(), step)).backward()
        if sync:
            average_grads(plain)
            reference.step()
            reference.zero_grad()
        assert all(parameter.grad is None for parameter in sharded.parameters())
        assert fired == (dict.fromkeys(sharded.parameters(), 1) if sync else {})
        fired.clear()
    assert_same_shards(sharded, plain)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("reshard", [None, False])
def test_an_optimizer_in_backward_steps_once_per_reduction(world_size, reshard):
    run_ranks(world_size, optimizer_in_backward, reshard)


def forward_between_backward_and_step(keep: str) -> None:
    plain = make_net(num_blocks=2)
    sharded = shard_net(copy.deepcopy(plain), reshard_after_forward=False if keep == "all" else None)
    optimizers = [ADAMW(m.parameters()) for m in (plain, sharded)]
    other = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    for step in range(3):
        for model in (plain, sharded):
            loss_of(model, batch(dist.get_rank(), step)).backward()
            with torch.set_grad_enabled(keep == "root"):
                loss_of(model, batch(0, 0))  # a forward for logging: full parameters stay
        average_grads(plain)
        other.step()
        assert not isinstance(sharded.embed.weight, DTensor)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert isinstance(sharded.embed.weight, DTensor)
    assert_same_shards(sharded, plain)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("keep", ["root", "all"])
def test_every_forward_sees_the_stepped_parameters(world_size, keep):
    run_ranks(world_size, forward_between_backward_and_step, keep)


def twice_from_the_start(reshard: bool | None) -> list[list[float]]:
    runs = []
    for _ in range(2):
        model = shard_net(make_net(num_blocks=2), reshard_after_forward=reshard)
        optimizer = ADAMW(model.parameters())
        values = []
        for step in range(4):
            loss = loss_of(model, batch(dist.get_rank(), step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
        values += [p.full_tensor().double().sum().item() for p in model.parameters()]
        runs.append(values)
    return runs


@pytest.mark.thorough
def test_two_runs_and_all_policies_are_bit_identical():
    runs = [run for reshard in (None, True, False) for run in run_ranks(4, twice_from_the_start, reshard)[0]]
    assert all(run == runs[0] for run in runs[1:])


@pytest.mark.parametrize(("options", "place"), [({"fused": True}, "meta"), ({"foreach": True}, "cpu")])
def test_a_step_count_that_a_kernel_reads_goes_where_its_parameter_goes(options, place):
    old = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([old], **options)
    old.grad = torch.ones(3)
    optimizer.step()
    new = torch.nn.Parameter(torch.empty(3, device="meta"))
    remap_optimizer(optimizer, {old: new})
    assert optimizer.state[new]["step"].device.type == place
