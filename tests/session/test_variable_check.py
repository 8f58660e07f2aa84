import pytest

from workbench.errors import UsageError
from workbench.events import Unit
from workbench.protocol.commands import Reshard, Unshard
from workbench.protocol.rank_messages import Names
from workbench.session.variable_check import check_function, check_model, everywhere, shard_first, with_path
from workbench.trace.schema import Header

FULL = Names(modules=("model",), variables=("model", "train_step", "_hidden"))
BARE = Names(variables=("train_step",))


def never(name):
    return False


def test_a_name_on_every_rank_is_fine():
    check_model({0: FULL, 1: FULL}, "model.blocks.0", never)
    check_function({0: FULL, 1: BARE}, "train_step", never)
    check_model({}, "model", never)


@pytest.mark.parametrize(
    ("names", "model", "in_notebook", "message"),
    [
        ({0: FULL, 1: BARE, 2: FULL, 3: BARE}, "model", never, "is on ranks 0, 2, not on ranks 1, 3"),
        ({0: BARE, 1: BARE}, "net", lambda name: name == "net", "put the code that defines it in a %%fsdp cell"),
        ({0: BARE}, "net", never, "define it in a %%fsdp cell"),
        ({0: FULL}, "modle", never, "did you mean 'model'? the ranks have model"),
        ({0: FULL}, "zzz.blocks", never, "no rank has a model named 'zzz': the ranks have model"),
    ],
)
def test_a_missing_model_is_reported_with_what_exists(names, model, in_notebook, message):
    with pytest.raises(UsageError) as caught:
        check_model(names, model, in_notebook)
    assert message in str(caught.value)


def test_a_missing_function_names_near_ones():
    with pytest.raises(UsageError, match="did you mean 'train_step'"):
        check_function({0: BARE}, "trainstep", never)
    with pytest.raises(UsageError, match="define it in a %%fsdp cell"):
        check_function({0: BARE}, "zzz", never)


def test_many_names_are_cut():
    many = Names(modules=tuple(f"m{i:02}" for i in range(20)))
    with pytest.raises(UsageError, match=r"m11, \.\.\."):
        check_model({0: many}, "zzz", never)


def test_commands_needed_before_a_step():
    assert "first %fsdp shard model" in str(shard_first({0: FULL}, "step"))
    assert "build a model in a %%fsdp cell" in str(shard_first({}, "step"))


def test_private_names_are_not_offered():
    assert everywhere({0: FULL, 1: BARE}, "variables") == ["model", "train_step"]


def units(*names):
    policy = {"reshard_after_forward": True, "shard_size": 2, "compute_dtype": "float32", "reduce_dtype": "float32"}
    sizes = {"compute_itemsize": 4, "reduce_itemsize": 4}
    return tuple(Unit(index=i, name=name, root=0, params=(), **policy, **sizes) for i, name in enumerate(names))


class Model:
    """The parts of the ranks' information on a model that these tests need."""

    def __init__(self, name, units):
        self.name, self.units = name, units


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("model.layers.1", "net.model.layers.1"),  # the name that shard prints
        ("net.model.layers.1", "net.model.layers.1"),
        ("head", "net.head"),
        ("net", "net"),
        ("model.layers.9", "model.layers.9"),
    ],
)
def test_a_unit_is_found_by_the_name_that_shard_prints(model, path):
    names = ("", "model.layers.0", "model.layers.1", "head")
    header = Header(world_size=2, units=units(*names))
    found = {0: (Model("net", (0, 1, 2, 3)),)}
    assert with_path(Reshard(model=model), lambda: found, header).model == path
    assert with_path(Unshard(model=model), lambda: found, header).model == model


def test_a_unit_of_several_models_is_not_guessed():
    names = ("", "head", "", "head")
    header = Header(world_size=2, units=units(*names))
    found = {0: (Model("a", (0, 1)), Model("b", (2, 3)))}
    with pytest.raises(UsageError, match=r"'head' is a unit of several models; write one of a\.head, b\.head"):
        with_path(Reshard(model="head"), lambda: found, header)
