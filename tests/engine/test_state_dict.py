"""state_dict and load_state_dict of a sharded model."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import assert_same_shards, shard_net
from tests.helpers.recording_probe import recording
from tests.helpers.small_models import adamw, batch, loss_of, make_net
from tests.helpers.unsharded_copy import train_both
from workbench.events import Category


def shares_storage(a: DTensor, b: DTensor) -> bool:
    return a.to_local().data_ptr() == b.to_local().data_ptr()


def state_dict_of_shards(unsharded_first: bool) -> None:
    plain = make_net(num_blocks=1)
    model = shard_net(copy.deepcopy(plain))
    if unsharded_first:
        model(batch(0, 0))
        assert not isinstance(model.embed.weight, DTensor)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for (name, value), param in zip(state.items(), model.parameters(), strict=True):
        assert isinstance(value, DTensor), name
        assert shares_storage(value, param)
        assert torch.equal(value.full_tensor(), plain.state_dict()[name])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("unsharded_first", [False, True])
def test_state_dict_holds_the_shards_themselves(world_size, unsharded_first):
    run_ranks(world_size, state_dict_of_shards, unsharded_first)


def round_trip(assign: bool, unsharded_first: bool) -> None:
    source = make_net(seed=1, num_blocks=2)
    state = {name: v.clone() for name, v in shard_net(copy.deepcopy(source)).state_dict().items()}
    with recording() as record:
        model = shard_net(make_net(seed=2, num_blocks=2), reshard_after_forward=False)
        pointers = [p.to_local().data_ptr() for p in model.parameters()]
        at_rest = record.alive
        if assign:
            at_rest = {Category.SHARDED_PARAMS: sum(value.to_local().nbytes for value in state.values())}
        if unsharded_first:
            with torch.no_grad():
                model(batch(0, 0))  # the policy keeps all units full
        assert model.load_state_dict(state, assign=assign).missing_keys == []
    assert record.alive == at_rest  # the replaced values are freed, and the new ones have no padding
    assert_same_shards(model, source)
    wanted = [v.to_local().data_ptr() for v in state.values()] if assign else pointers
    assert [p.to_local().data_ptr() for p in model.parameters()] == wanted
    train_both(source, model, 2)
    assert [p.to_local().data_ptr() for p in model.parameters()] == wanted


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("unsharded_first", [False, True])
def test_load_state_dict_round_trip(world_size, assign, unsharded_first):
    run_ranks(world_size, round_trip, assign, unsharded_first)


def in_pieces() -> None:
    source = make_net(seed=1, num_blocks=2)
    state = shard_net(copy.deepcopy(source)).state_dict()
    model = shard_net(make_net(seed=2, num_blocks=2))
    train_both(copy.deepcopy(make_net(seed=2, num_blocks=2)), model, 1)
    names = list(state)
    for part in (names[::2], names[1::2]):
        result = model.load_state_dict({name: state[name] for name in part}, strict=False, assign=True)
        assert sorted(result.missing_keys) == sorted(set(names) - set(part))
    assert_same_shards(model, source)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_dict_loaded_in_pieces(world_size):
    run_ranks(world_size, in_pieces)


def loaded_on_meta() -> None:
    source = make_net(num_blocks=2)
    with torch.device("meta"):
        model = shard_net(make_net(num_blocks=2))
    mesh = model.embed.weight.device_mesh
    state = {
        name: distribute_tensor(v, mesh, model.get_parameter(name).placements)
        for name, v in source.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    train_both(source, model, 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_dict_assigned_on_meta(world_size):
    run_ranks(world_size, loaded_on_meta)


def plain_values(unsharded_first: bool) -> str:
    source = make_net(seed=1, num_blocks=2)
    model = shard_net(make_net(seed=2, num_blocks=2), reshard_after_forward=False)
    if unsharded_first:
        model(batch(0, 0))
    mixed = model.state_dict() | {"blocks.1.mlp.0.weight": source.blocks[1].mlp[0].weight}
    with pytest.raises(TypeError) as refused:
        model.load_state_dict(mixed, assign=True)
    assert_same_shards(model, make_net(seed=2, num_blocks=2))
    set_model_state_dict(model, source.state_dict(), options=StateDictOptions(full_state_dict=True))
    assert_same_shards(model, source)
    train_both(source, model, 2)
    return str(refused.value)


@pytest.mark.parametrize("unsharded_first", [False, True])
def test_assigning_a_whole_tensor_loads_nothing_and_names_the_call_that_loads_it(unsharded_first):
    for message in run_ranks(2, plain_values, unsharded_first):
        assert message.startswith("load_state_dict(assign=True): parameter 'blocks.1.mlp.0.weight' is sharded")
        assert "set_model_state_dict(model, state_dict, options=StateDictOptions(full_state_dict=True))" in message


def of_another_mesh(assign: bool) -> None:
    model, mesh = shard_net(make_net(seed=2, num_blocks=2)), init_device_mesh("cpu", (2, 1))
    values = make_net(seed=1, num_blocks=2).state_dict()
    state = {name: distribute_tensor(value, mesh, [Shard(0), Replicate()]) for name, value in values.items()}
    with pytest.raises(ValueError, match="was saved on a mesh of 2x1 ranks, and is sharded over 2 here; nothing was"):
        model.load_state_dict(state, assign=assign)
    assert_same_shards(model, make_net(seed=2, num_blocks=2))


@pytest.mark.parametrize("assign", [False, True])
def test_parts_of_another_mesh_load_nothing(assign):
    run_ranks(2, of_another_mesh, assign)


def of_an_optimizer() -> None:
    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            loss_of(model, batch(dist.get_rank(), step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    models = [shard_net(make_net(num_blocks=1)) for _ in range(2)]
    first, second = (adamw(m.parameters()) for m in models)
    trained(models[0], first, range(2))
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # an optimizer loads tensors without copying them
    trained(models[0], first, range(2, 4))
    trained(models[1], second, range(2, 4))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())


@pytest.mark.parametrize("world_size", [1, 2])
def test_model_and_optimizer_resume_bit_identically_from_their_state_dicts(world_size):
    run_ranks(world_size, of_an_optimizer)
