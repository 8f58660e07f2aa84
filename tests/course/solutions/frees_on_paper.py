"""Announces that it frees a unit, and keeps its full parameters."""

from tests.course.solutions import solution
from tests.course.solutions.solution import fsdp_gather_full_params, fsdp_on_after_backward  # noqa: F401 - the other adapters


class FreesOnPaper(solution.ShardedUnit):
    def reshard(self):
        self.unit.reshard()


def get_fsdp(module):
    return solution.get_fsdp(module, FreesOnPaper)
