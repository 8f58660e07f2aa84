"""A wrapper's attributes equal those of torch's wrapper; setting one has an effect or raises an error that says why."""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_sharded_data_parallel as their_module

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.recording_probe import recording
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.wrapped_models import CPU, OURS, THEIRS, steps_of, whole, wrap_net
from workbench.events import Kind

OF_SCRIPTS = (
    "backward_prefetch",
    "compute_device",
    "cpu_offload",
    "forward_prefetch",
    "limit_all_gathers",
    "mixed_precision",
    "params",
    "process_group",
    "rank",
    "sharding_strategy",
    "training_state",
    "world_size",
)


def plain_value(name, value):
    """Convert an attribute of either wrapper to a comparable value."""
    if name == "process_group":
        return dist.get_process_group_ranks(value)
    if name == "params":
        return len(value)
    if name == "mixed_precision":
        return [getattr(value, field) for field in ("param_dtype", "reduce_dtype", "cast_forward_inputs")]
    return getattr(value, "name", getattr(value, "offload_params", value))


def has_all_of_them(strategy):
    for options in ({}, {"use_orig_params": True}, {"forward_prefetch": True, "limit_all_gathers": False}):
        found = []
        for api in (OURS, THEIRS):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                precision = api.MixedPrecision(param_dtype=torch.bfloat16)
                model = wrap_net(
                    api,
                    make_net(),
                    strategy,
                    mixed_precision=precision,
                    backward_prefetch=api.BackwardPrefetch.BACKWARD_POST,
                    **options,
                )
            public = {name for name in vars(model) if not name.startswith("_")} - set(vars(nn.Module()))
            if api is THEIRS:
                assert public == set(OF_SCRIPTS)
            elif dist.get_world_size() == 1 and strategy != "NO_SHARD":
                assert {str(each.message) for each in caught} == {
                    f"FullyShardedDataParallel: on one rank, {strategy} is the same as NO_SHARD; start several "
                    "ranks, or pass a process_group= or device_mesh= of several"
                }
                assert {each.filename for each in caught} == {wrap_net.__code__.co_filename}
            else:
                assert not caught
            wrappers = api.FullyShardedDataParallel.fsdp_modules(model)
            found.append([{name: plain_value(name, getattr(w, name)) for name in OF_SCRIPTS} for w in wrappers])
        assert found[0] == found[1]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_every_public_attribute_has_torchs_value(world_size, strategy):
    run_ranks(world_size, has_all_of_them, strategy)


def states_of(api):
    model = wrap_net(api, make_net(), use_orig_params=True)
    inner = model.blocks[1]
    seen = []

    def look(where):
        seen.append((where, model.training_state.name, inner.training_state.name))

    look("made")
    inner.module.register_forward_hook(lambda *_: look("forward of the inner one"))
    model.blocks[2].module.register_forward_hook(lambda *_: look("forward of the next"))
    loss = loss_of(model, batch(dist.get_rank(), 0))
    look("between")
    inner.module.norm.weight.register_hook(lambda grad: look("backward"))
    loss.register_hook(lambda grad: look("begin of backward"))
    loss.backward()
    look("after")
    with api.FullyShardedDataParallel.summon_full_params(model):
        look("summoned")
    with api.FullyShardedDataParallel.summon_full_params(inner):
        look("inner summoned")
    look("end")
    return seen


def says_what_it_does():
    ours, theirs = map(states_of, (OURS, THEIRS))
    assert ours == theirs
    assert {name for _, *names in ours for name in names} == {state.name for state in OURS.WrapperTrainingState}
    assert [state.name for state in OURS.WrapperTrainingState] == [state.name for state in their_module.TrainingState]


def test_the_training_state_is_torchs_at_every_point():
    run_ranks(2, says_what_it_does)


def gathers_of(model):
    """Return the order of gathers and reductions in one more training step."""
    steps = steps_of(model)
    next(steps)
    with recording() as record:
        next(steps)
    rows = [row[:3] for row in record.rows if row[0] in {Kind.ALL_GATHER, Kind.REDUCE_SCATTER}]
    first = min(unit for *_, unit in rows)
    return [(kind, edge, unit - first) for kind, edge, unit in rows]


def set_later():
    def made(**options):
        return wrap_net(OURS, make_net(), **options)

    prefetches = [OURS.BackwardPrefetch.BACKWARD_PRE, OURS.BackwardPrefetch.BACKWARD_POST, None]
    orders = []
    for backward, forward in itertools.product(prefetches, (True, False)):
        expected = gathers_of(made(backward_prefetch=backward, forward_prefetch=forward))
        model = made(backward_prefetch=prefetches[backward is not None], forward_prefetch=not forward)
        for wrapper in OURS.FullyShardedDataParallel.fsdp_modules(model):
            wrapper.backward_prefetch, wrapper.forward_prefetch, wrapper.limit_all_gathers = backward, forward, False
            assert (wrapper.backward_prefetch, wrapper.forward_prefetch) == (backward, forward)
            assert wrapper.limit_all_gathers is False
        assert gathers_of(model) == expected
        orders.append(expected)
    assert len({tuple(order) for order in orders}) > 1
    for name, value in {
        "backward_prefetch": THEIRS.BackwardPrefetch.BACKWARD_PRE,
        "forward_prefetch": 1,
        "limit_all_gathers": None,
    }.items():
        before = getattr(model, name)
        with pytest.raises(TypeError, match=name):
            setattr(model, name, value)
        assert getattr(model, name) == before


def test_prefetching_can_be_set_afterwards():
    run_ranks(2, set_later)


def refuses():
    model = wrap_net(OURS, make_net())
    for name in set(OF_SCRIPTS) - {"backward_prefetch", "forward_prefetch", "limit_all_gathers"}:
        before = getattr(model, name)
        with pytest.raises(AttributeError, match=f"{name} of a Fully.* cannot be set to None: .{{20}}"):
            setattr(model, name, None)
        assert plain_value(name, getattr(model, name)) == plain_value(name, before)


def test_read_only_attributes_say_what_to_do():
    run_ranks(2, refuses)


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Sequential(nn.Linear(4, 4)))


def keeps_batch_norms_in_units():
    found = []
    for api in (OURS, THEIRS):
        torch.manual_seed(0)
        model = api.FullyShardedDataParallel(
            Normed(), auto_wrap_policy=api.ModuleWrapPolicy({nn.Sequential}), device_id=CPU
        )
        model(torch.ones(3, 4) * dist.get_rank()).sum().backward()
        modules = [type(m).__name__ for m in model.modules()]
        found.append((modules, list(whole(model).values())))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1])


def test_without_mixed_precision_batch_norms_are_no_units():
    run_ranks(2, keeps_batch_norms_in_units)
