import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.commands import (
    RESHARD_AFTER_FORWARD,
    Command,
    Shard,
    Step,
    Unshard,
    Verify,
    from_dict,
    to_dict,
    to_text,
)
from workbench.magics.words import parse_command

identifiers = st.from_regex(r"[A-Za-z_]\w{0,9}", fullmatch=True).filter(str.isidentifier)
models = st.builds(
    lambda first, rest: ".".join([first, *rest]),
    identifiers,
    st.lists(identifiers | st.integers(0, 99).map(str), max_size=3),
)
globs = st.text(min_size=1, max_size=12).filter(lambda g: "," not in g and g == g.strip())
shards = st.builds(
    Shard,
    model=models,
    wrap=st.lists(identifiers, max_size=3).map(tuple),
    reshard_after_forward=st.sampled_from(RESHARD_AFTER_FORWARD),
    ignore=st.lists(globs, max_size=3).map(tuple),
)
commands = st.one_of(
    shards,
    st.builds(Unshard, model=models),
    st.builds(Step, count=st.integers(1, 10**9), fn=identifiers),
    st.builds(Verify, model=models | st.just(""), fn=identifiers),
)


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
        (Unshard(model="m"), "unshard m"),
        (Step(), "step"),
        (Step(count=40, fn="go"), "step 40 --fn go"),
        (Verify(), "verify"),
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
        (lambda: Verify(fn=""), "function"),
        (lambda: from_dict({"word": "dance"}), "shard, unshard, step, verify"),
        (lambda: from_dict({"model": "m"}), "None"),
        (lambda: from_dict({"word": "shard", "model": "m", "speed": 3}), "speed"),
        (lambda: from_dict({"word": "shard"}), "lacks model"),
    ],
)
def test_what_is_refused(make, says: str):
    with pytest.raises(ValueError, match=r".+") as caught:
        make()
    assert says in str(caught.value)
