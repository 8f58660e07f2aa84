"""Scripts of ``%fsdp run`` on a rank: each runs as ``__main__`` in the cells' namespace, where its names stay.

Of a function of the script that calls an optimizer, such as ``main()``, the models, optimizers and loaders stay too,
and those of the objects that it has, such as a trainer; and so do functions and methods that call one, with the
arguments of their last call.

The next script starts clean: the names of the last one are gone, its process groups are destroyed, and modules that lie
beside a script are imported again.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import linecache
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, MethodType, ModuleType
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Sampler

from workbench.engine._torch import named_groups
from workbench.engine.cancellable_waits import cancellation
from workbench.engine.process_groups import OWN
from workbench.errors import UsageError
from workbench.models import garbage
from workbench.protocol.commands import Run, RunReply
from workbench.runtime.group_membership import GroupMembership
from workbench.runtime.namespace import OFFERED, user_namespace
from workbench.runtime.recorder import Recorder
from workbench.runtime.script_environment import as_under_torchrun
from workbench.runtime.step_calls import Call, call_of, codes_of, keep_calls
from workbench.runtime.trainer import Trainer

_JOIN_S = 0.05
_KEPT = (nn.Module, Optimizer, DataLoader, Sampler, LRScheduler, GradScaler)
_ABOUT_ITSELF = ("__file__", "__spec__", "__package__", "__loader__", "__doc__", "__cached__")


class ScriptExit(Exception):
    """The script ended with a status other than 0."""


@dataclass(frozen=True, kw_only=True)
class _Program:
    """A script, ready to run.

    Attributes:
        code: its code.
        names: what Python defines in its namespace: ``__file__``, ``__spec__`` and the like.
    """

    code: CodeType
    names: dict[str, Any]


class ScriptRunner:
    """Runs scripts on this rank, one after another.

    Args:
        membership: the rank's membership of its default process group.
        recorder: the rank's recorder.
        trainer: sees the steps of the script's loop.

    Attributes:
        programs: code of the script that ran last; empty without one.
    """

    def __init__(self, membership: GroupMembership, recorder: Recorder, trainer: Trainer) -> None:
        self._membership, self._recorder, self._trainer = membership, recorder, trainer
        self._preloaded = _top_level_modules()  # torch, the workbench, ...: never imported again
        self._names: set[str] = set()
        self._hidden: dict[str, Any] = {}
        self._group_names: set[str] = set()
        self.programs: tuple[CodeType, ...] = ()

    def run(self, command: Run) -> RunReply:
        """Run a script.

        Raises:
            UsageError: this host has no such script, or it is no Python.
            ScriptExit: it ended with a status other than 0.
            BaseException: what it raises.
        """
        self._clean_up()
        folder = os.getcwd() if command.module else str(Path(command.script).parent)
        namespace = user_namespace()
        before, groups_before = dict(namespace), self._user_groups().keys()
        begin_ns = time.monotonic_ns() - self._recorder.held_ns
        pid, threads = os.getpid(), set(threading.enumerate())
        try:
            with as_under_torchrun((command.script, *command.args), folder, self._membership):
                self._forget_modules(folder)
                program = _load_module(command.script) if command.module else self._load(command.script)
                self.programs = (program.code,)
                if command.module:
                    sys.argv[0] = program.code.co_filename
                namespace.update(program.names)
                with (
                    self._trainer.whole_program(),
                    self._trainer.explained(),
                    _kept_locals(program.code) as (kept, calls),
                ):
                    _execute(program.code, namespace)
                    namespace.update({name: value for name, value in kept.items() if name not in namespace})
                    keep_calls(calls)
                    _join({*threading.enumerate()} - threads)
                    self._trainer.wait_for_device()
                    steps_done = self._trainer.steps_of_program
        finally:
            if os.getpid() != pid:
                _end_of_fork(sys.exception())
            self._names = {name for name, value in namespace.items() if before.get(name, before) is not value}
            self._hidden = {name: before[name] for name in self._names & {*OFFERED, *_ABOUT_ITSELF} & before.keys()}
            self._group_names = {*(self._user_groups().keys() - groups_before)}
        return RunReply(
            steps_done=steps_done,
            seconds=(time.monotonic_ns() - self._recorder.held_ns - begin_ns) / 1e9,
            models=tuple(sorted(name for name in self._names if isinstance(namespace.get(name), nn.Module))),
        )

    def _clean_up(self) -> None:
        """Remove what the last script left."""
        namespace = user_namespace()
        for name in self._names:
            namespace.pop(name, None)
        namespace.update(self._hidden)
        garbage.collect()  # models and optimizers refer to themselves
        for name, group in self._user_groups().items():
            if name in self._group_names:
                dist.destroy_process_group(group)
        self._names, self._hidden, self._group_names = set(), {}, set()

    @staticmethod
    def _user_groups() -> dict[str, dist.ProcessGroup]:
        """Return all groups by name but those of the engine."""
        return {name: group for name, group in named_groups().items() if not name.startswith(OWN)}

    def _forget_modules(self, folder: str) -> None:
        """Have modules that lie in ``folder``, and packages with all their parts, be imported again."""
        beside = {name for name in _top_level_modules() - self._preloaded if _is_in(sys.modules[name], folder)}
        for name in tuple(sys.modules):
            if name.partition(".")[0] in beside:
                del sys.modules[name]
        importlib.invalidate_caches()
        linecache.checkcache()

    def _load(self, path: str) -> _Program:
        """Return the program in a file.

        Raises:
            UsageError: this host has no such file, or it is no Python.
        """
        try:
            source = Path(path).read_bytes()
        except OSError as error:
            groups = self._membership.groups
            here = f"rank {groups.rank} on {groups.host.name}"
            raise UsageError(f"{here} cannot read {path}: {error.strerror}; all hosts need the script") from None
        try:
            code = compile(source, path, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise UsageError(_syntax_error(path, error)) from None
        except ValueError as error:
            raise UsageError(f"{path} is no Python: {error}") from None
        return _Program(code=code, names={"__file__": path, "__spec__": None, "__package__": None, "__doc__": None})


def _load_module(name: str) -> _Program:
    """Return the program in a module, or that of ``__main__`` in a package.

    Raises:
        UsageError: there is no such module, or it is no Python.
    """
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        code = None if spec is None else spec.loader.get_code(spec.name)  # type: ignore[union-attr]
    except SyntaxError as error:
        raise UsageError(_syntax_error(error.filename or name, error)) from None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the module's package imports
        spec = code = None
    if spec is None or code is None:
        raise UsageError(
            f"there is no module {name} to run: it is looked for in {os.getcwd()}, then in the environment"
        )
    names = {"__file__": spec.origin, "__spec__": spec, "__package__": spec.parent, "__doc__": None}
    return _Program(code=code, names={**names, "__loader__": spec.loader})


def _syntax_error(path: str, error: SyntaxError) -> str:
    text = f": {error.text.strip()}" if error.text else ""
    return f"{Path(path).name}, line {error.lineno}: {error.msg}{text}"


def _execute(code: CodeType, namespace: dict[str, Any]) -> None:
    """Run a program; ``sys.exit()`` ends it."""
    try:
        exec(code, namespace)
    except SystemExit as error:
        if error.code is None or error.code == 0:
            return
        status = repr(error.code) if isinstance(error.code, str) else error.code
        raise ScriptExit(f"the script called sys.exit({status})").with_traceback(error.__traceback__) from None


@contextmanager
def _kept_locals(code: CodeType) -> Iterator[tuple[dict[str, Any], dict[CodeType, Call]]]:
    """Provide variables and calls of the program's functions that run at steps of optimizers in the body.

    The variables are those at the first step of each optimizer, or of each function, the calls those at the last step.

    Variables are kept that :data:`_KEPT` names, and such attributes of other variables, the script's own included: of a
    trainer, for example; and these functions, and the objects of methods. Of equal names, those at the first step of
    the newest optimizer count, then that of the innermost function, and a variable before an attribute.
    """
    kept: dict[str, Any] = {}
    calls: dict[CodeType, Call] = {}
    stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
    folder = os.path.dirname(os.path.abspath(code.co_filename))

    def keep(optimizer: Optimizer, *_: object) -> None:
        frames, frame = [], inspect.currentframe()
        while frame is not None:
            if _is_of_script(frame.f_code.co_filename, code.co_filename, folder):
                frames.append(frame)
            frame = frame.f_back
        is_first, is_new = optimizer not in stepped, not calls.keys() >= {frame.f_code for frame in frames}
        stepped.add(optimizer)
        calls.update({frame.f_code: call_of(frame) for frame in frames})
        if is_first:
            kept.update(_kept_of(frames))
        if is_first or is_new:
            kept.update(_steps_of(frames, calls))

    handle = register_optimizer_step_pre_hook(keep)
    try:
        yield kept, calls
    finally:
        handle.remove()


def _kept_of(frames: Sequence[FrameType]) -> dict[str, Any]:
    """Return the variables of calls, the innermost first, that :data:`_KEPT` names, and such attributes of others."""
    found: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    for frame in frames:
        for name, value in tuple(frame.f_locals.items()):
            if not isinstance(value, (*_KEPT, type, ModuleType)):
                attributes = {**_kept_in(getattr(value, "__dict__", {})), **attributes}
            elif _is_function(frame) and isinstance(value, _KEPT):
                found.setdefault(name, value)
    return {**attributes, **found}


def _steps_of(frames: Sequence[FrameType], codes: Container[CodeType]) -> dict[str, Any]:
    """Return the methods that calls run, the innermost first, and their variables that run one of ``codes``."""
    methods: dict[str, MethodType] = {}
    found: dict[str, Any] = {}
    for frame in filter(_is_function, frames):
        methods = {**_method(frame), **methods}
        owners = {id(method.__self__) for method in methods.values()}
        for name, value in tuple(frame.f_locals.items()):
            if name != "self" and (id(value) in owners or any(each in codes for each in codes_of(value))):
                found.setdefault(name, value)
    return {**methods, **found}


def _is_function(frame: FrameType) -> bool:
    return frame.f_code.co_name != "<module>"


def _method(frame: FrameType) -> dict[str, MethodType]:
    """Return the method that a frame runs, by its name; empty if it is none, or a special one."""
    code = frame.f_code
    if not code.co_argcount or code.co_name.startswith("__"):
        return {}
    found = getattr(frame.f_locals.get(code.co_varnames[0]), code.co_name, None)
    return {code.co_name: found} if isinstance(found, MethodType) and code in codes_of(found) else {}


@functools.lru_cache(maxsize=1024)
def _is_of_script(filename: str, script: str, folder: str) -> bool:
    """Return whether a file is the script, or a module beside it."""
    return filename == script or os.path.dirname(os.path.abspath(filename)) == folder


def _kept_in(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if isinstance(value, _KEPT) and not name.startswith("_")}


def _end_of_fork(error: BaseException | None) -> NoReturn:
    """End a process that the script forked and that reached the end of the script: it is no rank."""
    if error is not None:
        traceback.print_exception(error)
    sys.stdout.flush()
    os._exit(int(error is not None))


def _join(threads: set[threading.Thread]) -> None:
    """Wait for threads that a process would wait for at its end.

    Raises:
        StepAborted: the user gave up.
    """
    for thread in threads:
        while thread.is_alive() and not thread.daemon:
            cancellation.check()
            thread.join(_JOIN_S)


def _top_level_modules() -> set[str]:
    return {name for name in tuple(sys.modules) if "." not in name}


def _is_in(module: object, folder: str) -> bool:
    """Return whether a module's file, or a package's folder, lies in ``folder`` itself."""
    names = getattr(module, "__dict__", {})
    places = [*(names.get("__path__") or ())] or [names.get("__file__")]
    return any(os.path.dirname(os.path.abspath(place)) == os.path.abspath(folder) for place in places if place)
