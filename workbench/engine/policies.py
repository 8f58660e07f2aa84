"""Policies of a unit: precision, offloading, resharding after forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from workbench.engine.backends import can_pin


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of compute, reduction and output; None: no cast. Shards, their gradients and the optimizer keep theirs.

    Attributes:
        param_dtype: of the full parameters: all-gather, forward and backward.
        reduce_dtype: of the reduction, and of gradients accumulated without sync; None: as in the installed torch.
            From 2.15 on, that is each parameter's ``grad_dtype``, by default its own dtype; before, ``param_dtype``.
        output_dtype: dtype that floating-point outputs of forward are cast to.
        cast_forward_inputs: cast floating-point inputs of forward to ``param_dtype``.
        param_dtype_override_fn: returns the dtype of a parameter that keeps its own, and None or ``param_dtype`` for
            any other; asked once, by ``fully_shard``, for each of its parameters. Both kinds have an all-gather and a
            reduce-scatter of their own.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)

    def keeps_dtype(self, path: str, param: nn.Parameter) -> bool:
        """Return whether modules compute with ``param`` in its own dtype, not in ``param_dtype``.

        Raises:
            ValueError: ``param_dtype_override_fn`` returned another dtype.
        """
        dtype = None if self.param_dtype_override_fn is None else self.param_dtype_override_fn(param)
        if dtype not in (None, self.param_dtype, param.dtype):
            raise ValueError(
                f"param_dtype_override_fn returned {dtype!r} for parameter {path!r}; it may return None, param_dtype "
                f"({self.param_dtype}) or the parameter's own dtype ({param.dtype})"
            )
        return dtype is not None and dtype != self.param_dtype

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for a value that is not a floating-point dtype or bool."""
        check_dtypes(self, "param_dtype", "reduce_dtype", "output_dtype")
        check_bools(self, "cast_forward_inputs")
        fn = self.param_dtype_override_fn
        if fn is not None and not callable(fn):
            raise TypeError(
                f"MixedPrecisionPolicy: param_dtype_override_fn must be a function of a parameter, got {fn!r}"
            )


@dataclass(frozen=True)
class OffloadPolicy:
    """Shards stay on the compute device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and the optimizer's state are on the CPU between uses.

    Attributes:
        pin_memory: pin that memory where CUDA exists, so that copies overlap with compute.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        """Raise TypeError if ``pin_memory`` is not a bool."""
        check_bools(self, "pin_memory")


@dataclass(frozen=True, kw_only=True)
class UnitPolicy:
    """All policies of a unit.

    Attributes:
        reshard_after_forward: True frees the full parameters between forward and backward, False keeps them, an int
            keeps them sharded over groups of that many ranks.
        mp_policy: see :class:`MixedPrecisionPolicy`.
        offload_policy: see :class:`OffloadPolicy`.
    """

    reshard_after_forward: bool | int = True
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)

    @property
    def offloads(self) -> bool:
        """True if shards live on the CPU, whatever the compute device."""
        return isinstance(self.offload_policy, CPUOffloadPolicy)

    @property
    def pins(self) -> bool:
        """True if the shards' memory is pinned."""
        policy = self.offload_policy
        return isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and can_pin()


def check_dtypes(policy: object, *names: str) -> None:
    """Raise TypeError or ValueError if one of the fields ``names`` is neither None nor a floating-point dtype."""
    for name in names:
        value = getattr(policy, name)
        if value is not None and not isinstance(value, torch.dtype):
            raise TypeError(f"{type(policy).__name__}: {name} must be a torch.dtype or None, got {value!r}")
        if value is not None and not value.is_floating_point:
            raise ValueError(f"{type(policy).__name__}: {name} must be a floating-point dtype, got {value}")


def check_bools(policy: object, *names: str) -> None:
    """Raise TypeError if one of the fields ``names`` is not a bool."""
    for name in names:
        value = getattr(policy, name)
        if not isinstance(value, bool):
            raise TypeError(f"{type(policy).__name__}: {name} must be a bool, got {value!r}")
