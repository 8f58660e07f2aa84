"""What ranks find out before and during the first iteration costs no collective: whoever counts sees torch's number."""

import math
from collections import Counter
from types import ModuleType

import pytest
import torch.distributed as dist
from torch.autograd.profiler import profile
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from tests.engine.both import APIS, shard_net_with
from tests.engine.models import batch, loss_of, make_net
from tests.engine.ranks import run_ranks

NUM_ITERATIONS = 2


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def count(api: ModuleType, shape: tuple[int, ...]) -> list[tuple[dict[str, int], int]]:
    """Per iteration: what CommDebugMode counts, by operation, and how many collectives the profiler sees."""
    model = shard_net_with(api, make_net(num_blocks=2), mesh=mesh_of(shape))
    seen = []
    for step in range(NUM_ITERATIONS):
        with profile() as profiled, CommDebugMode() as debug:
            loss_of(model, batch(dist.get_rank(), step)).backward()
        counts = Counter({str(op): n for op, n in debug.get_comm_counts().items()})
        seen.append((dict(counts), sum(event.name.startswith("gloo:") for event in profiled.function_events)))
    return seen


def both(shape: tuple[int, ...], choice: str) -> list[list[tuple[dict[str, int], int]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_COMM", choice)
        return [count(api, shape) for api in APIS]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # CommDebugMode's own, on a model of integer inputs
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")  # torch's, of torch's
@pytest.mark.parametrize("choice", ["default", "gloo", ""])
@pytest.mark.parametrize("shape", [(1,), (2,), (4,), (2, 2)])
def test_no_iteration_has_more_collectives_than_torchs(shape, choice):
    for ours, theirs in run_ranks(math.prod(shape), both, shape, choice):
        assert [n for _, n in ours] == [n for _, n in theirs]
        if choice == "default":
            assert [counts for counts, _ in ours] == [counts for counts, _ in theirs]
        if choice == "gloo":
            assert [sum(counts.values()) for counts, _ in ours] == [sum(counts.values()) for counts, _ in theirs]
