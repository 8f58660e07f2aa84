"""The full form of one parameter, which modules compute with while its unit is unsharded, and its gradients."""

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

from workbench.engine._spmd_types import Annotation
from workbench.engine._torch import Spec, dtensor_of, local_of, set_versions, waited, with_dtype

_VERSIONS = 2**10
"""Distance between the autograd versions of different views: leaves room for writes by the user."""
_numbers = itertools.count(1)  # view numbers in this process: a version identifies its parameter
_of_views: weakref.WeakValueDictionary[int, FullParam] = weakref.WeakValueDictionary()


def full_of_version(version: int) -> FullParam | None:
    """Return the full parameter that an autograd version belongs to; None without one."""
    return _of_views.get(version // _VERSIONS)


@dataclass
class FullView:
    """A full parameter in one memory.

    Attributes:
        data: of the full shape.
        version: autograd's version while the parameter points here; a graph that saved it in other memory must not
            use this view.
    """

    data: torch.Tensor
    version: int


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter: all of it unless tensor parallelism has split it."""
    return local_of(param) if isinstance(param, DTensor) else param


class FullParam:
    """A full parameter, empty while it is closed.

    Attributes:
        fqn: its name.
        param: the parameter; plain, or a DTensor over the axes of tensor parallelism.
        accumulated_grad: full gradient in the reduce dtype, of micro-batches not reduced yet.
        is_open: True while its memory holds its values.
        tp_spec: how tensor parallelism has split it; None if it has not.
        annotation: what ``spmd_types`` says of it; then it is plain, whatever ``tp_spec``; None if nothing.
        grad_dtype: dtype to which autograd casts its gradient, in a tuple; None in it: no cast. Empty: its own.
    """

    param: nn.Parameter
    _inner: torch.Tensor  # the parameter itself, or the local tensor of a DTensor
    _view: FullView  # the view it points to while open

    def __init__(
        self,
        fqn: str,
        tp_spec: Spec | None = None,
        reduced_axes: Sequence[int] = (),
        annotation: Annotation | None = None,
    ) -> None:
        self.fqn = fqn
        self.accumulated_grad: torch.Tensor | None = None
        self.is_open = False
        self.tp_spec = tp_spec
        self.annotation = annotation
        self.grad_dtype: tuple[()] | tuple[torch.dtype | None] = ()
        self._before_grad: Callable[[torch.Tensor], None] | None = None
        self._hook: RemovableHandle | None = None  # handle of _before_grad on the current parameter
        self._reduced_axes = reduced_axes  # axes of tp_spec's mesh that the engine reduces over

    # ---- memory

    @property
    def data(self) -> torch.Tensor:
        """Its values while it is open, in the full shape."""
        return self._view.data

    def view_of(self, full: torch.Tensor, *, requires_grad: bool) -> FullView:
        """Return a view of the parameter in memory ``full``, of the full shape and the param dtype."""
        if not hasattr(self, "param") or self.param.dtype != full.dtype:
            self._make(full, requires_grad=requires_grad)
            self._hide_values()
        return self.numbered(full)

    def numbered(self, full: torch.Tensor) -> FullView:
        """Return the view of memory ``full`` with a version of its own."""
        number = next(_numbers)
        _of_views[number] = self
        return FullView(full, number * _VERSIONS)

    def show(self, view: FullView) -> None:
        """Point the parameter to ``view``."""
        if self.is_open:
            self._view.version = self.param._version
            self._inner.data = view.data
            set_versions((self.param,), (view.version,))
        self._view = view

    def _show_values(self, *, requires_grad: bool) -> None:
        """Point the parameter to its memory."""
        self._inner.data = self._view.data

    def _hide_values(self) -> None:
        self._inner.data = self._nothing

    def _make(self, full: torch.Tensor, *, requires_grad: bool) -> None:
        """Create the parameter with the properties of ``full``.

        ``.data`` gives it its own version counter: autograd must not take a later unshard into the same memory for a
        change of the saved tensor.
        """
        self._nothing = _unreadable(full) if type(full) is torch.Tensor else full
        had = self.param.grad if hasattr(self, "param") else None
        data: torch.Tensor = full.data
        if self.tp_spec is not None and self.annotation is None:
            data = dtensor_of(data, with_dtype(self.tp_spec, data.dtype))
        self.param = nn.Parameter(data, requires_grad=requires_grad)
        self._hook = None
        self.param.grad = None if had is None else had.to(self.param)
        self._inner = local_tensor(self.param)

    def open(self, *, requires_grad: bool) -> None:
        """Point the parameter to the values in its memory."""
        self._show_values(requires_grad=requires_grad)
        if self.param.requires_grad != requires_grad:
            self.param.requires_grad_(requires_grad)
        if requires_grad and self._hook is None and self._before_grad is not None:
            self._hook = self.param.register_hook(self._before_grad)
        if self.grad_dtype and self.param.grad_dtype is not self.grad_dtype[0] and self.param.grad is None:
            self.param.grad_dtype = self.grad_dtype[0]
        set_versions((self.param,), (self._view.version,))
        self.is_open = True

    @property
    def may_be_partial(self) -> bool:
        """True if its gradient may be partial sums over tensor-parallel ranks, as that of a norm."""
        if self.annotation is not None:
            found = [placement.is_partial() for placement in self.annotation.grad_spec.placements]
        else:
            found = [p.is_replicate() for p in (() if self.tp_spec is None else self.tp_spec.placements)]
        return any(may_be for axis, may_be in enumerate(found) if axis not in self._reduced_axes)

    def annotate(self) -> None:
        """Annotate the parameter again, if it was and types are being checked."""
        if self.annotation is not None:
            self.annotation.put_on_if_checked(self.param)

    def close(self) -> None:
        """Empty the parameter; no-op if closed.

        Code that still uses the parameter fails or reads NaN instead of another unit's values. Its version changes too,
        so that a backward without an unshard fails instead of computing with them.
        """
        if not self.is_open:
            return
        self._hide_values()
        self._view.version = self.param._version  # the user may have written to it
        set_versions((self.param,), (self._view.version + 1,))
        self.is_open = False

    def expect_grad(self) -> None:
        """Let autograd accumulate a gradient although the parameter holds no values."""
        self._inner.data = self._view.data

    @property
    def freed(self) -> nn.Parameter | None:
        """The parameter while it is closed; None while it is open, or if it never was."""
        return None if self.is_open else getattr(self, "param", None)

    # ---- gradients

    def watch_grads(self, before_grad: Callable[[torch.Tensor], None]) -> None:
        """Call ``before_grad`` before autograd accumulates a gradient, from the next :meth:`open` on."""
        self._before_grad = before_grad

    @property
    def has_grad(self) -> bool:
        """True if there is a full gradient not yet reduced."""
        return self.param.grad is not None or self.accumulated_grad is not None

    @property
    def grads(self) -> tuple[torch.Tensor, ...]:
        """This rank's full gradients: the newest and the accumulated one, where present."""
        return tuple(local_tensor(g) for g in (self.param.grad, self.accumulated_grad) if g is not None)

    def grad_bytes(self) -> int:
        """Return the bytes of :attr:`grads`.

        Raises:
            NotImplementedError: the gradient is sparse.
        """
        grad = self.param.grad
        if not self.has_grad:
            return 0
        if grad is not None and grad.layout is not torch.strided:
            raise NotImplementedError(
                f"parameter {self.fqn!r} got a sparse gradient, which cannot be reduced with those of its unit; make "
                "it dense (sparse=False), or exclude it with ignored_params"
            )
        return sum(g.nbytes for g in self.grads)

    def accumulate_grad(self, dtype: torch.dtype | None) -> None:
        """Add the full gradient to ``accumulated_grad`` in ``dtype``; no-op if autograd does, or for None."""
        if self.param.grad is None:
            return
        if self.accumulated_grad is not None:
            self.accumulated_grad += self._plain_grad()
        elif self.param.grad.dtype != (dtype or self.param.grad.dtype):
            self.accumulated_grad = self._plain_grad().to(dtype)
        else:
            return  # autograd accumulates in this dtype
        self.param.grad = None

    def count_as_zero(self) -> None:
        """Set a missing gradient to zero."""
        if not self.has_grad:
            self.accumulated_grad = self._zeros()

    def _zeros(self) -> torch.Tensor:
        return torch.zeros_like(self._view.data)

    def take_grad(self) -> torch.Tensor | None:
        """Return this rank's gradient in the full shape and clear it; None without one."""
        if not self.has_grad:
            return None
        grad = self._plain_grad() if self.accumulated_grad is None else self.accumulated_grad
        self.drop_grad()
        return grad

    def drop_grad(self) -> None:
        """Drop the full gradient."""
        self.accumulated_grad = self.param.grad = None

    def _plain_grad(self) -> torch.Tensor:
        grad = cast("torch.Tensor", self.param.grad)
        if self.annotation is not None:
            grad = self.annotation.as_grad(waited(grad))
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
    """Return a placeholder for a closed full parameter: operations on it fail or give NaN."""
    return like.new_full((), torch.nan) if like.is_floating_point() or like.is_complex() else like.new_empty(0)
