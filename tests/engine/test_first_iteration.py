"""The checks that ranks make before and during the first iteration cost no collective: counts equal torch's."""

import math
from collections import Counter
from types import ModuleType

import pytest
import torch.distributed as dist
from torch.autograd.profiler import profile
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from tests.helpers.both_engines import shard_net_with
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.pairwise import quick
from tests.helpers.small_models import batch, loss_of, make_net
from workbench import engine

NUM_ITERATIONS = 2


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def count(api: ModuleType, shape: tuple[int, ...]) -> list[tuple[dict[str, int], int]]:
    """Return, per iteration, CommDebugMode's counts by operation and the profiler's number of collectives."""
    model = shard_net_with(api, make_net(num_blocks=2), mesh=mesh_of(shape))
    seen = []
    for step in range(NUM_ITERATIONS):
        with profile() as profiled, CommDebugMode() as debug:
            loss_of(model, batch(dist.get_rank(), step)).backward()
        counts = Counter({str(op): n for op, n in debug.get_comm_counts().items()})
        events = profiled.kineto_results.events()  # raw events: building a tree of them takes longer than the training
        seen.append((dict(counts), sum(event.name().startswith("gloo:") for event in events)))
    return seen


def ours(shape: tuple[int, ...], choice: str) -> list[tuple[dict[str, int], int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_COMM", choice)
        return count(engine, shape)


@pytest.fixture(scope="module", params=quick([(1,), (2,), (4,), (2, 2)], [(1,), (2,)]), ids=str)
def measured(request) -> tuple[tuple[int, ...], list[list[tuple[dict[str, int], int]]]]:
    """Return a mesh's shape and each rank's counts with torch's engine, which are the same for every choice of comm."""
    return request.param, run_ranks(math.prod(request.param), count, fsdp, request.param)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # CommDebugMode's own, on a model of integer inputs
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")  # of torch's engine
@pytest.mark.parametrize("choice", ["default", "gloo", ""])
def test_no_iteration_has_more_collectives_than_torchs(measured, choice):
    shape, of_torch = measured
    for counted, theirs in zip(run_ranks(math.prod(shape), ours, shape, choice), of_torch, strict=True):
        assert [n for _, n in counted] == [n for _, n in theirs]
        if choice == "default":
            assert [counts for counts, _ in counted] == [counts for counts, _ in theirs]
        if choice == "gloo":
            assert [sum(counts.values()) for counts, _ in counted] == [sum(counts.values()) for counts, _ in theirs]
