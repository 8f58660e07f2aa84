"""Emulation of a sharded model's precision in an unsharded copy.

It uses only torch's public API, as an independent check of the engine's dtypes: parameters are cast at every use,
inputs and outputs where a unit's policy says so. Gradients arrive in the parameters' own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from workbench.engine.fsdp_state import FSDPState, states_below, units_of
from workbench.engine.param import FSDPParam
from workbench.engine.root_checks import clean
from workbench.engine.tensor_trees import cast_floats
from workbench.events import Unit

UPDATE_TOLERANCE = {"bfloat16": 0.25, "float16": 0.05}
"""Largest relative difference in norm of a parameter's update, by the coarsest dtype of compute or reduction.

Ranks add rounded gradients in an unspecified order. Where they cancel, the sign of the sum is random, and Adam's first
steps depend only on signs. An update that misses another rank's gradients differs by more than 0.5.
"""


def coarsest_dtype(infos: Sequence[Unit]) -> str:
    """Return the dtype with the fewest mantissa bits that a unit computes or reduces in; default ``"float32"``."""
    found = {dtype for info in infos for dtype in (info.compute_dtype, info.reduce_dtype)}
    return max(found, key=lambda dtype: torch.finfo(getattr(torch, dtype)).eps, default="float32")


def compute_alike(model: nn.Module, reference: nn.Module) -> None:
    """Make ``reference`` cast as the policies of ``model``'s units do.

    Args:
        model: the sharded model.
        reference: its plain copy; its parameters stay the same objects, some under another name.
    """
    paths = {module: clean(path) for path, module in model.named_modules()}
    for state in states_below(model):
        for module in state.modules:
            _cast_inputs_and_outputs(reference.get_submodule(paths[module]), state)
        for unit in units_of([state]):
            for param in unit.fsdp_params:
                _cast_parameter(param, reference, paths, state.mp_policy.param_dtype)


def _cast_inputs_and_outputs(module: nn.Module, state: FSDPState) -> None:
    wanted, given = state.input_dtype, state.mp_policy.output_dtype

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return cast_floats(args, wanted), cast_floats(kwargs, wanted)

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401 - whatever forward returns
        return cast_floats(output, given)

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(after)


def _cast_parameter(
    param: FSDPParam, reference: nn.Module, paths: dict[nn.Module, str], dtype: torch.dtype | None
) -> None:
    if dtype is None or dtype == param.orig_dtype or not param.orig_dtype.is_floating_point:
        return
    for owner, name in (place for info in param.infos for place in info.places):
        twin = reference.get_submodule(paths[owner])
        parametrize.register_parametrization(twin, name, _Cast(dtype), unsafe=True)  # unsafe: the dtype changes


class _Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value`` in this module's dtype."""
        return value.to(self._dtype)
