"""``replicate``: whole copies of the parameters on every rank, beside torch's."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from tests.helpers.both_engines import SAME
from tests.helpers.expected_sizes import NET
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.recording_probe import Recording, recording
from tests.helpers.small_models import adamw, batch, loss_of, make_net
from workbench import engine
from workbench.events import Kind

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # of more ranks, gloo adds each element in an order of its place in the buffer


def beside_torch(dtype: torch.dtype | None) -> Recording:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("copy",))
    facts = []
    for api, replicate in ((fsdp, torch_replicate), (engine, engine.replicate)):
        model = make_net(**NET)
        options = {"mesh": mesh, "mp_policy": api.MixedPrecisionPolicy(dtype, torch.float32)}
        for module in (*model.blocks, model):
            replicate(module, **options)
        optimizer = adamw(model.parameters())
        with recording() as record:
            for step in range(4):  # two micro-batches for each update
                record.clear()
                model.set_requires_gradient_sync(step % 2 == 1)
                loss_of(model, batch(dist.get_rank(), step)).backward()
                if step % 2:
                    optimizer.step()
                    found = [
                        (p.placements, p.to_local().detach().clone(), p.grad.to_local()) for p in model.parameters()
                    ]
                    facts.append(found)
                    optimizer.zero_grad()
    for ours, theirs in zip(facts[2:], facts[:2], strict=True):
        for (placements, *values), (their_placements, *their_values) in zip(ours, theirs, strict=True):
            assert placements == their_placements == (Replicate(),)
            torch.testing.assert_close(values, their_values, **(SAME if dist.get_world_size() < 3 else CLOSE))
    return record


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_copies_train_as_those_of_torch(world_size, dtype):
    for record in run_ranks(world_size, beside_torch, dtype):
        units = len(record.units) if world_size > 1 else 0
        assert record.count(Kind.ALL_REDUCE).total() == units
        assert not record.count(Kind.ALL_GATHER) + record.count(Kind.REDUCE_SCATTER)


def undone_and_refused() -> None:
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match=r"replicate got a mesh of shape \(2, 1\); it takes a 1-D mesh"):
        engine.replicate(make_net(), mesh=square)
    with pytest.raises(ValueError, match="replicate got dp_mesh_dims, shard='a'; it takes a 1-D mesh"):
        engine.replicate(make_net(), mesh=square, dp_mesh_dims=engine.DataParallelMeshDims(shard="a"))
    model, plain = engine.replicate(make_net()), make_net()
    assert all(p.placements == (Replicate(),) for p in model.parameters())
    engine.unshard_module(model)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), **SAME)


def test_it_can_be_undone_and_refuses_other_meshes():
    run_ranks(2, undone_and_refused)
