"""The full form of one parameter: what modules compute with while its unit is unsharded, and its gradients."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from workbench.engine._torch import Spec, dtensor_of, local_of, set_versions, waited, with_dtype

_VERSIONS = 2**10
"""How far apart the versions of parameters in different memories are: room for writes of the user's."""
_numbers = itertools.count(1)  # of views, in this process: a version tells of which parameter it is
_of_views: weakref.WeakValueDictionary[int, FullParam] = weakref.WeakValueDictionary()


def full_of_version(version: int) -> FullParam | None:
    """Return the parameter of ours that a graph saved at an autograd version; None: there is none."""
    return _of_views.get(version // _VERSIONS)


@dataclass
class FullView:
    """A full parameter in one memory.

    Attributes:
        data: of the full shape.
        version: what autograd's counter says while the parameter is this: a graph that saved it elsewhere must not
            compute with it.
    """

    data: torch.Tensor
    version: int


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a parameter: all of it unless tensor parallelism has split it."""
    return local_of(param) if isinstance(param, DTensor) else param


class FullParam:
    """A full parameter, empty while it is closed.

    Attributes:
        fqn: its name.
        param: the parameter; plain, or a DTensor over the axes of tensor parallelism.
        accumulated_grad: full gradient in the reduce dtype, of micro-batches not reduced yet.
        is_open: True while its memory holds its values.
        tp_spec: how tensor parallelism has split it; None: it has not.
    """

    param: nn.Parameter
    _inner: torch.Tensor  # what the parameter holds: itself, or the local tensor of a DTensor
    _view: FullView  # what that is while it is open

    def __init__(self, fqn: str, tp_spec: Spec | None = None, reduced_axes: Sequence[int] = ()) -> None:
        self.fqn = fqn
        self.accumulated_grad: torch.Tensor | None = None
        self.is_open = False
        self.tp_spec = tp_spec
        self._before_grad: Callable[[torch.Tensor], None] | None = None
        self._hook: RemovableHandle | None = None  # of it, on the present parameter
        self._reduced_axes = reduced_axes  # of the mesh of tp_spec, over which the engine reduces

    # ---- where it is

    @property
    def data(self) -> torch.Tensor:
        """What it is while it is open, full shape."""
        return self._view.data

    def view_of(self, full: torch.Tensor, *, requires_grad: bool) -> FullView:
        """Return what the parameter is where its memory is ``full``, of the full shape and the param dtype."""
        if not hasattr(self, "param") or self.param.dtype != full.dtype:
            self._make(full, requires_grad=requires_grad)
        number = next(_numbers)
        _of_views[number] = self
        return FullView(full, number * _VERSIONS)

    def show(self, view: FullView) -> None:
        """Let the parameter be ``view`` from now on."""
        if self.is_open:
            self._view.version = self.param._version
            self._inner.data = view.data
            set_versions((self.param,), (view.version,))
        self._view = view

    def _make(self, full: torch.Tensor, *, requires_grad: bool) -> None:
        """Make the parameter, like ``full``, and empty for now.

        ``.data`` gives it a version counter of its own: copying a new unshard into the memory later must not look to
        autograd like a change of what it saved.
        """
        self._nothing = _unreadable(full)
        had = self.param.grad if hasattr(self, "param") else None
        data: torch.Tensor = full.data
        if self.tp_spec is not None:
            data = dtensor_of(data, with_dtype(self.tp_spec, data.dtype))
        self.param = nn.Parameter(data, requires_grad=requires_grad)
        self._hook = None
        self.param.grad = None if had is None else had.to(self.param)
        self._inner = local_tensor(self.param)
        self._inner.data = self._nothing

    def open(self, *, requires_grad: bool) -> None:
        """Hold the values that are in its memory now."""
        self._inner.data = self._view.data
        if self.param.requires_grad != requires_grad:
            self.param.requires_grad_(requires_grad)
        if requires_grad and self._hook is None and self._before_grad is not None:
            self._hook = self.param.register_hook(self._before_grad)
        set_versions((self.param,), (self._view.version,))
        self.is_open = True

    def close(self) -> None:
        """Hold nothing; no effect if it is closed.

        Whoever still has the parameter fails, or finds NaN rather than another unit's values; and its version is
        another one, so that a backward that was not preceded by an unshard fails instead of computing with them.
        """
        if not self.is_open:
            return
        self._inner.data = self._nothing
        self._view.version = self.param._version  # the user may have written to it
        set_versions((self.param,), (self._view.version + 1,))
        self.is_open = False

    def expect_grad(self) -> None:
        """Let autograd hand over a gradient although the values are not there."""
        self._inner.data = self._view.data

    # ---- gradients

    def watch_grads(self, before_grad: Callable[[torch.Tensor], None]) -> None:
        """Call ``before_grad`` from the next :meth:`open` on before autograd accumulates a gradient."""
        self._before_grad = before_grad

    @property
    def has_grad(self) -> bool:
        """True if there is a full gradient that was not reduced yet."""
        return self.param.grad is not None or self.accumulated_grad is not None

    @property
    def grads(self) -> tuple[torch.Tensor, ...]:
        """What this rank holds of full gradients: the newest, and what was accumulated before it."""
        return tuple(local_tensor(g) for g in (self.param.grad, self.accumulated_grad) if g is not None)

    def grad_bytes(self) -> int:
        """Bytes of :attr:`grads`.

        Raises:
            NotImplementedError: the gradient is sparse.
        """
        grad = self.param.grad
        if not self.has_grad:
            return 0
        if grad is not None and grad.layout is not torch.strided:
            raise NotImplementedError(
                f"parameter {self.fqn!r} got a sparse gradient, which cannot be reduced with those of its unit; make "
                "it dense (sparse=False), or leave it out with ignored_params"
            )
        return sum(g.nbytes for g in self.grads)

    def accumulate_grad(self, dtype: torch.dtype) -> None:
        """Move the full gradient into ``accumulated_grad``, kept in the reduce dtype."""
        if self.param.grad is None:
            return
        if self.accumulated_grad is not None:
            self.accumulated_grad += self._plain_grad()
        elif self.param.grad.dtype != dtype:
            self.accumulated_grad = self._plain_grad().to(dtype)
        else:
            return  # autograd adds up by itself
        self.param.grad = None

    def count_as_zero(self) -> None:
        """Take a gradient that did not come as zero."""
        if not self.has_grad:
            self.accumulated_grad = torch.zeros_like(self._view.data)

    def take_grad(self) -> torch.Tensor | None:
        """Return this rank's full gradient, full shape, and forget it; None: there is none."""
        if not self.has_grad:
            return None
        grad = self._plain_grad() if self.accumulated_grad is None else self.accumulated_grad
        self.drop_grad()
        return grad

    def drop_grad(self) -> None:
        """Forget the full gradient."""
        self.accumulated_grad = self.param.grad = None

    def _plain_grad(self) -> torch.Tensor:
        grad = cast("torch.Tensor", self.param.grad)
        if isinstance(grad, DTensor):
            spec = cast("Spec", self.tp_spec)
            wanted = tuple(
                (grad if axis in self._reduced_axes else spec).placements[axis] for axis in range(len(spec.placements))
            )
            if grad.placements != wanted:  # e.g. a norm's: partial sums over the tensor-parallel ranks
                grad = grad.redistribute(placements=wanted)
            grad = local_of(grad)
        return waited(grad)


def _unreadable(like: torch.Tensor) -> torch.Tensor:
    """Return what a full parameter holds while its memory is away: operations fail on it, or give NaN."""
    return like.new_full((), torch.nan) if like.is_floating_point() or like.is_complex() else like.new_empty(0)
