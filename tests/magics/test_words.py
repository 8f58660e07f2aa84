import argparse
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.commands import COMMANDS, Reshard, Shard, Step, Verify
from workbench.errors import UsageError
from workbench.magics.parser import HelpAsked
from workbench.magics.words import (
    CELL,
    METHODS,
    WORDS,
    overview,
    parse,
    parse_command,
    parse_line,
    parse_ranks,
    parser_for,
    to_command,
)
from workbench.views import VIEWS
from workbench.workbench import Workbench


def test_every_command_and_view_has_its_word_and_every_word_its_method():
    assert set(COMMANDS) | set(VIEWS) <= set(WORDS)
    assert all(callable(getattr(Workbench, METHODS.get(name, name))) for name in WORDS)


@pytest.mark.parametrize("name", WORDS)
def test_help_of_a_word_shows_usage_and_a_line_that_works(name):
    with pytest.raises(HelpAsked) as asked:
        parse_line(f"{name} -h")
    text = str(asked.value)
    assert text.startswith(f"usage: %fsdp {name}")
    assert WORDS[name].example in text
    assert parse_line(WORDS[name].example.removeprefix("%fsdp "))[0] == name
    assert f"\n  {name} " in overview()


def test_help_of_the_cell_magic():
    with pytest.raises(HelpAsked, match="usage: %%fsdp"):
        parse(CELL, ["--help"])


@pytest.mark.parametrize(
    ("line", "command"),
    [
        (
            "shard model --wrap Block,Head --ignore '*.bias'",
            Shard(model="model", wrap=("Block", "Head"), ignore=("*.bias",)),
        ),
        ("shard --reshard-after-forward=false model", Shard(model="model", reshard_after_forward="false")),
        (
            "shard --offload model --mesh 2x2 --mp bf16,reduce=fp32 --prefetch 1 --reshard-after-forward 2",
            Shard(
                model="model",
                mesh=(2, 2),
                mp="bf16,reduce=fp32",
                offload=True,
                prefetch=1,
                reshard_after_forward=2,
            ),
        ),
        ("shard model --no-offload", Shard(model="model")),
        ("reshard model", Reshard(model="model")),
        ("reshard model --no-offload --mp off", Reshard(model="model", offload=False, mp="off")),
        ("step", Step()),
        ("step 40 --fn 'go'", Step(count=40, fn="go")),
        ("verify", Verify()),
    ],
)
def test_lines_become_commands(line, command):
    assert to_command(*parse_line(line)) == command
    assert parse_command(line) == command


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("shrad model", "no word 'shrad', did you mean 'shard'?\nusage: %fsdp {start,status"),
        ("memroy", "did you mean 'memory'"),
        ("xyzzy", "no word 'xyzzy'\n"),
        ("shard model --rwap Block", "unknown flag '--rwap', did you mean '--wrap'?\nusage: %fsdp shard"),
        ("shard model --wrap=A --ingore=b", "'--ingore=b', did you mean '--ignore'?"),
        ("step --count 3", "unknown flag '--count'"),
        ("shard", "required: MODEL\nusage: %fsdp shard"),
        ("shard a b", "unknown argument 'b'"),
        ("shard a-b", "a model is named by its variable"),
        ("shard m --reshard-after-forward maybe", "one of auto, true, false, or a number of ranks"),
        ("shard m --reshard-after-forward 1", "at least 2, not 1\nusage: %fsdp shard"),
        ("shard m --mesh 2y2", "such as 4 or 2x2, not '2y2'"),
        ("shard m --mesh 2x2x2", "such as 4 or 2x2, not '2x2x2'"),
        ("shard m --mp half", "Dtypes are bf16, fp16, fp32, fp64"),
        ("shard m --prefetch few", "0 or more, got 'few'"),
        ("shard m --ofload", "unknown flag '--ofload', did you mean '--offload'?"),
        ("reshard m --ignore x", "unknown flag '--ignore'"),
        ("shard m --wrap", "expected one argument"),
        ("step zero", "at least 1, got 'zero'"),
        ("step 0", "at least 1, got '0'"),
        ("start -n 2.5", "at least 1, got '2.5'"),
        ("start --device tpu", "tpu"),
        ("shard 'model", "No closing quotation"),
        ("layout --fold perhaps", "expected true or false"),
        ("status now", "unknown argument 'now'"),
    ],
)
def test_wrong_lines_say_what_is_right(line, says):
    with pytest.raises(UsageError) as caught:
        to_command(*parse_line(line))
    assert says in str(caught.value)


def test_a_word_that_is_no_command():
    with pytest.raises(UsageError, match="'status' asks the ranks nothing"):
        parse_command("status")


@pytest.mark.parametrize("line", ["", "   ", "help", "-h", "--help"])
def test_nothing_means_help(line):
    assert parse_line(line)[0] == "help"


EXPANDED = {
    "start": ("start -n {n}", "num_ranks", 3),
    "shard": ("shard {m} --prefetch {n}", "prefetch", 3),
    "reshard": ("reshard {m}", "model", "net"),
    "unshard": ("unshard {m}", "model", "net"),
    "step": ("step {n} --fn {m}", "count", 3),
    "next": ("next {w}", "what", "unit"),
    "where": ("where {flag}", "stacks", True),
    "break": ("break add forward:blocks.{n} --rank {n}", "event", "forward:blocks.3"),
    "inspect": ("inspect blocks.{n}.weight", "fqn", "blocks.3.weight"),
    "eval": ("eval {n} --frame {n} -t {n}", "frame", 3),
    "back": ("back {n}", "n", 3),
    "verify": ("verify {m}", "model", "net"),
    "compare": ("compare {m}.trace last:{n}", "b", "last:3"),
    "export": ("export {n}.json", "file", "3.json"),
    "help": ("help {w}", "topic", "unit"),
}
VALUES = {"{n}": "3", "{m}": "net", "{w}": "unit", "{flag}": "--stacks", "{b}": "true"}


def expand(text):
    return re.sub(r"\{\w+\}", lambda found: VALUES[found[0]], text)


@pytest.mark.parametrize("name", [*EXPANDED, *VIEWS])
def test_names_in_braces_are_replaced_in_every_word(name):
    line, field, value = EXPANDED.get(name, (name, "", None))
    args = parse_line(line, expand)[1]
    assert getattr(args, field, None) == value
    if name in VIEWS:
        flags = [flag for flag in parser_for(name).flags if parser_for(name).format_help().count(f"{flag} true|false")]
        for flag in flags:
            assert getattr(parse_line(f"{name} {flag} {{b}}", expand)[1], flag[2:].replace("-", "_")) is True


def test_every_word_that_takes_a_text_has_its_line_above():
    parsers = {name: parser_for(name) for name in WORDS}
    taking = {name for name, parser in parsers.items() if parser.positionals or parser.flags.keys() - {"-h", "--help"}}
    assert taking <= {*EXPANDED, *VIEWS}


def test_code_is_left_as_it_is():
    assert parse_line("eval {n} + 1", expand)[1].expr == "{n} + 1"
    for when in ("--when '{n}'", "--when='{n}'"):
        assert parse_line(f"break add forward {when}", expand)[1].when == "{n}"
    assert parse(CELL, ["-t", "{n},1"], expand).targets == (1, 3)


def test_view_options_are_those_of_the_view():
    assert vars(parse_line("layout --fold true")[1]) == {"fold": True}
    assert vars(parse_line("layout --fold false")[1]) == {"fold": False}
    assert vars(parse_line("layout")[1]) == {}


@given(st.sets(st.integers(0, 63), min_size=1))
def test_ranks_as_a_list_or_in_runs(ranks):
    assert parse_ranks(",".join(map(str, ranks))) == tuple(sorted(ranks))
    assert parse_ranks(f"{min(ranks)}-{max(ranks)}") == tuple(range(min(ranks), max(ranks) + 1))


@pytest.mark.parametrize("text", ["", "a", "1,", "-1", "1-", "1.5"])
def test_what_is_no_list_of_ranks(text):
    with pytest.raises(argparse.ArgumentTypeError, match="such as 1,3 or 0-2"):
        parse_ranks(text)


def test_the_usage_line_is_one_line():
    with pytest.raises(UsageError) as caught:
        parse_line("shard m --x")
    assert len(str(caught.value).splitlines()) == 2
