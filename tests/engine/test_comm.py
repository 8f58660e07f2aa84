"""The two pairs of collectives, the choice between them, and groups of some of the ranks."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench.memory import count_in_all_threads, totals
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import check_parity, shard_net
from tests.helpers.recording_probe import recording
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.unsharded_copy import train_both
from workbench.engine import process_groups
from workbench.engine.backends import backend_of
from workbench.engine.backends.gloo import GlooAllGather, GlooReduceScatter
from workbench.engine.comm import (
    CommTraits,
    DefaultAllGather,
    DefaultReduceScatter,
    give_back,
    traits_of,
)
from workbench.events import Category

CPU = torch.device("cpu")
PAIRS = {
    "fast": (GlooAllGather, GlooReduceScatter),
    "default": (DefaultAllGather, DefaultReduceScatter),
}


def collect(name: str, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Gather and reduce this rank's random numbers; return both results and the staging bytes."""
    gather, reduce = (cls() for cls in PAIRS[name])
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    generator = torch.Generator().manual_seed(rank)
    shard = torch.randn(numel, generator=generator).to(dtype)
    output = gather.allocate((numel * (size - traits_of(gather).leaves_own_out),), dtype=dtype, device=CPU)
    gather(output, shard, group, async_op=True).wait()
    if traits_of(gather).leaves_own_out:
        output = torch.cat([output[: numel * rank], shard, output[numel * rank :]])
    given = torch.randn(numel * size, generator=generator).to(dtype)
    total = torch.empty(numel, dtype=dtype)
    if traits_of(reduce).own_in_output:
        total.copy_(given[numel * rank : numel * (rank + 1)])
        given = torch.cat([given[: numel * rank], given[numel * (rank + 1) :]])
    chunks = reduce.allocate(tuple(given.shape), dtype=dtype, device=CPU)
    chunks.copy_(given)
    reduce(total, chunks, group, dist.ReduceOp.SUM, async_op=True).wait()
    return output, total, traits_of(reduce).nbytes_in_flight(chunks, size) - chunks.nbytes


def expected(world_size: int, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    shards, chunks = [], []
    for rank in range(world_size):
        generator = torch.Generator().manual_seed(rank)
        shards.append(torch.randn(numel, generator=generator).to(dtype))
        chunks.append(torch.randn(numel * world_size, generator=generator).to(dtype))
    return torch.cat(shards), functools.reduce(torch.add, chunks).view(world_size, numel)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(
    ("numel", "dtype"),
    [(0, torch.float32), (1, torch.float32), (1000, torch.float64), (7, torch.bfloat16), (140_000, torch.float32)],
)
def test_results_of_the_collectives(world_size, name, numel, dtype):
    gathered, sums = expected(world_size, numel, dtype)
    for rank, (output, total, staging) in enumerate(run_ranks(world_size, collect, name, numel, dtype)):
        assert torch.equal(output, gathered)
        if name == "fast":
            assert torch.equal(total, sums[rank])  # in rank order: bit for bit
        else:
            torch.testing.assert_close(
                total, sums[rank], rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps
            )
        assert staging == (numel * (world_size - 1) * dtype.itemsize if name == "fast" else 0)


def most_allocated_in_a_gather(numel: int) -> int:
    """Return the bytes that an all-gather of ``numel`` elements allocates besides its output, over all threads."""
    gather, size = GlooAllGather(), dist.get_world_size()
    output = gather.allocate((numel * (size - 1),), dtype=torch.float32, device=CPU)
    shard = torch.zeros(numel)
    count_in_all_threads()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:  # else 2.11 warns
        gather(output, shard, dist.group.WORLD, async_op=True).wait()
        dist.barrier()
    found = totals(profiler.profiler.kineto_results.experimental_event_tree())
    return max((total for _, total in found), default=0)  # the totals start at 0


@pytest.mark.parametrize(("world_size", "numel", "num_copies"), [(2, 100_000, 0), (3, 100_000, 2), (3, 140_000, 0)])
def test_a_gather_over_gloo_allocates_only_its_output_and_small_copies(world_size, numel, num_copies):
    for num_bytes in run_ranks(world_size, most_allocated_in_a_gather, numel):
        assert num_bytes == pytest.approx(num_copies * numel * 4, abs=numel)


def pair_for(device: torch.device) -> tuple[tuple[type, type], str]:
    pair = backend_of(device).pair()
    return (type(pair.gather), type(pair.reduce)), pair.name


def test_the_chosen_pair_of_collectives(environ):
    fast, default = (PAIRS["fast"], "gloo"), (PAIRS["default"], "c10d")
    environ.pop("WORKBENCH_COMM", None)
    assert pair_for(CPU) == fast
    assert pair_for(torch.device("cuda")) == default
    for choice, expected_pair in {"": fast, "gloo": fast, "default": default}.items():
        environ["WORKBENCH_COMM"] = choice
        assert pair_for(CPU) == expected_pair
    environ["WORKBENCH_COMM"] = "Default"
    with pytest.raises(ValueError, match=r"unknown WORKBENCH_COMM='Default'; use 'gloo' .* 'default' .* or unset"):
        pair_for(CPU)


def losses_and_peak() -> tuple[list[float], int]:
    with recording() as record:
        losses = check_parity(make_net, shard_net, 3)
    return losses, record.peak[Category.REDUCE_SCATTER_BUFFERS]


def test_training_is_the_same_with_both_pairs(environ):
    fast = run_ranks(2, losses_and_peak)
    environ["WORKBENCH_COMM"] = "default"
    default = run_ranks(2, losses_and_peak)
    for (losses, peak), (default_losses, default_peak) in zip(fast, default, strict=True):
        assert losses == pytest.approx(default_losses, rel=1e-6)
        assert peak == default_peak


def on_part_of_the_ranks() -> list[tuple[int, ...]]:
    """Train two models, each sharded over one row of a 2 x 2 mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    seen = []
    with recording() as record:
        for axis in ("shard", "replicate"):
            plain, model = make_net(num_blocks=1), shard_net(make_net(num_blocks=1), mesh=mesh[axis])
            ranks = mesh[axis].mesh.tolist()
            _same_as_the_mean(plain, model, ranks)
            seen.append(tuple(ranks))
        assert list(record.groups.values()) == seen
    return seen


def _same_as_the_mean(plain: torch.nn.Module, model: torch.nn.Module, ranks: list[int]) -> None:
    loss_of(model, batch(dist.get_rank(), 0)).backward()
    for rank in ranks:
        (loss_of(plain, batch(rank, 0)) / len(ranks)).backward()
    for value, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(value.grad.full_tensor(), wanted.grad)


def test_each_row_and_each_column_of_a_mesh_is_a_group_of_its_own():
    assert run_ranks(4, on_part_of_the_ranks) == [
        [(0, 1), (0, 2)],
        [(0, 1), (1, 3)],
        [(2, 3), (0, 2)],
        [(2, 3), (1, 3)],
    ]


def one_group_for_all() -> int:
    models = [shard_net(make_net(num_blocks=1)) for _ in range(2)]
    mesh = DeviceMesh("cpu", [0, 1])
    models.append(shard_net(make_net(num_blocks=1), mesh=mesh))
    unit_groups = {id(m._get_fsdp_state()._fsdp_param_group.mesh_info.shard_group) for m in models}
    return len(unit_groups)


def test_units_over_the_same_ranks_share_one_group():
    assert run_ranks(2, one_group_for_all) == [1, 1]


def rebuilt() -> list[int]:
    model = shard_net(make_net(num_blocks=1))
    group = model._get_fsdp_state()._fsdp_param_group.mesh_info.shard_group
    indices, old = [group.index], group.process_group
    with recording() as record:
        for _ in range(2):
            process_groups.rebuild_all()
            indices.append(group.index)
        assert list(record.groups.items()) == [(index, (0, 1)) for index in indices[1:]]
    assert group.process_group is not old
    assert group.next_comm().seq == 0  # each generation counts from 0
    train_both(make_net(num_blocks=1), model, 1)
    return indices


def test_a_rebuilt_group_has_a_new_index_and_the_units_use_it():
    indices = run_ranks(2, rebuilt)
    assert indices[0] == indices[1]
    assert len(set(indices[0])) == 3


# ---- what a communication does beyond torch's signatures


class OfTorchsShape:
    """A user's own collective: no traits."""

    def free(self, _buffer: torch.Tensor) -> None:
        pytest.fail("only a communication that says so gets its buffers back")


def test_a_communication_without_traits_is_as_torch_has_it():
    own = OfTorchsShape()
    assert traits_of(own) == CommTraits() == traits_of(DefaultAllGather()) == traits_of(DefaultReduceScatter())
    give_back(own, torch.empty(3))
    own.traits = "a name of the user's"
    assert traits_of(own) == CommTraits()
    assert CommTraits().nbytes_in_flight(torch.empty(3), 4) == 12


def test_bytes_in_flight_are_the_buffer_and_its_staging_or_none_if_shared():
    staged = CommTraits(staging_nbytes=lambda num_bytes, num_ranks: num_bytes * num_ranks)
    assert staged.nbytes_in_flight(torch.empty(3), 4) == 12 + 48
    assert CommTraits(is_shared=True).nbytes_in_flight(torch.empty(3), 4) == 0
    few, many = torch.empty(1000), torch.empty(2**20)
    gather = traits_of(GlooAllGather())
    assert [gather.nbytes_in_flight(buffer, 3) for buffer in (few, many)] == [2 * few.nbytes, many.nbytes]
    assert gather.nbytes_in_flight(few, 2) == few.nbytes
