"""Hypothesis strategies for every command of ``%fsdp``, derived from its declaration: a new one needs no code here."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from workbench.magics.command_lines import parse_line
from workbench.protocol.arguments import Argument, argument_of
from workbench.protocol.breakpoints import EVENTS
from workbench.protocol.commands import Command
from workbench.protocol.policy import DTYPES

ODD = (
    *("", "-", "--", "---", "-h", "--help", "-t", "-t 0", "-1", "-x y", "--when", "--when=1", "--rank=1", "=", "-="),
    *(
        "{n}",
        "{{n}}",
        "{",
        "}}",
        "{n}}",
        "-{n}",
        "{}",
        "'",
        '"',
        "'a' \"b\"",
        "\\",
        "a b",
        " a ",
        "#",
        "$n",
        "a,b",
        "\t",
    ),
    *("a\nb", "a\r\n", "é{n}", "\0", "true", "False", "None", "4", "1,2"),
)
"""Texts with a special meaning to a shell, argparse, format strings or a magic."""

CODE = (
    *("x['a'] - 1", 'f"{x}"', "x.sum() -  rank", "[i for i in range(3)]", "a -t b", "x -t 0", "x --frame 1", "-t 0"),
    *(
        "-t 0 x",
        "--frame=1 x",
        "-- x",
        "x --",
        "x -- -t 1",
        "-h",
        "-x",
        "x -1",
        "x\n -t 0",
        "x --targets 0-1",
        "{n} + 1",
    ),
    *("x -t {n}", "x['-t 0']", "'''a\nb'''"),
)
"""Code, some of which begins or ends like a flag."""

LIMIT = 2**63 - 1

_identifiers = st.from_regex(r"[A-Za-z_]\w{0,9}", fullmatch=True).filter(str.isidentifier)
_paths = st.builds(".".join, st.lists(_identifiers, min_size=1, max_size=3))
_any_text = st.sampled_from(ODD) | st.text(max_size=20)
_precisions = st.builds(
    lambda first, more: ",".join([first, *(f"{name}={dtype}" for name, dtype in more.items())]),
    st.sampled_from(list(DTYPES)),
    st.dictionaries(st.sampled_from(["reduce", "output"]), st.sampled_from(list(DTYPES))),
)


@cache
def commands(word: type[Command]) -> st.SearchStrategy[Command]:
    """Return a strategy of the valid commands of one class."""
    hints, example = get_type_hints(word), parse_line(word.example)
    values = {f.name: _values(f, hints[f.name], example) for f in dataclasses.fields(word)}
    return st.fixed_dictionaries(values).map(lambda fields: word(**fields) if _goes(word, **fields) else example)


def _goes(make: Callable[..., object], *given: object, **fields: object) -> bool:
    """Return whether the call succeeds without a ValueError."""
    try:
        make(*given, **fields)
    except ValueError:
        return False
    return True


def _values(declared: dataclasses.Field[Any], hint: Any, example: Command) -> st.SearchStrategy[Any]:
    """Return a strategy of an argument's values; choices need not fit the other arguments of the example.

    An invalid value is replaced by the example's: a filter would reject most draws of some arguments.
    """
    known = argument_of(declared)
    kinds = get_args(hint) if get_origin(hint) in {UnionType, Union} else (hint,)
    own = st.one_of([_of_kind(kind, known) for kind in kinds])
    if known.choices is None:
        name, usual = declared.name, getattr(example, declared.name)
        own = own.map(lambda value: value if _goes(dataclasses.replace, example, **{name: value}) else usual)
    return own if declared.default is dataclasses.MISSING else st.just(declared.default) | own


def _of_kind(kind: Any, known: Argument) -> st.SearchStrategy[Any]:
    if kind is NoneType:
        return st.none()
    if kind is bool:
        return st.booleans()
    if kind is int:
        return (st.integers(-3, 64) | st.integers(-LIMIT, LIMIT)).filter(lambda value: _goes(known.read, str(value)))
    if kind is float:
        return st.floats(allow_nan=False)
    if get_origin(kind) is Sequence:
        return st.lists(_of_kind(get_args(kind)[0], known), max_size=3).map(tuple)
    assert kind is str, f"{kind} of {known.about} is nothing that a line can hold"
    return _texts(known)


def _texts(known: Argument) -> st.SearchStrategy[str]:
    if known.choices is not None:
        return st.sampled_from(known.choices)
    if known.is_code:
        return st.sampled_from(CODE) | _any_text
    if known.completes == "events":
        return (
            st.builds(":".join, st.lists(st.sampled_from((*EVENTS, "all-gather.end", "blocks.*", "")), max_size=3))
            | _any_text
        )
    offered = st.nothing() if isinstance(known.completes, str) else st.sampled_from(known.completes)
    return offered | _identifiers | _paths | _precisions | _any_text
