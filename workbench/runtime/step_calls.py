"""The last calls of a script's functions that stepped an optimizer, so that ``verify`` can repeat one.

They are kept in a variable of the script, so that what they hold is saved, restored and replaced as its other variables
are.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, TypeAlias

from workbench.errors import UsageError
from workbench.runtime.namespace import lookup, user_namespace, variables

Call: TypeAlias = dict[str, Any]
"""The arguments of a call: ``named``, a dict, ``further``, the list of ``*args``, and ``options``, the ``**kwargs``."""

_CALLS = "_step_calls"
_OF_ARGUMENTS = (TypeError, ValueError, AttributeError, LookupError)  # as of another value than was passed


def keep_calls(calls: dict[CodeType, Call]) -> None:
    """Keep the last call of each function, by its code, until the variables of the script are removed."""
    user_namespace()[_CALLS] = calls


def call_of(frame: FrameType) -> Call:
    """Return the call that a frame runs, with the arguments as its variables are now."""
    names, further, options = inspect.getargs(frame.f_code)
    found = frame.f_locals if names or further or options else {}  # to make them takes time, at each step
    return {
        "named": {name: found[name] for name in names if name in found},
        "further": list(found.get(further or "", ())),
        "options": dict(found.get(options or "", {})),
    }


def codes_of(function: object) -> Iterator[CodeType]:
    """Yield the code that a call of an object runs, and that of the functions that it wraps, the outermost first."""
    while function is not None:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, MethodType):
            function = function.__func__
        elif isinstance(function, FunctionType):
            yield function.__code__
            function = vars(function).get("__wrapped__")
        else:
            own = () if isinstance(function, type) else type(function).__mro__
            call = next((vars(cls)["__call__"] for cls in own if "__call__" in vars(cls)), None)
            function = call if isinstance(call, FunctionType) else getattr(function, "__wrapped__", None)


def step_names() -> tuple[str, ...]:
    """Return the variables whose call has stepped an optimizer of the script, the innermost first."""
    order = {code: place for place, code in enumerate(user_namespace().get(_CALLS, {}))}
    found = {name: [order[code] for code in codes_of(each) if code in order] for name, each in variables().items()}
    return tuple(sorted((name for name, places in found.items() if places), key=lambda name: min(found[name])))


def repeated_call(name: str) -> tuple[Callable[[], Any], tuple[str, ...]] | None:
    """Return what calls the function ``name`` as the script did last, and the names of the arguments that it passes.

    The result is None if the script did not call it, or if an argument that it needs is not known.
    """
    function, calls = lookup(name), user_namespace().get(_CALLS, {})
    code = next((each for each in codes_of(function) if each in calls), None)
    if code is None:
        return None
    call, is_wrapped = calls[code], code is not next(codes_of(function))
    try:
        params = inspect.signature(function, follow_wrapped=is_wrapped).parameters.values()
    except ValueError:  # it wraps in C
        params = inspect.signature(function).parameters.values()
    if any(is_required(each) and each.name not in call["named"] for each in params):
        return None
    rest = {each.kind: each.name for each in params}
    further = rest.get(inspect.Parameter.VAR_POSITIONAL, "") if call["further"] else ""
    options = rest.get(inspect.Parameter.VAR_KEYWORD, "") if call["options"] else ""
    own = {each.name: each.kind for each in params if each.name in call["named"]}
    placed = [
        each
        for each, kind in own.items()
        if kind is inspect.Parameter.POSITIONAL_ONLY or (further and kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]

    def repeat() -> Any:  # noqa: ANN401 - whatever the function returns
        named = call["named"]  # with copies of the model in it then, perhaps, as in the function
        args = [*(named[each] for each in placed), *(call["further"] if further else ())]
        kwargs = {each: named[each] for each in own if each not in placed}
        try:
            return lookup(name)(*args, **kwargs, **(call["options"] if options else {}))
        except _OF_ARGUMENTS as error:
            if not (changed := own.keys() & rebound(code)):
                raise
            raise UsageError(
                f"the last call of {name}() cannot be repeated, as it rebinds its argument "
                f"{', '.join(sorted(changed))} ({type(error).__name__}: {error}): give what it computes another name"
            ) from None

    return repeat, (*own, *(f"*{further}",) * bool(further), *(f"**{options}",) * bool(options))


def rebound(code: CodeType) -> set[str]:
    """Return the variables of a function that it sets itself."""
    stores = (each for each in dis.get_instructions(code) if each.opname.startswith(("STORE_FAST", "STORE_DEREF")))
    names = ((each.opname, each.argval if isinstance(each.argval, tuple) else (each.argval,)) for each in stores)
    return {name for kind, own in names for name in (own[:1] if kind == "STORE_FAST_LOAD_FAST" else own)}


def is_required(param: inspect.Parameter) -> bool:
    """Return whether a function cannot be called without a parameter."""
    return param.default is param.empty and param.kind not in (param.VAR_POSITIONAL, param.VAR_KEYWORD)
