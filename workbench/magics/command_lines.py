"""Lines of ``%fsdp``: one parser per command, generated from :mod:`workbench.protocol.commands`.

A command that draws is declared by its view: by the first line of the view's docstring, its keywords and their text.

Nothing here runs a command. A wrong line becomes a :class:`~workbench.errors.UsageError` with the usage line and the
nearest match; ``-h`` becomes :class:`HelpAsked` with the text to show.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, ClassVar, cast, get_args, get_type_hints

from workbench.errors import UsageError, did_you_mean
from workbench.magics.parser import JSON, AskHelp, HelpAsked, Parser, PositionalText, as_written
from workbench.protocol.arguments import Argument, Names, Variable, argument, argument_of, truth, with_variables
from workbench.protocol.commands import COMMANDS, TALK, Cell, Command, Help, is_by_place, summary
from workbench.views import VIEWS

CELL = Cell.word


@dataclass(frozen=True)
class Option:
    """One keyword of a view: its name, the type of its flag's value, and its text in the docstring.

    A switch is off by default, and its flag takes no value.
    """

    name: str
    type: type
    about: str
    is_switch: bool = False


def options_of(view: Callable[..., Any]) -> Iterator[Option]:
    """Yield the keyword-only arguments of ``view`` that fit one word of text: int, float, bool, str."""
    hints = get_type_hints(view)
    about = inspect.getdoc(view) or ""
    for parameter in inspect.signature(view).parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        hint = hints[parameter.name]
        given = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        plain = [t for t in given if t in {int, float, bool, str}]
        if plain:
            found = re.search(rf"^\s+{parameter.name}: (.+)$", about, re.MULTILINE)
            yield Option(parameter.name, plain[0], _for_a_flag(found[1]) if found else "", parameter.default is False)


def _for_a_flag(about: str) -> str:
    """Return the text of an argument in a docstring as help of a flag.

    Example: ``"which step; None: the newest."`` -> ``"which step (default: the newest)"``.
    """
    text, _, default = about.removesuffix(".").partition("; None: ")
    return f"{text} (default: {default})" if default else text


class DrawCommand(Command):
    """Base of the commands that draw; options not given are None, and the view's own default applies."""

    looks: ClassVar[bool] = True

    def call(self) -> tuple[str, dict[str, Any]]:
        """Return the workbench method that draws the view, and the given options."""
        _, options = super().call()
        return self.word, {name: value for name, value in options.items() if value is not None}


class TimelineCommand(DrawCommand):
    """The command ``timeline``, which also has a live widget that shows ranks started later."""

    def call(self) -> tuple[str, dict[str, Any]]:
        """Return the workbench method that draws the view, and the given options."""
        name, options = super().call()
        if not options.pop("canvas", False):
            return name, options
        if options:
            raise UsageError("%fsdp timeline --canvas shows the whole run: it takes no other flag")
        return "canvas", {}


_CANVAS = Argument(about="show the whole run, live, to pan and zoom", needs_no_ranks=True)
_COMPLETES: dict[str, Names] = {"unit": "units"}
_MORE = {
    "layout": "`--unit blocks.2`: only this unit",
    "states": "`--unit blocks.2`: only this unit",
    "comms": "`--unit blocks.2`: only this unit",
    "timeline": "`--canvas`: the whole run, live, to pan and zoom",
    "memory": "`--process`: also the memory of the whole process; `--by module` or `--by op`: whose activations",
}


def _drawing(name: str) -> type[Command]:
    """Return the command of the view ``name``."""
    options = [
        (
            option.name,
            bool | None if option.is_switch else option.type | None,
            argument(_argument(option), default=None),
        )
        for option in options_of(VIEWS[name])
    ]
    options += [("talk", bool | None, argument(TALK, default=None))]
    options += [("canvas", bool | None, argument(_CANVAS, default=None))] if name == "timeline" else []
    made = dataclasses.make_dataclass(
        f"Draw{name.title()}",
        options,
        bases=(TimelineCommand if name == "timeline" else DrawCommand,),
        frozen=True,
        kw_only=True,
        namespace={"word": name, "example": name, "more": _MORE.get(name, ""), "__doc__": VIEWS[name].__doc__},
    )
    return cast("type[Command]", made)


def _argument(option: Option) -> Argument:
    about = option.about.replace("``", "")
    if option.is_switch:
        return Argument(about=about)
    if option.type is bool:
        return Argument(about=about, metavar="true|false", read=truth, flags=("--" + option.name.replace("_", "-"),))
    completes = _COMPLETES.get(option.name, "")
    return Argument(about=about, metavar=option.name.upper(), read=option.type, completes=completes)


WORDS: dict[str, type[Command]] = {}
for _name, _declared in COMMANDS.items():
    WORDS |= {_name: _declared}
    if _name == "explain":  # in reading order: views before compare and export
        WORDS |= {view: _drawing(view) for view in VIEWS}


@cache
def parser_for(name: str) -> Parser:
    """Return the parser of one command of ``%fsdp``, or of the cell magic for ``"%%fsdp"``.

    Cached: to make one takes milliseconds, and a check of a course reads several lines.

    Args:
        name: key of :data:`WORDS`, or :data:`CELL`.
    """
    word = Cell if name == CELL else WORDS[name]
    prog = CELL if name == CELL else f"%fsdp {name}"
    example = f"{CELL} {word.example}" if name == CELL else f"%fsdp {word.example}"
    parser = Parser(
        prog=prog,
        description=summary(word),
        epilog="example:\n" + "\n".join(f"  {line}" for line in example.splitlines()),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100, max_help_position=32),
        argument_default=argparse.SUPPRESS,  # the command's own defaults apply
        add_help=False,
        allow_abbrev=False,
    )
    parser.flag("-h", "--help", action=AskHelp, nargs=0, help="show this")
    hints = get_type_hints(word)
    for declared in dataclasses.fields(word):
        _add(parser, declared, is_bool=bool in {hints[declared.name], *getattr(hints[declared.name], "__args__", ())})
    parser.json()
    return parser


def _add(parser: Parser, declared: dataclasses.Field[Any], *, is_bool: bool) -> None:
    """Add one argument to ``parser``."""
    known = argument_of(declared)
    flag = "--" + declared.name.replace("_", "-")
    about = known.about.replace("%", "%%")
    if is_bool and known.is_switch:
        parser.switch([*known.flags, flag][0], about=about, dest=declared.name)
        return
    complete: Sequence[str] = list(WORDS) if known.completes == "words" else known.choices or known.completes
    settings: dict[str, Any] = {"type": _reading(known.read), "metavar": known.metavar, "help": about}
    settings |= {} if known.choices is None else {"choices": known.choices}
    if not is_by_place(declared):
        parser.flag(*(known.flags or (flag,)), complete=complete, dest=declared.name, **settings)
        return
    if known.is_code:
        parser.rest = complete
    is_optional = declared.default is not dataclasses.MISSING
    if known.takes_rest:
        parser.takes_rest = True
        settings |= {"nargs": "*", "default": ()}
    elif is_optional:
        settings |= {"nargs": "?", "default": declared.default}  # argparse takes no SUPPRESS here
    parser.positional(declared.name, complete=complete, **settings)


def _reading(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the callable with which argparse parses a text."""

    def called(text: str) -> Any:  # noqa: ANN401
        try:
            return read(as_written(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return called


_as_it_is: Variable = "{{{}}}".format
"""Leaves ``{name}`` unchanged."""


def parse(name: str, args: Sequence[str], variable: Variable = _as_it_is) -> Command:
    """Return the command with the name ``name`` and these arguments.

    Args:
        name: as for :func:`parser_for`.
        args: the arguments, split.
        variable: returns the text for ``{name}``, in all arguments but code.

    Raises:
        UsageError: the arguments are invalid.
        HelpAsked: ``-h`` is among them.
    """
    parser = parser_for(name)
    word = Cell if name == CELL else WORDS[name]
    code = [f"--{f.name}" for f in dataclasses.fields(word) if argument_of(f).is_code and not is_by_place(f)]
    args, rest = (args[: (cut := _end_of_flags(parser, args))], args[cut:]) if parser.takes_rest else (args, ())
    end = args.index("--") if "--" in args else len(args)
    words: list[str] = []
    for before, arg in zip(["", *args], args[:end], strict=False):
        flag, is_joined, text = arg.partition("=")
        if is_joined and flag in parser.flags:
            words += [flag, PositionalText(text if flag in code else with_variables(text, variable))]
        else:
            words.append(arg if before in code else with_variables(arg, variable))
    behind = [PositionalText(with_variables(arg, variable)) for arg in (*args[end + 1 :], *rest)]
    return _command(parser, word, [*words, *behind])


def _end_of_flags(parser: Parser, args: Sequence[str]) -> int:
    """Return the index behind the first positional word: ``["--until", "step", "a.py", "-x"]`` -> 3."""
    place = 0
    while place < len(args) and args[place].startswith("-"):
        if args[place] == "--":
            place += 1
            break
        place += 2 if args[place] in parser.flags else 1
    return place + 1


def _command(parser: Parser, word: Callable[..., Command], words: Sequence[str]) -> Command:
    found, rest = parser.read(words)
    if rest:
        first = as_written(rest[0])
        if not rest[0].startswith("-"):
            is_number = first.isdecimal() and "-n" in parser.flags
            parser.error(f"unknown argument {first!r}{f', did you mean -n {first}?' if is_number else ''}")
        meant = "" if first.startswith("--") else parser.behind_hint(words)
        near = did_you_mean(first.partition("=")[0], [*parser.flags, *parser.switches])
        parser.error(f"unknown flag {first!r}{meant or near}")
    arguments = vars(found)
    arguments.pop("json", None)  # about how a result is shown, which no command knows
    try:
        return word(**arguments)
    except ValueError as error:
        raise UsageError(f"{parser.prog}: {error}\n{parser.usage_line()}") from None


def split(line: str) -> list[str]:
    """Split a magic's line into words as a shell does.

    Raises:
        UsageError: a quote is not closed.
    """
    try:
        return shlex.split(line, posix=True)
    except ValueError as error:
        raise UsageError(f"cannot split {line!r} into words: {error}") from None


def parse_line(line: str, variable: Variable = _as_it_is) -> Command:
    """Return the command of a ``%fsdp`` line; an empty line means ``help``.

    Inverse of :func:`workbench.protocol.commands.to_text`.

    Args:
        line: without ``%fsdp``.
        variable: returns the text for ``{name}``, in all arguments but code.

    Raises:
        UsageError: there is no such command, or its arguments are invalid.
        HelpAsked: ``-h`` is among them.
    """
    name, rest = [*line.split(maxsplit=1), "", ""][:2]
    if name in WORDS and any(is_by_place(f) and argument_of(f).is_code for f in dataclasses.fields(WORDS[name])):
        return _parse_raw(name, rest.strip(), variable)  # its code has quotes of its own
    name, *args = split(line) or ["help"]
    if name in {"-h", "--help"}:
        name = "help"
    if name not in WORDS:
        raise no_such_word(name)
    return parse(name, args, variable)


def no_such_word(name: str) -> UsageError:
    """Return the error for an unknown command of ``%fsdp``; it names the nearest one."""
    return UsageError(f"%fsdp has no command {name!r}{did_you_mean(name, list(WORDS))}\n%fsdp help lists them")


def _parse_raw(name: str, rest: str, variable: Variable) -> Command:
    """Parse a line whose rest is code, with flags before or after it: ``"--frame 1 x.shape -t 0,1"``.

    After ``--`` everything is code: ``"--frame 1 -- x -t 0"``. ``{name}`` is replaced in flags only.
    """
    parser = parser_for(name)
    if rest in {"-h", "--help"}:
        raise HelpAsked(parser.format_help())
    names = "|".join(map(re.escape, sorted(parser.flags.keys() - {"-h", "--help"}, reverse=True)))
    flag = rf"(?:(?P<flag>{names})[ =]\s*(?P<value>[\d,\-]+|\{{\w+\}})|{JSON})"
    leading, trailing = rf"{flag}(?:\s+(?P<rest>.*))?", rf"(?P<rest>.*\S)\s+{flag}"
    before, after = list[str](), list[str]()
    while found := re.fullmatch(leading, rest, re.DOTALL):
        before += _given(found, variable)
        rest = found["rest"] or ""
    if marked := re.fullmatch(r"--(?:\s+(?P<code>.*))?", rest, re.DOTALL):
        rest = marked["code"] or ""
    else:
        while found := re.fullmatch(trailing, rest, re.DOTALL):
            after = [*_given(found, variable), *after]
            rest = found["rest"]
    return _command(parser, WORDS[name], [*before, *after, *([PositionalText(rest)] if rest else [])])


def _given(found: re.Match[str], variable: Variable) -> list[str]:
    """Return the words of a flag with a value, or of ``--json``."""
    return [found["flag"], with_variables(found["value"], variable)] if found["flag"] else [JSON]


def has_json(line: str) -> bool:
    """Return whether a line, correct or not, has the flag ``--json``; one behind a script is the script's own."""
    words = line.split()
    if words and words[0] in WORDS and (parser := parser_for(words[0])).takes_rest:
        words = words[: 1 + _end_of_flags(parser, words[1:])]
    return JSON in words[: words.index("--") if "--" in words else len(words)]


_BEGINS = {
    "start": "Ranks",
    "dashboard": "Live view",
    "shard": "The model",
    "step": "Training, and stopping inside a step",
    "verify": "Correctness",
    "explain": "Views of the trace",
    "export": "Traces and help",
}
"""Headings of the help, by the first command below each."""


def overview() -> str:
    """Return the help of ``%fsdp``: one line for each command, grouped by headings."""
    width = max(map(len, WORDS))
    lines = []
    for name, word in WORDS.items():
        lines += ["", f"{_BEGINS[name]}:"] if name in _BEGINS else []
        lines.append(f"  {name:<{width}}  {summary(word)}")
    cell = f"  {CELL:<{width}}  first line of a cell: {summary(Cell)}"
    texts = (
        "  {name} is replaced by a variable of this notebook, {{name}} by the text {name}; the code of eval,",
        "  --when and cells is not changed. After --, an argument may begin with -: %fsdp open -- -odd.trace",
        "  With --json, a line prints its result as one line of JSON",
    )
    return "\n".join(["usage: %fsdp COMMAND ...  (-h after a command explains it)", *lines, "", cell, *texts])


def help_text(command: Help) -> str:
    """Return the help of one command, or the overview.

    Raises:
        UsageError: there is no such command.
    """
    topic = command.topic.strip()
    if topic and topic not in WORDS:
        raise no_such_word(topic)
    return parser_for(topic).format_help() if topic else overview()
