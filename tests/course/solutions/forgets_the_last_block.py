"""Leaves the last block out: each rank trains its own copy of it."""

from torch import nn

from tests.course.solutions import solution
from tests.course.solutions.solution import fsdp_on_after_backward  # noqa: F401 - the other adapters


def get_fsdp(module):
    forgotten = module.blocks[-1]
    module.blocks[-1] = nn.Identity()
    root = solution.get_fsdp(module, blocks=len(module.blocks) - 1)
    root.module.blocks[-1] = forgotten
    return root


def fsdp_gather_full_params(fsdp_model):
    last = len(fsdp_model.module.blocks) - 1
    own = fsdp_model.module.blocks[last].named_parameters(prefix=f"blocks.{last}")
    return solution.fsdp_gather_full_params(fsdp_model) | {name: param.detach().clone() for name, param in own}
