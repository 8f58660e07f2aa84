"""Emulation of a sharded model's precision in an unsharded copy.

It uses only torch's public API, as an independent check of the engine's dtypes: parameters are cast at every use,
inputs and outputs where a unit's policy says so. Gradients arrive in the parameters' own dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from workbench.engine.tensor_trees import cast_floats
from workbench.events import Unit
from workbench.models.sharded_model import Casts

UPDATE_TOLERANCE = {"bfloat16": 0.25, "float16": 0.05}
"""Largest relative difference in norm of a parameter's update, by the coarsest dtype of compute or reduction.

Ranks add rounded gradients in an unspecified order. Where they cancel, the sign of the sum is random, and Adam's first
steps depend only on signs. An update that misses another rank's gradients differs by more than 0.5.
"""


def coarsest_dtype(infos: Sequence[Unit]) -> str:
    """Return the dtype with the fewest mantissa bits that a unit computes or reduces in; default ``"float32"``."""
    found = {dtype for info in infos for dtype in (info.compute_dtype, info.reduce_dtype)}
    return max(found, key=lambda dtype: torch.finfo(getattr(torch, dtype)).eps, default="float32")


def compute_alike(casts: Iterable[Casts], paths: Mapping[nn.Module, str], reference: nn.Module) -> None:
    """Make ``reference`` cast as a sharded model does.

    Args:
        casts: what the model casts.
        paths: paths of its modules, without wrappers.
        reference: its plain copy; its parameters stay the same objects, some under another name.
    """
    for each in casts:
        for module in each.modules:
            _cast_inputs_and_outputs(reference.get_submodule(paths[module]), each.input_dtype, each.output_dtype)
        for own, owner, name in each.params:
            if each.param_dtype not in {None, own} and own.is_floating_point:
                twin = reference.get_submodule(paths[owner])
                # unsafe: the dtype changes
                parametrize.register_parametrization(twin, name, _Cast(each.param_dtype), unsafe=True)


def _cast_inputs_and_outputs(module: nn.Module, wanted: torch.dtype | None, given: torch.dtype | None) -> None:

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return cast_floats(args, wanted), cast_floats(kwargs, wanted)

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401 - whatever forward returns
        return cast_floats(output, given)

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(after)


class _Cast(nn.Module):
    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value`` in this module's dtype."""
        return value.to(self._dtype)
