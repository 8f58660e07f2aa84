"""Notes on errors of torch about sharded parameters: the unit, its state, what freed or gathered it last, and a fix.

A note is added with ``add_note``, so it is displayed wherever the traceback is. The parameter is found in the frames of
the traceback; its state and history are those of the recorder. :data:`PATTERNS` lists the errors. Nothing is kept, and
an error gets no note where its parameter is not found.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from traceback import walk_tb
from types import FrameType
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.engine import explain
from workbench.engine._torch import local_of, storage_of
from workbench.engine.module_names import clean
from workbench.errors import shortened
from workbench.events import STATE_AFTER, Edge, FlatPart, Kind, Param, ParamTensors, Phase, Unit, UnitState, unit_words
from workbench.protocol.policy import DTYPES
from workbench.runtime.namespace import user_namespace
from workbench.runtime.recorder import CAPACITY, Recorder
from workbench.trace.schema import Rows
from workbench.trace.step_names import step_name

BEGINS = "[workbench] "
"""How each note begins."""


_HAS_NOTE = "_workbench_has_note"
"""Attribute of an error that was examined: whether it got a note."""


def install(recorder: Recorder) -> None:
    """Add notes to errors from now on, with what ``recorder`` has recorded."""
    explain.annotate = lambda error: annotate(error, recorder)


def uninstall() -> None:
    """Add no more notes."""
    explain.annotate = lambda error: False


def annotate(error: BaseException, recorder: Recorder) -> bool:
    """Add a note to an error of :data:`PATTERNS` whose parameter is found; return whether it has one.

    The units may be in another state later, so only the first call examines an error.
    """
    with suppress(Exception):  # whatever fails here must not hide the error
        if not hasattr(error, _HAS_NOTE):
            setattr(error, _HAS_NOTE, False)
            text = shortened(str(error))
            matching = [pattern for pattern in PATTERNS if pattern.text.search(text)]
            note = _note(_RaisedError(error, text, recorder), matching) if matching else ""
            if note:
                error.add_note(f"{BEGINS}{note}")
                setattr(error, _HAS_NOTE, True)
    return getattr(error, _HAS_NOTE, False)


# ---- where the error was raised


class _ShardedParam(NamedTuple):
    """A sharded parameter of this rank."""

    unit: Unit
    param: Param | FlatPart
    tensors: ParamTensors

    @property
    def is_flat(self) -> bool:
        return isinstance(self.param, FlatPart)


class _Read(NamedTuple):
    """A tensor that the code of a frame refers to.

    Attributes:
        frame: the frame.
        tensor: the tensor.
        label: variable, or an expression for the attribute.
        place: module that has it, and its name there; None for a variable.
    """

    frame: FrameType
    tensor: torch.Tensor
    label: str
    place: tuple[nn.Module, str] | None


class _RaisedError:
    """The frames of an error, and the sharded parameters of this rank.

    Attributes:
        text: the error's message.
        frames: the innermost first.
        recorder: the recorder.
        sharded: all sharded parameters; for a flat one, its parts.
    """

    def __init__(self, error: BaseException, text: str, recorder: Recorder) -> None:
        self.text, self.recorder = text, recorder
        self.frames = [frame for frame, _ in walk_tb(error.__traceback__)][::-1]
        self.sharded = list(_sharded_params(recorder))

    def reads(self) -> Iterator[_Read]:
        """Yield the tensors that the frames refer to, the innermost first."""
        for frame in self.frames:
            yield from _reads(frame)

    @property
    def numbers(self) -> set[int]:
        """Sizes in the message, but not the numbers of arguments, as in ``mat2``, and of dimensions, as in ``1-D``."""
        return {int(number) for number in re.findall(r"\d+", re.sub(r"\b[a-z]+\d\b|\d-?D", "", self.text))}

    def owner(self, read: _Read) -> _ShardedParam | None:
        """Return the parameter whose shard, or place in a module, is what a frame read."""
        for sharded in self.sharded:
            at = sharded.tensors.places
            if read.tensor is sharded.tensors.shard or (read.place is not None and read.place in at):
                return sharded
        return next((sharded for sharded in self.sharded if _lies_in(read.tensor, sharded.tensors.shard)), None)

    def freed(self, read: _Read) -> _ShardedParam | None:
        """Return the parameter of which a frame has the full tensor, from before it was freed."""
        at = storage_of(read.tensor) if _is_plain(read.tensor) else None
        found = [
            sharded
            for sharded in self.sharded
            for freed in [sharded.tensors.freed]
            if isinstance(freed, torch.Tensor) and (read.tensor is freed or storage_of(freed) == at)
        ]
        named = [sharded for sharded in found if _name_of(sharded) in {read.label, read.label.rpartition(".")[2]}]
        placed = [sharded for sharded in found if read.place in sharded.tensors.places]
        shaped = [sharded for sharded in found if tuple(read.tensor.shape) == sharded.param.shape]
        return next(iter([*placed, *named, *shaped, *found]), None)


def _sharded_params(recorder: Recorder) -> Iterator[_ShardedParam]:
    for unit in recorder.header.units:
        tensors = recorder.tensors(unit.index) if unit.in_use else {}
        for param in unit.params:
            for each in param.parts or (param,):
                if each.fqn in tensors:
                    yield _ShardedParam(unit, each, tensors[each.fqn])


def _name_of(sharded: _ShardedParam) -> str:
    return sharded.param.fqn.rpartition(".")[2]


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in {torch.Tensor, nn.Parameter}  # a subclass may refuse to be read


def _lies_in(tensor: torch.Tensor, shard: object) -> bool:
    """Return whether a plain tensor is in the memory of a shard."""
    if not isinstance(shard, torch.Tensor) or not _is_plain(tensor) or not tensor.numel():
        return False
    local = local_of(shard) if isinstance(shard, DTensor) else shard
    first = local.storage_offset()
    begin = int(tensor.storage_offset())
    return bool(storage_of(tensor) == storage_of(local) and first <= begin < first + local.numel())


def _variables(frame: FrameType) -> Mapping[str, object]:
    """Return the variables that the code of a frame can refer to: its own, and globals that it names."""
    globals_ = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
    return globals_ if frame.f_locals is frame.f_globals else {**globals_, **frame.f_locals}


def _reads(frame: FrameType) -> Iterator[_Read]:
    names = set(frame.f_code.co_names)
    variables = _variables(frame)
    for name, value in variables.items():
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, torch.Tensor):
                yield _Read(frame, each, name, None)
    for variable, module in variables.items():
        if not isinstance(module, nn.Module):
            continue
        for path, inner in module.named_modules():
            parts = {part for part in path.split(".") if part and not part.isdigit()}
            if not parts <= names:
                continue
            for name, value in {**inner._parameters, **vars(inner)}.items():
                if name in names and isinstance(value, torch.Tensor):
                    yield _Read(frame, value, f"{_as_code(variable, path)}.{name}", (inner, name))


# ---- what is wrong


class _Finding(NamedTuple):
    """The result of a finder.

    Attributes:
        frame: the frame that read it.
        sharded: the parameter; None: it is about a tensor that is not a parameter.
        verdict: a clause about the parameter or tensor.
        fix: what to type.
    """

    frame: FrameType
    sharded: _ShardedParam | None
    verdict: str
    fix: str


def _of_sharded(raised: _RaisedError) -> _Finding | None:
    """Find a sharded parameter that a frame computes with as if it were whole."""
    for read in raised.reads():
        sharded = raised.owner(read)
        if sharded is not None and not _is_open(sharded):
            fix = _after_forward(raised, sharded) or _call_of(raised, sharded)
            return _Finding(read.frame, sharded, f"parameter {sharded.param.fqn!r} is sharded", fix)
    return None


def _of_freed(raised: _RaisedError) -> _Finding | None:
    """Find a full parameter that a frame has kept from before it was freed."""
    for read in raised.reads():
        sharded = raised.freed(read)
        if sharded is not None:
            kept = "" if read.place is not None else f", kept in {read.label!r},"
            return _Finding(
                read.frame,
                sharded,
                f"the full parameter {sharded.param.fqn!r}{kept} has no values any more",
                f"read it from its module on each use; {_call_of(raised, sharded)}",
            )
    return None


def _of_a_part(raised: _RaisedError) -> _Finding | None:
    """Find a tensor with the shape of this rank's part of a parameter, where the message has a size of that shape."""
    for read in raised.reads():
        sharded = raised.owner(read)
        if sharded is None or _is_open(sharded):
            continue
        is_split = isinstance(read.tensor, DTensor)
        if is_split and "to_local" not in read.frame.f_code.co_names:
            continue
        part = tuple((local_of(read.tensor) if isinstance(read.tensor, DTensor) else read.tensor).shape)
        whole = sharded.param.shape
        if part == whole or not _is_in_message(raised, part, whole):
            continue
        fix = f"{read.label}.full_tensor()" if is_split else _call_of(raised, sharded)
        verdict = f"{list(part)} is this rank's part of {sharded.param.fqn!r}, whose shape is {list(whole)}"
        return _Finding(read.frame, sharded, verdict, fix)
    return None


def _is_in_message(raised: _RaisedError, part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    if len(part) != len(whole):  # a piece of a flat parameter
        return f"{len(part)}-D" in raised.text or bool(set(part) & raised.numbers)
    return any(size in raised.numbers for size, full in zip(part, whole, strict=True) if size != full)


def _of_pending_sum(raised: _RaisedError) -> _Finding | None:
    """Find a DTensor of which each rank has only a part of the sum."""
    for read in raised.reads():
        value = read.tensor
        if read.place is None and isinstance(value, DTensor) and any(each.is_partial() for each in value.placements):
            placed = ", ".join(map(str, value.placements))
            return _Finding(
                read.frame,
                None,
                f"{read.label!r} is placed as {placed} over {value.device_mesh.size()} ranks: each holds only its own "
                "part of the sum, and .item() returns that part",
                f"{'the result' if read.frame.f_code.co_name == 'loss_of' else read.label}.full_tensor().item()",
            )
    return None


def _of_other_dtype(raised: _RaisedError) -> _Finding | None:
    """Find a full parameter in the compute dtype of its unit, and a tensor of another dtype that meets it."""
    for frame in raised.frames:
        reads = [read for read in _reads(frame) if read.tensor.is_floating_point()]
        params = [(read, sharded) for read in reads for sharded in [raised.owner(read)] if sharded is not None]
        for read, sharded in params:
            others = [each for each in reads if each.place is None and each.tensor.dtype is not read.tensor.dtype]
            if others and _is_open(sharded):
                return _dtypes_meet(raised, read, sharded, others[0])
    return None


def _dtypes_meet(raised: _RaisedError, read: _Read, sharded: _ShardedParam, other: _Read) -> _Finding:
    wanted, found = (str(each.tensor.dtype).removeprefix("torch.") for each in (read, other))
    unit = unit_words(sharded.unit.name)
    source = _last_output(raised.recorder, sharded.unit)
    fix = f"{other.label} = {other.label}.to(torch.{wanted})"
    if source is not None and not source.is_flat:
        name = _SHORT.get(wanted, wanted)
        in_code = f"MixedPrecisionPolicy(..., output_dtype=torch.{wanted})"
        units = _units_in_code(raised, source)
        if source.runner.can_reshard and units:
            fix = f"%fsdp reshard {units} --mp output={name}, or in code mp_policy={in_code} for unit {source.name!r}"
        else:
            fix = f"mp_policy={in_code} for unit {unit_words(source.name)!r}, or {fix}"
    came = "" if source is None else f", the output of unit {unit_words(source.name)!r}"
    return _Finding(
        read.frame,
        None,
        f"unit {unit!r} computes in {wanted}, as parameter {sharded.param.fqn!r}, and {other.label!r} is {found}{came}",
        fix,
    )


_SPELT = {torch.float32: "float", torch.bfloat16: "bfloat16", torch.float16: "half"}
"""Dtypes as torch's messages spell them, in lower case."""

_CAST = r"[^\n]*\.(to|type|type_as|float|bfloat16|half)\("


def _of_buffer(raised: _RaisedError) -> _Finding | None:
    """Find a buffer in another dtype than its unit computes in, which the innermost module uses without a cast."""
    for frame in raised.frames:
        modules = [(name, each) for name, each in _variables(frame).items() if isinstance(each, nn.Module)]
        found = [(*each, unit) for each in modules if (unit := _unit_within(raised, each[1])) is not None]
        if found:
            return next((each for one in found if (each := _odd_buffer(raised, frame, *one)) is not None), None)
    return None


def _odd_buffer(
    raised: _RaisedError,
    frame: FrameType,
    variable: str,
    module: nn.Module,
    unit: tuple[_ShardedParam, str, torch.dtype],
) -> _Finding | None:
    """Find such a buffer below a module; ``variable``: the module's name in the frame."""
    sharded, prefix, wanted = unit
    for path, buffer in module.named_buffers():
        *parts, name = (part for part in path.split(".") if not part.isdigit())
        if buffer.dtype is wanted or not _are_named(raised.text, {buffer.dtype, wanted}):
            continue
        if {*parts, name} <= set(frame.f_code.co_names) and not _is_cast(frame, name):
            return _buffer_differs(frame, sharded, prefix + path, _as_code(variable, path), buffer, wanted)
    return None


def _are_named(text: str, dtypes: set[torch.dtype]) -> bool:
    """Return whether a message of torch's names all of these dtypes."""
    return all(each in _SPELT and re.search(rf"\b{_SPELT[each]}\b", text.lower()) for each in dtypes)


def _unit_within(raised: _RaisedError, module: nn.Module) -> tuple[_ShardedParam, str, torch.dtype] | None:
    """Return an open parameter below a module, the path of the module in the model, and the parameter's full dtype."""
    paths = {inner: path for path, inner in module.named_modules()}
    for sharded in raised.sharded:
        full = sharded.tensors.full
        for owner, name in sharded.tensors.places:
            below = f"{paths[owner]}.{name}".lstrip(".") if owner in paths else ""
            if below and isinstance(full, torch.Tensor) and sharded.param.fqn.endswith(below):
                return sharded, sharded.param.fqn.removesuffix(below), full.dtype
    return None


def _is_cast(frame: FrameType, name: str) -> bool:
    try:
        return re.search(rf"\b{name}\b{_CAST}", inspect.getsource(frame.f_code)) is not None
    except (OSError, TypeError):
        return True  # unknown


def _buffer_differs(
    frame: FrameType, sharded: _ShardedParam, fqn: str, code: str, buffer: torch.Tensor, wanted: torch.dtype
) -> _Finding:
    found, computes = (str(dtype).removeprefix("torch.") for dtype in (buffer.dtype, wanted))
    unit = unit_words(sharded.unit.name)
    return _Finding(
        frame,
        None,
        f"buffer {fqn!r} is {found} in unit {unit!r}, which computes in {computes}: mixed precision casts inputs and "
        "parameters, not buffers",
        f"{code}.to(torch.{computes})",
    )


_SHORT = {dtype: short for short, dtype in DTYPES.items()}


def _last_output(recorder: Recorder, unit: Unit) -> Unit | None:
    """Return the unit whose forward ended last, if it is another one."""
    rows = recorder.newest(CAPACITY)
    ended = rows[(rows["kind"] == Kind.FORWARD) & (rows["edge"] == Edge.END)]
    index = int(ended["unit"][-1]) if len(ended) else unit.index
    return next((each for each in recorder.header.units if each.index == index != unit.index), None)


def _units_in_code(raised: _RaisedError, unit: Unit) -> str:
    """Return a unit's name from the variable of its model, as ``reshard`` takes it; empty if none is found."""
    sharded = next((each for each in raised.sharded if each.unit.index == unit.index), None)
    found = None if sharded is None else _unit_in_code(raised, sharded)
    return "" if found is None else re.sub(r"\[(\d+)\]", r".\1", found[0])


class _Pattern(NamedTuple):
    """A kind of error: its message, and finders of the reason, the most specific first; the innermost frame counts."""

    text: re.Pattern[str]
    finders: tuple[Callable[[_RaisedError], _Finding | None], ...]


def _pattern(text: str, *finders: Callable[[_RaisedError], _Finding | None]) -> _Pattern:
    return _Pattern(re.compile(text, re.IGNORECASE), finders)


PATTERNS = (
    _pattern(r"got mixed torch\.Tensor and DTensor", _of_pending_sum, _of_sharded),
    _pattern(r"^\w+: parameter '[^']+' is sharded; call", _of_sharded),
    _pattern(
        r"setStorage: .*out of bounds for storage of size 0|storage has no data|data is not allocated"
        r"|unallocated storage|was read before unit",
        _of_freed,
    ),
    _pattern(
        r"shapes cannot be multiplied|size of tensor a .* must match|must be a (matrix|vector)|size mismatch"
        r"|need to be at least 1D|is invalid for input of size",
        _of_freed,
        _of_a_part,
    ),
    _pattern(r"returned a DTensor", _of_pending_sum),
    _pattern(r"must have the same dtype|to have the same dtype|expected scalar type", _of_other_dtype, _of_buffer),
    _pattern(r"\bnans?\b|not finite|non-?finite", _of_freed),
)
"""The errors that get a note, by their message."""


def _note(raised: _RaisedError, patterns: list[_Pattern]) -> str:
    every = [found for pattern in patterns for find in pattern.finders if (found := find(raised)) is not None]
    if not every:
        return ""
    found = min(every, key=lambda found: raised.frames.index(found.frame))
    said = [found.verdict]
    if found.sharded is not None:
        if f"parameter {found.sharded.param.fqn!r}" in raised.text:  # the engine's own message
            said.clear()
        said.append(_state_of(found.sharded, raised.recorder))
    return f"{'; '.join(said)}\nfix: {found.fix}"


# ---- state and history of a unit


def _is_open(sharded: _ShardedParam) -> bool:
    return sharded.tensors.full is not None


def _state_of(sharded: _ShardedParam, recorder: Recorder) -> str:
    """Return a clause with the state of the parameter's unit, and what put it into that state."""
    unit = sharded.unit
    state, why = _history(recorder.newest(CAPACITY), unit)
    is_open = _is_open(sharded)
    text = f"unit {unit_words(unit.name)!r} is {'unsharded' if is_open else 'sharded'}"
    if is_open != (state is UnitState.UNSHARDED):  # off the record
        return text
    return f"{text}: {why}"


def _history(rows: Rows, unit: Unit) -> tuple[UnitState, str]:
    """Return the state of a unit after ``rows``, and what put it there."""
    own = rows[(rows["unit"] == unit.index) & np.isin(rows["kind"], _OF_STATE)]
    edges = [(Kind(row["kind"]), Edge(row["edge"])) for row in own]
    last = max((at for at, edge in enumerate(edges) if edge in STATE_AFTER), default=None)
    if last is None:
        return UnitState.SHARDED, "it has not been gathered yet"
    state, row = STATE_AFTER[edges[last]], own[last]
    during = step_name(int(row["step"]))
    when = f" in {during}" if during else ""
    if state is UnitState.SHARDED:
        return state, f"{_freed_by(unit, edges[:last], edges[last][0], Phase(row['phase']))}{when}"
    if state is UnitState.UNSHARDED:
        return state, f"{_gathered_by(edges[last + 1 :], Phase(row['phase']))}{when}"
    return state, f"its all-gather is in flight{when}"


_OF_STATE = (Kind.FORWARD, Kind.BACKWARD, *{kind for kind, _ in STATE_AFTER})


def _freed_by(unit: Unit, before: list[tuple[Kind, Edge]], kind: Kind, phase: Phase) -> str:
    if kind is Kind.RESET:
        return "freed when the step was aborted"
    if before and before[-1] == (Kind.FORWARD, Edge.END):
        return f"freed by its post-forward hook, as reshard_after_forward={unit.reshard_after_forward}"
    if phase in {Phase.BACKWARD, Phase.POST_BACKWARD} or (before and before[-1] == (Kind.BACKWARD, Edge.END)):
        return "freed after its backward"
    if phase is Phase.OPTIMIZER:
        return "freed by the optimizer's step, after which its full parameters were out of date"
    return f"freed by a call of reshard() or the like, {phase.info.doing}"


def _gathered_by(after: list[tuple[Kind, Edge]], phase: Phase) -> str:
    if (Kind.FORWARD, Edge.BEGIN) in after:
        ended = (Kind.FORWARD, Edge.END) in after
        return f"gathered by its pre-forward hook{' and kept, as reshard_after_forward=False' if ended else ''}"
    if phase in {Phase.PRE_BACKWARD, Phase.BACKWARD, Phase.POST_BACKWARD}:
        return "gathered for its backward"
    if phase is Phase.FORWARD:
        return "gathered ahead of its forward"
    return f"gathered by a call of unshard() or the like, {phase.info.doing}"


# ---- what to type


def _call_of(raised: _RaisedError, sharded: _ShardedParam) -> str:
    """Return what to call instead, as code."""
    found = _unit_in_code(raised, sharded)
    if found is None:
        within = "summon_full_params()" if sharded.is_flat else "its unshard() and reshard()"
        return f"call the module of its unit, or compute {'within' if sharded.is_flat else 'between'} {within}"
    code, module = found
    if sharded.is_flat:
        return f"call {code}(...), or compute within FullyShardedDataParallel.summon_full_params({code})"
    for frame in raised.frames:
        if frame.f_locals.get("self") is module:
            if frame.f_code.co_name in {"forward", *_OF_A_CALL}:
                break
            return f"register_fsdp_forward_method({code}, {frame.f_code.co_name!r})"
    return f"call {code}(...), or compute between {code}.unshard() and {code}.reshard()"


def _after_forward(raised: _RaisedError, sharded: _ShardedParam) -> str:
    """Return the fix for a unit that was resharded within its own forward, which a call began; empty for another."""
    code, module = _unit_in_code(raised, sharded) or ("", None)
    inside = {frame.f_code.co_name for frame in raised.frames if module and frame.f_locals.get("self") is module}
    is_called = "forward" in inside and inside & _OF_A_CALL
    return f"a backward or reshard() within the forward of {code} has freed it: run that after it" if is_called else ""


_OF_A_CALL = {"__call__", "_call_impl", "_wrapped_call_impl"}


def _unit_in_code(raised: _RaisedError, sharded: _ShardedParam) -> tuple[str, nn.Module] | None:
    """Return an expression for the module of a parameter's unit, and the module, from the outermost variable."""
    owners = [module for module, _ in sharded.tensors.places]
    name = sharded.unit.name
    below = sharded.param.fqn[len(name) + 1 if name else 0 :].rpartition(".")[0]
    users = [_variables(frame) for frame in reversed(raised.frames) if not _is_of_torch(frame)]
    for variables in (*users, user_namespace()):
        for variable, value in tuple(variables.items()):
            if not isinstance(value, nn.Module) or variable == "self" or variable.startswith("_"):
                continue
            paths = [clean(path) for path, module in value.named_modules() if module in owners]
            for path in paths:
                if f".{path}".endswith(f".{below}" if below else ""):
                    above = path[: len(path) - len(below)].rstrip(".") if below else path
                    modules = {clean(each): module for each, module in reversed(list(value.named_modules()))}
                    return _as_code(variable, above), modules[above]
    return None


def _is_of_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in {"torch", "workbench"}


def _as_code(variable: str, path: str) -> str:
    """Return an expression for a module: ``("model", "blocks.0.mlp")`` -> ``model.blocks[0].mlp``."""
    return variable + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split(".") if part)
