"""Plain parameters with types of ``spmd_types``: kept as DTensors, plain and annotated in forward."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.helpers.annotated_models import IS_INSTALLED, Feed, annotated, annotations
from tests.helpers.both_engines import APIS
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.pairwise import quick
from tests.helpers.small_models import adamw
from workbench import engine
from workbench.engine._torch import REDUCES_IN_GRAD_DTYPE
from workbench.engine.fsdp_state import RegisterPostBackwardFunction

MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "sharded": ({"dp": 2}, {"shard": "dp"}),
    "tensor parallel": ({"dp": 2, "tp": 2}, {"shard": "dp"}),
    "tensor parallel outside": ({"tp": 2, "dp": 2}, {"shard": "dp"}),
    "tensor parallel on one rank": ({"dp": 2, "tp": 1}, {"shard": "dp"}),
    "hybrid": ({"replicate": 2, "dp": 2}, {"shard": "dp", "replicate": "replicate"}),
    "joined": ({"dp": 2, "cp": 2}, {"shard": ("dp", "cp")}),
}
EXACT = {"rtol": 1e-12, "atol": 1e-14}
TORCH_REFUSES = {"tensor parallel outside", "tensor parallel on one rank"}  # it mixes up the axes, or misses one
BESIDE = APIS if IS_INSTALLED and REDUCES_IN_GRAD_DTYPE else (engine,)


def mesh_of(sizes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def data(mesh: DeviceMesh, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole batch, and this rank's rows of it: ranks that differ along "tp" only have the same."""
    names = [name for name in mesh.mesh_dim_names if name != "tp"]
    parts, number = 1, 0
    for name in names:
        parts, number = parts * mesh[name].size(), number * mesh[name].size() + mesh.get_local_rank(name)
    batch = torch.randn(3 * parts, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return batch, batch.chunk(parts)[number]


def train_annotated(case: str) -> None:
    sizes, dims = MESHES[case]
    mesh = mesh_of(sizes)
    with annotations() as spmd, pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_COMM", "default")  # the collectives that torch's engine uses
        plain, models = nn.Sequential(Feed(), Feed()), []
        for api in BESIDE if case not in TORCH_REFUSES else (engine,):
            model = annotated(spmd, mesh)
            options = {"mesh": mesh, "dp_mesh_dims": api.DataParallelMeshDims(**dims)}
            for module in (*model, model):
                api.fully_shard(module, **options)
            models.append(model)
        optimizers = [adamw(each.parameters()) for each in (plain, *models)]
        for step in range(3):
            whole, rows = data(mesh, step)
            plain(whole).square().mean().backward()
            for model in models:
                model(rows).square().mean().backward()
                for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(param.grad.full_tensor(), expected.grad, **EXACT)
            for ours, theirs in zip(*(model.parameters() for model in (models[0], models[-1])), strict=True):
                assert (ours.device_mesh, ours.placements) == (theirs.device_mesh, theirs.placements)
                assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("case", quick(MESHES, ["sharded", "tensor parallel"]))
def test_annotated_parameters_train_as_unsharded_ones(case):
    sizes, _ = MESHES[case]
    run_ranks(torch.Size(sizes.values()).numel(), train_annotated, case)


# ---- what modules see


def seen_in_forward() -> dict[str, Any]:
    """Return facts about the parameters in forward while types are checked, and after the model is plain again."""
    mesh = mesh_of({"dp": 2})
    facts: dict[str, Any] = {}
    with annotations() as spmd:
        model = annotated(spmd, mesh)
        types = dict(spmd.get_local_type(model[0].up))
        engine.fully_shard(model, mesh=mesh, dp_mesh_dims=engine.DataParallelMeshDims(shard="dp"))
        facts["stored"] = isinstance(model[0].up, DTensor)

        def look(module: nn.Module, *_: Any) -> None:
            facts["plain"] = not isinstance(module.up, DTensor)
            facts["types"] = spmd.get_local_type(module.up) == types
            facts["checked"] = spmd.is_type_checking()

        model[0].register_forward_pre_hook(look)
        model(torch.ones(1, 6, dtype=torch.float64))
        facts["types without checks"] = facts["types"]
        spmd.checking = True
        model(torch.ones(1, 6, dtype=torch.float64))
        spmd.checking = False
        facts["told"] = RegisterPostBackwardFunction in spmd.local
        engine.unshard_module(model)
        facts["types at the end"] = spmd.get_local_type(model[0].up) == types
    return facts


@pytest.mark.skipif(IS_INSTALLED, reason="the stand-in can be told that types are checked")
def test_types_come_back_where_they_are_checked():
    expected = {"stored": True, "plain": True, "types": True, "checked": True, "types without checks": False}
    expected |= {"told": True, "types at the end": True}
    for facts in run_ranks(2, seen_in_forward):
        assert facts == expected


# ---- refusals


def refusals() -> dict[str, str]:
    mesh = mesh_of({"dp": 2, "tp": 2})
    found = {}
    dims = {"mesh": mesh, "dp_mesh_dims": engine.DataParallelMeshDims(shard="dp")}
    with annotations() as spmd:
        dp, tp, world = mesh.get_group("dp"), mesh.get_group("tp"), dist.group.WORLD
        cases: dict[str, tuple[dict[Any, Any], dict[str, Any]]] = {
            "no mesh": ({dp: spmd.R, tp: spmd.R}, {}),
            "split": ({dp: spmd.S(0), tp: spmd.R}, dims),
            "other axis": ({world: spmd.R}, dims),
            "varies": ({dp: spmd.R, tp: spmd.V}, dims),
            "too few": ({dp: spmd.R}, dims),
        }
        for name, (types, options) in cases.items():
            model = nn.Linear(4, 4, bias=False)
            spmd.assert_type(model.weight, types)
            with pytest.raises(ValueError, match="parameter 'weight'") as caught:
                engine.fully_shard(model, **options)
            found[name] = str(caught.value)
        model = annotated(spmd, mesh)
        engine.fully_shard(model, **dims)
        with pytest.raises(NotImplementedError) as refused:
            engine.unshard_module(model)
        found["unshard"] = str(refused.value)
    return found


def test_what_an_annotation_must_say():
    expected = {
        "no mesh": "has a type of spmd_types: pass fully_shard the whole mesh, and dp_mesh_dims",
        "split": "must have the type R along",
        "other axis": "is no axis of the mesh passed to fully_shard (dp, tp)",
        "varies": "parameter 'weight': Cannot convert plain Varying",
        "too few": "has no type along 'tp', an axis of the mesh passed to fully_shard",
        "unshard": "unshard_module cannot gather parameter '0.up', which is annotated",
    }
    for found in run_ranks(4, refusals):
        for name, text in expected.items():
            assert text in found[name], (name, found[name])
