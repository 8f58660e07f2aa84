"""Frees a unit only after its backward."""

from tests.course.solutions import solution
from tests.course.solutions.solution import fsdp_gather_full_params, fsdp_on_after_backward  # noqa: F401 - the other adapters


class KeepsAfterForward(solution.ShardedUnit):
    def after_forward(self):
        pass

    def before_backward(self, grad):
        self.unit.begin_backward()


def get_fsdp(module):
    return solution.get_fsdp(module, KeepsAfterForward)
