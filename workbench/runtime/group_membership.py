"""The default process group as the user's code on a rank sees it: it is joined and left, and exists all the time.

The engine, the meshes and the models of a rank need the group. So ``init_process_group`` joins it and
``destroy_process_group`` leaves it: neither makes nor ends a group. Cells begin as members of it; a script of
``%fsdp run`` has yet to join. Until it does, ``is_initialized`` is False, but collectives work: libraries such as
Accelerate remember from an earlier script that they have joined. After the user's code has left, c10d is without a
default group for it, also in later cells. Other groups of the user are real.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from workbench.engine.process_groups import SIMULATED
from workbench.runtime.distributed import NEVER, ProcessGroups

_TWICE = "trying to initialize the default process group twice!"  # as torch says
_FROM_THE_START = (
    "The ranks are in a process group from the start: leave init_process_group out. "
    "%fsdp run runs a script that has it, unchanged"
)


class GroupMembership:
    """Answers the user's code for the default process group.

    Args:
        groups: the rank's process groups.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self._show: Callable[[], None] | None = None
        self._is_script = self._left_in_cell = False
        self._replaced = ExitStack()

    def install(self) -> GroupMembership:
        """Replace torch's functions until :meth:`uninstall`."""
        for name in ("init_process_group", "destroy_process_group"):
            self._replaced.callback(_wrap(name, getattr(self, name)))
        for name in ("new_group", "split_group"):
            self._replaced.callback(_wrap(name, self.make_group))
        return self

    def uninstall(self) -> None:
        """Put torch's functions back."""
        self.show()
        self._replaced.close()

    @contextmanager
    def of_script(self) -> Iterator[None]:
        """Let the body, a script, join the group itself."""
        before, self._is_script = self._is_script, True
        self._hide(is_gone=False)
        try:
            yield
        finally:
            self.show()
            self._is_script = before

    def begin_cell(self) -> None:
        """Hide the group from a cell if an earlier one has left it."""
        if self._left_in_cell and self._show is None:
            self._hide(is_gone=True)

    def end_cell(self) -> None:
        """Show the group to the commands that follow a cell."""
        self._left_in_cell = self._show is not None
        self.show()

    def _hide(self, *, is_gone: bool) -> None:
        """Let c10d say in this thread, the user's, that there is no default group.

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
        """Undo the hiding; no-op without it. While a script trains, torch.compile meets the original function."""
        if self._show is not None:
            self._show()
        self._show = None

    def init_process_group(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Join the default group.

        Raises:
            ValueError: it does not fit what the code asks for, or the code has joined it already.
        """
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        if self._show is None:
            raise ValueError(_TWICE if self._is_script else f"{_TWICE} {_FROM_THE_START}")
        self._check_fits(given.get("backend"), given.get("world_size", -1), given.get("rank", -1))
        self.show()

    def _check_fits(self, backend: object, world_size: int, rank: int) -> None:
        groups, device = self.groups, self.groups.device_type
        if world_size not in {-1, groups.world_size}:
            raise ValueError(
                f"init_process_group asks for world_size={world_size}, and there are {groups.world_size} ranks: "
                f"%fsdp stop, then %fsdp start -n {world_size}"
            )
        if rank not in {-1, groups.rank}:
            raise ValueError(f"init_process_group asks for rank={rank} on rank {groups.rank}: take RANK of os.environ")
        wanted = str(backend or groups.backend).lower()
        of_devices = dict(part.split(":", 1) for part in wanted.split(",") if ":" in part)
        if of_devices.get(device, wanted) != groups.backend and groups.backend != SIMULATED:  # which stands for any
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
        self._hide(is_gone=True)

    def make_group(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as torch
        """Make a group without a timeout: a rank may be held for long. An abort frees the ranks that wait in it."""
        given = inspect.signature(original).bind(*args, **kwargs)
        given.arguments["timeout"] = NEVER
        with self.groups.tracked():
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
