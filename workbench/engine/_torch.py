"""Every private piece of torch that the engine needs, and nothing else.

Each function here has a test in ``tests/engine/test_torch_private.py`` that notices when torch changes it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

TESTED_TORCH = ("2.13",)


def queue_backward_final_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass under way has finished all of its work.

    Raises:
        RuntimeError: outside of a backward pass.
    """
    Variable._execution_engine.queue_callback(callback)  # type: ignore[no-untyped-call,attr-defined,unused-ignore]


def dtensor_like(reference: DTensor, local: torch.Tensor) -> DTensor:
    """Wrap ``local`` as a DTensor of ``reference``'s global shape, mesh and placements, without any check.

    ``DTensor.from_local`` does the same in 20-50 us with checks and autograd; this runs once per gradient and step.
    """
    return DTensor(local, reference._spec, requires_grad=False)


def local_of(dtensor: DTensor) -> torch.Tensor:
    """Return the very tensor a DTensor wraps (``to_local`` gives a new view of a parameter's)."""
    return dtensor._local_tensor


def set_local(dtensor: DTensor, local: torch.Tensor) -> None:
    """Exchange the tensor a DTensor wraps; shape and dtype must be what its spec says."""
    dtensor._local_tensor = local


def parameter_of(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return the parameter registered under ``name``, without the search of ``nn.Module.__getattr__``."""
    return module._parameters.get(name)


def set_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Exchange a registered parameter without the checks of ``nn.Module.__setattr__``: runs 4 times a step each."""
    module._parameters[name] = param
