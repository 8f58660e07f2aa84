"""The environment of a script on a rank, as torchrun gives it to its processes; undone after the script.

The script joins and leaves the default process group as in group_membership.py.
"""

from __future__ import annotations

import builtins
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from workbench.runtime.distributed import ProcessGroups
from workbench.runtime.group_membership import GroupMembership


@contextmanager
def as_under_torchrun(argv: Sequence[str], folder: str, membership: GroupMembership) -> Iterator[None]:
    """Run the body, the script, in the environment of a process that torchrun started.

    Args:
        argv: the script and its arguments.
        folder: the folder whose modules the script imports first.
        membership: the rank's membership of its default process group.
    """
    with ExitStack() as undo:
        undo.callback(_restore_streams, sys.stdout, sys.stderr, builtins.print)
        undo.callback(_restore_signals, {number: signal.getsignal(number) for number in signal.valid_signals()})
        undo.callback(_restore_torch, torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled())
        undo.callback(_restore_environ, dict(os.environ))
        undo.callback(setattr, sys, "path", sys.path)
        undo.callback(setattr, sys, "argv", sys.argv)
        os.environ.update(_variables(membership.groups))
        sys.argv, sys.path = list(argv), [folder, *sys.path]
        undo.enter_context(membership.of_script())
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
