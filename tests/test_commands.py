import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import commands as all_commands
from workbench.commands import (
    COMMANDS,
    NEXT,
    Abort,
    Break,
    Command,
    Continue,
    Evaluate,
    Inspect,
    Next,
    Pause,
    Reshard,
    Shard,
    Step,
    Unshard,
    Verify,
    from_dict,
    to_dict,
    to_text,
)
from workbench.magics.words import parse_command
from workbench.policy import DTYPES, OFF, RESHARD_AFTER_FORWARD

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
    Break: st.builds(Break, event=events, rank=st.none() | ranks, when=st.none() | words),
    Inspect: st.builds(Inspect, fqn=texts),
    Evaluate: st.builds(Evaluate, expr=exprs, ranks=st.sets(ranks, max_size=4).map(lambda s: tuple(sorted(s)))),
}
commands = st.one_of(*STRATEGIES.values())


def test_every_command_there_is_can_be_built_here_and_has_a_word_of_its_own():
    defined = {c for c in vars(all_commands).values() if isinstance(c, type) and issubclass(c, Command)} - {Command}
    assert set(STRATEGIES) == defined == set(COMMANDS.values())
    assert [cls.word for cls in COMMANDS.values()] == list(COMMANDS)


@given(commands)
def test_text_round_trip(command: Command):
    assert parse_command(to_text(command)) == command


@given(commands)
def test_dict_round_trip_through_json(command: Command):
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
        (Break(event="all_gather:blocks.*"), "break add 'all_gather:blocks.*'"),
        (Break(event="wait", rank=0, when="step > 1"), "break add wait --rank 0 --when 'step > 1'"),
        (Inspect(fqn="blocks.2.mlp.0.weight"), "inspect blocks.2.mlp.0.weight"),
        (Evaluate(expr="x['a'] + 1"), "eval x['a'] + 1"),
        (Evaluate(expr="x", ranks=(0, 2)), "eval x -t 0,2"),
        (Evaluate(expr="x", ranks=(0,), frame=1), "eval --frame 1 x -t 0"),
        (Verify(model="m"), "verify m"),
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
        (lambda: from_dict({"word": "reshard", "model": "m", "ignore": []}), "no field ignore"),
        (lambda: from_dict({"word": "dance"}), "shard, reshard, unshard, step, verify"),
        (lambda: from_dict({"model": "m"}), "None"),
        (lambda: from_dict({"word": "shard", "model": "m", "speed": 3}), "speed"),
        (lambda: from_dict({"word": "shard"}), "lacks model"),
    ],
)
def test_what_is_refused(make, says: str):
    with pytest.raises(ValueError, match=r".+") as caught:
        make()
    assert says in str(caught.value)
