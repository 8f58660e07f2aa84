"""Jobs of a held rank, run between two events of its step: expressions, cells and inspections.

Names in an expression or a cell are looked up in this order: in the variables of the user's active functions, innermost
first; in those of the cells; in the globals of these functions' modules. Assignments create variables of the cells.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import io
import linecache
import traceback
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from workbench.engine._torch import local_of
from workbench.engine.explain import explain
from workbench.errors import UsageError, shortened
from workbench.events import Kind, Phase
from workbench.models._torch_private import DispatchMode
from workbench.protocol.commands import Evaluate, Inspect
from workbench.protocol.rank_messages import Job, JobError, JobReply, RunCell
from workbench.runtime.inspection import inspect
from workbench.runtime.namespace import user_namespace
from workbench.runtime.recorder import Recorder
from workbench.runtime.stacks import HELD_CELL, HELD_EXPRESSION, frames_of_the_step, place_of

MAX_TEXT = 50_000
"""Characters of output or of a repr that are kept."""

_COMMUNICATING = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_LOCAL = ("wait_tensor", "_wrap_tensor_autograd")  # only wait for, or wrap, what was issued


def run(job: Job, recorder: Recorder) -> JobReply:
    """Run one job in this thread; if it raises, the rank stays held.

    Args:
        job: the work. If other ranks do not run it too, a collective with them would wait forever; it raises instead.
        recorder: the rank's recorder.

    Returns:
        the result; ``text`` is a repr or the output.
    """
    output = io.StringIO()
    try:
        with redirect_stdout(output), redirect_stderr(output), _company(job):
            if isinstance(job.work, Inspect):
                return JobReply(inspected=inspect(job.work.fqn, recorder))
            text = _run(job.work, recorder.phase_now)
    except BaseException as error:  # noqa: BLE001 - any exception, also an interrupt, is the result: the rank stays held
        return JobReply(text=_cut(output.getvalue()), error=_error(error, job.work))
    return JobReply(text=_cut(output.getvalue() + text))


def _company(job: Job) -> AbstractContextManager[object]:
    if not job.alone:
        return nullcontext()
    alone: AbstractContextManager[object] = _CollectiveGuard(job.alone, job.ranks)
    return alone


def needs_others(what: str, alone: str) -> str:
    """Return the sentence that ``what`` cannot be done by some ranks only; ``alone`` is that of the job."""
    return f"{what} waits for other ranks, and only {alone}"


def refusal(why: str) -> JobReply:
    """Return the result of a job that did not run."""
    return JobReply(error=JobError(ename="NotRun", evalue=why, traceback=f"NotRun: {why}"))


def _run(work: Evaluate | RunCell, phase: Phase) -> str:
    scope = _Scope.here(work.frame if isinstance(work, Evaluate) else 0, phase)
    with _WholeNumbers(), scope.explained():
        return _evaluate(work.expr, scope) if isinstance(work, Evaluate) else _run_cell(work.code, scope)


# ---- names


class _Scope(MutableMapping[str, Any]):
    """Names where the step is stopped: variables of functions and of the cells, globals of modules.

    Args:
        frames: active functions of the user, innermost first.
        first: index of the innermost frame to use; it and its callers are searched.
        phase: of the rank.
    """

    def __init__(self, frames: Sequence[FrameType], first: int, phase: Phase) -> None:
        is_in_forward = any(frame.f_code.co_name == "forward" for frame in frames)  # also if backward runs it again
        self._is_after_forward = phase.info.part is Kind.BACKWARD and not is_in_forward
        self._places = [place_of(frame) for frame in frames]
        if first and first >= len(frames):
            raise UsageError(f"there is no frame {first} here; {self._frames()}")
        self._cells = user_namespace()
        self._variables: dict[str, Any] = {}
        self._modules: dict[str, Any] = {}
        for frame in reversed(frames[first:]):
            self._modules |= frame.f_globals
            if frame.f_locals is not self._cells:
                self._variables |= frame.f_locals

    @classmethod
    def here(cls, first: int, phase: Phase) -> _Scope:
        """Return the names in the calling thread, in a phase of the step."""
        return cls(frames_of_the_step(), first, phase)

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - a variable
        for known in (self._variables, self._cells, self._modules):
            if name in known:
                return known[name]
        raise KeyError(name)

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401 - a variable
        self._variables.pop(name, None)
        self._cells[name] = value

    def __delitem__(self, name: str) -> None:
        self._variables.pop(name, None)
        del self._cells[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole())

    def __len__(self) -> int:
        return len(self.whole())

    def whole(self) -> dict[str, Any]:
        """Return all names and their values."""
        return self._modules | self._cells | self._variables

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Add the nearest names and the frames to a NameError that the body itself raises."""
        try:
            yield
        except NameError as error:
            raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
            if error.name is None or raised_in not in {HELD_CELL, HELD_EXPRESSION}:
                raise
            near = _nearest(error.name, self.whole()) or _nearest(error.name, dir(builtins), cutoff=0.8)
            hint = [f"nearest: {', '.join(near)}"] if near else []
            named = NameError("; ".join([str(error), *hint, self._frames()]), name=error.name)
            raise named.with_traceback(error.__traceback__) from None

    def _frames(self) -> str:
        ended = "; in backward, forward has returned and its variables are gone" * self._is_after_forward
        if not self._places:
            return f"none of your functions is running here{ended}"
        return f"frames: {', '.join(f'{number} {place}' for number, place in enumerate(self._places))}{ended}"


def _nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> list[str]:
    return difflib.get_close_matches(name, [other for other in known if not other.startswith("_")], n=5, cutoff=cutoff)


def _let_read(filename: str, text: str) -> None:
    """Let tracebacks and positions show the lines of code that has no file."""
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)


# ---- expressions


def _evaluate(text: str, scope: _Scope) -> str:
    text = text.strip()
    _let_read(HELD_EXPRESSION, text)
    tree = ast.parse(text, HELD_EXPRESSION, "eval")
    names = scope.whole()  # one dictionary: a function within the expression sees only its globals
    value = eval(compile(tree, HELD_EXPRESSION, "eval", dont_inherit=True), names)
    for name in {node.target.id for node in ast.walk(tree) if isinstance(node, ast.NamedExpr)} & names.keys():
        if names[name] is not scope.get(name):
            scope[name] = names[name]
    return described(value)


def described(value: Any) -> str:  # noqa: ANN401 - any value of the user's expression
    """Return the repr of ``value``; a DTensor is described as this rank's shard, with its local values."""
    if not isinstance(value, DTensor):
        return repr(value)
    local = local_of(value).detach()
    placements = ", ".join(map(str, value.placements))
    return f"this shard, {list(local.shape)} of {list(value.shape)}, placed as {placements}:\n{local!r}"


class _WholeNumbers(TorchFunctionMode):
    """Refuses to convert a DTensor with a pending sum to a number: on one rank it would be only that rank's part."""

    _MAKE_NUMBERS = frozenset(
        {
            torch.Tensor.item,
            torch.Tensor.tolist,
            torch.Tensor.__float__,
            torch.Tensor.__int__,
            torch.Tensor.__bool__,
        }
    )

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - signature of torch
        """Call ``func`` unless it makes a number of a pending sum."""
        if func in self._MAKE_NUMBERS and _is_pending_sum(args[0]):
            raise TypeError(
                "this DTensor is a partial sum, not reduced over the ranks yet: evaluate x.full_tensor() on all "
                "ranks for the sum, or x.to_local() for this rank's part"
            )
        return func(*args, **(kwargs or {}))


def _is_pending_sum(value: object) -> bool:
    return isinstance(value, DTensor) and any(p.is_partial() for p in value.placements)


class _CollectiveGuard(DispatchMode):
    """Refuses collectives with ranks that do not run the job.

    Args:
        alone: that of the job.
        ranks: the ranks that run the job.
    """

    def __init__(self, alone: str, ranks: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alone, self._ranks = alone, frozenset(ranks)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - signature of torch
        """Call ``func`` unless it communicates."""
        if DTensor in types:
            return NotImplemented  # let it become plain operations, which are dispatched here again
        given = (*args, *(kwargs or {}).values())
        if func.namespace in _COMMUNICATING and func.overloadpacket.__name__ not in _LOCAL:
            group = _group_among(given)
            if group is None or not self._ranks.issuperset(dist.get_process_group_ranks(group)):
                raise UsageError(needs_others(func.overloadpacket.__name__.strip("_"), self._alone))
        return func(*args, **(kwargs or {}))


def _group_among(given: Sequence[object]) -> dist.ProcessGroup | None:
    """Return the process group among the arguments of an operator; None if they hold only a name, or none."""
    for value in given:
        if isinstance(value, torch.ScriptObject):
            with suppress(RuntimeError):  # not a group, but for example the kind of a reduction
                return dist.ProcessGroup.unbox(value)
    return None


# ---- cells


def _run_cell(text: str, scope: _Scope) -> str:
    """Run a cell; return the repr of its last line if that is an expression with a value."""
    _let_read(HELD_CELL, text)
    tree = ast.parse(text, HELD_CELL)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, HELD_CELL, "exec", dont_inherit=True), user_namespace(), scope)
    if not isinstance(last, ast.Expr):
        return ""
    value = eval(compile(ast.Expression(last.value), HELD_CELL, "eval", dont_inherit=True), user_namespace(), scope)
    return "" if value is None else f"{described(value)}\n"


# ---- errors


def _error(error: BaseException, work: Inspect | Evaluate | RunCell) -> JobError:
    explain(error)
    ename, evalue = type(error).__name__, shortened(str(error))
    if isinstance(work, RunCell):
        return JobError(ename=ename, evalue=evalue, traceback=_cut("".join(_traceback_of(error))))
    place = _place(error) if isinstance(work, Evaluate) else ""
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    text = _cut(f"{place}{ename}: {evalue.partition(chr(10))[0]}{notes}")
    return JobError(ename=ename, evalue=evalue, traceback=text)


def _traceback_of(error: BaseException) -> list[str]:
    """Return the traceback from the cell's own line inwards."""
    where = error.__traceback__
    while where is not None and where.tb_frame.f_code.co_filename != HELD_CELL:
        where = where.tb_next
    return traceback.format_exception(type(error), error, where)


def _place(error: BaseException) -> str:
    """Return where it was raised, unless in the expression itself."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    if last is None or last.filename in {HELD_EXPRESSION, __file__}:
        return ""
    return f"{last.filename.rpartition('/')[2]}:{last.lineno} in {last.name}: "


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}\n... {len(text) - MAX_TEXT:,} more characters"
