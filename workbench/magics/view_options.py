"""The options of a view as flags of its word: read off the view's own signature and docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True)
class Option:
    """One keyword of a view: its name, the type its flag takes, and what its docstring says of it.

    A switch is off unless its flag is there, which takes no word then.
    """

    name: str
    type: type
    about: str
    is_switch: bool = False


def options_of(view: Callable[..., Any]) -> Iterator[Option]:
    """Yield the keyword-only arguments of ``view`` that one word of text can hold: int, float, bool, str."""
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
    """Return what a docstring says of an argument as a flag's help says it.

    Example: ``"which step; None: the newest."`` -> ``"which step (default: the newest)"``.
    """
    said, _, default = about.removesuffix(".").partition("; None: ")
    return f"{said} (default: {default})" if default else said
