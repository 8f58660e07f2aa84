"""``dp_mesh_dims``: parameters are DTensors on the whole mesh, and some of its axes are data-parallel."""

import copy
import inspect
import math
import re
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.helpers.both_engines import APIS
from tests.helpers.forked_ranks import on_one_rank, run_ranks
from tests.helpers.pairwise import quick
from tests.helpers.small_models import adamw
from workbench.engine import DataParallelMeshDims, fully_shard

DIM, HIDDEN, ROWS = 6, 20, 4  # 20 rows halve evenly twice; of 6 rows four ranks have 2, 2, 2, 0
OVER_TP = {"0.weight": 0, "0.bias": 0, "2.weight": 1}  # the dim that tensor parallelism splits
MESHES = {
    "one axis": ({"dp": 2}, {"shard": "dp"}),
    "hybrid": ({"replicate": 2, "dp": 2}, {"shard": "dp", "replicate": "replicate"}),
    "joined": ({"dp": 2, "cp": 2}, {"shard": ("dp", "cp")}),
    "hybrid, joined": ({"replicate": 1, "dp": 2, "cp": 2}, {"shard": ("dp", "cp"), "replicate": "replicate"}),
    "two replicate axes": ({"zone": 2, "host": 1, "dp": 2}, {"shard": ("dp",), "replicate": ("zone", "host")}),
    "tensor parallel": ({"dp": 2, "tp": 2}, {"shard": "dp"}),
    "tensor parallel, joined": ({"dp": 2, "cp": 1, "tp": 2}, {"shard": ("dp", "cp")}),
    "tensor parallel outside": ({"tp": 2, "dp": 2}, {"shard": "dp"}),
    "replicas alone": ({"replicate": 2}, {"replicate": "replicate"}),
}


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, DIM)).double()


def mesh_of(sizes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def on_mesh(mesh: DeviceMesh) -> nn.Module:
    """Return the model as DTensors on ``mesh``: split along "tp", replicated along the other axes."""
    model = make()
    for name, param in list(model.named_parameters()):
        split = [
            Shard(OVER_TP[name]) if axis == "tp" and name in OVER_TP else Replicate() for axis in mesh.mesh_dim_names
        ]
        module, _, own = name.rpartition(".")
        setattr(model.get_submodule(module), own, nn.Parameter(distribute_tensor(param.detach(), mesh, split)))
    return model


def placed_data(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Return the data's placements: each axis except "tp" has its own rows."""
    return tuple(Replicate() if axis == "tp" else Shard(0) for axis in mesh.mesh_dim_names)


def all_data(mesh: DeviceMesh, step: int) -> torch.Tensor:
    """Return the input [ROWS * data-parallel ranks, DIM]."""
    ranks = math.prod(mesh.size(axis) for axis, name in enumerate(mesh.mesh_dim_names) if name != "tp")
    return torch.randn(ROWS * ranks, DIM, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def loss_of(model: nn.Module, mesh: DeviceMesh, step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the mean over this rank's rows."""
    out = model(distribute_tensor(all_data(mesh, step).to(dtype), mesh, placed_data(mesh)))
    return out.redistribute(placements=placed_data(mesh)).to_local().square().mean()


def described(tensor: DTensor) -> tuple[object, ...]:
    mesh = tensor.device_mesh
    return mesh.mesh_dim_names, mesh.mesh.tolist(), tensor.placements, tensor.to_local().detach()


def assert_same(ours: DTensor, theirs: DTensor) -> None:
    *place, local = described(ours)
    *their_place, their_local = described(theirs)
    assert place == their_place
    torch.testing.assert_close(local, their_local, rtol=1e-12, atol=1e-14)


def shard(api: ModuleType, model: nn.Module, mesh: DeviceMesh, dims: dict[str, object]) -> nn.Module:
    given = {"mesh": mesh, "dp_mesh_dims": api.DataParallelMeshDims(**dims)}
    for layer in (model[0], model[2]):
        api.fully_shard(layer, **given)
    return api.fully_shard(model, **given)


def beside_torchs(case: str) -> None:
    sizes, dims = MESHES[case]
    mesh = mesh_of(sizes)
    plain = make()
    ours, theirs = models = [shard(api, on_mesh(mesh), mesh, dims) for api in APIS]
    optimizers = [adamw(model.parameters()) for model in (plain, *models)]
    for step in range(3):
        plain(all_data(mesh, step)).square().mean().backward()
        losses, counts = [], []
        for model in models:
            with CommDebugMode() as mode:
                loss = loss_of(model, mesh, step)
                loss.backward()
            losses.append(loss)
            counts.append(sum(mode.get_comm_counts().values()))
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0.0)
        if step:  # before the first step ranks compare their units
            saved = counts[1] - counts[0]
            assert saved == 0 or (saved > 0 and 1 in sizes.values()), counts  # torch's engine reduces over one rank too
        for (name, a), b, p in zip(ours.named_parameters(), theirs.parameters(), plain.parameters(), strict=True):
            assert_same(a, b)
            assert_same(a.grad, b.grad)
            torch.testing.assert_close(
                a.grad.full_tensor(), p.grad, msg=lambda message, name=name: f"{name}: {message}"
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, p in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), p)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # CommDebugMode's, from its module hooks
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")  # of torch's engine
@pytest.mark.parametrize("case", quick(MESHES, ["one axis", "hybrid", "replicas alone"]))
def test_three_steps_match_torch_and_the_plain_model(case):
    run_ranks(math.prod(MESHES[case][0].values()), beside_torchs, case)


def undone() -> None:
    from workbench import engine
    from workbench.engine import reshard_module, unshard_module

    mesh = mesh_of({"dp": 2, "tp": 2})
    whole = on_mesh(mesh)
    model = shard(engine, copy.deepcopy(whole), mesh, {"shard": "dp"})
    reshard_module(model, reshard_after_forward=False)
    loss_of(model, mesh, 0).backward()
    unshard_module(model)
    for (name, a), b in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert (name, a.placements, a.device_mesh) == (b[0], b[1].placements, mesh)
        assert torch.equal(a.full_tensor(), b[1].full_tensor())


@pytest.mark.thorough
def test_unsharded_again_the_parameters_are_dtensors_on_the_whole_mesh():
    run_ranks(4, undone)


def refused(
    mesh: DeviceMesh, model: nn.Module, kind: type[Exception], message: str, dims: object, **more: object
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims, **more)


@on_one_rank
def test_impossible_meshes_are_refused():
    mesh, dims = mesh_of({"dp": 1, "cp": 1, "tp": 1}), DataParallelMeshDims
    model = on_mesh(mesh)
    refused(mesh, model, ValueError, "names 'x'; the axes of the mesh have 'dp', 'cp', 'tp'", dims("x"))
    refused(mesh, model, ValueError, "names an axis twice: shard 'dp', replicate 'dp'", dims("dp", "dp"))
    refused(mesh, model, ValueError, "joins the axes 'dp', 'tp', which must be adjacent", dims(("dp", "tp")))
    refused(mesh, model, TypeError, "must be a workbench.engine.DataParallelMeshDims, got 'dp'", "dp")
    refused(
        mesh, model, NotImplementedError, "takes True, False or None, not an int", dims("dp"), reshard_after_forward=1
    )
    refused(mesh, model, ValueError, "must be Replicate() on the data-parallel axis 'tp'", dims("tp"))
    refused(mesh, make(), ValueError, "'0.weight' is a plain Parameter: create them with distribute_tensor", dims("dp"))
    other = mesh_of({"a": 1, "dp": 1})
    refused(other, model, ValueError, "'0.weight' is a DTensor on", dims("dp"))
    nameless = init_device_mesh("cpu", (1,))
    refused(nameless, model, ValueError, "no names: set mesh_dim_names", dims("dp"))
    assert type(model) is nn.Sequential


def test_the_names_are_given_as_torchs():
    ours, theirs = (inspect.signature(api.DataParallelMeshDims) for api in APIS)
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]
    assert repr(DataParallelMeshDims("a")) == repr(APIS[1].DataParallelMeshDims("a"))


def test_the_names_are_names():
    assert DataParallelMeshDims(("a", "b"), "c").shard_names == ("a", "b")
    assert DataParallelMeshDims(replicate="c").replicate_names == ("c",)
    with pytest.raises(ValueError, match="needs shard, replicate or both"):
        DataParallelMeshDims()
    with pytest.raises(ValueError, match="needs shard, replicate or both"):
        DataParallelMeshDims(shard=())
    with pytest.raises(TypeError, match="shard takes a name or a tuple of names, got 3"):
        DataParallelMeshDims(shard=3)


# ---- the calls that torchtitan makes for a decoder


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.layers = nn.ModuleDict({str(i): nn.Linear(DIM, DIM) for i in range(2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for layer in self.layers.values():
            hidden = hidden + layer(hidden).tanh()
        return self.head(self.norm(hidden))


def decoder(api: ModuleType, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = Decoder()
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(param.detach(), mesh, [Replicate()] * mesh.ndim)
            setattr(module, name, nn.Parameter(whole))
    precision = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    given = {"mesh": mesh, "mp_policy": precision, "dp_mesh_dims": api.DataParallelMeshDims("dp", "replicate")}
    api.fully_shard(model.embed, **given, reshard_after_forward=True)
    api.fully_shard([model.norm, model.head], **given, reshard_after_forward=False)
    for layer in model.layers.values():
        api.fully_shard(layer, **given, reshard_after_forward=True)
    api.fully_shard(model, **given)
    for module in model.modules():
        if isinstance(module, api.FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo only sums
    return model


def as_torchtitan() -> None:
    mesh = mesh_of({"replicate": 2, "dp": 2})
    models = [decoder(api, mesh) for api in APIS]
    optimizers = [adamw(model.parameters()) for model in models]
    for step in range(3):
        losses = [loss_of(model, mesh, step, torch.bfloat16) for model in models]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            assert_same(a.grad, b.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert_same(a, b)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")  # of torch's engine
def test_the_calls_of_torchtitan_train_as_with_torchs_engine():
    run_ranks(4, as_torchtitan)
