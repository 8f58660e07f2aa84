"""Tensors without values: placeholders for sharded parameters and for gradients that are not reduced yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn

from workbench.engine._torch import without_fakes
from workbench.engine.full_param import FullParam
from workbench.engine.refusal_text import is_sharded

_OF_FORM: frozenset[Callable[..., Any]] = frozenset(
    {
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.element_size,
    }
)


def _one_by_one(given: Sequence[Any]) -> Iterator[Any]:
    """Yield arguments one by one, with lists and tuples flattened."""
    for value in given:
        yield from value if isinstance(value, (list, tuple)) else [value]


class _StandIn(torch.Tensor):
    """A placeholder for a tensor, with its shape, dtype and device but no values."""

    answers: ClassVar[frozenset[Callable[..., Any]]] = _OF_FORM
    """Functions that work as on any tensor."""

    @classmethod
    def _for(cls, tensor: torch.Tensor, shape: torch.Size | None = None) -> Self:
        with without_fakes():
            one = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
            return one.expand(tensor.shape if shape is None else shape).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - torch's protocol
        """Run functions that read only shape, dtype or device.

        Raises:
            RuntimeError: the function would compute with the values.
        """
        if func.__name__ == "__get__" or func in cls.answers:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return cls._compute(func, (*args, *(kwargs or {}).values()))

    @classmethod
    def _compute(cls, func: Callable[..., Any], given: Sequence[Any]) -> Any:  # noqa: ANN401 - whatever func returns
        """Handle any other function; refuse it by default."""
        one = next(value for value in _one_by_one(given) if isinstance(value, cls))
        raise RuntimeError(f"{func.__name__}: {one.refusal}")

    @property
    def refusal(self) -> str:
        """Error message: why nothing can compute with the placeholder, and what to do instead."""
        raise NotImplementedError


class FlatPlaceholder(_StandIn):
    """Placeholder on a module for a parameter that is sharded in a flat parameter."""

    full: FullParam

    @classmethod
    def of(cls, full: FullParam) -> FlatPlaceholder:
        """Return the placeholder for ``full`` while it is closed; it has the global shape."""
        away = cls._for(full.data, None if full.tp_spec is None else full.param.shape)
        away.full = full
        return away

    def __repr__(self) -> str:  # type: ignore[override]
        """Return a short description."""
        return f"<{self.full.fqn} is sharded: {list(self.shape)}, {self.dtype}>"

    @property
    def refusal(self) -> str:
        """Error message: why nothing can compute with the placeholder, and what to do instead."""
        return is_sharded(self.full.fqn, "the FullyShardedDataParallel around its module", "within summon_full_params")


class Unreduced(_StandIn):
    """Placeholder in ``.grad`` for gradients that were accumulated within ``no_sync`` and not reduced yet.

    It lets ``zero_grad`` find them, as with torch's wrapper: ``zero_grad`` removes the placeholder or sets it to zero,
    and the accumulated gradients are then dropped before the next ones arrive.
    """

    answers = _OF_FORM | {torch.Tensor.requires_grad_}
    fqn: str
    is_zero: bool

    @classmethod
    def of(cls, param: nn.Parameter, fqn: str) -> Unreduced:
        """Return the placeholder for the gradient of ``param``."""
        unreduced = cls._for(param.detach())
        unreduced.fqn, unreduced.is_zero = fqn, False
        return unreduced

    def __repr__(self) -> str:  # type: ignore[override]
        """Return a short description."""
        return f"<gradient of {self.fqn}, not reduced yet: {list(self.shape)}, {self.dtype}>"

    @property
    def refusal(self) -> str:
        """Error message: why nothing can compute with the placeholder, and what to do instead."""
        return (
            f"the gradient of {self.fqn!r} was accumulated within no_sync() and is not reduced yet; run a backward "
            "outside no_sync() before using gradients"
        )

    @classmethod
    def _compute(cls, func: Callable[..., Any], given: Sequence[Any]) -> Any:  # noqa: ANN401 - whatever func returns
        """Record zeroing; refuse anything else."""
        if func.__name__ not in {"zero_", "_foreach_zero_"}:
            return super()._compute(func, given)
        for grad in _one_by_one(given):
            if isinstance(grad, Unreduced):
                grad.is_zero = True
            else:
                grad.zero_()
        return given[0]


def reduced_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient of ``param``; None without one, or if it is not reduced yet."""
    return None if isinstance(param.grad, Unreduced) else param.grad


@dataclass(eq=False)
class ExposedGrad:
    """An unreduced gradient, or its placeholder, exposed in ``.grad`` of a parameter.

    Attributes:
        param: the parameter.
        grad: the exposed gradient or placeholder.
        reduced: the gradient that ``param`` had before, from earlier backwards.
        fulls: the full parameters that own the unreduced gradients.
    """

    param: nn.Parameter
    grad: torch.Tensor
    reduced: torch.Tensor | None
    fulls: Sequence[FullParam]

    def take_back(self) -> None:
        """Restore the earlier ``.grad``; drop the unreduced gradients if the exposed one was zeroed or replaced."""
        if self.param.grad is self.grad and not getattr(self.grad, "is_zero", False):
            self.param.grad = self.reduced
            return
        if self.param.grad is self.grad:
            self.param.grad = None
        for full in self.fulls:
            full.drop_grad()
