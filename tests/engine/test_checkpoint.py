"""torch.distributed.checkpoint and its state dict functions: save on some ranks, load on others."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.pairwise import quick
from tests.helpers.parity import assert_same_shards
from tests.helpers.small_models import batch, loss_of, make_net
from workbench.engine import fully_shard

BEFORE, AFTER = range(2), range(2, 4)  # steps before and after the checkpoint
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def mesh_of(kind: str) -> DeviceMesh:
    """Return a mesh of all ranks ("1-D") or of 2 replicas ("HSDP")."""
    if kind == "1-D":
        return init_device_mesh("cpu", (dist.get_world_size(),))
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def make_plain(seed: int = 0) -> nn.Module:
    """Blocks split evenly over 2 and 4 ranks, the embedding does not; float64 hides the order of sums."""
    return make_net(seed, dim=8, num_blocks=2, vocab=7).double()


def shard(model: nn.Module, kind: str, wrap: Callable[..., object] = fully_shard) -> nn.Module:
    mesh = mesh_of(kind)
    for block in model.blocks:
        wrap(block, mesh=mesh)
    wrap(model, mesh=mesh)
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sharded(kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.AdamW]:
    model = shard(make_plain(seed), kind)
    return model, adamw(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train on the same batches, split over any number of ranks; return the mean losses over all ranks."""
    losses = []
    for step in steps:
        rows = batch(0, step, size=4).chunk(dist.get_world_size())[dist.get_rank()]
        loss = loss_of(model, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def assert_close(losses: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))


# ---- saved on some ranks, loaded on others


def save_on_the_way(kind: str, folder: Path) -> list[float]:
    """Train, save in every way, train on; return the losses after the checkpoint."""
    model, optimizer = sharded(kind)
    train(model, optimizer, BEFORE)
    functions = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(functions, checkpoint_id=folder / "functions")
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder / "plain")
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "stateful")
    return train(model, optimizer, AFTER)


def load_functions(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def load_plain(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    train(model, optimizer, range(1))  # creates a state dict to load into; loading overwrites the values
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)  # loads in place, into the parameters' storage
    optimizer.load_state_dict(state["optimizer"])


def load_stateful(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    train(model, optimizer, range(1))
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


WAYS = {"functions": load_functions, "plain": load_plain, "stateful": load_stateful}


def load_and_go_on(way: str, kind: str, folder: Path) -> list[float]:
    model, optimizer = sharded(kind, seed=1)
    WAYS[way](model, optimizer, folder / way)
    return train(model, optimizer, AFTER)


def go_on_from_each(kind: str, folders: dict[str, Path]) -> dict[tuple[str, str], list[float]]:
    """Load every checkpoint in every way; return the losses after it, by the mesh that saved it and the way.

    All cases run on the same ranks, because each process must learn once how an operation acts on DTensors.
    """
    return {(saved, way): load_and_go_on(way, kind, folder) for saved, folder in folders.items() for way in WAYS}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[dict[str, Path], dict[str, list[float]]]:
    """Return the checkpoint folders of 4 ranks by mesh, and the losses after each checkpoint."""
    folders = {kind: tmp_path_factory.mktemp("checkpoint") for kind in ("1-D", "HSDP")}
    expected = {}
    for kind, folder in folders.items():
        losses = run_ranks(4, save_on_the_way, kind, folder)
        assert all(each == losses[0] for each in losses)
        expected[kind] = losses[0]
    return folders, expected


@pytest.fixture(scope="module", params=quick([(4, "1-D"), (4, "HSDP"), (2, "1-D"), (1, "1-D")], [(1, "1-D")]), ids=str)
def gone_on(request, checkpoints) -> list[dict[tuple[str, str], list[float]]]:
    """Return the result of :func:`go_on_from_each` on each rank of a mesh."""
    world_size, kind = request.param
    return run_ranks(world_size, go_on_from_each, kind, checkpoints[0])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("saved", ["1-D", "HSDP"])
def test_a_resumed_run_on_other_ranks_matches_the_uninterrupted_one(checkpoints, gone_on, saved, way):
    for losses in gone_on:
        assert_close(losses[saved, way], checkpoints[1][saved])


# ---- the full state on rank 0


def full_state_on_rank_0(kind: str, path: Path) -> None:
    model, optimizer = sharded(kind)
    train(model, optimizer, BEFORE)
    values = [p.full_tensor() for p in model.parameters()]
    states = get_state_dict(model, optimizer, options=ON_RANK_0)
    if dist.get_rank():
        assert states == ({}, {})
    else:
        assert list(states[0]) == [name for name, _ in model.named_parameters()]
        for full, value in zip(states[0].values(), values, strict=True):
            assert type(full) is torch.Tensor
            assert torch.equal(full, value)
        torch.save(states, path)
    expected = train(model, optimizer, AFTER)

    other, other_optimizer = sharded(kind, seed=1)
    # only rank 0 reads the file; weights_only runs no code from it
    states = ({}, {}) if dist.get_rank() else torch.load(path, weights_only=True)
    set_model_state_dict(other, states[0], options=FROM_RANK_0)
    set_optimizer_state_dict(other, other_optimizer, states[1], options=FROM_RANK_0)
    assert train(other, other_optimizer, AFTER) == expected


@pytest.mark.parametrize(("world_size", "kind"), [(4, "HSDP"), (2, "1-D"), (1, "1-D")])
def test_the_full_state_goes_to_rank_0_and_back_bit_identically(world_size, kind, tmp_path):
    run_ranks(world_size, full_state_on_rank_0, kind, tmp_path / "full.pt")


def full_state_into_meta(kind: str) -> None:
    source = make_plain(1)
    with torch.device("meta"):
        model = shard(make_plain(), kind)
    state = {} if dist.get_rank() else source.state_dict()
    set_model_state_dict(model, state, options=FROM_RANK_0)
    assert_same_shards(model, source)
    whole = copy.deepcopy(source)
    train(model, adamw(model), BEFORE)
    optimizer = adamw(whole)
    for step in BEFORE:
        loss_of(whole, batch(0, step, size=4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_shards(model, whole)


# to choose a device for a meta model's values, torch makes a deprecated call
@pytest.mark.filterwarnings("ignore:`_get_pg_default_device` will be deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:Multiple backends are registered with this ProcessGroup:UserWarning")
@pytest.mark.parametrize(("world_size", "kind"), [(4, "HSDP"), (2, "1-D")])
def test_a_model_on_meta_takes_its_values_from_rank_0(world_size, kind):
    run_ranks(world_size, full_state_into_meta, kind)


# ---- between our engine and torch's


def moves_over(folder: Path) -> None:
    wraps = {"ours": fully_shard, "torch's": torch_fully_shard}
    for first, second in [("ours", "torch's"), ("torch's", "ours")]:
        models = [shard(make_plain(seed), "1-D", wraps[name]) for seed, name in enumerate((first, second))]
        optimizers = [adamw(model) for model in models]
        train(models[0], optimizers[0], BEFORE)
        state = {"model": models[0].state_dict(), "optimizer": get_optimizer_state_dict(models[0], optimizers[0])}
        dcp.save(state, checkpoint_id=folder / first)
        load_functions(models[1], optimizers[1], folder / first)
        losses = [train(*pair, AFTER) for pair in zip(models, optimizers, strict=True)]
        assert_close(*losses)


def test_a_checkpoint_of_ours_is_one_of_torchs_and_the_other_way_round(tmp_path):
    run_ranks(2, moves_over, tmp_path)


# ---- state dicts of shards


def pointers(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: value.to_local().data_ptr() for name, value in tensors.items()}


def kept_state_dict(kind: str) -> None:
    model, optimizer = sharded(kind)
    kept = model.state_dict()
    before = pointers(kept)
    train(model, optimizer, BEFORE)
    assert pointers(dict(model.named_parameters())) == before  # training updates its tensors in place
    other = {name: value.clone() for name, value in shard(make_plain(1), kind).state_dict().items()}
    model.load_state_dict(other)
    for name, value in model.state_dict().items():
        assert value.to_local().data_ptr() == before[name]
        assert torch.equal(kept[name].to_local(), other[name].to_local())
    train(model, optimizer, AFTER)
    assert pointers(dict(model.named_parameters())) == before


@pytest.mark.parametrize(("world_size", "kind"), [(4, "HSDP"), (2, "1-D"), (1, "1-D")])
def test_a_state_dict_stays_the_parameters_storage_through_steps_and_loads(world_size, kind):
    run_ranks(world_size, kept_state_dict, kind)


def assigned_in_pieces(kind: str) -> None:
    source = make_plain(1)
    state = shard(copy.deepcopy(source), kind).state_dict()
    model = shard(make_plain(), kind)
    names = list(state)
    for part in (names[::3], names[1::3], names[2::3]):
        result = model.load_state_dict({name: state[name] for name in part}, strict=False, assign=True)
        assert set(result.missing_keys) == set(names) - set(part)
        assert result.unexpected_keys == []
    assert_same_shards(model, source)
    reference, optimizer = shard(copy.deepcopy(source), kind), adamw(model)
    assert train(model, optimizer, BEFORE) == train(reference, adamw(reference), BEFORE)
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        assert torch.equal(ours.to_local(), expected.to_local())


@pytest.mark.parametrize(("world_size", "kind"), [(4, "HSDP"), (2, "1-D"), (1, "1-D")])
def test_a_state_dict_assigned_in_pieces_trains_on(world_size, kind):
    run_ranks(world_size, assigned_in_pieces, kind)


def saved_by_each_rank(kind: str, folder: Path) -> None:
    model, optimizer = sharded(kind)
    train(model, optimizer, BEFORE)
    path = folder / f"{dist.get_rank()}.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    average = copy.deepcopy(model.state_dict())  # as for the start of an average over the steps
    expected = train(model, optimizer, AFTER)
    state = torch.load(path, weights_only=True)
    for name, value in state["model"].items():
        assert torch.equal(value.to_local(), average[name].to_local())
    other, other_optimizer = sharded(kind, seed=1)
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    assert train(other, other_optimizer, AFTER) == expected


@pytest.mark.parametrize(("world_size", "kind"), [(4, "HSDP"), (2, "1-D")])
def test_each_rank_may_save_its_own_shards_in_a_file_of_weights_only(world_size, kind, tmp_path):
    run_ranks(world_size, saved_by_each_rank, kind, tmp_path)
