"""Steps on a rank: calls of the user's step function."""

from __future__ import annotations

import inspect
import linecache
import math
import re
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from workbench.engine import StepAborted
from workbench.engine.cancellable_waits import cancellation
from workbench.engine.explain import explain
from workbench.engine.tensor_trees import tensors_in
from workbench.errors import UsageError
from workbench.models.engines import is_sharded, missed_grads
from workbench.protocol.commands import Step, StepReply
from workbench.runtime.loop_steps import LoopSteps
from workbench.runtime.model_summary import name_from_models, outermost, sharded_variables, unmanaged
from workbench.runtime.namespace import find_module, lookup, module_names
from workbench.runtime.recorder import Recorder
from workbench.runtime.step_calls import is_required, repeated_call
from workbench.runtime.tracebacks import user_part, walked

_LOOK_S = 0.001  # between two polls of a device that runs behind


def find_step_function(name: str, *, again: bool = False) -> Callable[[], Any]:
    """Return the user's step function.

    Args:
        name: its variable.
        again: if it takes arguments, pass those with which a script has called it last.

    Raises:
        UsageError: there is none, it is not callable, or it takes arguments.
    """
    function = lookup(name)
    if not callable(function):
        raise UsageError(f"{name!r} is a {type(function).__name__}, not a function; define it in a %%fsdp cell")
    call = repeated_call(name) if again else None
    if call is not None:
        return call[0]
    if wanted := _required(function):
        raise UsageError(
            f"{name}() wants {', '.join(wanted)}, but a step is called without arguments: define one that passes them, "
            f"such as def step(): return {name}({', '.join(wanted)}), and name it with --fn step"
        )

    def now() -> Any:  # noqa: ANN401 - whatever the function returns
        return lookup(name)()  # a method of a copy of the model, perhaps

    called: Callable[[], Any] = function
    return now if again else called


def _exhausted(error: StopIteration) -> RuntimeError:
    """Return the error that an iterator of the step has no more batches, with the user's part of the traceback."""
    lines = user_part(error.__traceback__)
    code = [linecache.getline(at.tb_frame.f_code.co_filename, at.tb_lineno) for at in walked(lines)]
    names = re.findall(r"\bnext\(\s*([\w.]+)", code[-1] if code else "")
    what = f"the iterator {names[0]}" if len(names) == 1 else "an iterator"
    return RuntimeError(f"{what} has no more batches: make another one when it ends").with_traceback(lines)


def passed_again(name: str) -> tuple[str, ...]:
    """Return the names of the arguments that :func:`find_step_function` passes again; empty if none."""
    call = repeated_call(name)
    return () if call is None else call[1]


def _required(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments without which a function cannot be called; empty if they are not known."""
    try:
        params = inspect.signature(function, follow_wrapped=False).parameters.values()  # a decorator may pass them
    except (TypeError, ValueError):  # of a builtin
        return []
    return [each.name for each in params if is_required(each)]


def loss_of(result: Any) -> float | None:  # noqa: ANN401 - whatever the user's function returned
    """Return the number in ``result``, or None.

    Raises:
        TypeError: ``result`` is a DTensor, whose value on one rank may be only that rank's part, or a coroutine or
            generator, whose code has not run.
    """
    if isinstance(result, (Awaitable, Generator, AsyncGenerator)):
        if isinstance(result, Coroutine):
            result.close()  # else Python warns that it was never awaited
        kind = type(result).__name__.replace("_", " ")
        raise TypeError(
            f"the step function returned a{'n' * kind.startswith('a')} {kind}, so nothing of it ran: write it without "
            "async and yield, or call it from a plain function that runs it, as with asyncio.run"
        )
    if isinstance(result, DTensor):
        raise TypeError(
            "the step function returned a DTensor; on one rank its value may be only that rank's part: "
            "return result.full_tensor().item()"
        )
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        return float(result.detach())
    is_number = isinstance(result, (int, float)) and not isinstance(result, bool)
    return float(result) if is_number else None


def _models() -> dict[str, torch.nn.Module]:
    return outermost({name: find_module(name) for name in module_names()})


@contextmanager
def _rows_counted() -> Iterator[list[int]]:
    """Yield the list to which each training forward of a sharded model adds the rows of its batch."""
    counted: list[int] = []

    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        batch = next((tensor for tensor in tensors_in((args, kwargs)) if tensor.ndim), None)
        counted.append(0 if batch is None else len(batch))

    sharded = [model for model in _models().values() if is_sharded(model)]
    hooks = [model.register_forward_pre_hook(before, with_kwargs=True) for model in sharded]
    try:
        yield counted
    finally:
        for hook in hooks:
            hook.remove()


class Trainer(LoopSteps):
    """Runner of steps, which also reports to the recorder what the engine cannot see: steps, optimizers, metrics.

    Attributes:
        not_finite_since: first of the latest consecutive steps with a NaN or infinite loss; None: the last was finite.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._named_at = -1  # version of the header when units got their names
        self.not_finite_since: int | None = None
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # in the newest command

    def run(self, command: Step, between: Callable[[int], object] = lambda done: None) -> StepReply:
        """Call the step function ``command.count`` times.

        Args:
            command: the command.
            between: called before the first step and after each, with the number of steps done.

        Raises:
            UsageError: there is no such function.
            StepAborted: this rank was aborted because another one failed.
        """
        function = find_step_function(command.fn)
        losses, seconds, rows = [], [], []
        unreduced: dict[str, None] = {}
        first_step, num_issued = self._recorder.next_step, self._recorder.num_issued
        self._stepped.clear()
        self.note_models()
        self._running = True
        try:
            with self.explained(), _rows_counted() as counted:
                between(0)
                for done in range(1, command.count + 1):
                    begin_ns = self._recorder.now_ns() - self._recorder.held_ns
                    losses.append(self._one_step(function))
                    seconds.append((self._recorder.now_ns() - self._recorder.held_ns - begin_ns) / 1e9)
                    unreduced |= dict.fromkeys(missed_grads())
                    rows.append(sum(counted))
                    counted.clear()
                    between(done)
                self.wait_for_device()
        finally:
            self._running = False
            self._recorder.give_up_step()
        return StepReply(
            steps_done=len(losses),
            losses=tuple(losses) if any(loss is not None for loss in losses) else None,
            seconds=tuple(seconds),
            optimizer_steps=self.optimizer_steps,
            first_step=first_step,
            unreduced=tuple(unreduced),
            rows=tuple(rows),
            unsharded=self._trained_alone() if self._recorder.num_issued == num_issued else (),
        )

    def _after_optimizer(self, optimizer: Optimizer, *rest: Any) -> None:  # noqa: ANN401 - hook signature
        self._stepped.add(optimizer)
        super()._after_optimizer(optimizer, *rest)

    def _trained_alone(self) -> tuple[str, ...]:
        """Return the variables of models that optimizers of the command trained, if no engine runs any of them."""
        trained = {id(param) for each in self._stepped for group in each.param_groups for param in group["params"]}
        found = {
            name: model
            for name, model in _models().items()
            if any(id(param) in trained and param.requires_grad for param in model.parameters())
        }
        is_plain = all(type(param) is torch.nn.Parameter for model in found.values() for param in model.parameters())
        return tuple(found) if is_plain and not any(map(is_sharded, found.values())) else ()

    def _one_step(self, function: Callable[[], Any]) -> float | None:
        cancellation.check()
        self._recorder.begin_step()
        self.has_stepped = False
        try:
            loss = loss_of(function())
        except StopIteration as error:
            raise _exhausted(error) from None
        if loss is not None:
            self._recorder.metric("loss", loss)
            if math.isfinite(loss):
                self.not_finite_since = None
            elif self.not_finite_since is None:
                self.not_finite_since = self._recorder.step
        self._recorder.end_step()
        self.trained_steps += 1
        return loss

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Explain torch's errors of the body; raise the reason of an abort instead of its consequence."""
        try:
            yield
        except Exception as error:
            explain(error)
            reason = self._translated(error) if isinstance(error, RuntimeError) else error
            if reason is error:
                raise
            raise reason from error

    def wait_for_device(self) -> None:
        """Wait until the device has done what was recorded.

        Raises:
            StepAborted: this rank was aborted meanwhile.
        """
        self._recorder.wait_for_device(lambda: cancellation.sleep(_LOOK_S))

    @staticmethod
    def _translated(error: RuntimeError) -> RuntimeError:
        """Return the reason of an abort instead of its consequence (a shut socket inside a user's collective)."""
        if isinstance(error, StepAborted):
            return error
        try:
            cancellation.check_after_failure()
        except StepAborted as aborted:
            return aborted
        return error

    def before_step(self) -> None:
        """Name units, and note what the engine does not manage: a root became known just now, or a unit anew."""
        models = sharded_variables()
        if self._recorder.header_version != self._named_at:
            name_from_models(models.values())
            self._named_at = self._recorder.header_version
        found = unmanaged(models, buffers=False)
        self._recorder.note_unmanaged(found.params, found.hooks)

    def note_models(self) -> None:
        """Put the names of units, and the parts of models that the engine does not manage, into the trace's header."""
        models = sharded_variables()
        name_from_models(models.values())
        found = unmanaged(models)
        self._recorder.note_unmanaged(found.params, found.hooks)
        self._recorder.note_buffers(found.buffers)
