import json
from contextlib import nullcontext
from functools import partial
from types import NoneType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import command_strategies
from workbench.magics.command_lines import WORDS, parse_line
from workbench.protocol import commands as all_commands
from workbench.protocol.breakpoints import EVENTS, UNTIL, Breakpoint, nearest
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
    Explain,
    Export,
    Inspect,
    Next,
    Open,
    Pause,
    Reshard,
    Shard,
    Start,
    Step,
    StepReply,
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
            Shard(model="m", mesh=(4,), prefetch="auto", reshard_after_forward=True),
            "shard m --mesh 4 --reshard-after-forward true",
        ),
        (Reshard(model="m", reshard_after_forward=False), "reshard m --reshard-after-forward false"),
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
        (Explain("rank", "1", step=0), "explain rank 1 --step 0"),
        (Compare("before.trace", "last:3..5", talk=True), "compare before.trace last:3..5 --talk"),
        (Export("my run.json", steps="-3.."), "export 'my run.json' --steps=-3.."),
        (Export("train.py", engine="torch"), "export train.py --engine torch"),
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


MODEL = "model is a variable on the ranks, such as model or model.blocks, not "
FN = "fn is the name of a function on the ranks, such as train_step, not "
COUNT = "the number of steps is a whole number of at least 1, not "
IGNORE = "ignore takes patterns of names without commas or outer spaces, such as *.bias, not "
RESHARD = "reshard_after_forward is one of auto, true, false, or a number of ranks of at least 2, not "
MESH = (
    "mesh is hosts (one replica per host), a number of shard ranks, or replicas x shard ranks, such as 4 or 2x2, not "
)
PREFETCH = "prefetch is the number of units gathered ahead: 1, 2, ..., or auto for the engine's own order, not "
MP = (
    "mp is a dtype, with reduce= and output= if they differ, such as bf16 or "
    "bf16,reduce=fp32,output=fp32; off means none, also for one of them: reduce=off; the dtypes are "
    "bf16, fp16, fp32, fp64; keep=*.norm* leaves the parameters of these names in their own dtype; got "
)
NEAR_MONTH = ", ".join(nearest("month", EVENTS))
KNOWN = "; known: shard, reshard, unshard, lint, step, snapshot, run, save, load, verify, fault"
FREES = (
    "reshard_after_forward is for --api fully_shard; with classic give --strategy full, which frees full "
    "parameters after forward, or grad, which keeps them"
)
STRATEGY = (
    "strategy is for --api classic; with fully_shard give --reshard-after-forward true for full and "
    "false for grad, --mesh 4x1 for none, --mesh 2x2 for hybrid"
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shard(model="a-b"), f"{MODEL}'a-b'"),
        (lambda: Shard(model=""), f"{MODEL}''"),
        (lambda: Shard(model="m", wrap=("a b",)), "wrap takes names of module classes such as Block, not 'a b'"),
        (lambda: Shard(model="m", reshard_after_forward="yes"), f"{RESHARD}'yes'"),
        (lambda: Shard(model="m", ignore=("a,b",)), f"{IGNORE}('a,b',)"),
        (lambda: Shard(model="m", ignore=("",)), f"{IGNORE}('',)"),
        (lambda: Shard(model="m", ignore=(" a",)), f"{IGNORE}(' a',)"),
        (lambda: Shard(model="m", api="fsdp3"), "api is one of fully_shard, classic, not 'fsdp3'"),
        (lambda: Shard(model="m", api=""), "api is one of fully_shard, classic, not ''"),
        (
            lambda: Shard(model="m", api="classic", strategy="FULL"),
            "strategy is one of full, grad, none, hybrid, hybrid2, not 'FULL'",
        ),
        (lambda: Shard(model="m", api="classic", orig_params=1), "orig_params is true or false, not 1"),
        (lambda: Shard(model="m", strategy="none"), STRATEGY),
        (
            lambda: Shard(model="m", orig_params=True),
            "orig_params is for --api classic; with fully_shard, optimizers always have the model's own parameters",
        ),
        (lambda: Reshard(model="m", api="fully_shard", strategy="full"), STRATEGY),
        (lambda: Shard(model="m", api="classic", reshard_after_forward=2), FREES),
        (lambda: Reshard(model="m", api="classic", reshard_after_forward="true"), FREES),
        (
            lambda: Shard(model="m", api="classic", mp="bf16,output=fp32"),
            (
                "mp 'bf16,output=fp32': --api classic does not cast outputs: leave out output=, or "
                "cast in the model; output=off removes an earlier setting"
            ),
        ),
        (
            lambda: Shard(model="m", api="classic", prefetch=2),
            (
                "prefetch 2: --api classic gathers at most one unit ahead; give 1, for forward and "
                "backward, or 0, for backward only"
            ),
        ),
        (
            lambda: Shard(model="m", api="classic", strategy="hybrid"),
            "strategy hybrid needs a mesh of replicas x shard ranks: --mesh 2x2",
        ),
        (
            lambda: Shard(model="m", api="classic", mesh="2x2"),
            (
                "strategy full takes no mesh of replicas, such as 2x2: give --strategy hybrid, or "
                "hybrid2, which keeps full parameters from forward to backward"
            ),
        ),
        (lambda: Unshard(model="4"), f"{MODEL}'4'"),
        (lambda: Step(count=0), f"{COUNT}0"),
        (lambda: Step(count=True), f"{COUNT}True"),
        (lambda: Step(count="3"), f"{COUNT}'3'"),
        (lambda: Step(fn="f()"), f"{FN}'f()'"),
        (lambda: Verify(model="a b"), f"{MODEL}'a b'"),
        (lambda: Evaluate(expr=" "), "eval needs an expression, such as x.shape"),
        (lambda: Evaluate(expr="x", frame=-1), "frame is a number, 0 for the innermost, not -1"),
        (lambda: Verify(fn=""), f"{FN}''"),
        (lambda: Shard(model="m", reshard_after_forward=1), f"{RESHARD}1"),
        (lambda: Shard(model="m", reshard_after_forward=""), f"{RESHARD}''"),
        (lambda: Shard(model="m", mesh=(2, 2, 2)), f"{MESH}'2x2x2'"),
        (lambda: Shard(model="m", mesh=(0,)), f"{MESH}'0'"),
        (lambda: Shard(model="m", mesh=(2, True)), f"{MESH}'2xTrue'"),
        (lambda: Shard(model="m", mp="bf8"), f"{MP}'bf8'"),
        (lambda: Shard(model="m", mp=""), f"{MP}''"),
        (lambda: Shard(model="m", mp=16), f"{MP}16"),
        (lambda: Shard(model="m", mp="bf16,speed=fp32"), f"{MP}'bf16,speed=fp32'"),
        (lambda: Shard(model="m", mp="bf16,fp32"), f"{MP}'bf16,fp32'"),
        (lambda: Shard(model="m", mp="bf16,reduce=fp32,reduce=fp16"), f"{MP}'bf16,reduce=fp32,reduce=fp16'"),
        (lambda: Shard(model="m", offload=1), "offload is true or false, not 1"),
        (lambda: Shard(model="m", offload=None), "offload is true or false, not None"),
        (lambda: Shard(model="m", prefetch=-1), f"{PREFETCH}-1"),
        (lambda: Shard(model="m", prefetch=True), f"{PREFETCH}True"),
        (lambda: Reshard(model="4"), f"{MODEL}'4'"),
        (lambda: Reshard(model="m", wrap=("a b",)), "wrap takes names of module classes such as Block, not 'a b'"),
        (lambda: Reshard(model="m", mp="half"), f"{MP}'half'"),
        (lambda: Reshard(model="m", offload="yes"), "offload is true or false, not 'yes'"),
        (lambda: Reshard(model="m", prefetch="2"), f"{PREFETCH}'2'"),
        (
            lambda: from_dict({"word": "reshard", "model": "m", "ignore": []}),
            (
                "command 'reshard' lacks ['api', 'mesh', 'mp', 'offload', 'orig_params', "
                "'prefetch', 'reshard_after_forward', 'strategy', 'wrap'] and has unknown ['ignore']"
            ),
        ),
        (lambda: from_dict({"word": "dance"}), f"unknown command 'dance'{KNOWN}"),
        (lambda: from_dict({"word": "pause"}), f"unknown command 'pause'{KNOWN}"),
        (lambda: Break("add"), "add needs an event, such as all_gather:blocks.2 or backward"),
        (lambda: Break("list", rank=0), "list takes no --rank and no --when"),
        (lambda: Break("off", "1", when="step"), "off takes no --rank and no --when"),
        (lambda: Break("list", "wait"), "list takes no event"),
        (lambda: Break("clear", "wait"), "clear takes a number that %fsdp break list shows, not 'wait'"),
        (lambda: Break("on", "wait"), "on takes a number that %fsdp break list shows, not 'wait'"),
        (lambda: Break("off", "-1"), "off takes a number that %fsdp break list shows, not '-1'"),
        (lambda: Next("month"), "next takes one of event, collective, unit, phase, not 'month'"),
        (lambda: Step(until="month"), f"there is no event 'month'; the events, nearest first: {NEAR_MONTH}"),
        (lambda: Evaluate(expr="x", frame=True), "frame is a number, 0 for the innermost, not True"),
        (lambda: Unshard(model="m."), f"{MODEL}'m.'"),
        (lambda: Unshard(model="m.4.4x"), f"{MODEL}'m.4.4x'"),
        (lambda: Unshard(model=None), f"{MODEL}None"),
        (lambda: Shard(model="m", ignore=(3,)), f"{IGNORE}(3,)"),
        (lambda: Break("dance"), "break takes add, list, clear, on or off, not 'dance'"),
        (lambda: from_dict({"model": "m"}), f"unknown command None{KNOWN}"),
        (
            lambda: from_dict({"word": "shard", "model": "m", "speed": 3}),
            (
                "command 'shard' lacks ['api', 'engine', 'ignore', 'mesh', 'mp', 'offload', 'orig_params', "
                "'prefetch', 'reshard_after_forward', 'strategy', 'wrap'] and has unknown ['speed']"
            ),
        ),
        (
            lambda: from_dict({"word": "shard"}),
            (
                "command 'shard' lacks ['api', 'engine', 'ignore', 'mesh', 'model', 'mp', 'offload', "
                "'orig_params', 'prefetch', 'reshard_after_forward', 'strategy', 'wrap']"
            ),
        ),
        (lambda: from_dict(to_dict(Step()) | {"count": "3"}), "command 'step'.count is '3', expected int"),
        (lambda: from_dict(to_dict(Step()) | {"count": 0}), f"{COUNT}0"),
        (
            lambda: from_dict(to_dict(Step()) | {"count": 2**63}),
            "command 'step'.count is a number of 64 bits; at most 63 and a sign fit",
        ),
        (lambda: from_dict(["step"]), f"unknown command None{KNOWN}"),
    ],
)
def test_invalid_commands_are_refused(make, message: str):
    with pytest.raises(ValueError, match=r".+") as caught:
        make()
    assert str(caught.value) == message


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


@pytest.mark.parametrize(
    ("command", "method", "arguments"),
    [
        (Pause(), "pause", {}),
        (Export("a.trace", steps="3"), "export", {"path": "a.trace", "steps": "3", "engine": ""}),
        (Open("a.trace"), "open_record", {"path": "a.trace"}),
        (Continue(), "resume", {"background": None}),
        (Continue(foreground=True), "resume", {"background": False}),
        (Continue(background=True), "resume", {"background": True}),
        (Continue(foreground=True, background=True), "resume", {"background": True}),
        (Break("add", "wait", rank=1, when="step"), "break_add", {"event": "wait", "rank": 1, "when": "step"}),
        (Break("list"), "break_list", {}),
        (Break("clear"), "break_clear", {"id": None}),
        (Break("off", "2"), "break_off", {"id": 2}),
        (Break("on", "0"), "break_on", {"id": 0}),
        (Evaluate("x"), "evaluate", {"expr": "x", "ranks": None, "frame": 0}),
        (Evaluate(" x ", [2, 0, 2], frame=1), "evaluate", {"expr": "x", "ranks": (0, 2), "frame": 1}),
    ],
)
def test_what_the_workbench_is_asked_to_do(command, method, arguments):
    assert command.call() == (method, arguments)


def test_ranks_are_waited_for_where_they_are_needed():
    waits = {word for word, cls in COMMANDS.items() if cls.needs_ranks}
    assert set(COMMANDS) - waits == {
        *("start", "attach", "stop", "dashboard", "abort", "compare", "open", "history", "output", "help", "faults"),
        "example",
    }
    assert Verify().waits_for_start
    assert not Open("x").waits_for_start


def test_until_is_a_breakpoint_for_once():
    assert Step().stop is None
    stop = Breakpoint(id=UNTIL, event="all_gather.end", unit="blocks.*", once=True)
    assert Step(until="all-gather.end:blocks.*").stop == stop


@pytest.mark.parametrize(
    ("breakpoint", "text"),
    [
        (Breakpoint(id=1, event="wait"), "wait"),
        (Breakpoint(id=1, event="wait", unit="(root)", rank=0), "wait:(root) --rank 0"),
        (Breakpoint(id=1, event="wait", rank=2, when="step > 1"), "wait --rank 2 --when 'step > 1'"),
    ],
)
def test_a_breakpoint_is_written_as_it_is_added(breakpoint, text):
    assert str(breakpoint) == text


def test_of_a_command_it_is_declared_who_runs_it_and_what_is_answered():
    assert (Step.word, Step.example, Step.method, Step.on_ranks, Step.reply) == ("step", "step 40", "", True, StepReply)
    assert (Pause.on_ranks, Pause.reply, Pause.looks) == (False, NoneType, False)
    assert (Cell.word, Cell.on_ranks) == ("%%fsdp", False)
    assert list(ON_RANKS) == [
        "shard",
        "reshard",
        "unshard",
        "lint",
        "step",
        "snapshot",
        "run",
        "save",
        "load",
        "verify",
        "fault",
    ]
    assert summary(Pause) == "stop all ranks at the same event of the running step"


@pytest.mark.parametrize(
    ("mesh", "value", "world_size", "shard_size", "message"),
    [
        ((), 2, 8, 8, ""),
        ((), 3, 8, 0, ""),
        ((2, 4), 2, 8, 8, ""),
        ((2, 4), 4, 8, 8, "the 4 shard ranks into equal, smaller groups; these fit: 2; or auto, true, false"),
        ((), 3, 8, 8, "the 8 shard ranks into equal, smaller groups; these fit: 2, 4; or auto, true, false"),
        ((2, 3), 3, 8, 8, "mesh 2x3 = 6 does not match the number of ranks, 8; these fit: 8, 2x4, 4x2, 8x1"),
    ],
)
def test_a_mesh_and_a_number_of_ranks_fit_the_job(mesh, value, world_size, shard_size, message):
    command = Reshard("m", mesh=mesh, reshard_after_forward=value)
    with pytest.raises(ValueError, match=r".+") if message else nullcontext() as caught:
        command.check_fits(world_size, shard_size)
    assert message == "" or str(caught.value).endswith(message)
