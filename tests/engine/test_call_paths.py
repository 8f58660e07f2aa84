"""From a module's hook to c10d and back: the functions of the engine that a collective passes through."""

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import workbench.engine
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import shard_net
from tests.helpers.small_models import batch, loss_of, make_net

ENGINE = str(Path(workbench.engine.__file__).parent)
ALL_GATHER = [
    "FSDPState.pre_forward",
    "FSDPState._unshard",
    "FSDPParamGroup.unshard",
    "foreach_all_gather",
    "CommGroup.issue",
    "DefaultAllGather.__call__",
]
WAIT = [
    "FSDPState.pre_forward",
    "FSDPState._unshard",
    "FSDPParamGroup.wait_for_unshard",
    "AllGatherState.wait",
    "PendingWork.wait",
]
REDUCE_SCATTER = [
    "RegisterPostBackwardFunction.backward",
    "FSDPParamGroup.post_backward",
    "FSDPParamGroup._reduce",
    "FSDPParamGroup._start_reduction",
    "foreach_reduce",
    "CommGroup.issue",
    "DefaultReduceScatter.__call__",
]


def path_here() -> tuple[str, ...]:
    """Return the engine's functions that have called the caller, outermost first; without that which stops autograd."""
    found, frame = [], sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(ENGINE + os.sep) and "unrecorded" not in frame.f_code.co_qualname:
            found.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return tuple(reversed(found))


def paths_of_a_step() -> tuple[set[tuple[str, ...]], set[tuple[str, ...]], set[tuple[str, ...]]]:
    """Return the paths of the second step: to all-gathers, to the wait for one of them, and to reduce-scatters."""
    from workbench.engine.backends import async_work

    gathers, waits, reduces = set(), set(), set()
    with pytest.MonkeyPatch.context() as patch:

        def noting(name: str, into: set[tuple[str, ...]]) -> None:
            call = getattr(dist, name, None)
            if call is not None:

                def noted(*args, **kwargs):
                    into.add(path_here())
                    return call(*args, **kwargs)

                patch.setattr(dist, name, noted)

        class NotingCancellation:
            @staticmethod
            def check() -> None:  # every wait calls this first
                waits.add(path_here()[:-1])  # without the context manager of the wait

        patch.setattr(async_work, "cancellation", NotingCancellation)
        model = shard_net(make_net(num_blocks=2))
        for step in range(2):
            if step:
                for name in ("all_gather_single", "all_gather_into_tensor"):
                    noting(name, gathers)
                for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
                    noting(name, reduces)
            loss_of(model, batch(dist.get_rank(), step)).backward()
    return gathers, waits, reduces


def test_how_far_it_is_from_a_hook_to_c10d(environ):
    environ["WORKBENCH_COMM"] = "default"
    for gathers, waits, reduces in run_ranks(2, paths_of_a_step):
        assert tuple(ALL_GATHER) in gathers
        assert tuple(WAIT) in waits
        assert tuple(REDUCE_SCATTER) in reduces
        ends = {path[-1] for path in gathers | reduces}
        assert ends == {"DefaultAllGather.__call__", "DefaultReduceScatter.__call__"}
