"""CPUOffloadPolicy puts shards, gradients and optimizer state on the CPU. On a CPU mesh it must change nothing.

``test_cuda.py`` tests what needs a GPU: pinned memory, and copies in parallel with compute.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.forked_ranks import on_one_rank, run_ranks
from tests.helpers.pairwise import quick
from tests.helpers.parity import check_parity, shard_net
from tests.helpers.recording_probe import Recording, recording
from tests.helpers.small_models import adamw, batch, loss_of, make_net
from workbench.engine import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from workbench.engine.fsdp_state import states_below, units_of
from workbench.engine.policies import UnitPolicy
from workbench.events import Category, Kind

POLICIES = (CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False))
PRECISIONS = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16, fp32 sums": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return adamw(model.parameters(), weight_decay=0.1)


def accumulated(model: nn.Module, step: int, *, sync: bool) -> list[float]:
    """Run three micro-batches; without ``sync`` only the last one reduces."""
    losses = []
    for micro in range(3):
        model.set_requires_gradient_sync(sync or micro == 2)
        model.set_is_last_backward(micro == 2)
        loss = loss_of(model, batch(dist.get_rank(), 10 * step + micro))
        loss.backward()
        losses.append(loss.item())
    return losses


def run(policy: OffloadPolicy, mp_policy: MixedPrecisionPolicy, sync: bool | None, **options: object) -> object:
    """Train; return this rank's losses, values, gradients and moments, and the recorded events."""
    model = shard_net(make_net(tied=True), offload_policy=policy, mp_policy=mp_policy, **options)
    optimizer, losses, grads = optimizer_of(model), [], []
    for step in range(4):
        if sync is None:
            loss = loss_of(model, batch(dist.get_rank(), step))
            loss.backward()
            losses.append(loss.item())
        else:
            losses += accumulated(model, step, sync=sync)
        grads = [p.grad.to_local().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    moments = [optimizer.state[p][key].to_local() for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
    tensors = [*(p.to_local() for p in model.parameters()), *grads, *moments]
    assert all(tensor.device.type == "cpu" for tensor in tensors)
    assert all(unit.policy.offloads == isinstance(policy, CPUOffloadPolicy) for unit in units_of(states_below(model)))
    return losses, [tensor.detach().clone() for tensor in tensors]


def same_bits(policy: OffloadPolicy, mp_policy: MixedPrecisionPolicy, sync: bool | None, mesh: bool) -> None:
    def options() -> dict[str, object]:
        names = ("replicate", "shard")
        return {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=names)} if mesh else {}

    losses, tensors = run(policy, mp_policy, sync, **options())
    expected, others = run(OffloadPolicy(), mp_policy, sync, **options())
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


@pytest.mark.parametrize("policy", POLICIES, ids=["pinned", "pageable"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_offloading_changes_no_bit(world_size, policy):
    run_ranks(world_size, same_bits, policy, PRECISIONS["fp32"], None, False)


@pytest.mark.parametrize("sync", quick([True, False], [True]), ids=["with sync", "without sync"])
@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
def test_nor_does_it_with_accumulation_and_other_precisions(precision, sync):
    run_ranks(2, same_bits, CPUOffloadPolicy(), precision, sync, False)


@pytest.mark.parametrize("sync", [None, True, False])
def test_nor_with_replicas(sync):
    run_ranks(2, same_bits, CPUOffloadPolicy(), PRECISIONS["fp32"], sync, True)


def parity() -> None:
    check_parity(make_net, lambda m: shard_net(m, offload_policy=CPUOffloadPolicy()), steps=5, clip=0.5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_offloaded_model_equals_the_plain_one(world_size):
    run_ranks(world_size, parity)


def bytes_and_events(policy: OffloadPolicy) -> tuple[list[dict[Category, int]], dict[Category, int], list[str]]:
    alive = []
    with recording() as record:
        model = shard_net(make_net(), offload_policy=policy)
        alive.append(record.alive)
        for step in range(2):
            record.clear()
            loss = loss_of(model, batch(0, step))
            alive.append(record.alive)
            loss.backward()
            alive.append(record.alive)
            model.zero_grad()
    assert [unit.offload for unit in record.units.values()] == [isinstance(policy, CPUOffloadPolicy)] * 4
    return alive, dict(record.peak), transfers(record)


def transfers(record: Recording) -> list[str]:
    return [event for event in record.events if Kind.OFFLOAD.name in event or "REDUCE" in event or "GATHER" in event]


@pytest.mark.parametrize("world_size", [1, 2])
def test_on_the_cpu_offloading_changes_neither_bytes_nor_events(world_size):
    offloaded = run_ranks(world_size, bytes_and_events, CPUOffloadPolicy())
    assert offloaded == run_ranks(world_size, bytes_and_events, OffloadPolicy())
    assert not any(Kind.OFFLOAD.name in event for *_, events in offloaded for event in events)


@on_one_rank
def test_nothing_is_pinned_where_there_is_no_gpu():
    assert not UnitPolicy(offload_policy=CPUOffloadPolicy(pin_memory=False)).pins
    assert UnitPolicy(offload_policy=CPUOffloadPolicy()).pins == torch.cuda.is_available()
    model = shard_net(make_net(), offload_policy=CPUOffloadPolicy(pin_memory=True))
    if not torch.cuda.is_available():
        assert not any(p.to_local().is_pinned() for p in model.parameters())
    loss_of(model, batch(0, 0)).backward()


def on_meta() -> None:
    with torch.device("meta"):
        model = shard_net(make_net(), offload_policy=CPUOffloadPolicy())
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.constant_(param, 0.1)
    loss_of(model, batch(dist.get_rank(), 0)).backward()
    assert all(p.grad.to_local().device.type == "cpu" for p in model.parameters())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_made_on_the_meta_device(world_size):
    run_ranks(world_size, on_meta)


def saved_and_loaded() -> None:
    model = shard_net(make_net(), offload_policy=CPUOffloadPolicy())
    other = shard_net(make_net(seed=1), offload_policy=CPUOffloadPolicy())
    step = loss_of(model, batch(dist.get_rank(), 0))
    step.backward()
    state = model.state_dict()
    assert all(
        v.to_local().untyped_storage().data_ptr() == p.to_local().untyped_storage().data_ptr()
        for v, p in zip(state.values(), model.parameters(), strict=True)
    )
    other.load_state_dict(state)
    with torch.no_grad():
        assert loss_of(other, batch(dist.get_rank(), 0)).item() == step.item()


def test_a_state_dict_of_shards_on_the_cpu():
    run_ranks(2, saved_and_loaded)
