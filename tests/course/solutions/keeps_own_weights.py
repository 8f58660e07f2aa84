"""Shards what each rank has drawn, and does not broadcast the weights of rank 0."""

from tests.course.solutions import solution
from tests.course.solutions.solution import fsdp_gather_full_params, fsdp_on_after_backward  # noqa: F401 - the other adapters


class KeepsOwnWeights(solution.ShardedUnit):
    def share_initial_weights(self, flat):
        pass


def get_fsdp(module):
    return solution.get_fsdp(module, KeepsOwnWeights)
