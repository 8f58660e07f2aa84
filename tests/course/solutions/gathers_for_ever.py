"""Gathers each unit once, and never frees it."""

from tests.course.solutions import solution
from tests.course.solutions.solution import fsdp_gather_full_params, fsdp_on_after_backward  # noqa: F401 - the other adapters


class GathersForEver(solution.ShardedUnit):
    is_full = False

    def begin_unshard(self):
        if not self.is_full:
            super().begin_unshard()

    def unshard(self):
        if not self.is_full:
            super().unshard()
            self.is_full = True

    def reshard(self):
        pass


def get_fsdp(module):
    return solution.get_fsdp(module, GathersForEver)
