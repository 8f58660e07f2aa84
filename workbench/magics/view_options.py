"""The options of a view as flags of its command, from the view's signature and docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints


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
        plain = [t for t in (get_args(hint) or (hint,)) if t in {int, float, bool, str}]
        if plain:
            found = re.search(rf"^\s+{parameter.name}: (.+)$", about, re.MULTILINE)
            yield Option(parameter.name, plain[0], _for_a_flag(found[1]) if found else "", parameter.default is False)


def _for_a_flag(about: str) -> str:
    """Return the text of an argument in a docstring as help of a flag.

    Example: ``"which step; None: the newest."`` -> ``"which step (default: the newest)"``.
    """
    text, _, default = about.removesuffix(".").partition("; None: ")
    return f"{text} (default: {default})" if default else text
