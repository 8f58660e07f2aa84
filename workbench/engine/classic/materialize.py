"""Initialising and moving a module's parameters before they are flattened."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.engine._torch import local_of, parameter_of, set_local, set_parameter
from workbench.engine.backends import is_of_kind
from workbench.engine.classic.wrapper_mesh import route_over
from workbench.engine.full_param import local_tensor
from workbench.engine.mesh import FSDPMeshInfo
from workbench.events import unit_words

Managed = Sequence[tuple[str, nn.Module]]
"""(path, module) pairs, without modules of wrappers below."""


def check(managed: Managed, param_init_fn: Callable[[nn.Module], None] | None, ignored: frozenset[int]) -> None:
    """Check that modules on the meta device can be initialised; nothing is changed.

    Args:
        managed: the modules of one unit, or of a whole tree.
        param_init_fn: see :func:`materialize`.
        ignored: ids of parameters that are not managed.

    Raises:
        TypeError: ``param_init_fn`` is not callable.
        ValueError: a module has no ``reset_parameters``.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise TypeError(f"param_init_fn must be a function of a module, got {param_init_fn!r}")
    if param_init_fn is not None:
        return
    for path, module in managed:
        if _on_meta(module, ignored) and not callable(getattr(module, "reset_parameters", None)):
            raise ValueError(
                f"module {unit_words(path)!r} ({type(module).__name__}) is on the meta device and has no "
                "reset_parameters(): define it, or pass param_init_fn"
            )


def materialize(
    managed: Managed, device: torch.device, param_init_fn: Callable[[nn.Module], None] | None, ignored: frozenset[int]
) -> None:
    """Initialise parameters and buffers on the meta device; parameters stay the same objects.

    Args:
        managed: the modules of one unit.
        device: the device that they compute on.
        param_init_fn: called with each module that has tensors on meta; None: call its ``reset_parameters``.
        ignored: ids of parameters that are not managed.

    Raises:
        ValueError: ``param_init_fn`` left tensors on the meta device.
    """
    for path, module in managed:
        if not _on_meta(module, ignored):
            continue
        before = [(name, param) for name, param in module.named_parameters(recurse=False) if param.is_meta]
        if param_init_fn is not None:
            param_init_fn(module)
        else:
            module.to_empty(device=device, recurse=False)
            with torch.no_grad():
                module.reset_parameters()  # type: ignore[operator]
        for name, param in before:
            _keep(module, name, param)
        left = _on_meta(module, ignored)
        if left:
            raise ValueError(
                f"param_init_fn left {', '.join(left)} of module {path!r} on the meta device: call "
                "module.to_empty(device=..., recurse=False) in it, and initialise them"
            )


def _keep(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Swap the new parameter's contents into the old object, which optimizers and other modules may hold."""
    made = parameter_of(module, name)
    if made is not None and made is not param and not made.is_meta:
        torch.utils.swap_tensors(param, made)
        set_parameter(module, name, param)


def _on_meta(module: nn.Module, ignored: frozenset[int]) -> list[str]:
    """Return the names of a module's own parameters and buffers that are on the meta device."""
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return [name for name, tensor in own if tensor.is_meta and id(tensor) not in ignored]


def move(managed: Managed, device: torch.device, ignored: frozenset[int]) -> None:
    """Move parameters and buffers to ``device``; those on the meta device stay there."""
    for _, module in managed:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_meta or id(tensor) in ignored or is_of_kind(tensor, device):
                continue
            if isinstance(tensor, DTensor):
                set_local(tensor, local_of(tensor).detach().to(device))
            else:
                tensor.data = tensor.data.to(device)


@torch.no_grad()
def sync(managed: Managed, mesh: FSDPMeshInfo, ignored: frozenset[int]) -> None:
    """Broadcast the parameters and buffers of the first rank; collective.

    With tensor parallelism, each rank gets those of the first rank with the same part.
    """
    for _, module in managed:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if id(tensor) not in ignored:
                for group in route_over(mesh.mesh):
                    dist.broadcast(local_tensor(tensor).detach(), group=group, group_src=0)
