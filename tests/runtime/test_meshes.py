"""Meshes and groups, the workbench's and the user's, survive a rebuild of all groups."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.helpers.booted_ranks import namespace, run
from workbench.engine._torch import name_groups_from, named_groups
from workbench.engine.process_groups import OWN
from workbench.runtime import rank as rank_module
from workbench.runtime.distributed import AXES


def groups_of(mesh):
    return [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in AXES]


def use(mesh):
    """Return results of the mesh's collectives: a gathered tensor, a sum over copies, and a norm over both axes."""
    rank = namespace()["rank"]
    shard = DTensor.from_local(torch.full((2,), float(rank % mesh.size(1))), mesh, [Replicate(), Shard(0)])
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh["replicate"].get_group())
    norm = torch.nn.utils.clip_grad_norm_(_with_grad(shard), 1.0).full_tensor().item()
    return shard.full_tensor().tolist(), total.item(), norm


def _with_grad(value):
    param = torch.nn.Parameter(value.clone())
    param.grad = value.clone()
    return [param]


def life_of_a_mesh(shape):
    runtime = rank_module.this_rank()
    mesh = runtime.groups.mesh_of(shape)
    same = runtime.groups.mesh_of(shape) is mesh
    first = groups_of(mesh), use(mesh)
    results = []
    for generation in ("1", "2"):
        rank_module.recover(generation)
        runtime.groups.mesh_of((1, dist.get_world_size()))  # another mesh, another order of creation
        results.append((groups_of(mesh), use(mesh)))
    return same, first, results, mesh.mesh_dim_names


@pytest.mark.parametrize(("shape", "copies"), [((2, 2), 2), ((4, 1), 4), ((1, 4), 1)])
def test_a_mesh_of_copies_works_before_and_after_its_groups_are_rebuilt(shape, copies):
    for rank, (same, first, results, axes) in enumerate(run(4, life_of_a_mesh, shape)):
        ranks = torch.arange(4).view(shape)
        copy, place = divmod(rank, shape[1])
        assert first[0] == [ranks[:, place].tolist(), ranks[copy].tolist()]
        gathered, total, norm = first[1]
        assert gathered == [float(i) for i in range(shape[1]) for _ in range(2)]
        assert total == copies
        assert norm == pytest.approx(sum(v * v for v in gathered) ** 0.5)
        assert results == [first] * 2
        assert axes == AXES
        assert same


def plain_shapes():
    groups = rank_module.this_rank().groups
    return groups.mesh_of(()) is groups.mesh_of((2,)) is groups.mesh


def test_a_shape_of_one_axis_is_the_mesh_of_all_ranks():
    assert run(2, plain_shapes) == [True, True]


def life_of_a_users_groups():
    """Tensor parallelism on a cell's mesh, and groups in variables."""
    ns = namespace()
    ns["pair"] = dist.new_group([1, 2])
    ns["old_world"] = dist.group.WORLD
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    inputs = torch.ones(2, 4)
    before = model(inputs).tolist()
    name_groups_from(9 + ns["rank"])  # as if an error had let only some ranks make groups
    for generation in ("1", "2"):
        rank_module.recover(generation)
        assert model(inputs).tolist() == before
    total = torch.ones(1)
    if ns["rank"] in (1, 2):
        dist.all_reduce(total, group=ns["pair"])
    dist.all_reduce(total, group=ns["old_world"])
    later = dist.new_group([0, 1, 2, 3])
    dist.all_reduce(total, group=later)
    return total.item(), dist.get_process_group_ranks(mesh.get_group("tp"))


def test_groups_of_the_user_outlive_a_rebuild_of_all_groups():
    found = run(4, life_of_a_users_groups)
    assert found == [(24.0, [0, 1])] * 2 + [(24.0, [2, 3])] * 2


def half_made():
    """A group that only two of its three ranks know is dropped: no rank waits for the third."""
    ns = namespace()
    groups = rank_module.this_rank().groups
    ranks = dist.get_process_group_ranks
    known = {name: ranks(group) for name, group in named_groups().items() if not name.startswith(OWN)}
    lost = {"lost": [0, 1, 2]} if ns["rank"] < 2 else {}
    return sorted(groups._revive(known | lost, 7)), name_groups_from(0)


def test_a_group_that_not_all_of_its_ranks_made_is_dropped():
    found = run(3, half_made)
    assert found == [(found[0][0], 7)] * 3
    assert "lost" not in found[0][0]
