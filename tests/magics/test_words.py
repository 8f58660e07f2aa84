import argparse

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


def test_only_n_and_t_are_expanded():
    def expand(text):
        return text.replace("{n}", "3")

    assert parse_line("start -n {n}", expand)[1].num_ranks == 3
    assert parse(CELL, ["-t", "{n},1"], expand).targets == (1, 3)
    assert parse_line("export {n}.json", expand)[1].file == "{n}.json"


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
