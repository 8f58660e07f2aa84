import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import command_strategies
from workbench.magics.command_lines import WORDS, parse_line
from workbench.protocol import commands as all_commands
from workbench.protocol.commands import (
    COMMANDS,
    ON_RANKS,
    Abort,
    Break,
    Cell,
    Command,
    Compare,
    Continue,
    Evaluate,
    Export,
    Inspect,
    Next,
    Open,
    Pause,
    Reshard,
    Shard,
    Start,
    Step,
    Unshard,
    Verify,
    Where,
    from_dict,
    summary,
    to_dict,
    to_text,
)


def test_every_command_has_its_own_word():
    defined = {c for c in vars(all_commands).values() if isinstance(c, type) and issubclass(c, Command) and c.word}
    assert defined - {Cell} == set(COMMANDS.values())


def no_variable(name):
    raise AssertionError(f"{{{name}}} of a text was taken for a variable")


@pytest.mark.parametrize("word", WORDS)
@given(data=st.data())
def test_the_line_of_a_command_makes_it_again(word: str, data: st.DataObject):
    command = data.draw(command_strategies.commands(WORDS[word]))
    assert parse_line(to_text(command), no_variable) == command


@pytest.mark.parametrize("word", ON_RANKS)
@given(data=st.data())
def test_rank_commands_survive_the_wire(word: str, data: st.DataObject):
    command = data.draw(command_strategies.commands(ON_RANKS[word]))
    assert from_dict(json.loads(json.dumps(to_dict(command)))) == command


@pytest.mark.parametrize("text", command_strategies.ODD)
@pytest.mark.parametrize("make", [Inspect, Open, partial(Break, "add"), lambda text: Compare("--", text)])
def test_an_odd_text_by_place_makes_it_again(make, text):
    if text or make in (Inspect, Open):
        assert parse_line(to_text(make(text)), no_variable) == make(text)


@pytest.mark.parametrize("code", command_strategies.CODE)
@pytest.mark.parametrize("ranks", [(), (0, 2)])
def test_code_makes_it_again(code, ranks):
    assert parse_line(to_text(Evaluate(code, ranks)), no_variable) == Evaluate(code, ranks)
    assert parse_line(to_text(Break("add", "-x", when=code)), no_variable) == Break("add", "-x", when=code)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (Shard(model="model"), "shard model"),
        (Shard(model="net.body", wrap=("Block", "Head")), "shard net.body --wrap Block,Head"),
        (Shard(model="m", reshard_after_forward="false"), "shard m --reshard-after-forward false"),
        (Shard(model="m", ignore=("*.bias", "-odd one")), "shard m --ignore '*.bias,-odd one'"),
        (Shard(model="m", ignore=("-x",)), "shard m --ignore=-x"),
        (
            Shard(model="m", mesh=(2, 4), mp="bf16,reduce=fp32", offload=True, prefetch=2, reshard_after_forward=4),
            "shard m --mesh 2x4 --reshard-after-forward 4 --mp bf16,reduce=fp32 --offload --prefetch 2",
        ),
        (Shard(model="m", mesh=(4,), mp="off", offload=False, prefetch=0), "shard m --mesh 4"),
        (
            Shard(model="m", api="classic", strategy="hybrid", mesh="2x2", orig_params=True, mp="bf16", prefetch=1),
            "shard m --mesh 2x2 --api classic --strategy hybrid --orig-params --mp bf16 --prefetch 1",
        ),
        (Reshard(model="m", api="classic", strategy="grad"), "reshard m --api classic --strategy grad"),
        (Reshard(model="m", api="fully_shard", orig_params=False), "reshard m --api fully_shard --no-orig-params"),
        (Reshard(model="m"), "reshard m"),
        (Reshard(model="m", wrap=("Block",), mesh=(4,)), "reshard m --wrap Block --mesh 4"),
        (Reshard(model="m", mp="off", offload=False, prefetch=0), "reshard m --mp off --no-offload --prefetch 0"),
        (Reshard(model="m", reshard_after_forward="auto"), "reshard m --reshard-after-forward auto"),
        (Unshard(model="m"), "unshard m"),
        (Step(), "step"),
        (Step(count=40, fn="go"), "step 40 --fn go"),
        (
            Step(count=3, until="all_gather:blocks.2", background=True),
            "step 3 --until all_gather:blocks.2 --background",
        ),
        (Verify(), "verify"),
        (Pause(), "pause"),
        (Continue(), "continue"),
        (Next(), "next"),
        (Next(what="unit"), "next unit"),
        (Abort(), "abort"),
        (Break("add", "all_gather:blocks.*"), "break add 'all_gather:blocks.*'"),
        (Break("add", "wait", rank=0, when="step > 1"), "break add wait --rank 0 --when 'step > 1'"),
        (Inspect(fqn="blocks.2.mlp.0.weight"), "inspect blocks.2.mlp.0.weight"),
        (Evaluate(expr="x['a'] + 1"), "eval x['a'] + 1"),
        (Evaluate(expr="x", ranks=(0, 2)), "eval x -t 0,2"),
        (Evaluate(expr="x", ranks=(0,), frame=1), "eval x -t 0 --frame 1"),
        (Verify(model="m"), "verify m"),
        (Break("clear", "1"), "break clear 1"),
        (Start(num_ranks=2), "start -n 2"),
        (Compare("before.trace", "last:3..5", talk=True), "compare before.trace last:3..5 --talk"),
        (Export("my run.json", steps="-3.."), "export 'my run.json' --steps=-3.."),
        (Where(stacks=True), "where --stacks"),
        (Inspect("-a"), "inspect -- -a"),
        (Break("add", "-a", rank=1), "break --rank 1 -- add -a"),
        (Open("{n} a.trace"), "open '{{n}} a.trace'"),
        (Evaluate("x - 1", (0,)), "eval x - 1 -t 0"),
        (Evaluate("x -t 1", [2, 0, 2]), "eval -t 0,2 -- x -t 1"),
        (WORDS["layout"](fold=True, talk=False), "layout --fold true --no-talk"),
    ],
)
def test_text_is_the_typed_line(command: Command, text: str):
    assert to_text(command) == text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shard(model="a-b"), "a-b"),
        (lambda: Shard(model=""), "variable"),
        (lambda: Shard(model="m", wrap=("a b",)), "a b"),
        (lambda: Shard(model="m", reshard_after_forward="yes"), "auto, true, false"),
        (lambda: Shard(model="m", ignore=("a,b",)), "commas"),
        (lambda: Shard(model="m", ignore=("",)), "commas"),
        (lambda: Shard(model="m", ignore=(" a",)), "outer spaces"),
        (lambda: Shard(model="m", api="fsdp3"), "api is one of fully_shard, classic, not 'fsdp3'"),
        (lambda: Shard(model="m", api=""), "api is one of fully_shard, classic, not ''"),
        (lambda: Shard(model="m", api="classic", strategy="FULL"), "one of full, grad, none, hybrid, hybrid2, not"),
        (lambda: Shard(model="m", api="classic", orig_params=1), "orig_params is true or false, not 1"),
        (lambda: Shard(model="m", strategy="none"), "strategy is for --api classic; with fully_shard give"),
        (lambda: Shard(model="m", orig_params=True), "orig_params is for --api classic"),
        (lambda: Reshard(model="m", api="fully_shard", strategy="full"), "strategy is for --api classic"),
        (lambda: Shard(model="m", api="classic", reshard_after_forward=2), "with classic give --strategy full"),
        (lambda: Reshard(model="m", api="classic", reshard_after_forward="true"), "is for --api fully_shard"),
        (lambda: Shard(model="m", api="classic", mp="bf16,output=fp32"), "leave out output=, or cast in the model"),
        (lambda: Shard(model="m", api="classic", prefetch=2), "gathers at most one unit ahead; give 1"),
        (
            lambda: Shard(model="m", api="classic", strategy="hybrid"),
            "hybrid needs a mesh of replicas x shard ranks: --m",
        ),
        (
            lambda: Shard(model="m", api="classic", mesh="2x2"),
            "full takes no mesh of replicas, such as 2x2: give --str",
        ),
        (lambda: Unshard(model="4"), "'4'"),
        (lambda: Step(count=0), "at least 1"),
        (lambda: Step(count=True), "True"),
        (lambda: Step(count="3"), "'3'"),
        (lambda: Step(fn="f()"), "f()"),
        (lambda: Verify(model="a b"), "a b"),
        (lambda: Evaluate(expr=" "), "eval needs an expression"),
        (lambda: Evaluate(expr="x", frame=-1), "0 for the innermost, not -1"),
        (lambda: Verify(fn=""), "function"),
        (lambda: Shard(model="m", reshard_after_forward=1), "at least 2, not 1"),
        (lambda: Shard(model="m", reshard_after_forward=True), "auto, true, false, or a number"),
        (lambda: Shard(model="m", reshard_after_forward=""), "not ''"),
        (lambda: Shard(model="m", mesh=(2, 2, 2)), "such as 4 or 2x2, not '2x2x2'"),
        (lambda: Shard(model="m", mesh=(0,)), "not '0'"),
        (lambda: Shard(model="m", mesh=(2, True)), "not '2xTrue'"),
        (lambda: Shard(model="m", mp="bf8"), "the dtypes are bf16, fp16, fp32, fp64; got 'bf8'"),
        (lambda: Shard(model="m", mp=""), "got ''"),
        (lambda: Shard(model="m", mp=16), "got 16"),
        (lambda: Shard(model="m", mp="bf16,speed=fp32"), "reduce= and output="),
        (lambda: Shard(model="m", mp="bf16,fp32"), "reduce= and output="),
        (lambda: Shard(model="m", mp="bf16,reduce=fp32,reduce=fp16"), "reduce= and output="),
        (lambda: Shard(model="m", offload=1), "offload is true or false, not 1"),
        (lambda: Shard(model="m", offload=None), "offload is true or false, not None"),
        (lambda: Shard(model="m", prefetch=-1), "1, 2, ..., or 0"),
        (lambda: Shard(model="m", prefetch=True), "not True"),
        (lambda: Reshard(model="4"), "'4'"),
        (lambda: Reshard(model="m", wrap=("a b",)), "a b"),
        (lambda: Reshard(model="m", mp="half"), "got 'half'"),
        (lambda: Reshard(model="m", offload="yes"), "not 'yes'"),
        (lambda: Reshard(model="m", prefetch="2"), "not '2'"),
        (lambda: from_dict({"word": "reshard", "model": "m", "ignore": []}), "unknown ['ignore']"),
        (lambda: from_dict({"word": "dance"}), f"known: {', '.join(ON_RANKS)}"),
        (lambda: from_dict({"word": "pause"}), "unknown command 'pause'"),
        (lambda: Break("add"), "needs an event"),
        (lambda: Break("dance"), "add, list, clear, on or off"),
        (lambda: from_dict({"model": "m"}), "None"),
        (lambda: from_dict({"word": "shard", "model": "m", "speed": 3}), "speed"),
        (lambda: from_dict({"word": "shard"}), "command 'shard' lacks ['api', 'ignore', 'mesh', 'model'"),
        (lambda: from_dict(to_dict(Step()) | {"count": "3"}), "command 'step'.count is '3', expected int"),
        (lambda: from_dict(to_dict(Step()) | {"count": 0}), "at least 1"),
        (lambda: from_dict(to_dict(Step()) | {"count": 2**63}), "a number of 64 bits"),
        (lambda: from_dict(["step"]), "unknown command None"),
    ],
)
def test_invalid_commands_are_refused(make, message: str):
    with pytest.raises(ValueError, match=r".+") as caught:
        make()
    assert message in str(caught.value)


@pytest.mark.parametrize("mesh", ["2x2", [2, 2], (2, 2)])
def test_names_and_meshes_as_a_person_writes_them(mesh):
    assert Shard("m", wrap="Block", mesh=mesh, ignore=["*.bias"]) == Shard(
        "m", wrap=("Block",), mesh=(2, 2), ignore=("*.bias",)
    )
    assert Reshard("m", mesh=4).mesh_shape == (4,)
    with pytest.raises(ValueError, match="such as 4 or 2x2, not '2y2'"):
        Shard("m", mesh="2y2")


@pytest.mark.parametrize("word", COMMANDS.values(), ids=COMMANDS)
def test_the_help_of_a_command_is_one_line(word):
    assert summary(word)
    assert "`" not in summary(word)
    assert len(summary(word)) <= 110


@pytest.mark.parametrize(("ranks_per_host", "mesh"), [([2, 2, 2], (3, 2)), ([4], (4,)), ([1, 1], (2, 1))])
def test_a_mesh_of_hosts_has_a_copy_on_each(ranks_per_host, mesh):
    command = Shard("m", mesh="hosts")
    assert to_text(command) == "shard m --mesh hosts"
    assert command.on_hosts(ranks_per_host) == Shard("m", mesh=mesh)
    assert Reshard("m", mesh="2x2").on_hosts(ranks_per_host).mesh == (2, 2)


def test_hosts_with_different_numbers_of_ranks_make_no_mesh():
    with pytest.raises(ValueError, match="the same number of ranks on every host, not 2, 1"):
        Shard("m", mesh="hosts").on_hosts([2, 1])


def test_a_strategy_is_checked_once_the_hosts_are_known():
    hybrid = Shard("m", api="classic", strategy="hybrid", mesh="hosts")
    assert hybrid.on_hosts([2, 2]).mesh == (2, 2)
    with pytest.raises(ValueError, match="needs a mesh of replicas x shard ranks"):
        hybrid.on_hosts([4])
