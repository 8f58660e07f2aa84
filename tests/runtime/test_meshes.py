"""Meshes of copies x shards: their groups, and that they outlive a rebuild of all process groups."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.runtime.job import namespace, run
from workbench.runtime import rank as rank_module
from workbench.runtime.meshes import AXES


def groups_of(mesh):
    return [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in AXES]


def use(mesh):
    """What the mesh's own collectives give: a gathered tensor, a sum over copies, and a norm over both axes."""
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
    runtime = rank_module._this_rank()
    mesh = runtime.groups.mesh_of(shape)
    same = runtime.groups.mesh_of(shape) is mesh
    first = groups_of(mesh), use(mesh)
    results = []
    for generation in ("1", "2"):
        rank_module.recover(generation)
        runtime.groups.mesh_of((1, dist.get_world_size()))  # another mesh, another order of making
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
    groups = rank_module._this_rank().groups
    return groups.mesh_of(()) is groups.mesh_of((2,)) is groups.mesh


def test_a_shape_of_one_axis_is_the_mesh_of_all_ranks():
    assert run(2, plain_shapes) == [True, True]
