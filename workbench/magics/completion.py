"""Tab completion of ``%fsdp`` lines: commands, flags, their choices, and names on the ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from workbench.magics.command_lines import CELL, WORDS, parser_for
from workbench.protocol.arguments import Names

Lookup = Callable[[Names], Sequence[str]]
"""Returns the current names of one kind; called only where they can occur."""


_LINE = re.compile(r"\s*(?:[\w.,\s]+=\s*)?(?P<magic>%{1,2}fsdp)\s(?P<rest>.*)")


def matcher_for(lookup: Lookup) -> Callable[[CompletionContext], SimpleMatcherResult]:
    """Return the matcher that IPython calls at every Tab; its completions, if any, are the only ones."""

    @context_matcher(identifier="fsdp")  # type: ignore[untyped-decorator]
    def fsdp_matcher(context: CompletionContext) -> SimpleMatcherResult:
        found = candidates(context.text_until_cursor, context.token, lookup)
        return {
            "completions": [SimpleCompletion(text=text, type="magic") for text in found],
            "suppress": True,
            "ordered": True,
        }

    return fsdp_matcher  # type: ignore[no-any-return]


def candidates(before: str, symbol: str, lookup: Lookup) -> list[str]:
    """Return the completions of ``symbol``; none if the line is not a ``%fsdp`` line.

    Args:
        before: the line up to the cursor, including ``symbol``.
        symbol: the part that is being completed.
        lookup: returns names.
    """
    line = _LINE.match(before)
    if line is None or not before.endswith(symbol):
        return []
    if ":" in symbol:
        head, _, tail = symbol.rpartition(":")
        before, symbol = before[: len(before) - len(tail)], tail
        return [f"{head}:{found}" for found in candidates(before + tail, tail, lookup)]
    words = line["rest"][: len(line["rest"]) - len(symbol)].split()
    if line["magic"] == CELL:
        name, args = CELL, words
    elif not words:
        return _starting(symbol, WORDS)
    else:
        name, *args = words
    if name != CELL and name not in WORDS:
        return []
    return _starting(symbol, _arguments(name, args, symbol, lookup))


def _arguments(name: str, args: Sequence[str], symbol: str, lookup: Lookup) -> list[str]:
    """Return what can follow ``args`` of the command ``name``."""
    parser = parser_for(name)
    if args and args[-1].endswith(":"):  # the part of EVENT:UNIT after the colon, where a new symbol begins
        return list(lookup("units"))
    last = args[-1].rstrip("=").partition("=")[0] if args else ""
    if last in parser.flags and last not in {"-h", "--help"}:
        return _known(parser.flags[last], lookup)
    given = sum(
        not arg.startswith("-") and previous not in parser.flags
        for previous, arg in zip(["", *args], args, strict=False)
    )
    if given and parser.takes_rest:
        return []
    flags = [flag for flag in (*parser.flags, *sorted(parser.switches)) if flag.startswith("--")]
    if symbol.startswith("-"):
        return flags
    if parser.rest:  # it may hold any number of words
        return [*_known(parser.rest, lookup), *flags]
    places = parser.positionals[given:]
    return (_known(places[0], lookup) if places else []) + flags


def _known(what: Sequence[str], lookup: Lookup) -> list[str]:
    if not what:
        return []
    return list(lookup(cast("Names", what)) if isinstance(what, str) else what)


def _starting(symbol: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(symbol)]
