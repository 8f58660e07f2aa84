"""The environment of a script on a rank, as torchrun gives it to its processes; undone after the script.

The rank is in a default process group already, which its engine, its meshes and its models need. So in the script
``init_process_group`` joins that group, and ``destroy_process_group`` leaves it: neither makes nor ends a group. Before
the first, ``is_initialized`` is False, but collectives work: libraries such as Accelerate remember from an earlier
script that they have joined. After the second, c10d is without a default group. Other groups of the script are real.
"""

from __future__ import annotations

import builtins
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from workbench.runtime.distributed import NEVER, ProcessGroups


@contextmanager
def as_under_torchrun(argv: Sequence[str], folder: str, groups: ProcessGroups) -> Iterator[None]:
    """Run the body, the script, in the environment of a process that torchrun started.

    Args:
        argv: the script and its arguments.
        folder: the folder whose modules the script imports first.
        groups: the rank's process groups.
    """
    with ExitStack() as undo:
        undo.callback(_restore_streams, sys.stdout, sys.stderr, builtins.print)
        undo.callback(_restore_signals, {number: signal.getsignal(number) for number in signal.valid_signals()})
        undo.callback(_restore_torch, torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled())
        undo.callback(_restore_environ, dict(os.environ))
        undo.callback(setattr, sys, "path", sys.path)
        undo.callback(setattr, sys, "argv", sys.argv)
        os.environ.update(_variables(groups))
        sys.argv, sys.path = list(argv), [folder, *sys.path]
        joining = _Joining(groups)
        undo.callback(joining.show)
        joining.hide(is_gone=False)
        for name in ("init_process_group", "destroy_process_group"):
            undo.callback(_wrap(name, getattr(joining, name)))
        for name in ("new_group", "split_group"):
            undo.callback(_wrap(name, joining.make_group))
        yield


def _variables(groups: ProcessGroups) -> dict[str, str]:
    """Return the variables of torchrun that a rank does not have all the time."""
    num_hosts = -(-groups.world_size // groups.local_world_size)
    return {
        "GROUP_RANK": str(groups.rank // groups.local_world_size),
        "GROUP_WORLD_SIZE": str(num_hosts),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(groups.rank),
        "ROLE_WORLD_SIZE": str(groups.world_size),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


# ---- what a script changes for its whole process


def _restore_streams(stdout: Any, stderr: Any, write: Any) -> None:  # noqa: ANN401 - a script may have replaced them
    """Undo what scripts do to silence all ranks but one."""
    sys.stdout, sys.stderr = stdout, stderr
    builtins.print = write


def _restore_signals(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _restore_torch(dtype: torch.dtype, device: torch.device, is_grad_enabled: bool) -> None:
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(is_grad_enabled)
    if torch.get_default_device() != device:
        torch.set_default_device(None if device == torch.device("cpu") else device)


def _restore_environ(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


# ---- process groups


class _Joining:
    """Answers for the default process group, which exists all the time.

    Args:
        groups: the rank's process groups.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._show: Callable[[], None] | None = None

    def hide(self, *, is_gone: bool) -> None:
        """Let c10d say in this thread, the script's, that there is no default group.

        Args:
            is_gone: whether collectives raise as well.
        """
        here = threading.get_ident()
        self._show = _wrap(
            "is_initialized",
            lambda original: threading.get_ident() != here and original(),
            but=() if is_gone else (distributed_c10d,),  # where collectives ask
        )

    def show(self) -> None:
        """Undo :meth:`hide`; no-op without it. While the script trains, torch.compile meets the original function."""
        if self._show is not None:
            self._show()
        self._show = None

    def init_process_group(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Join the default group.

        Raises:
            ValueError: it does not fit what the script asks for, or the script has joined it already.
        """
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        if self._show is None:
            raise ValueError("trying to initialize the default process group twice!")
        self._check_fits(given.get("backend"), given.get("world_size", -1), given.get("rank", -1))
        self.show()

    def _check_fits(self, backend: object, world_size: int, rank: int) -> None:
        groups, device = self._groups, self._groups.device_type
        if world_size not in {-1, groups.world_size}:
            raise ValueError(
                f"init_process_group asks for world_size={world_size}, and there are {groups.world_size} ranks: "
                f"%fsdp stop, then %fsdp start -n {world_size}"
            )
        if rank not in {-1, groups.rank}:
            raise ValueError(f"init_process_group asks for rank={rank} on rank {groups.rank}: take RANK of os.environ")
        wanted = str(backend or groups.backend).lower()
        of_devices = dict(part.split(":", 1) for part in wanted.split(",") if ":" in part)
        if of_devices.get(device, wanted) != groups.backend:
            raise ValueError(
                f"init_process_group asks for {wanted}, and the ranks use {groups.backend} on {device}: "
                f"write {groups.backend}, or restart the ranks with %fsdp stop and %fsdp start --device"
            )

    def destroy_process_group(self, original: Callable[..., None], group: dist.ProcessGroup | None = None) -> None:
        """Leave the default group; destroy any other."""
        if group is not None and group is not dist.group.WORLD:
            original(group)
            return
        if self._show is not None:
            raise ValueError("Default process group has not been initialized, so it cannot be destroyed.")
        self.hide(is_gone=True)

    def make_group(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as torch
        """Make a group without a timeout: a rank may be held for long. An abort frees the ranks that wait in it."""
        given = inspect.signature(original).bind(*args, **kwargs)
        given.arguments["timeout"] = NEVER
        with self._groups.tracked():
            return original(*given.args, **given.kwargs)


def _wrap(name: str, wrapper: Callable[..., Any], but: Sequence[ModuleType] = ()) -> Callable[[], None]:
    """Replace a function of ``torch.distributed`` in every module that has it, since some import it by name.

    Args:
        name: of the function.
        wrapper: called with the original and the arguments.
        but: modules that keep the original.

    Returns:
        undoes it, also in modules that were loaded meanwhile.
    """
    original = getattr(dist, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the original
        return wrapper(original, *args, **kwargs)

    replacement.__name__, replacement.__doc__ = name, original.__doc__
    _exchange(name, original, replacement, but)
    return partial(_exchange, name, replacement, original)


def _exchange(name: str, old: object, new: object, but: Sequence[ModuleType] = ()) -> None:
    for module in tuple(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old and module not in but:
            setattr(module, name, new)
