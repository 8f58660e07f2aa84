from contextlib import nullcontext
from dataclasses import replace

import pytest

from workbench.errors import UsageError
from workbench.events import FlatPart, Param, Unit
from workbench.protocol.commands import Pause, Reshard, Run, Shard, Step, Unshard, Verify
from workbench.protocol.rank_messages import Names
from workbench.protocol.starting import ConnectReply
from workbench.session.variable_check import (
    check,
    check_function,
    check_model,
    check_parameter,
    everywhere,
    on_hosts,
    shard_first,
    unit_paths,
    with_path,
    with_script,
)
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
        (
            {0: FULL, 1: BARE, 2: FULL, 3: BARE},
            "model",
            never,
            "model 'model' is on ranks 0, 2, not on ranks 1, 3: define it in a %%fsdp cell without -t",
        ),
        (
            {0: BARE, 1: BARE},
            "net",
            lambda name: name == "net",
            "'net' is in this notebook, not on the ranks: put the code that defines it in a %%fsdp cell",
        ),
        ({0: BARE}, "net", never, "no rank has a model named 'net': define it in a %%fsdp cell"),
        ({0: FULL}, "modle", never, "no rank has a model named 'modle': did you mean 'model'? the ranks have model"),
        ({0: FULL}, "zzz.blocks", never, "no rank has a model named 'zzz': the ranks have model"),
    ],
)
def test_a_missing_model_is_reported_with_what_exists(names, model, in_notebook, message):
    with pytest.raises(UsageError) as caught:
        check_model(names, model, in_notebook)
    assert str(caught.value) == message


def test_a_missing_function_names_near_ones():
    near = "^no rank has a function named 'trainstep': did you mean 'train_step'\\? the ranks have train_step$"
    with pytest.raises(UsageError, match=near):
        check_function({0: BARE}, "trainstep", never)
    with pytest.raises(UsageError, match=r"^no rank has a function named 'zzz': define it in a %%fsdp cell$"):
        check_function({0: BARE}, "zzz", never)


def test_many_names_are_cut():
    for number, more in ((12, ""), (13, ", ...")):
        many = Names(modules=tuple(f"m{i:02}" for i in range(number)))
        first = ", ".join(f"m{i:02}" for i in range(12))
        with pytest.raises(UsageError, match=f"^no rank has a model named 'zzz': the ranks have {first}{more}$"):
            check_model({0: many}, "zzz", never)


NOTHING = "nothing is sharded yet, so there is nothing to {}: first "


def test_what_to_run_before_a_step():
    assert str(shard_first({0: FULL}, "step")) == NOTHING.format("step") + "%fsdp shard model"
    build = "build a model in a %%fsdp cell, then %fsdp shard MODEL"
    assert str(shard_first({}, "verify")) == NOTHING.format("verify") + build


def test_commands_needed_before_a_step():
    known = [f"blocks.{i}.weight" for i in range(6)]
    check_parameter("blocks.2.weight", known)
    check_parameter("model.blocks.2.weight", known)
    near = "blocks.2.weight, blocks.0.weight, blocks.1.weight, blocks.3.weight, blocks.4.weight"
    with pytest.raises(
        UsageError, match=r"^there is no parameter 'block.2.weight'; the parameters, nearest first: "
    ) as no:
        check_parameter("block.2.weight", known)
    assert str(no.value).endswith(f"nearest first: {near}")
    with pytest.raises(UsageError, match=r"^there is no parameter 'w'; the parameters, nearest first: none$"):
        check_parameter("w", [])


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


def test_units_that_can_be_resharded_alone_have_a_path():
    flat = FlatPart(fqn="w", shape=(2,), global_shape=(2,), first=0)
    param = Param(
        **{"fqn": "w", "shape": (2,), "global_shape": (2,), "dtype": "float32", "itemsize": 4, "shard_dim": 0},
        **{"rows_per_rank": (1, 1), "padded_rows": 1, "parts": (flat,)},
    )
    root, first, several, classic = units("", "a", "b, c", "d")
    found = {0: (Model("net", (0, 1, 2, 3)), Model("_own", (0, 1))), 1: (Model("also", (1,)),)}
    assert unit_paths(found, (root, first, several, replace(classic, params=(param,)))) == ["also.a", "net.a", "net.b"]


def on(*hosts):
    """Return ranks on these hosts."""
    return [ConnectReply(rank=rank, host=host, device="cpu", pid=rank) for rank, host in enumerate(hosts)]


def test_a_mesh_of_hosts_is_resolved_for_the_ranks_there_are():
    ranks = on("a", "a", "b", "b")
    assert on_hosts(Shard("m", mesh="hosts"), ranks).mesh == (2, 2)
    assert on_hosts(Reshard("m", mesh="hosts"), ranks[:2]).mesh == (2,)
    assert on_hosts(Pause(), ranks) == Pause()
    with pytest.raises(
        UsageError, match=r"^%fsdp shard: mesh hosts needs the same number of ranks on every host, not "
    ):
        on_hosts(Shard("m", mesh="hosts"), ranks[:3])


SHARDED = Header(world_size=2, units=units("", "head"))


@pytest.mark.parametrize(
    ("command", "header", "message"),
    [
        (Step(), SHARDED, ""),
        (Step(until="forward:head"), SHARDED, ""),
        (Step(until="forward"), SHARDED, ""),
        (Verify("model"), SHARDED, ""),
        (Pause(), Header(), ""),
        (Shard("model"), Header(), ""),
        (Shard("model", mesh="2x2"), Header(), "%fsdp shard: mesh 2x2 = 4 does not match the number of ranks, 2; "),
        (
            Shard("model", reshard_after_forward=2),
            Header(),
            "%fsdp shard: reshard_after_forward 2 does not split the 2 ",
        ),
        (Reshard("model", reshard_after_forward=2), SHARDED, ""),
        (Step(), Header(), NOTHING.format("step") + "%fsdp shard model"),
        (Verify(), Header(), NOTHING.format("verify") + "%fsdp shard model"),
        (Reshard("model"), Header(), NOTHING.format("reshard") + "%fsdp shard model"),
        (Step(until="forward:hed"), SHARDED, "there is no unit 'hed'; the units, nearest first: head, (root)"),
        (Step(fn="go"), SHARDED, "no rank has a function named 'go': define it in a %%fsdp cell"),
        (Verify("net"), SHARDED, "no rank has a model named 'net': the ranks have model"),
        (Unshard("net"), Header(), "no rank has a model named 'net': the ranks have model"),
    ],
)
def test_what_not_all_ranks_could_do_is_refused_before_any_begins(command, header, message):
    with pytest.raises(UsageError) if message else nullcontext() as caught:
        check(command, {0: FULL, 1: FULL}, header, 2, never)
    assert not message or str(caught.value).startswith(message)


def test_a_script_gets_its_full_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    for script in ("train.py", "./train.py", "~/train.py"):
        path = with_script(Run(script, ("--lr", "1"))).script
        assert path.startswith(str(tmp_path))
        assert path.endswith("train.py")
    assert with_script(Run("package.train", module=True)).script == "package.train"
    assert with_script(Pause()) == Pause()


def test_a_script_that_is_not_found_is_refused_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(UsageError, match=r"there is no script trian\.py in .*, did you mean 'train\.py'\?$"):
        with_script(Run("trian.py"))
    with pytest.raises(UsageError, match=r"there is no script folder\.py"):
        with_script(Run("folder.py"))
