"""Reduces after each micro-batch instead of once after the last one."""

from tests.course.solutions import solution
from tests.course.solutions.solution import fsdp_gather_full_params  # noqa: F401 - the other adapters


class ReducesEachMicroBatch(solution.ShardedUnit):
    def accumulate(self, grad):
        before, self.grad = self.shard.grad, grad
        self.reduce()
        if before is not None:
            self.shard.grad += before


def fsdp_on_after_backward(fsdp_model, optimizer):
    pass


def get_fsdp(module):
    return solution.get_fsdp(module, ReducesEachMicroBatch)
