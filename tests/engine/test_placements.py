"""``shard_placement_fn``: the dim along which a parameter is split, and the mesh."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.engine.test_errors import fingerprint
from tests.helpers.forked_ranks import on_one_rank, run_ranks, simulated_rank, simulating
from tests.helpers.pairwise import quick
from tests.helpers.small_models import Net, adamw, make_net
from tests.helpers.unsharded_copy import train_both
from workbench.engine import ShardPlacementResult, fully_shard
from workbench.engine.mesh import FSDPMeshInfo, HSDPMeshInfo

Placer = Callable[[nn.Parameter], object]

# ---- one placement for a model, parameter by parameter


def default(param: nn.Parameter) -> None:
    return None


def second(param: nn.Parameter) -> Shard | None:
    """Split matrices by column, vectors by default."""
    return Shard(1) if param.ndim > 1 else None


def last(param: nn.Parameter) -> Shard:
    return Shard(-1)


def negative_first(param: nn.Parameter) -> Shard:
    return Shard(-param.ndim)


def mixed(param: nn.Parameter) -> Shard | None:
    """Split wide matrices by column, tall ones by row, vectors by default."""
    if param.ndim == 1:
        return None
    return Shard(1) if param.shape[1] > param.shape[0] else Shard(0)


def even_net() -> Net:
    """Like the parity tests' model, but 2 and 4 ranks divide the columns; the number of rows (7) is uneven."""
    net = make_net(dim=8, num_blocks=1)
    net.blocks[0].mlp[0], net.blocks[0].mlp[2] = nn.Linear(8, 12), nn.Linear(12, 8)
    return net


def trained(place: Placer, dims: dict[str, int]) -> None:
    plain = even_net()
    sharded = copy.deepcopy(plain)
    for block in sharded.blocks:
        fully_shard(block, shard_placement_fn=place)
    fully_shard(sharded, shard_placement_fn=place)
    for name, param in sharded.named_parameters():
        assert param.placements == (Shard(dims.get(name, 0)),), name
        assert param.stride() == plain.get_parameter(name).stride(), name
        assert param.to_local().is_contiguous(), name
        reference = distribute_tensor(plain.get_parameter(name).detach(), param.device_mesh, param.placements)
        assert torch.equal(param.to_local(), reference.to_local()), name
    train_both(plain, sharded)
    for name, value in sharded.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), plain.state_dict()[name])


MATRICES = ["embed.weight", "head.weight", "blocks.0.mlp.0.weight", "blocks.0.mlp.2.weight"]
PLACERS = {
    "default": (default, {}),
    "columns": (second, dict.fromkeys(MATRICES, 1)),
    "last": (last, dict.fromkeys(MATRICES, 1)),
    "counted from the right": (negative_first, {}),
    "mixed": (mixed, {"embed.weight": 1, "head.weight": 1, "blocks.0.mlp.2.weight": 1}),
}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("case", PLACERS)
def test_training_is_the_same_however_the_parameters_are_split(world_size, case):
    run_ranks(world_size, trained, *PLACERS[case])


def hsdp_columns() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain = even_net()
    sharded = fully_shard(copy.deepcopy(plain), mesh=mesh, shard_placement_fn=second)
    assert sharded.head.weight.placements == (Replicate(), Shard(1))
    assert sharded.head.weight.to_local().shape == (7, 4)
    train_both(plain, sharded)


def test_columns_over_the_shard_axis_of_hsdp():
    run_ranks(4, hsdp_columns)


@on_one_rank
def test_the_function_is_called_for_exactly_the_managed_parameters():
    seen: list[nn.Parameter] = []
    model = make_net(num_blocks=1, tied=True)
    params = dict(model.named_parameters())
    fully_shard(model.blocks[0])
    fully_shard(model, shard_placement_fn=seen.append, ignored_params={model.scale})
    assert {id(p) for p in seen} == {id(params["embed.weight"])}  # once per tied parameter; not the inner unit's


# ---- a placement with its own mesh


class Experts(nn.Module):
    """A router shared by all ranks, and an expert per group of ranks."""

    def __init__(self, group: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.out = nn.Linear(5, 6), nn.Linear(6, 5)
        torch.manual_seed(group)  # ranks of a group start with the same expert
        self.expert = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.router(x)
        return self.out(x + self.expert(x))


def groups_of_ranks(per_group: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh of all ranks, and the mesh of the ranks with the same expert."""
    world = dist.get_world_size()
    both = init_device_mesh("cpu", (world // per_group, per_group), mesh_dim_names=("ep", "efsdp"))
    return init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",)), both["efsdp"]


def place_experts(model: Experts, mesh: DeviceMesh, dim: int) -> Placer:
    inside = set(model.expert.parameters())
    info = FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0)

    def place(param: nn.Parameter) -> ShardPlacementResult | None:
        own = Shard(dim) if param.ndim > dim else Shard(0)
        return ShardPlacementResult(placement=own, mesh_info=info) if param in inside else None

    return place


def reduce_as_placed(plain: Experts, mesh: DeviceMesh) -> None:
    """Average each gradient over the ranks of the parameter's own mesh."""
    inside = set(plain.expert.parameters())
    for param in plain.parameters():
        dist.all_reduce(param.grad, group=mesh.get_group() if param in inside else None)
        param.grad.div_(mesh.size() if param in inside else dist.get_world_size())


def experts(per_group: int, dim: int, own_unit: bool) -> list[str]:
    everyone, own = groups_of_ranks(per_group)
    plain = Experts(dist.get_rank() // per_group)
    sharded = copy.deepcopy(plain)
    place = place_experts(sharded, own, dim)
    if own_unit:
        fully_shard(sharded.expert, mesh=everyone, shard_placement_fn=place)
    fully_shard(sharded, mesh=everyone, shard_placement_fn=place)
    optimizers = [adamw(m.parameters()) for m in (plain, sharded)]
    for step in range(5):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(3, 5, generator=generator)
        for model in (plain, sharded):
            model(x).square().mean().backward()
        reduce_as_placed(plain, own)
        assert_each_on_its_mesh(sharded, plain, {"expert": own, "": everyone}, dim)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_each_on_its_mesh(sharded, plain, {"expert": own, "": everyone}, dim)
    return [str(p.device_mesh.mesh.tolist()) for p in sharded.parameters()]


def assert_each_on_its_mesh(sharded: nn.Module, plain: nn.Module, meshes: dict[str, DeviceMesh], dim: int) -> None:
    for (name, s), (plain_name, p) in zip(sharded.named_parameters(), plain.named_parameters(), strict=True):
        inside = name.startswith("expert")
        assert name == plain_name
        assert s.device_mesh == meshes["expert" if inside else ""], name
        assert s.placements == (Shard(dim if inside and p.ndim > dim else 0),), name
        torch.testing.assert_close(s.full_tensor(), p)
        if p.grad is not None:
            assert s.grad.device_mesh == s.device_mesh, name
            torch.testing.assert_close(s.grad.full_tensor(), p.grad)


@pytest.mark.parametrize("own_unit", quick([False, True], [True]))
@pytest.mark.parametrize("per_group", [1, 2])
def test_experts_on_a_smaller_mesh(per_group, own_unit):
    for rank, meshes in enumerate(run_ranks(4, experts, per_group, 0, own_unit)):
        first = rank // per_group * per_group
        mine = str(list(range(first, first + per_group)))
        assert meshes == ["[0, 1, 2, 3]"] * 4 + [mine] * 4


def even_experts() -> None:
    """Split experts by column: 6 and 8 inner features over 2 ranks."""
    everyone, own = groups_of_ranks(2)
    model = Experts(dist.get_rank() // 2)
    model.expert = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    fully_shard(model, mesh=everyone, shard_placement_fn=place_experts(model, own, 1))
    assert model.expert[0].weight.to_local().shape == (8, 3)
    assert model.expert[2].weight.to_local().shape == (6, 4)
    assert model.expert[0].bias.placements == (Shard(0),)
    model(torch.ones(2, 5)).sum().backward()
    assert model.expert[0].weight.grad.to_local().shape == (8, 3)


def test_experts_split_by_column_on_a_smaller_mesh():
    run_ranks(4, even_experts)


def one_on_a_replicated_mesh() -> None:
    """Shard one parameter over pairs of ranks and replicate it between pairs; shard the others over all ranks."""
    plain = even_net()
    sharded = copy.deepcopy(plain)
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    info = HSDPMeshInfo(mesh=pairs, shard_mesh_dim=1, replicate_mesh_dim=0)
    head = sharded.head.weight
    fully_shard(
        sharded,
        shard_placement_fn=lambda p: ShardPlacementResult(placement=Shard(0), mesh_info=info) if p is head else None,
    )
    assert sharded.head.weight.placements == (Replicate(), Shard(0))
    assert sharded.head.weight.device_mesh == pairs
    assert sharded.head.weight.to_local().shape == (4 - dist.get_rank() % 2, 8)
    assert sharded.embed.weight.placements == (Shard(0),)
    train_both(plain, sharded)


def test_a_parameter_on_a_mesh_that_replicates():
    run_ranks(4, one_on_a_replicated_mesh)


# ---- refused


def refused(module: nn.Module, place: Placer, *words: str) -> None:
    before = fingerprint(module)
    with pytest.raises(ValueError, match="parameter") as caught:
        fully_shard(module, shard_placement_fn=place)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert fingerprint(module) == before


class Inner(nn.Module):
    """Two parameters: when the second is refused, the first must stay unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x))


def uneven_columns() -> None:
    refused(Inner(), second, "'inner.weight' of shape [4, 5]", "along dim 1", "2 ranks", "return Shard(0)")


def test_uneven_columns_are_refused():
    run_ranks(2, uneven_columns)


@pytest.mark.parametrize(("ndim", "dim"), [(1, 1), (1, -2), (1, 7), (2, 2), (2, -3)])
@on_one_rank
def test_a_dim_that_a_parameter_has_not_is_refused(ndim, dim):
    name, last = ("'bias' of shape [4]", "0 to 0") if ndim == 1 else ("'weight' of shape [4, 4]", "0 to 1")
    refused(nn.Linear(4, 4), lambda p: Shard(dim) if p.ndim == ndim else None, f"Shard({dim})", name, last)


# ---- the law: shards of any shape, dtype, dim and number of ranks

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
FEW_RANKS, MANY_RANKS = st.integers(1, 8), st.sampled_from([13, 32, 64, 100, 128])


@st.composite
def placed(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> tuple[tuple[int, ...], int, int]:
    """Return a shape, the number of ranks and the dim to split; a dim other than 0 divides evenly."""
    shape, num_ranks = draw(SHAPES), draw(sizes)
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    if dim % len(shape):
        shape = tuple(n * num_ranks if d == dim % len(shape) else n for d, n in enumerate(shape))
    return shape, num_ranks, dim


def numbered(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that counts from 1, modulo 251, which every dtype represents exactly."""
    return (torch.arange(math.prod(shape)) % 251 + 1).to(dtype).view(shape)


def shard_of(full: torch.Tensor, rank: int, num_ranks: int, dim: int) -> torch.Tensor:
    """Return the shard of a simulated ``rank``, after checking its size against torch's formula."""
    with simulated_rank(rank, num_ranks):
        module = nn.Module()
        module.p = nn.Parameter(full.clone())
        fully_shard(module, shard_placement_fn=lambda _: Shard(dim))
        param = module.p
        assert isinstance(param, DTensor)
        assert param.placements == (Shard(dim % full.ndim),)
        assert (param.shape, param.stride(), param.dtype) == (full.shape, full.stride(), full.dtype)
        local = param.to_local().detach()
        size, _ = Shard.local_shard_size_and_offset(full.shape[dim], num_ranks, rank)
        assert local.shape == (*full.shape[: dim % full.ndim], size, *full.shape[dim % full.ndim + 1 :])
        assert local.is_contiguous()
        return local.clone()


@simulating
@settings(max_examples=60, deadline=None)
@given(placed(FEW_RANKS), DTYPES)
@example(((0, 4), 4, 1), torch.float32)  # no rows to split by column
@example(((3, 0), 4, 0), torch.float32)
@example(((1,), 8, -1), torch.bfloat16)
def test_shards_put_together_are_the_parameter(case, dtype):
    shape, num_ranks, dim = case
    full = numbered(shape, dtype)
    locals_ = [shard_of(full, rank, num_ranks, dim) for rank in range(num_ranks)]
    assert torch.equal(torch.cat(locals_, dim), full)
    largest = math.ceil(shape[dim] / num_ranks)
    assert [local.shape[dim] for local in locals_] == sorted((local.shape[dim] for local in locals_), reverse=True)
    assert max(local.shape[dim] for local in locals_) == largest


@simulating
@settings(max_examples=10, deadline=None)
@given(placed(MANY_RANKS), DTYPES, st.data())
def test_shards_on_many_ranks_are_torch_chunks(case, dtype, data):
    shape, num_ranks, dim = case
    full = numbered(shape, dtype)
    chunks = full.chunk(num_ranks, dim)
    some = {
        0,
        len(chunks) - 1,
        min(len(chunks), num_ranks - 1),
        num_ranks - 1,
        data.draw(st.integers(0, num_ranks - 1)),
    }
    nothing = full.narrow(dim, 0, 0)
    for rank in some:
        expected = chunks[rank] if rank < len(chunks) else nothing
        assert torch.equal(shard_of(full, rank, num_ranks, dim), expected)
