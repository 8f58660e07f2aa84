"""Pads by a whole row of ranks where nothing needs to be padded."""

from tests.course.solutions import solution
from tests.course.solutions.solution import fsdp_gather_full_params, fsdp_on_after_backward  # noqa: F401 - the other adapters


class PadsTooMuch(solution.ShardedUnit):
    def padding(self, length):
        return self.world_size - length % self.world_size


def get_fsdp(module):
    return solution.get_fsdp(module, PadsTooMuch)
