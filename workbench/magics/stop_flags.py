"""The arguments of the words that stop inside a step, look around and go on."""

from __future__ import annotations

import argparse
import re

from workbench.commands import NEXT
from workbench.errors import UsageError
from workbench.magics.parser import Expand, HelpAsked, Parser, parse_ranks

BREAK = ("add", "list", "clear")

_FLAG = r"(?P<flag>-t|--targets|--frame)[ =]\s*(?P<value>[\d,\-]+|\{\w+\})"
_LEADING = re.compile(rf"{_FLAG}(?:\s+(?P<rest>.*))?", re.DOTALL)
_TRAILING = re.compile(rf"(?P<rest>.*\S)\s+{_FLAG}", re.DOTALL)


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a rank such as 1, got {text!r}")
    return int(text)


def _count(text: str) -> int:
    """A whole number, 0 included."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 for the newest event, got {text!r}")
    return int(text)


def add_step(parser: Parser) -> None:
    """Add what lets a step stop or go on behind the notebook."""
    parser.flag("--until", complete="events", default="", metavar="EVENT", help="stop before it, once: EVENT[:UNIT]")
    parser.switch("background", default=False, about="go on with the notebook at once (default: no)")


def add_continue(parser: Parser) -> None:
    """Add the arguments of ``continue``."""
    parser.switch("foreground", default=False, about="wait for what was begun with --background, too (default: no)")


def add_next(parser: Parser) -> None:
    """Add the arguments of ``next``."""
    parser.positional(
        "what", complete=NEXT, nargs="?", default="event", choices=NEXT, metavar="|".join(NEXT), help="default: event"
    )


def add_where(parser: Parser) -> None:
    """Add the arguments of ``where``."""
    parser.switch("stacks", default=False, about="also each rank's Python threads (default: no)")


def add_break(parser: Parser) -> None:
    """Add the arguments of ``break``."""
    parser.positional("action", complete=BREAK, choices=BREAK, metavar="|".join(BREAK), help="what to do")
    parser.positional(
        "event",
        complete="events",
        nargs="?",
        default="",
        metavar="EVENT[:UNIT]|ID",
        help="such as backward:blocks.2",
    )
    parser.flag("--rank", type=_rank, metavar="R", help="the only rank that stops (default: all)")
    parser.flag("--when", metavar="EXPR", help="a condition such as 'num_bytes > 1e6' (default: always)")


def check_break(args: argparse.Namespace) -> None:
    """Check what goes together.

    Raises:
        UsageError: it does not.
    """
    if args.action == "add" and not args.event:
        raise UsageError("%fsdp break add needs an event, such as all_gather:blocks.2 or backward")
    if args.action != "add" and (args.rank is not None or args.when is not None):
        raise UsageError(f"%fsdp break {args.action} takes no --rank and no --when")
    if args.action == "list" and args.event:
        raise UsageError("%fsdp break list takes no event")
    if args.action == "clear" and args.event and not args.event.isdecimal():
        raise UsageError(f"%fsdp break clear takes a number that %fsdp break list shows, not {args.event!r}")


def add_inspect(parser: Parser) -> None:
    """Add the arguments of ``inspect``."""
    parser.positional("fqn", complete="fqns", metavar="FQN", help="a parameter, such as blocks.2.mlp.0.weight")


def add_eval(parser: Parser) -> None:
    """Add the arguments of ``eval``, for its help: :func:`parse_eval` reads them."""
    parser.positional(
        "expr", complete="variables", metavar="EXPR", help="a Python expression: the raw rest of the line"
    )
    parser.flag("-t", "--targets", metavar="RANKS", help="ranks that evaluate it, such as 1,3 or 0-2 (default: all)")
    parser.flag(
        "--frame",
        metavar="N",
        help="look names up from the N-th function under way outwards; 0: the innermost (default 0)",
    )


def parse_eval(rest: str, parser: Parser, expand: Expand) -> argparse.Namespace:
    """Read the raw rest of an ``eval`` line: ``"--frame 1 x.shape -t 0,1"`` -> ``x.shape``, ranks 0 and 1, frame 1.

    Flags stand before the expression or after it; of them alone ``{name}`` is replaced.

    Raises:
        UsageError: there is no expression, or no such list of ranks, or number of a frame.
        HelpAsked: it is ``-h``.
    """
    expr, given = rest.strip(), {"--frame": "0", "-t": ""}
    if expr in {"-h", "--help"}:
        raise HelpAsked(parser.format_help())
    while found := _LEADING.fullmatch(expr) or _TRAILING.fullmatch(expr):
        given["-t" if found["flag"] == "--targets" else found["flag"]] = expand(found["value"])
        expr = (found["rest"] or "").strip()
    if not expr:
        parser.error("the following arguments are required: EXPR")
    try:
        ranks = parse_ranks(given["-t"]) if given["-t"] else ()
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument -t/--targets: {error}")
    if not given["--frame"].isdecimal():
        parser.error(f"argument --frame: expected a whole number, 0 for the innermost, got {given['--frame']!r}")
    return argparse.Namespace(expr=expr, ranks=ranks, frame=int(given["--frame"]))


def add_back(parser: Parser) -> None:
    """Add the arguments of ``back``."""
    parser.positional("n", nargs="?", type=_count, default=1, metavar="N", help="events; 0: the newest (default 1)")
