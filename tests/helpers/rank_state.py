"""The state of a rank that runs the functions of several tests: every function starts from the same state.

Each function gets a new process group, store and c10d threads. All other leftovers are undone here or reported: a rank
that changed in a way that cannot be undone is not reused.
"""

import functools
import gc
import importlib
import io
import marshal
import os
import pickle
import signal
import sys
import time
import types
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.helpers import leaks
from workbench.engine import backends, cancellable_waits, fsdp_state
from workbench.events import UNIT_INDICES
from workbench.runtime.sockets import open_sockets

_PACKAGES = (
    "__main__",
    "workbench",
    "tests",
    "torch.distributed",
    "torch.nn",
    "torch.optim",
    "torch.autograd",
    "torch.utils",
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
SETTLE_S = 1.0
_MISSING = object()


# ---- the message to a rank


class _Pickler(pickle.Pickler):
    """Pickles by value what a forked rank would inherit: lambdas and inner functions; and modules by name."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.ModuleType):
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, types.FunctionType) and not _can_be_named(obj):
            return _function, (marshal.dumps(obj.__code__), obj.__module__, *_parts(obj))
        if isinstance(obj, torch.Tensor) and obj.is_shared():
            raise pickle.PicklingError("memory that ranks share")
        return NotImplemented


def _can_be_named(function: types.FunctionType) -> bool:
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _parts(function: types.FunctionType) -> tuple[Any, ...]:
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return function.__qualname__, function.__defaults__, function.__kwdefaults__, cells


def _function(code: bytes, module: str, name: str, defaults: Any, kwdefaults: Any, cells: tuple[Any, ...]) -> Any:
    closure = tuple(map(types.CellType, cells))
    namespace = importlib.import_module(module).__dict__
    function = types.FunctionType(marshal.loads(code), namespace, name.rpartition(".")[2], defaults, closure)
    function.__kwdefaults__, function.__module__, function.__qualname__ = kwdefaults, module, name
    return function


def packed(job: tuple[Any, ...]) -> bytes | None:
    """Return a job (a function, its arguments and its group) and the environment that a fork would inherit.

    Returns None if only a fork can pass them: locks and events, memory that ranks share, classes defined in a function.
    """
    surroundings = dict(os.environ), os.getcwd(), warnings.filters
    file = io.BytesIO()
    try:
        _Pickler(file).dump((job, surroundings))
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return file.getvalue()


def unpacked(message: bytes) -> Any:
    """Set the environment, and return the job."""
    job, (environment, directory, filters) = pickle.loads(message)
    os.environ.clear()
    os.environ |= environment
    os.chdir(directory)
    warnings.resetwarnings()  # warnings shown once may be shown again
    warnings.filters[:] = filters
    return job


# ---- the state between two functions


def _namespaces() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield modules and their classes, with their variables."""
    for name, module in tuple(sys.modules.items()):
        if isinstance(module, types.ModuleType) and name.startswith(_PACKAGES):
            yield module, vars(module).copy()
            classes = [c for c in vars(module).values() if issubclass(type(c), type) and c.__module__ == name]
            yield from ((cls, dict(vars(cls))) for cls in classes)


def _are_the_same(owner: Any, before: dict[str, Any]) -> bool:
    """Return whether no variable was set: one fast comparison, which uses values' own ``__eq__``."""
    try:
        return bool(vars(owner) == before)
    except Exception:  # noqa: BLE001 - from the __eq__ of a value that was set
        return False


class RankState:
    """The state of this process now, to which :meth:`put_back` returns."""

    def __init__(self) -> None:
        self._namespaces = dict(_namespaces())
        self._next_unit = UNIT_INDICES.next
        self._rng = torch.get_rng_state()
        self._caches = list(_caches(self._namespaces))
        self._hooks = [(hooks, hooks.copy()) for hooks in _global_hooks()]
        self._signals = {number: signal.getsignal(number) for number in _SIGNALS}
        self._path = list(sys.path)
        self._census = leaks.census(with_orphans=False)
        self._num_sockets = len(open_sockets())
        gc.freeze()

    def put_back(self) -> tuple[list[str], list[str]]:
        """Restore this state, once the process groups are destroyed.

        Returns:
            The leftovers that no test may leave (threads, processes, process groups), and everything that makes the
            process unfit for another test.
        """
        cancellable_waits.cancellation.reset()
        UNIT_INDICES.next = self._next_unit
        backends._chosen.clear()
        backends.backend_of.cache_clear()
        self._put_back_variables()
        self._put_back_torch()
        for number, handler in self._signals.items():
            signal.signal(number, handler)
        sys.path[:] = self._path
        gc.collect()
        gc.freeze()  # later collections skip what stays, as in a newly forked rank
        return self._left()

    def _put_back_variables(self) -> None:
        for owner, before in self._namespaces.items():
            if _are_the_same(owner, before):
                continue
            now = dict(vars(owner))
            for name in before.keys() | now.keys():
                old, new = before.get(name, _MISSING), now.get(name, _MISSING)
                if old is not new and not _lasts(name, new):
                    _set(owner, name, old)

    def _put_back_torch(self) -> None:
        _clear_sharding_prop_cache()
        clear_redistribute_planner_cache()
        for cache in self._caches:
            cache.cache_clear()
        torch.set_rng_state(self._rng)
        torch.set_num_threads(1)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)
        for hooks, before in self._hooks:
            hooks.clear()
            hooks.update(before)

    def _left(self) -> tuple[list[str], list[str]]:
        deadline = time.monotonic() + SETTLE_S
        while (left := [*self._running(), *self._open()]) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._running(), [*left, *(f"a model: {type(root).__name__}" for root in fsdp_state.roots)]

    def _running(self) -> list[str]:
        now = leaks.census(with_orphans=False)
        return replace(now, ports=self._census.ports).describe_beyond(self._census)

    def _open(self) -> list[str]:
        """Describe the sockets of process groups that are still referenced."""
        more = len(open_sockets()) - self._num_sockets
        return [f"{more} sockets"] if more > 0 else []


def _lasts(name: str, value: object) -> bool:
    return isinstance(value, types.ModuleType) or (name.startswith("__") and name.endswith("__"))


def _set(owner: Any, name: str, value: object) -> None:
    if value is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _caches(namespaces: dict[Any, dict[str, Any]]) -> Iterator[Any]:
    """Yield DTensor's caches of operations: they refer to meshes, and so to process groups."""
    for owner, variables in namespaces.items():
        if (owner.__module__ if isinstance(owner, type) else owner.__name__).startswith("torch.distributed"):
            values = (value.__func__ if type(value) is staticmethod else value for value in variables.values())
            yield from (value for value in values if type(value) is functools._lru_cache_wrapper)


def _global_hooks() -> Iterator[dict[Any, Any]]:
    """Yield torch's hooks of all modules and of all optimizers."""
    for module in (torch.nn.modules.module, sys.modules[torch.optim.Optimizer.__module__]):
        for name, hooks in vars(module).items():
            if name.startswith("_global_") and name.endswith("hooks"):
                yield hooks
