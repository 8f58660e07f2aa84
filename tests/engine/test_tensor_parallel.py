"""FSDP on top of tensor parallelism: 2-D and 3-D meshes, and strided shards where both split the same dim."""

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from tests.helpers.forked_ranks import run_cases, run_ranks, simulated_rank, simulating
from tests.helpers.parity import assert_all_close, average_grads
from tests.helpers.small_models import adamw
from workbench.engine import fully_shard

FSDP_TP = (("dp", "tp"), (2, 2))
HSDP_TP = ("replicate", "shard", "tp")
DIM, VOCAB, HIDDEN, LENGTH = 6, 10, 10, 4  # tensor parallelism halves evenly, FSDP halves again: 5 rows become 3 + 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Every parameter is in the plan, because :func:`torch.nn.utils.clip_grad_norm_` needs a single mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, DIM), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


def split(model: Decoder, tp: DeviceMesh) -> Decoder:
    """Apply tensor parallelism; activations between the blocks are split over the sequence."""
    over_sequence = Shard(1)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=over_sequence),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=over_sequence),
        "blocks.*.down": RowwiseParallel(output_layouts=over_sequence),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=over_sequence, output_layouts=Replicate()),
    }
    return parallelize_module(model, tp, plan)


def shard(model: Decoder, dp: DeviceMesh, by: Callable[..., nn.Module], **options: object) -> Decoder:
    for block in model.blocks:
        by(block, mesh=dp, **options)
    by(model, mesh=dp, **options)
    return model


def meshes(names: tuple[str, ...], shape: tuple[int, ...]) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the data-parallel part of the mesh, 1-D or 2-D, and its last axis, the tensor-parallel one."""
    whole = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return (whole[names[:-1]] if len(names) > 2 else whole[names[0]]), whole[names[-1]]


def loss_of(model: nn.Module, step: int, dp: DeviceMesh) -> torch.Tensor:
    """Return the loss of tokens [2, LENGTH] that differ between steps and data-parallel ranks, but not along "tp"."""
    place = sum(at * 10**i for i, at in enumerate(dp.get_coordinate()))
    generator = torch.Generator().manual_seed(1000 * step + place)
    tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=generator)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def in_pairs(sharded: nn.Module, plain: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    for (name, s), (plain_name, p) in zip(sharded.named_parameters(), plain.named_parameters(), strict=True):
        assert name == plain_name
        yield name, s, p


def assert_whole(found: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    """Check that each full DTensor equals the plain tensor of its name; collective."""
    pairs = {}
    for name, dtensor, plain in found:
        assert isinstance(dtensor, DTensor), name
        assert (dtensor.shape, dtensor.stride()) == (plain.shape, plain.stride()), name
        pairs[name] = dtensor.full_tensor(), plain
    assert_all_close(pairs)


def three_steps(
    names: tuple[str, ...], shape: tuple[int, ...], reshard: bool | None = None, *, clip: float = 0.1
) -> None:
    dp, tp = meshes(names, shape)
    plain = make()
    sharded = shard(split(copy.deepcopy(plain), tp), dp, fully_shard, reshard_after_forward=reshard)
    optimizers = [adamw(m.parameters()) for m in (plain, sharded)]
    for step in range(3):
        reference, loss = (loss_of(m, step, dp) for m in (plain, sharded))
        torch.testing.assert_close(loss, reference)
        reference.backward(), loss.backward()
        average_grads(plain)  # over all ranks: each "tp" rank has every batch once
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), clip) for m in (plain, sharded)]
        torch.testing.assert_close(norms[1].full_tensor(), norms[0])
        assert (norms[0] > clip) == (clip < 1)
        assert all(s.grad.placements == s.placements for s in sharded.parameters())
        assert_whole((f"gradient of {name}", s.grad, p.grad) for name, s, p in in_pairs(sharded, plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = plain.state_dict()
    state = sharded.state_dict()
    assert list(state) == list(expected)
    assert_whole((name, value, expected[name]) for name, value in state.items())


@pytest.mark.thorough
def test_fsdp_with_tensor_parallelism_equals_the_plain_model():
    run_cases(4, {reshard: partial(three_steps, *FSDP_TP, reshard) for reshard in (None, True, False)})


@pytest.mark.thorough
def test_hsdp_with_tensor_parallelism_equals_the_plain_model():
    run_cases(4, {shape: partial(three_steps, HSDP_TP, shape) for shape in ((2, 1, 2), (1, 2, 2), (2, 2, 1))})


@pytest.mark.exhaustive
def test_hsdp_with_tensor_parallelism_on_eight_ranks_without_clipping():
    run_ranks(8, partial(three_steps, HSDP_TP, (2, 2, 2), clip=100.0))


# ---- the layout next to torch's


def layout(param: DTensor) -> dict[str, object]:
    mesh = param.device_mesh
    return {
        "placements": param.placements,
        "mesh": mesh.mesh.tolist(),
        "names": mesh.mesh_dim_names,
        "shape": (param.shape, param.stride()),
        "local": param.to_local().shape,
        "requires_grad": param.requires_grad,
    }


def both_layouts(names: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, dict[str, object]]:
    dp, tp = meshes(names, shape)
    ours, theirs = (shard(split(make(), tp), dp, by) for by in (fully_shard, torch_fully_shard))
    for name, a, b in in_pairs(ours, theirs):
        assert layout(a) == layout(b), name
        assert torch.equal(a.to_local(), b.to_local()), name
    losses = [loss_of(m, 0, dp) for m in (ours, theirs)]
    for loss in losses:
        loss.backward()
    for name, a, b in in_pairs(ours, theirs):
        assert layout(a.grad) == layout(b.grad), name
        torch.testing.assert_close(a.grad.to_local(), b.grad.to_local())
    return {
        name: {"names": p.device_mesh.mesh_dim_names, "text": str(p.placements)} for name, p in ours.named_parameters()
    }


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's engine warns of a view as output
def test_meshes_placements_and_shards_are_torchs():
    cases = (FSDP_TP, (HSDP_TP, (2, 1, 2)), (HSDP_TP, (1, 2, 2)))
    for (names, _), found in run_cases(4, {case: partial(both_layouts, *case) for case in cases})[0].items():
        replicate = "Replicate(), " if len(names) == 3 else ""
        assert {name: value["names"] for name, value in found.items()} == dict.fromkeys(found, names)
        placed = {name: value["text"].replace("dim=", "").replace("sf=", "") for name, value in found.items()}
        assert placed["blocks.0.norm.weight"] == f"({replicate}Shard(0), Replicate())"
        assert placed["blocks.0.down.weight"] == f"({replicate}Shard(0), Shard(1))"
        for name in ("blocks.0.up.weight", "blocks.0.up.bias", "embed.weight", "head.weight"):
            assert placed[name] == f"({replicate}_StridedShard(0, 2), Shard(0))"


class PartlySplit(nn.Module):
    """A unit of which tensor parallelism splits only one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(DIM, HIDDEN, bias=False), nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) * self.scale


def partly_split(frozen: bool) -> None:
    dp, tp = meshes(*FSDP_TP)
    torch.manual_seed(0)
    plain = PartlySplit()
    plain.up.requires_grad_(not frozen)
    sharded = parallelize_module(copy.deepcopy(plain), tp, {"up": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(sharded, mesh=dp)
    assert sharded.scale.device_mesh.mesh_dim_names == ("dp",)
    assert sharded.up.weight.device_mesh.mesh_dim_names == ("dp", "tp")
    optimizers = [torch.optim.SGD((p for p in m.parameters() if p.requires_grad), lr=0.1) for m in (plain, sharded)]
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + dp.get_local_rank())
        x = torch.randn(3, DIM, generator=generator)
        for model in (plain, sharded):
            model(x).square().mean().backward()
        average_grads(plain)
        for name, s, p in in_pairs(sharded, plain):
            assert (s.grad is None) == (p.grad is None) == (frozen and name == "up.weight")
        assert_whole((name, s.grad, p.grad) for name, s, p in in_pairs(sharded, plain) if p.grad is not None)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_whole(in_pairs(sharded, plain))


def test_a_unit_with_split_and_whole_parameters():
    run_cases(4, {frozen: partial(partly_split, frozen) for frozen in (False, True)})


# ---- registered parameters by phase


def forms() -> list[tuple[str, str]]:
    dp, tp = meshes(*FSDP_TP)
    model = shard(split(make(), tp), dp, fully_shard, reshard_after_forward=False)
    seen = []

    def look(when: str) -> None:
        weight = model.blocks[0].up.weight
        mesh = weight.device_mesh.mesh_dim_names if isinstance(weight, DTensor) else None
        seen.append((when, f"{mesh} {list(weight.to_local().shape)}"))

    look("sharded")
    model.blocks[0].unshard()
    look("unsharded")
    model.blocks[0].reshard()
    look("resharded")
    loss = loss_of(model, 0, dp)
    look("after forward")
    loss.backward()
    look("after backward")
    return seen


def test_unsharded_a_split_parameter_is_the_dtensor_that_tensor_parallelism_made():
    whole, part = f"('tp',) {[HIDDEN // 2, DIM]}", "('dp', 'tp') {}"
    for rank, seen in enumerate(run_ranks(4, forms)):
        rows = 3 if rank < 2 else 2  # HIDDEN / 2 = 5 rows, over the two ranks of "dp"
        mine = part.format([rows, DIM])
        assert seen == [
            ("sharded", mine),
            ("unsharded", whole),
            ("resharded", mine),
            ("after forward", whole),
            ("after backward", mine),
        ]


# ---- the law of strided shards, on simulated ranks


def split_by_hand(full: torch.Tensor, dim: int, tp: DeviceMesh) -> nn.Parameter:
    """Return ``full`` as tensor parallelism over ``dim`` leaves it on this rank, without communication."""
    local = full.chunk(tp.size(), dim)[tp.get_local_rank()].contiguous()
    return nn.Parameter(DTensor.from_local(local, tp, [Shard(dim)], run_check=False))


@simulating
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 5), st.integers(1, 3), st.sampled_from([0, 1]))
def test_tensor_parallelism_splits_first_and_fsdp_splits_what_is_left(num_dp, num_tp, rows, columns, tp_dim):
    full = torch.arange(1.0, rows * num_tp * columns * num_tp + 1).view(rows * num_tp, columns * num_tp)
    parts: dict[tuple[int, int], torch.Tensor] = {}
    for rank in range(num_dp * num_tp):
        with simulated_rank(rank, num_dp * num_tp):
            dp, tp = meshes(("dp", "tp"), (num_dp, num_tp))
            module = nn.Module()
            module.weight = split_by_hand(full, tp_dim, tp)
            fully_shard(module, mesh=dp)
            weight = module.weight
            assert weight.device_mesh.mesh_dim_names == ("dp", "tp")
            assert (weight.shape, weight.stride()) == (full.shape, full.stride())
            assert weight.placements[1] == Shard(tp_dim)
            assert isinstance(weight.placements[0], Shard) == (tp_dim == 1 or num_tp == 1)
            parts[dp.get_local_rank(), tp.get_local_rank()] = weight.to_local().detach().clone()
    columns_of_mesh = [torch.cat([parts[i, j] for i in range(num_dp)]) for j in range(num_tp)]
    assert torch.equal(torch.cat(columns_of_mesh, tp_dim), full)
    chunks = columns_of_mesh[0].chunk(num_dp)
    assert all(torch.equal(parts[i, 0], chunk) for i, chunk in enumerate(chunks))


# ---- refused


def same_axis_twice() -> str:
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Linear(4, 4)
    parallelize_module(module, whole["tp"], ColwiseParallel())
    names = [type(p) for p in module.parameters()]
    with pytest.raises(ValueError, match="weight") as refused:
        fully_shard(module, mesh=whole["tp"])
    assert type(module) is nn.Linear
    assert [type(p) for p in module.parameters()] == names
    assert [p.device_mesh.mesh_dim_names for p in module.parameters()] == [("tp",)] * 2
    return str(refused.value)


def test_sharding_over_the_tensor_parallel_axis_itself_is_refused():
    for message in run_ranks(4, same_axis_twice):
        assert "tp" in message
