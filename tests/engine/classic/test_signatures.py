"""Every public call of torch's wrapper works on ours, with the same argument names."""

import copy
import inspect
from enum import Enum

import pytest
import torch.distributed.fsdp as theirs
import torch.distributed.fsdp.wrap as their_policies
from torch import nn
from torch.distributed.fsdp import fully_sharded_data_parallel as their_module

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.wrapped_models import CPU, OURS
from workbench import engine
from workbench.engine import classic
from workbench.engine.classic import wrap as policies
from workbench.engine.classic.attributes import Fixed, WrapperAttributes

THEIRS, MINE = theirs.FullyShardedDataParallel, classic.FullyShardedDataParallel
METHODS = sorted(name for name in dir(THEIRS) if not name.startswith("_") and callable(getattr(THEIRS, name)))


def arguments(fn):
    """Return name, kind and default of each argument; enum members by name, because each API has its own enums."""
    found = inspect.signature(fn).parameters.values()
    return [(each.name, each.kind, getattr(each.default, "name", each.default)) for each in found]


@pytest.mark.parametrize("name", ["__init__", *METHODS])
def test_methods_take_torchs_arguments(name):
    assert arguments(getattr(MINE, name)) == arguments(getattr(THEIRS, name))


def exported():
    both = ((theirs, classic), (their_policies, policies), (their_module, classic))
    return {name: (getattr(mod, name), getattr(ours, name, None)) for mod, ours in both for name in mod.__all__}


def test_every_exported_name_is_offered_where_its_api_is():
    """Names of the second API are in ``workbench.engine``, like ``fully_shard``."""
    missing = {name for name, (_, mine) in exported().items() if mine is None}
    assert "fully_shard" in missing
    assert missing <= set(engine.__all__)
    assert {name for name in missing if f"``{name}``" not in classic.__doc__} == set()


def public(obj):
    return {name for name in dir(obj) if not name.startswith("_")}


def test_every_public_name_of_every_class_is_there():
    """``test_attributes`` compares the attributes of instances."""
    compared = 0
    for name, (their, mine) in exported().items():
        if mine is not None and inspect.isclass(their):
            assert public(their) <= public(mine), name
            compared += 1
    assert compared > 15


def test_members_of_enums_are_torchs():
    kinds = {name: pair for name, pair in exported().items() if inspect.isclass(pair[0]) and issubclass(pair[0], Enum)}
    assert len(kinds) == 4
    for name, (their, mine) in kinds.items():
        assert [(each.name, each.value) for each in mine] == [(each.name, each.value) for each in their], name


def test_the_difference_that_the_package_names_are_the_messages_that_it_gives():
    run_ranks(2, says_so)


def says_so():
    text = " ".join(classic.__doc__.split())
    with pytest.raises(TypeError) as refused:
        MINE(nn.Linear(2, 2), sharding_strategy=theirs.ShardingStrategy.FULL_SHARD, device_id=CPU)
    assert "must be a workbench.engine.classic.ShardingStrategy, got" in str(refused.value)
    assert "must be a workbench.engine.classic.ShardingStrategy, got" in text
    model = MINE(nn.Linear(2, 2), device_id=CPU)
    with pytest.raises(NotImplementedError) as refused:
        copy.deepcopy(model)
    assert "can be neither copied nor pickled" in str(refused.value)
    assert "can be neither copied nor pickled" in text
    fixed = {name for name in vars(WrapperAttributes) if isinstance(vars(WrapperAttributes)[name], Fixed)}
    assert fixed == {name for name in fixed if f"``{name}``" in text}
    with pytest.raises(AttributeError) as refused:
        model.sharding_strategy = None
    began, _, ends = "sharding_strategy of a FullyShardedDataParallel cannot be set to ...: wrap".partition("...")
    assert str(refused.value).startswith(began)
    assert ends in str(refused.value)
    assert f"{began}...{ends}" in text


def test_functions_and_classes_take_torchs_arguments():
    compared = 0
    for name, (their, mine) in exported().items():
        if mine is not None and (inspect.isfunction(their) or (their is not THEIRS and inspect.isclass(their))):
            assert arguments(mine) == arguments(their), name
            compared += 1
    assert compared > 20


def takes_them_by_place():
    model = OURS.FullyShardedDataParallel(nn.Linear(2, 2), device_id=CPU)
    names = ("destination", "prefix", "keep_vars")
    values = ({}, "a.", True)
    for count in range(1, 4):
        with pytest.warns(FutureWarning, match="positional arguments are deprecated"):
            made = model.state_dict(*values[:count])
        assert made is values[0]
        expected = model.state_dict(**dict(zip(names, ({}, *values[1:count]), strict=False)))
        assert list(made) == list(expected)
        assert [each.requires_grad for each in made.values()] == [each.requires_grad for each in expected.values()]
        made.clear()
    seen = [len(list(nn.Sequential(model, model).named_modules(remove_duplicate=each))) for each in (True, False)]
    assert seen == [3, 5]
    assert len(list(model.named_modules(remove_duplicate=False))) == 2


def test_state_dict_takes_arguments_by_place_as_well():
    run_ranks(2, takes_them_by_place)
