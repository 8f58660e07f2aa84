import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.magics.words import parse_line
from workbench.protocol import commands as all_commands
from workbench.protocol.commands import (
    COMMANDS,
    DEVICES,
    NEXT,
    Abort,
    Back,
    Break,
    Cell,
    Command,
    Compare,
    Continue,
    Dashboard,
    Evaluate,
    Export,
    Help,
    History,
    Inspect,
    Next,
    Open,
    Pause,
    Reshard,
    Shard,
    Start,
    Status,
    Step,
    Stop,
    Unshard,
    Verify,
    Where,
    from_dict,
    summary,
    to_dict,
    to_text,
)
from workbench.protocol.policy import DTYPES, OFF, RESHARD_AFTER_FORWARD

identifiers = st.from_regex(r"[A-Za-z_]\w{0,9}", fullmatch=True).filter(str.isidentifier)
models = st.builds(
    lambda first, rest: ".".join([first, *rest]),
    identifiers,
    st.lists(identifiers | st.integers(0, 99).map(str), max_size=3),
)
globs = st.text(min_size=1, max_size=12).filter(lambda g: "," not in g and g == g.strip())
sizes = st.integers(1, 1000)
meshes = st.just(()) | st.tuples(sizes) | st.tuples(sizes, sizes)
afters = st.sampled_from(RESHARD_AFTER_FORWARD) | st.integers(2, 1000)
dtypes = st.sampled_from(list(DTYPES))
precisions = st.just(OFF) | st.builds(
    lambda first, more: ",".join([first, *(f"{name}={dtype}" for name, dtype in more.items())]),
    dtypes,
    st.dictionaries(st.sampled_from(["reduce", "output"]), dtypes),
)
wraps = st.lists(identifiers, max_size=3).map(tuple)
shards = st.builds(
    Shard,
    model=models,
    wrap=wraps,
    mesh=meshes,
    reshard_after_forward=afters,
    mp=precisions,
    offload=st.booleans(),
    prefetch=st.integers(0, 99),
    ignore=st.lists(globs, max_size=3).map(tuple),
)
reshards = st.builds(
    Reshard,
    model=models,
    wrap=wraps,
    mesh=meshes,
    reshard_after_forward=afters | st.just(""),
    mp=precisions | st.just(""),
    offload=st.none() | st.booleans(),
    prefetch=st.none() | st.integers(0, 99),
)
words = st.text(min_size=1, max_size=20)
texts = words.filter(lambda text: not text.startswith("-"))  # argparse takes a word that does for a flag
ranks = st.integers(0, 999)
events = st.sampled_from(["all_gather", "backward.end", "forward:blocks.1", "reshard:(root)", "wait:*"]) | texts
# the raw rest of the line: no spaces around it, and nothing at its ends that reads as -t RANKS or -h
exprs = words.filter(lambda text: text == text.strip() and "-" not in text) | st.sampled_from(
    ["x['a'] - 1", 'f"{x}"', "x.sum() -  rank", "[i for i in range(3)]", "a -t b"]
)
STRATEGIES = {
    Shard: shards,
    Reshard: reshards,
    Unshard: st.builds(Unshard, model=models),
    Step: st.builds(
        Step, count=st.integers(1, 10**9), fn=identifiers, until=st.just("") | events, background=st.booleans()
    ),
    Verify: st.builds(Verify, model=models | st.just(""), fn=identifiers),
    Pause: st.builds(Pause),
    Continue: st.builds(Continue),
    Next: st.builds(Next, what=st.sampled_from(NEXT)),
    Abort: st.builds(Abort),
    Start: st.builds(Start, num_ranks=st.integers(1, 64), device=st.sampled_from(DEVICES), profile=st.none() | texts),
    **{word: st.builds(word) for word in (Status, Stop, Dashboard)},
    Where: st.builds(Where, stacks=st.booleans()),
    Back: st.builds(Back, n=st.integers(0, 10**6)),
    Compare: st.builds(Compare, a=texts, b=texts, rank=st.none() | ranks, talk=st.booleans()),
    Export: st.builds(Export, path=texts, steps=st.sampled_from(["", "7", "-3..", "3..5"])),
    Open: st.builds(Open, path=texts),
    History: st.builds(History, n=st.integers(0, 10**6)),
    Help: st.builds(Help, topic=st.just("") | texts),
    Break: st.just(Break("list"))
    | st.builds(Break, action=st.sampled_from(["clear", "on", "off"]), event=st.just("") | ranks.map(str))
    | st.builds(Break, action=st.just("add"), event=events, rank=st.none() | ranks, when=st.none() | words),
    Inspect: st.builds(Inspect, fqn=texts),
    Evaluate: st.builds(Evaluate, expr=exprs, ranks=st.sets(ranks, max_size=4).map(lambda s: tuple(sorted(s)))),
}
commands = st.one_of(*STRATEGIES.values())


def test_every_command_there_is_can_be_built_here_and_has_a_word_of_its_own():
    defined = {c for c in vars(all_commands).values() if isinstance(c, type) and issubclass(c, Command) and c.word}
    assert set(STRATEGIES) == defined - {Cell} == set(COMMANDS.values())
    assert [cls.word for cls in COMMANDS.values()] == list(COMMANDS)


@given(commands)
def test_text_round_trip(command: Command):
    assert parse_line(to_text(command)) == command


@given(st.one_of([strategy for word, strategy in STRATEGIES.items() if word.on_ranks]))
def test_what_ranks_do_arrives_there(command: Command):
    assert from_dict(json.loads(json.dumps(to_dict(command)))) == command


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
    ],
)
def test_text_is_what_a_person_would_write(command: Command, text: str):
    assert to_text(command) == text


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Shard(model="a-b"), "a-b"),
        (lambda: Shard(model=""), "variable"),
        (lambda: Shard(model="m", wrap=("a b",)), "a b"),
        (lambda: Shard(model="m", reshard_after_forward="yes"), "auto, true, false"),
        (lambda: Shard(model="m", ignore=("a,b",)), "commas"),
        (lambda: Shard(model="m", ignore=("",)), "commas"),
        (lambda: Shard(model="m", ignore=(" a",)), "outer spaces"),
        (lambda: Unshard(model="4"), "'4'"),
        (lambda: Step(count=0), "at least 1"),
        (lambda: Step(count=True), "True"),
        (lambda: Step(count="3"), "'3'"),
        (lambda: Step(fn="f()"), "f()"),
        (lambda: Verify(model="a b"), "a b"),
        (lambda: Evaluate(expr="x", frame=-1), "0 for the innermost, not -1"),
        (lambda: Verify(fn=""), "function"),
        (lambda: Shard(model="m", reshard_after_forward=1), "at least 2, not 1"),
        (lambda: Shard(model="m", reshard_after_forward=True), "auto, true, false, or a number"),
        (lambda: Shard(model="m", reshard_after_forward=""), "not ''"),
        (lambda: Shard(model="m", mesh=(2, 2, 2)), "such as 4 or 2x2, not '2x2x2'"),
        (lambda: Shard(model="m", mesh=(0,)), "not '0'"),
        (lambda: Shard(model="m", mesh=(2, True)), "not '2xTrue'"),
        (lambda: Shard(model="m", mp="bf8"), "Dtypes are bf16, fp16, fp32, fp64. Not 'bf8'"),
        (lambda: Shard(model="m", mp=""), "Not ''"),
        (lambda: Shard(model="m", mp=16), "Not 16"),
        (lambda: Shard(model="m", mp="bf16,speed=fp32"), "reduce= and output="),
        (lambda: Shard(model="m", mp="bf16,fp32"), "reduce= and output="),
        (lambda: Shard(model="m", mp="bf16,reduce=fp32,reduce=fp16"), "reduce= and output="),
        (lambda: Shard(model="m", offload=1), "offload is true or false, not 1"),
        (lambda: Shard(model="m", offload=None), "offload is true or false, not None"),
        (lambda: Shard(model="m", prefetch=-1), "1, 2, ..., or 0"),
        (lambda: Shard(model="m", prefetch=True), "not True"),
        (lambda: Reshard(model="4"), "'4'"),
        (lambda: Reshard(model="m", wrap=("a b",)), "a b"),
        (lambda: Reshard(model="m", mp="half"), "Not 'half'"),
        (lambda: Reshard(model="m", offload="yes"), "not 'yes'"),
        (lambda: Reshard(model="m", prefetch="2"), "not '2'"),
        (lambda: from_dict({"word": "reshard", "model": "m", "ignore": []}), "unknown ['ignore']"),
        (lambda: from_dict({"word": "dance"}), "shard, reshard, unshard, step, verify"),
        (lambda: from_dict({"word": "pause"}), "unknown command 'pause'"),
        (lambda: Break("add"), "needs an event"),
        (lambda: Break("dance"), "add, list, clear, on or off"),
        (lambda: from_dict({"model": "m"}), "None"),
        (lambda: from_dict({"word": "shard", "model": "m", "speed": 3}), "speed"),
        (lambda: from_dict({"word": "shard"}), "command 'shard' lacks ['ignore', 'mesh', 'model'"),
        (lambda: from_dict(to_dict(Step()) | {"count": "3"}), "command 'step'.count is '3', expected int"),
        (lambda: from_dict(to_dict(Step()) | {"count": 0}), "at least 1"),
        (lambda: from_dict(to_dict(Step()) | {"count": 2**63}), "a number of 64 bits"),
        (lambda: from_dict(["step"]), "unknown command None"),
    ],
)
def test_what_is_refused(make, says: str):
    with pytest.raises(ValueError, match=r".+") as caught:
        make()
    assert says in str(caught.value)


@pytest.mark.parametrize("mesh", ["2x2", [2, 2], (2, 2)])
def test_names_and_meshes_as_a_person_writes_them(mesh):
    assert Shard("m", wrap="Block", mesh=mesh, ignore=["*.bias"]) == Shard(
        "m", wrap=("Block",), mesh=(2, 2), ignore=("*.bias",)
    )
    assert Reshard("m", mesh=4).mesh_shape == (4,)
    with pytest.raises(ValueError, match="such as 4 or 2x2, not '2y2'"):
        Shard("m", mesh="2y2")


@pytest.mark.parametrize("word", COMMANDS.values(), ids=COMMANDS)
def test_what_is_said_of_a_word_is_one_line(word):
    assert summary(word)
    assert "`" not in summary(word)
    assert len(summary(word)) <= 110
