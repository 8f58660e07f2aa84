"""Patches and hooks in a program that is not ours: whatever fails in them, the program goes on as without them."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from traceback import extract_tb, walk_tb
from types import ModuleType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from workbench.engine import probe
from workbench.engine.errors import CollectiveFailed, RanksDisagreeError, StepAborted
from workbench.errors import WorkbenchError

_DELIBERATE = (WorkbenchError, StepAborted, CollectiveFailed, RanksDisagreeError)
"""Exceptions that a probe raises into a step on purpose, such as an abort."""

Watching: TypeAlias = Generator[Any, Any, None]
"""The watcher of one call: it runs up to its ``yield`` before the original, and goes on after it.

If it yields arguments, a tuple, they replace the caller's. What follows the ``yield`` does not run if the original
fails, or the patches are taken off within it.
"""

RESULT = object()
"""A watcher yields it to receive the result of the original, which takes twice as long."""


def complain(sentence: str) -> None:
    """Write a sentence to stderr, with this process's rank."""
    rank = f", rank {dist.get_rank()}" if dist.is_initialized() else ""
    sys.stderr.write(f"workbench{rank}: {sentence}\n")


class Patches:
    """The patches and hooks through which one kind of things is watched.

    If one of them fails, the program does not notice: the original is called exactly once, and its result or error is
    what the caller gets. All patches of the kind are then taken off, as what the others see makes no sense without it.

    Args:
        what: what is not seen without them: ``"collectives are"``.
        say: receives the sentence that says so.
        abandon: called when they are taken off.

    Attributes:
        is_off: whether they were taken off.
    """

    def __init__(
        self,
        what: str,
        say: Callable[[str], object] = complain,
        abandon: Callable[[], object] = lambda: None,
    ) -> None:
        self._what, self._say, self._abandon = what, say, abandon
        self._undo: list[tuple[object, str, object]] = []
        self.is_off = False

    def install(self, install: Callable[[Patches], None]) -> None:
        """Call ``install``, which makes the patches."""
        try:
            install(self)
        except Exception as error:  # noqa: BLE001 - such as a name that torch no longer has
            self.fail("the inside", error)

    def wrap(
        self, owner: type | ModuleType, name: str, watcher: Callable[..., Watching], *, if_probed: bool = False
    ) -> None:
        """Let ``watcher(*args)`` watch the calls of ``owner.name``.

        Args:
            owner: a class or module; without such a function, nothing of the kind is watched.
            name: a function of it.
            watcher: called with the arguments of each call.
            if_probed: while there is no probe, call the original alone.
        """
        original, where = getattr(owner, name, None), f"{owner.__name__.rpartition('.')[2]}.{name}"
        if original is None:
            self._take_off(f"torch {torch.__version__} has no {where}: {self._what} not seen")
        else:
            self.replace(owner, name, self.guarded(original, watcher, where, if_probed=if_probed))

    def replace(self, owner: type | ModuleType, name: str, replacement: object) -> None:
        """Replace ``owner.name``, which exists."""
        if not self.is_off:
            self._undo.append((owner, name, vars(owner).get(name, getattr(owner, name))))
            setattr(owner, name, replacement)

    def guarded(
        self, original: Callable[..., Any], watcher: Callable[..., Watching], where: str, *, if_probed: bool = False
    ) -> Callable[..., Any]:
        """Return the original, watched by ``watcher(*args)`` until that fails."""

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the original
            if self.is_off or (if_probed and probe.active is None):
                return original(*args, **kwargs)
            watching: Any = None
            wanted: Any = None
            try:
                watching = watcher(*args, **kwargs)
                wanted = next(watching, None)
            except Exception as error:  # noqa: BLE001 - the program goes on, whatever it is
                self.fail(where, error)
            goes_on = False
            try:
                result = original(*(wanted if type(wanted) is tuple else args), **kwargs)
                goes_on = not self.is_off
                return result
            finally:
                try:
                    if goes_on and wanted is RESULT:
                        watching.send(result)
                    elif goes_on:
                        next(watching, None)
                    elif watching is not None:
                        watching.close()
                except StopIteration:
                    pass
                except Exception as error:  # noqa: BLE001 - as above
                    self.fail(where, error)

        return replacement

    def hook(self, run: Callable[..., None], where: str) -> Callable[..., None]:
        """Return a hook that calls ``run`` until it fails."""

        def hook(*args: Any) -> None:  # noqa: ANN401 - arguments of any hook
            if not self.is_off:
                try:
                    run(*args)
                except Exception as error:  # noqa: BLE001 - the program goes on, whatever it is
                    self.fail(where, error)

        return hook

    def fail(self, where: str, error: Exception) -> None:
        """Say that watching ``where`` failed, and take all patches off; raise an error meant for the program."""
        if _is_deliberate(error):
            raise error
        *_, at = extract_tb(error.__traceback__)
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        self._take_off(
            f"watching {where} of torch {torch.__version__} failed ({why}, at line {at.lineno} of"
            f" {os.path.basename(at.filename)}): {self._what} not seen from here on; the program continues"
        )

    def _take_off(self, sentence: str) -> None:
        if self.is_off:
            return
        self.undo()
        with suppress(Exception):
            self._abandon()
        with suppress(Exception):  # stderr may be closed
            self._say(sentence)

    def undo(self) -> None:
        """Put all originals back; hooks do nothing any more."""
        self.is_off = True
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)


def _is_deliberate(error: Exception) -> bool:
    """Return whether an error is meant for the program: the workbench's own, or of the program's signal handlers."""
    if isinstance(error, _DELIBERATE):
        return True
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in walk_tb(error.__traceback__))
