"""The words of ``%fsdp``: one argparse parser per word, and text -> words -> :mod:`workbench.commands`.

Nothing here runs anything. A wrong line becomes a :class:`~workbench.errors.UsageError` with the usage line and the
nearest match; ``-h`` becomes :class:`HelpAsked` with the text to show.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.commands import COMMANDS, Break, Command, Reshard, Shard
from workbench.errors import UsageError
from workbench.magics import stop_flags
from workbench.magics.parser import AskHelp, Expand, Parser, names, number, parse_ranks
from workbench.magics.policy_flags import add_policy
from workbench.magics.view_options import options_of
from workbench.views import VIEWS

DEVICES = ("auto", "cpu", "cuda")
CELL = "%%fsdp"


@dataclass(frozen=True, kw_only=True)
class Word:
    """One word of ``%fsdp``.

    Attributes:
        summary: what it does, in one line.
        example: a line that works.
        add: adds its arguments to a parser.
    """

    summary: str
    example: str
    add: Callable[[Parser], None] = lambda parser: None


def _as_is(text: str) -> str:
    return text


def _add_start(parser: Parser) -> None:
    parser.flag(
        "-n",
        "--num-ranks",
        type=number,
        default=4,
        metavar="N",
        help="ranks (default 4)",
    )
    parser.flag("--device", choices=DEVICES, default="auto", help="where they compute (default auto)")
    parser.flag("--profile", help="ipyparallel profile (default: none is needed)")


def _add_cell(parser: Parser) -> None:
    parser.flag(
        "-t",
        "--targets",
        type=parse_ranks,
        metavar="RANKS",
        help="ranks that run the cell, such as 1,3 or 0-2 (default: all)",
    )


def _add_shard(parser: Parser) -> None:
    _add_model(parser)
    add_policy(parser, Shard)
    parser.flag(
        "--ignore", type=names, default=(), metavar="GLOB,...", help="parameters that stay whole, such as *.bias"
    )


def _add_reshard(parser: Parser) -> None:
    _add_model(parser)
    add_policy(parser, Reshard)


def _add_unshard(parser: Parser) -> None:
    _add_model(parser)


def _add_step(parser: Parser) -> None:
    parser.positional("count", nargs="?", type=number, default=1, metavar="N", help="training steps (default 1)")
    _add_fn(parser)
    stop_flags.add_step(parser)


def _add_verify(parser: Parser) -> None:
    about = "default: the only sharded model there is"
    parser.positional("model", complete="modules", nargs="?", default="", metavar="MODEL", help=about)
    _add_fn(parser)


def _add_compare(parser: Parser) -> None:
    about = (
        "a trace file; last: what is recorded so far; of either some steps, such as last:3..5, or last:-3.. for the "
        "newest three; 3..5 is of last"
    )
    parser.positional("a", complete="traces", metavar="A", help=about)
    parser.positional("b", complete="traces", metavar="B", help="likewise: what to compare it with")
    parser.flag("--rank", type=int, default=None, help="compare this rank (default: whose peak differs most)")
    _add_talk(parser)


def _add_export(parser: Parser) -> None:
    about = ".trace: to load again; .json: Perfetto; .html: page of figures"
    parser.positional("file", complete="files", metavar="FILE", help=about)
    parser.flag(
        "--steps",
        default="",
        metavar="STEPS",
        help="only these, such as 7, 3..5, 400.. or --steps=-3.. (the newest three)",
    )


def _add_help(parser: Parser) -> None:
    parser.positional("topic", complete=list(WORDS), nargs="?", default="", metavar="WORD", help="default: all words")


def _add_model(parser: Parser) -> None:
    parser.positional("model", complete="modules", metavar="MODEL", help="its variable on the ranks, such as model")


def _add_fn(parser: Parser) -> None:
    parser.flag(
        "--fn", complete="variables", default="train_step", metavar="NAME", help="step function (default train_step)"
    )


def _add_view(name: str) -> Callable[[Parser], None]:
    def add(parser: Parser) -> None:
        for option in options_of(getattr(importlib.import_module(f"workbench.views.{name}"), name)):
            if option.is_switch:
                parser.switch(option.name, default=argparse.SUPPRESS, about=option.about)
                continue
            parser.flag(
                "--" + option.name.replace("_", "-"),
                type=_truth if option.type is bool else option.type,
                default=argparse.SUPPRESS,  # the view's own default holds
                metavar="true|false" if option.type is bool else option.name.upper(),
                help=option.about.replace("%", "%%").replace("``", ""),
            )
        _add_talk(parser)

    return add


def _add_talk(parser: Parser) -> None:
    parser.switch("talk", default=argparse.SUPPRESS, about="in sizes and colours for a projector")


def _add_timeline(parser: Parser) -> None:
    _add_view("timeline")(parser)
    parser.switch("canvas", default=False, about="all of the run instead, live, to pan and zoom")


def _truth(text: str) -> bool:
    if text not in {"true", "false"}:
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text == "true"


_VIEW_SUMMARIES = {
    "layout": "which rows of which parameter lie on which rank",
    "memory": "bytes by class over time, and what set the peak",
    "timeline": "compute, collectives and waits of the last step, per rank",
    "states": "which unit is sharded, gathering, unsharded or reducing, over time",
    "comms": "collectives per unit: calls, bytes and time, beside the closed form",
    "training": "loss, step time and what else is logged",
}

METHODS = {"continue": "resume", "eval": "evaluate", "break": "break_add"}
"""The words whose method has another name, for theirs are Python's."""

WORDS: dict[str, Word] = {
    "start": Word(summary="start the ranks", example="%fsdp start -n 4", add=_add_start),
    "status": Word(summary="the ranks, what is sharded, what is recorded", example="%fsdp status"),
    "stop": Word(summary="stop the ranks; what was recorded stays", example="%fsdp stop"),
    "dashboard": Word(
        summary="watch the ranks while they train, and stop them inside a step", example="%fsdp dashboard"
    ),
    "shard": Word(summary="shard a model with fully_shard", example="%fsdp shard model --wrap Block", add=_add_shard),
    "reshard": Word(
        summary="change how a sharded model is sharded, in place",
        example="%fsdp reshard model --reshard-after-forward false",
        add=_add_reshard,
    ),
    "unshard": Word(summary="make it a plain module again", example="%fsdp unshard model", add=_add_unshard),
    "step": Word(summary="train: call train_step() on every rank", example="%fsdp step 40", add=_add_step),
    "pause": Word(summary="stop all ranks at the same event of the step under way", example="%fsdp pause"),
    "next": Word(
        summary="let stopped ranks go on to the next event, collective, unit or phase",
        example="%fsdp next collective",
        add=stop_flags.add_next,
    ),
    "continue": Word(summary="let stopped ranks go on", example="%fsdp continue", add=stop_flags.add_continue),
    "abort": Word(summary="give up what the ranks do; they are ready again", example="%fsdp abort"),
    "where": Word(summary="where every rank is, and since when", example="%fsdp where", add=stop_flags.add_where),
    "break": Word(
        summary="stop before every such event: add, list or clear breakpoints",
        example="%fsdp break add all_gather:blocks.2",
        add=stop_flags.add_break,
    ),
    "inspect": Word(
        summary="what every stopped rank has of a parameter",
        example="%fsdp inspect blocks.2.mlp.0.weight",
        add=stop_flags.add_inspect,
    ),
    "eval": Word(
        summary="evaluate an expression on stopped ranks, inside the step",
        example="%fsdp eval loss.item() -t 0",
        add=stop_flags.add_eval,
    ),
    "back": Word(
        summary="show what was recorded up to some events ago; undoes nothing",
        example="%fsdp back 3",
        add=stop_flags.add_back,
    ),
    "verify": Word(summary="compare a step with an unsharded one", example="%fsdp verify", add=_add_verify),
    **{name: Word(summary=_VIEW_SUMMARIES[name], example=f"%fsdp {name}", add=_add_view(name)) for name in VIEWS},
    "timeline": Word(summary=_VIEW_SUMMARIES["timeline"], example="%fsdp timeline --canvas", add=_add_timeline),
    "compare": Word(
        summary="what changed from one trace, or some steps of it, to another",
        example="%fsdp compare before.trace last",
        add=_add_compare,
    ),
    "export": Word(summary="write what was recorded to a file", example="%fsdp export run.trace", add=_add_export),
    "help": Word(summary="these words, or one of them", example="%fsdp help shard", add=_add_help),
}
_CELL_WORD = Word(summary="run the cell on the ranks", example="%%fsdp -t 0,2\nprint(rank)", add=_add_cell)


def parser_for(name: str) -> Parser:
    """Return the parser of one word of ``%fsdp``, or of the cell magic for ``"%%fsdp"``.

    Args:
        name: key of :data:`WORDS`, or :data:`CELL`.
    """
    word = _CELL_WORD if name == CELL else WORDS[name]
    parser = Parser(
        prog=CELL if name == CELL else f"%fsdp {name}",
        description=word.summary,
        epilog="example:\n" + "\n".join(f"  {line}" for line in word.example.splitlines()),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100, max_help_position=32),
        add_help=False,
        allow_abbrev=False,
    )
    parser.flag("-h", "--help", action=AskHelp, nargs=0, default=argparse.SUPPRESS, help="show this")
    word.add(parser)
    return parser


def parse(name: str, args: Sequence[str], expand: Expand = _as_is) -> argparse.Namespace:
    """Parse the arguments of one word.

    Args:
        name: as for :func:`parser_for`.
        args: in words.
        expand: replaces ``{name}``, in all of them but the code that ``--when`` takes.

    Raises:
        UsageError: they are not such arguments.
        HelpAsked: ``-h`` is among them.
    """
    parser = parser_for(name)
    is_code = [arg.startswith("--when=") or before == "--when" for before, arg in zip(["", *args], args, strict=False)]
    words = [arg if code else expand(arg) for arg, code in zip(args, is_code, strict=True)]
    found, rest = parser.parse_known_args(words)
    if rest:
        what = "flag" if rest[0].startswith("-") else "argument"
        hint = did_you_mean(rest[0].partition("=")[0], [*parser.flags, *parser.switches]) if what == "flag" else ""
        parser.error(f"unknown {what} {rest[0]!r}{hint}")
    return found


def split(line: str) -> list[str]:
    """Split a magic's line into words, quotes honoured.

    Raises:
        UsageError: a quote is not closed.
    """
    try:
        return shlex.split(line, posix=True)
    except ValueError as error:
        raise UsageError(f"cannot split {line!r} into words: {error}") from None


def parse_line(line: str, expand: Expand = _as_is) -> tuple[str, argparse.Namespace]:
    """Return the word of a ``%fsdp`` line and its arguments; an empty line means ``help``.

    Raises:
        UsageError: no such word, or not its arguments.
        HelpAsked: ``-h`` is among them.
    """
    name, _, rest = line.strip().partition(" ")
    if name == "eval":  # its expression has quotes of its own
        return name, stop_flags.parse_eval(rest, parser_for(name), expand)
    name, *args = split(line) or ["help"]
    if name in {"-h", "--help"}:
        name = "help"
    if name not in WORDS:
        raise UsageError(f"%fsdp has no word {name!r}{did_you_mean(name, list(WORDS))}\n{usage()}")
    return name, parse(name, args, expand)


def parse_command(text: str) -> Command:
    """Inverse of :func:`workbench.commands.to_text`.

    Raises:
        UsageError: ``text`` is no command for the ranks.
    """
    name, args = parse_line(text)
    command = to_command(name, args)
    if command is None:
        raise UsageError(f"{name!r} asks the ranks nothing")
    return command


def to_command(name: str, args: argparse.Namespace) -> Command | None:
    """Return what the ranks are asked by a parsed word; None if it is not for them.

    Raises:
        UsageError: an argument is not what the command takes.
    """
    if name not in COMMANDS:
        return None
    fields = dict(vars(args))
    if COMMANDS[name] is Break:
        stop_flags.check_break(args)
        if fields.pop("action") != "add":
            return None
    try:
        return COMMANDS[name](**fields)
    except ValueError as error:
        raise UsageError(f"%fsdp {name}: {error}\n{parser_for(name).usage_line()}") from None


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return ``", did you mean 'shard'?"`` for the nearest of ``known``, or nothing."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else ""


def usage() -> str:
    """Return the usage line of ``%fsdp``."""
    return f"usage: %fsdp {{{','.join(WORDS)}}} ...  (-h after a word explains it)"


def overview() -> str:
    """Return the help of ``%fsdp``: every word in one line."""
    width = max(map(len, WORDS))
    lines = [f"  {name:<{width}}  {word.summary}" for name, word in WORDS.items()]
    cell = f"  {CELL:<{width}}  first line of a cell: {_CELL_WORD.summary}, all or -t RANKS"
    braces = "  {name} stands for a variable of this notebook, but in the code of eval, --when and cells"
    return "\n".join([usage(), "", *lines, "", cell, braces])
