import inspect
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.fake_cluster import gives
from workbench.errors import UsageError
from workbench.magics.command_lines import (
    CELL,
    WORDS,
    overview,
    parse,
    parse_line,
    parser_for,
)
from workbench.magics.parser import HelpAsked
from workbench.protocol import commands
from workbench.protocol.arguments import argument
from workbench.protocol.arguments import ranks as parse_ranks
from workbench.protocol.commands import (
    COMMANDS,
    Break,
    Cell,
    Command,
    Reshard,
    Run,
    Shard,
    Step,
    Verify,
    command,
    summary,
)
from workbench.reports.pause_reports import EndReport
from workbench.reports.report_makers import REPORT_MAKERS
from workbench.views import VIEWS
from workbench.workbench import Workbench, on_ranks


def test_every_view_is_a_command_and_every_command_a_method():
    looking = [*COMMANDS].index("explain") + 1
    assert list(WORDS) == [*[*COMMANDS][:looking], *VIEWS, *[*COMMANDS][looking:]]
    for name, word in WORDS.items():
        command = parse_line(word.example)
        method, arguments = command.call()
        signature = inspect.signature(getattr(Workbench, method))
        assert callable(getattr(Workbench, method))
        if name not in VIEWS:
            signature.bind(Workbench, **arguments)


@pytest.mark.parametrize("word", [word for word in COMMANDS.values() if word.on_ranks], ids=lambda word: word.word)
def test_the_method_of_a_rank_command_takes_its_declared_arguments(word):
    method = getattr(Workbench, word.method or word.word)
    taken = list(inspect.signature(method).parameters.values())[1:]
    declared = list(inspect.signature(word).parameters.values())
    own = [parameter for parameter in taken if not parameter.name.startswith("on_")]
    assert [(p.name, p.default) for p in own] == [(p.name, p.default) for p in declared]
    assert summary(word)[1:] in " ".join((method.__doc__ or "").split()) or word in {Step, Run}


@pytest.mark.parametrize("name", WORDS)
def test_help_of_a_command_shows_usage_and_a_working_line(name):
    with pytest.raises(HelpAsked) as requested:
        parse_line(f"{name} -h")
    text = str(requested.value)
    assert text.startswith(f"usage: %fsdp {name}")
    assert f"\n  %fsdp {WORDS[name].example}\n" in text
    assert summary(WORDS[name]) in " ".join(text.split())
    assert parse_line(WORDS[name].example).word == name
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
    assert parse_line(line) == command


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("shrad model", "no command 'shrad', did you mean 'shard'?\n%fsdp help lists them"),
        ("memroy", "did you mean 'memory'"),
        ("stp 3", "no command 'stp', did you mean 'step' or 'stop'?"),
        ("xyzzy", "no command 'xyzzy'\n"),
        ("shard model --rwap Block", "unknown flag '--rwap', did you mean '--wrap'?\nusage: %fsdp shard"),
        ("shard model --wrap=A --ingore=b", "'--ingore=b', did you mean '--ignore'?"),
        ("step --count 3", "unknown flag '--count'"),
        ("shard", "required: MODEL\nusage: %fsdp shard"),
        ("shard a b", "unknown argument 'b'"),
        ("start 2", "unknown argument '2', did you mean -n 2?"),
        ("shard a-b", "model is a variable on the ranks"),
        ("shard m --reshard-after-forward maybe", "one of auto, true, false, or a number of ranks"),
        ("shard m --reshard-after-forward 1", "at least 2, not 1\nusage: %fsdp shard"),
        ("shard m --mesh 2y2", "such as 4 or 2x2, not '2y2'"),
        ("shard m --mesh 2x2x2", "such as 4 or 2x2, not '2x2x2'"),
        ("shard m --mp half", "the dtypes are bf16, fp16, fp32, fp64"),
        ("shard m --prefetch few", "auto or a whole number, got 'few'"),
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
        ("step 3 --every 2", "--every K goes with --save FOLDER"),
        ("verify --repeat --resume a", "two checks: give one of them"),
        ("save ''", "a checkpoint needs a folder"),
        ("open -x.trace", "required: FILE; '-x.trace' is read as a flag; write -- before it: %fsdp open -- -x.trace\n"),
        ("open --odd.trace", "write -- before it: %fsdp open -- --odd.trace\n"),
        ("break add -x", "unknown flag '-x'; '-x' is read as a flag; write -- before it: %fsdp break add -- -x\n"),
        ("export --steps 3 -x", "write -- before it: %fsdp export --steps 3 -- -x\n"),
    ],
)
def test_wrong_lines_explain_the_correction(line, message):
    with pytest.raises(UsageError) as caught:
        parse_line(line)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "line", ["open", "step -4", "status -x", "layout --unit -x", "inspect -- -a -b", "shard m --ofload"]
)
def test_the_hint_to_write_dashes_appears_only_where_it_helps(line):
    with pytest.raises(UsageError) as caught:
        parse_line(line)
    assert "is read as a flag" not in str(caught.value)


def test_help_lists_all_commands_below_headings():
    text = overview()
    lines = text.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")][: len(WORDS)] == list(WORDS)
    headings = [place for place, line in enumerate(lines) if line.endswith(":")]
    assert len(headings) == 7
    assert all(lines[place - 1] == "" and lines[place + 1].startswith("  ") for place in headings)


@pytest.mark.parametrize("line", ["", "   ", "help", "-h", "--help"])
def test_an_empty_line_shows_help(line):
    assert parse_line(line).word == "help"


EXPANDED = {
    "start": ("start -n {n}", "num_ranks", 3),
    "attach": ("attach --profile {m}", "profile", "net"),
    "shard": ("shard {m} --prefetch {n}", "prefetch", 3),
    "reshard": ("reshard {m}", "model", "net"),
    "plan": ("plan {m} --ranks {n}", "ranks", 3),
    "unshard": ("unshard {m}", "model", "net"),
    "lint": ("lint {m}", "model", "net"),
    "step": ("step {n} --fn {m}", "count", 3),
    "save": ("save runs/{m}", "folder", "runs/net"),
    "load": ("load runs/{m}", "folder", "runs/net"),
    "run": ("run {m}.py --lr {n}", "args", ("--lr", "3")),
    "next": ("next {w}", "what", "unit"),
    "where": ("where {flag}", "stacks", True),
    "break": ("break add forward:blocks.{n} --rank {n}", "event", "forward:blocks.3"),
    "inspect": ("inspect blocks.{n}.weight", "fqn", "blocks.3.weight"),
    "eval": ("eval {n} --frame {n} -t {n}", "frame", 3),
    "back": ("back {n}", "n", 3),
    "verify": ("verify {m}", "model", "net"),
    "fault": ("fault straggler --ms {n}", "ms", 3),
    "explain": ("explain rank {n} --step {n}", "which", "3"),
    "compare": ("compare {m}.trace last:{n}", "b", "last:3"),
    "export": ("export {n}.json", "path", "3.json"),
    "open": ("open {m}.trace", "path", "net.trace"),
    "history": ("history {n}", "n", 3),
    "output": ("output --rank {n}", "rank", 3),
    "help": ("help {w}", "topic", "unit"),
}
variable = {"n": "3", "m": "net", "w": "unit", "flag": "--stacks", "b": "true"}.__getitem__


@pytest.mark.parametrize("name", [*EXPANDED, *VIEWS])
def test_names_in_braces_are_replaced_in_every_argument(name):
    line, field, value = EXPANDED.get(name, (name, "", None))
    assert getattr(parse_line(line, variable), field, None) == value
    if name in VIEWS:
        flags = [flag for flag in parser_for(name).flags if parser_for(name).format_help().count(f"{flag} true|false")]
        for flag in flags:
            assert getattr(parse_line(f"{name} {flag} {{b}}", variable), flag[2:].replace("-", "_")) is True


def test_every_command_with_free_text_has_an_example():
    parsers = {name: parser_for(name) for name in WORDS}
    taking = {name for name, parser in parsers.items() if parser.positionals or parser.flags.keys() - {"-h", "--help"}}
    assert taking <= {*EXPANDED, *VIEWS}


def test_code_is_left_as_it_is():
    assert parse_line("eval {n} + 1", variable).expr == "{n} + 1"
    for when in ("--when '{n}'", "--when='{n}'"):
        assert parse_line(f"break add forward {when}", variable).when == "{n}"
    assert parse_line("break --when {n} -- add --when={n}", variable) == Break("add", "--when=3", when="{n}")
    assert parse(CELL, ["-t", "{n},1"], variable) == Cell(ranks=(1, 3))


@pytest.mark.parametrize(
    ("text", "path"),
    [("{{n}}", "{n}"), ("{{{n}}}", "{3}"), ("{{{{n}}}}", "{{n}}"), ("{n}{n}", "33"), ("{", "{"), ("{}-}", "{}-}")],
)
def test_double_braces_are_literal_and_a_single_brace_is_kept(text, path):
    assert parse_line(f"open {text}", variable).path == path


def test_view_options_are_those_of_the_view():
    assert parse_line("layout --fold true").call() == ("layout", {"fold": True})
    assert parse_line("layout --fold false").call() == ("layout", {"fold": False})
    assert parse_line("layout").call() == ("layout", {})
    assert parse_line("layout --unit 'blocks.*'").call() == ("layout", {"unit": "blocks.*"})
    assert parse_line("memory --process --step 3 --talk").call() == (
        "memory",
        {"process": True, "step": 3, "talk": True},
    )
    with pytest.raises(UsageError, match="--marks"):  # what only code passes is no flag
        parse_line("memory --marks a")


@pytest.mark.parametrize("view", VIEWS)
def test_the_help_of_a_view_shows_its_defaults_except_none(view):
    reported = parser_for(view).format_help()
    assert "None" not in reported
    assert ("(default: the newest)" in reported) == ("the last step to show" in reported)


def test_the_widget_of_the_timeline_takes_no_other_flag():
    assert parse_line("timeline --canvas").call() == ("canvas", {})
    assert parse_line("timeline --no-canvas --step 3").call() == ("timeline", {"step": 3})
    with pytest.raises(UsageError, match="it takes no other flag"):
        parse_line("timeline --canvas --step 3").call()


@pytest.mark.parametrize(
    ("line", "waits"),
    [
        ("timeline", True),
        ("timeline --no-canvas", True),
        ("timeline --canvas", False),
        ("memory", True),
        ("dashboard", False),
    ],
)
def test_completion_of_fixed_words_needs_no_ranks(line, waits):
    assert parse_line(line).waits_for_start is waits


@given(st.sets(st.integers(0, 63), min_size=1))
def test_ranks_as_a_list_or_in_runs(ranks):
    assert parse_ranks(",".join(map(str, ranks))) == tuple(sorted(ranks))
    assert parse_ranks(f"{min(ranks)}-{max(ranks)}") == tuple(range(min(ranks), max(ranks) + 1))


@pytest.mark.parametrize("text", ["", "a", "1,", "-1", "1-", "1.5"])
def test_invalid_lists_of_ranks(text):
    with pytest.raises(ValueError, match="such as 1,3 or 0-2"):
        parse_ranks(text)


def test_the_usage_line_is_one_line():
    with pytest.raises(UsageError) as caught:
        parse_line("shard m --x")
    assert len(str(caught.value).splitlines()) == 2


@dataclass(frozen=True, kw_only=True)
class Tallied:
    count: int


@command("tally model --of params", reply=Tallied)
class Tally(Command):
    """Count what a model has."""

    model: str = argument("which", kw_only=False, metavar="MODEL", completes="modules")
    of: str = argument("of what", default="units", completes=("units", "params"))


def test_a_command_is_its_declaration_handler_and_report(notebook, monkeypatch):
    monkeypatch.setitem(WORDS, "tally", Tally)
    monkeypatch.setitem(commands.ON_RANKS, "tally", Tally)
    monkeypatch.setitem(
        REPORT_MAKERS, Tally, lambda by_rank: EndReport(sentence=f"{sum(t.count for t in by_rank)} in all")
    )
    notebook.fake.script["tally"] = gives({"count": 3})  # what a rank does
    assert notebook.ok("%fsdp tally model --of params").shown[0]["text/plain"] == "12 in all"
    assert notebook.fake.log[-1] == ("execute", Tally("model", of="params"))
    assert commands.to_text(Tally("model", of="params")) == Tally.example
    assert "count what a model has" in notebook.ok("%fsdp help tally").out
    assert "  tally      count what a model has\n" in notebook.ok("%fsdp").out
    assert notebook.complete("%fsdp tal") == ["tally"]
    assert "model" in notebook.complete("%fsdp tally ")
    assert notebook.complete("%fsdp tally model --of p") == ["params"]
    assert "no rank has a model named 'teacher'" in notebook.run("%fsdp tally teacher").out
    assert "unknown flag '--off', did you mean '--of'" in notebook.run("%fsdp tally model --off x").out
    method = on_ranks(Tally, EndReport)
    assert str(inspect.signature(method)).startswith("(self, model: str, *, of: str = 'units')")
    assert method.__doc__.startswith("Count what a model has.")
