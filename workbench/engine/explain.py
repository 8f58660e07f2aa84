"""Explanations of torch's errors about sharded parameters: which parameter and unit, and what to do."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from workbench.engine.full_param import FullParam, full_of_version
from workbench.engine.param import FSDPParam
from workbench.engine.param_group import FSDPParamGroup, units
from workbench.engine.refusal_text import is_sharded, used_after_reshard

_MIXED = "got mixed torch.Tensor and DTensor"
_STALE = re.compile(r"modified by an inplace operation.*expected version (\d+) instead", re.DOTALL)
_OF_A_VIEW = re.compile(r"Function \w+ returned an invalid gradient at index \d+ - got \[(0?)\] but expected shape")


_OF_NOTHING = re.compile(r"both arguments to \w+ need to be at least 1D|\w+ must be a (matrix|vector)")

annotate: Callable[[BaseException], bool] = lambda error: False  # noqa: E731 - a variable: what records a rank sets it
"""Called with each error first, while the units are in the state in which it was raised. Returns whether a note of it
explains the error."""


def explain(error: BaseException) -> None:
    """Put an explanation before torch's message; no-op for other errors and for one explained already, as by a note.

    It explains an operation on a sharded parameter and an ordinary tensor, a backward that needs a resharded full
    parameter, a backward through a view made before a reshard, and an operation on a full parameter kept past one.
    """
    if annotate(error) or not isinstance(error, RuntimeError):
        return
    text = str(error)
    stale = _STALE.search(text)
    meaning = ""
    if stale is not None and stale.start() < 200:  # otherwise already explained
        meaning = _of_stale(int(stale[1]))
    elif _MIXED in text and text.index(_MIXED) < 100:
        meaning = _of_mixed(error.__traceback__)
    elif _OF_A_VIEW.match(text):
        meaning = _of_view(error.__traceback__)
    elif _OF_NOTHING.match(text):
        meaning = _of_kept(error.__traceback__)
    if meaning:
        error.args = (f"{meaning}\n(torch: {text})",)


class _Hook:
    """Replacement of ``sys.excepthook``: explains an error that ends the program, then calls the previous hook."""

    def __init__(self, before: Callable[..., object]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        with suppress(Exception):  # whatever fails here must not hide the error
            explain(error)
        self._before(kind, error, traceback)


def explain_uncaught() -> None:
    """Explain errors that end the program, such as those of a backward, before Python prints them; once is enough."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


# ---- a backward that needs a resharded parameter


def _of_stale(version: int) -> str:
    full = full_of_version(version)
    unit = None if full is None else _unit_of(full)
    if full is None or unit is None:
        return ""
    return (
        f"backward needs the full parameter {unit.in_model(full.fqn)!r}, but unit {unit.title!r} was resharded after "
        "the forward that used it, and this backward does not pass through an output of the unit. Compute the loss "
        "from what the module returns (a tensor stored on self does not count), or keep the parameters until the "
        "last backward: reshard_after_forward=False, and for several backwards through one graph "
        "set_reshard_after_backward(False) before the first"
    )


def _unit_of(full: FullParam) -> FSDPParamGroup | None:
    return next((unit for unit in units.values() if any(full in p.fulls for p in unit.fsdp_params)), None)


# ---- a backward through a view of a resharded parameter


def _of_view(traceback: TracebackType | None) -> str:
    for full in _viewed_in(traceback):
        unit = None if full.is_open else _unit_of(full)
        if unit is not None:
            return (
                f"the loss is computed from a view of the full parameter {unit.in_model(full.fqn)!r}, such as its "
                f"transpose, that was made before unit {unit.title!r} was resharded: its values may be out of date. "
                "Create the view in each forward and use it there (not one stored on self), or keep the parameters "
                "until the last backward: reshard_after_forward=False"
            )
    return ""


def _of_kept(traceback: TracebackType | None) -> str:
    """Explain a failed operation on an empty full parameter, by looking for one in the frames; "" if there is none."""
    fulls = _fulls()
    for frame in reversed([frame for frame, _ in walk_tb(traceback)]):
        for value in list(frame.f_locals.values()):
            full = fulls.get(id(value))
            unit = None if full is None or full.is_open else _unit_of(full)
            if full is not None and unit is not None:
                return used_after_reshard(unit.in_model(full.fqn), unit.title)
    return ""


def _fulls() -> dict[int, FullParam]:
    """Return all full parameters, by the id of their tensor."""
    return {id(full.param): full for unit in units.values() for p in unit.fsdp_params for full in p.fulls}


def _viewed_in(traceback: TracebackType | None) -> Iterator[FullParam]:
    """Yield parameters with views in the graphs of the tensors in the frames, such as a backward's arguments."""
    fulls = _fulls()
    locals_of = (frame.f_locals.values() for frame, _ in walk_tb(traceback))
    found = [each for values in locals_of for value in values for each in _tensors_in(value)]
    nodes: list[Any] = [tensor.grad_fn for tensor in found]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            nodes.append(following)
            full = fulls.get(id(getattr(following, "variable", None)))
            if full is not None and "AsStrided" in node.name():  # autograd's node for a view whose base changed
                yield full


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    for each in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(each, torch.Tensor):
            yield each


# ---- an operation on a sharded parameter and an ordinary tensor


def _of_mixed(traceback: TracebackType | None) -> str:
    frames = [frame for frame, _ in walk_tb(traceback)]
    for frame in reversed(frames):
        found = list(_params_read_in(frame))
        if found:
            unit, param, owner = found[0]
            others = f" (likewise {', '.join(u.in_model(p.fqn) for u, p, _ in found[1:])})" if len(found) > 1 else ""
            if any(_is_forward_around(param, each) for each in frames):
                return (
                    f"parameter {unit.in_model(param.fqn)!r}{others} was resharded within the forward of its unit "
                    f"{unit.title!r}, by a backward or reshard() inside it; run that after the forward"
                )
            inner = f", not the {type(owner).__name__} in it" if "." in param.info.path else ""
            call = f"the module of unit {unit.title!r}, on which fully_shard was called{inner}"
            return is_sharded(unit.in_model(param.fqn), call, f"between its unshard() and reshard(){others}")
    return ""


def _is_forward_around(param: FSDPParam, frame: FrameType) -> bool:
    """Return whether a frame is the forward of the module whose unit has ``param``."""
    module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
    owner, _, _ = param.info.path.rpartition(".")
    inside = dict(module.named_modules()) if isinstance(module, nn.Module) else {}
    return inside.get(owner) is param.info.module


def _params_read_in(frame: FrameType) -> Iterator[tuple[FSDPParamGroup, FSDPParam, nn.Module]]:
    """Yield sharded parameters that a frame's code refers to, as variables or as attributes of its modules."""
    names, values = set(frame.f_code.co_names), list(frame.f_locals.values())
    modules = [value for value in values if isinstance(value, nn.Module)]
    known = {
        id(owned): (unit, param)
        for unit in units.values()
        if unit.is_sharded
        for param in unit.fsdp_params
        for owned in param.owned
    }
    for value in values:
        if id(value) in known:
            unit, param = known[id(value)]
            yield unit, param, param.info.module
    for module in modules:
        for path, value in module.named_parameters():
            if id(value) in known and {part for part in path.split(".") if not part.isdigit()} <= names:
                unit, param = known[id(value)]
                yield unit, param, param.info.module
