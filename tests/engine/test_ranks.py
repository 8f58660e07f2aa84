"""Long-lived ranks run each function as freshly forked ranks do; a change that cannot be undone ends them."""

import multiprocessing
import os
import signal
import threading
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.helpers.booted_ranks import execute, namespace, prepare, run
from tests.helpers.forked_ranks import POOL, RankFailure, on_one_rank, outcomes, run_ranks
from tests.helpers.small_models import make_net
from workbench.engine import cancellable_waits, fully_shard, process_groups
from workbench.events import UNIT_INDICES
from workbench.protocol.commands import Shard, Step
from workbench.runtime import rank as rank_module

here = "as it was"


class Marked:
    mark = "as it was"


def pids(world_size: int = 2, **options: bool) -> list[int]:
    return run_ranks(world_size, os.getpid, **options)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_same_processes_run_one_function_after_another(world_size):
    first = pids(world_size)
    assert len(set(first)) == world_size
    assert pids(world_size) == first
    assert set(first) <= {process.pid for process in POOL.processes}


def test_other_sizes_and_fresh_ranks_are_forked_for_one_function():
    assert not set(pids(2, fresh=True)) & set(pids(2))
    assert not set(pids(3)) & set(pids(3))


def test_ranks_are_forked_where_a_test_patches_something(monkeypatch):
    monkeypatch.setattr(Marked, "mark", "patched")
    monkeypatch.setenv("WORKBENCH_TESTS_MARK", "set")
    assert not POOL.is_open
    assert run_ranks(2, lambda: (Marked.mark, os.environ["WORKBENCH_TESTS_MARK"])) == [("patched", "set")] * 2


@pytest.mark.fresh_ranks
def test_ranks_are_forked_if_the_test_requests_it():
    assert not set(pids()) & set(pids())


# ---- what is sent to a rank


def test_inner_functions_lambdas_modules_and_parts_are_sent():
    stays, offset, kept = pids(), 3, [4]

    def inner(module, number, *, more=2):
        return os.getpid(), module is dist, number + offset + more + kept[0]

    assert run_ranks(2, partial(inner, dist), 1) == [(pid, True, 10) for pid in stays]
    assert run_ranks(2, lambda api: api is torchs, torchs) == [True, True]


def test_arguments_that_cannot_be_pickled_are_forked():
    class Local:
        value = 7

    def meet(event):
        if dist.get_rank() == 0:
            event.set()
        return event.wait(60)

    assert run_ranks(2, meet, multiprocessing.get_context("fork").Event()) == [True, True]
    assert run_ranks(2, lambda: Local.value) == [7, 7]
    shared = torch.zeros(1).share_memory_()
    run_ranks(1, shared.fill_, 5)
    assert shared.item() == 5


@on_one_rank
def test_a_decorated_test_runs_on_a_rank():
    assert dist.get_world_size() == 1


def test_ranks_that_stay_have_the_environment_and_the_filters_of_the_test():
    def warns():
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("again", UserWarning, stacklevel=1)
        return len(caught), os.environ.get("WORKBENCH_TESTS_MARK")

    stays = pids()
    os.environ["WORKBENCH_TESTS_MARK"] = "set"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            assert run_ranks(2, warns) == [(1, "set")] * 2
            warnings.simplefilter("ignore")
            assert run_ranks(2, warns) == [(0, "set")] * 2
    finally:
        del os.environ["WORKBENCH_TESTS_MARK"]
    assert outcomes(2, warns)[0][0] == "UserWarning: again"  # pytest's filters apply again
    with pytest.raises(RankFailure, match="UserWarning: again"):
        run_ranks(2, warns)
    assert not set(pids()) & set(stays)


# ---- what is restored


def change() -> None:
    """Change everything that tests change and that is restored."""
    globals()["here"] = "changed"
    Marked.mark = "changed"
    Marked.more = "added"
    cancellable_waits.SLICE_S = 5.0
    cancellable_waits.cancellation.cancel("for the test")
    os.environ["WORKBENCH_TESTS_MARK"] = "set"
    os.chdir("/")
    torch.manual_seed(1)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    nn.modules.module.register_module_forward_hook(lambda *_: None)
    torch.optim.Optimizer.zero_grad = None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    dist.get_world_size = None


def seen() -> list[object]:
    return [
        here,
        Marked.mark,
        hasattr(Marked, "more"),
        cancellable_waits.SLICE_S,
        cancellable_waits.cancellation.is_set,
        dict(os.environ),
        os.getcwd(),
        torch.rand(1).item(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device().type,
        len(nn.modules.module._global_forward_hooks),
        torch.optim.Optimizer.zero_grad is None,
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        dist.get_world_size(),
        len(dist.distributed_c10d._world.pg_map),
        len(process_groups._groups),
    ]


def test_a_kept_rank_is_reset():
    fresh = run_ranks(2, seen, fresh=True)
    stays = pids()
    assert run_ranks(2, seen) == fresh
    run_ranks(2, change)
    assert run_ranks(2, seen) == fresh
    assert pids() == stays


def learn(shape: tuple[int, ...]) -> list[object]:
    """Run DTensor operations on a mesh; return the sum and the ranks of the result's mesh."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    total = (distribute_tensor(torch.ones(4, 2), mesh) * 2).sum()
    assert isinstance(total, DTensor)
    assert total.device_mesh is mesh
    return [total.full_tensor().item(), dist.get_process_group_ranks(mesh.get_group(0))]


def test_dtensor_caches_refer_to_no_earlier_process_group():
    stays = pids(4)
    fresh = run_ranks(4, learn, (2, 2), fresh=True)
    assert run_ranks(4, learn, (2, 2)) == fresh
    run_ranks(4, lambda: [dist.new_group([0, 1]), dist.new_group([2, 3]), None][-1])
    assert run_ranks(4, learn, (2, 2)) == fresh
    assert [total for total, _ in run_ranks(4, learn, (4,))] == [16.0] * 4
    assert pids(4) == stays


def begin_and_change() -> list[object]:
    """Return what a booted rank begins with, and change it."""
    begin = ["model" in namespace(), UNIT_INDICES.next, rank_module.this_rank().recorder.next_step, namespace()["rank"]]
    prepare(dim=8, num_blocks=1)
    execute(Shard(model="model", wrap=("Block",)))
    execute(Step(count=1))
    return begin


def test_kept_ranks_are_booted_anew():
    stays = pids()
    for _ in range(2):
        assert run(2, begin_and_change) == [[False, 0, 0, rank] for rank in range(2)]
    assert pids() == stays


def test_each_function_has_its_own_store():
    def count(name: str) -> int:
        return dist.distributed_c10d._get_default_store().add(name, 1)

    assert {tuple(sorted(run_ranks(2, count, "visits"))) for _ in range(2)} == {(1, 2)}


# ---- what ends the ranks


def train_and_leave_nothing() -> None:
    model = fully_shard(make_net(dim=8, num_blocks=1))
    model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()


def test_a_trained_model_lets_the_ranks_stay():
    stays = pids()
    run_ranks(2, train_and_leave_nothing)
    assert pids() == stays


def test_ranks_end_when_one_fails_or_dies():
    stays = pids()
    with pytest.raises(RankFailure, match="rank 1: ZeroDivisionError"):
        run_ranks(2, lambda: 1 // (1 - dist.get_rank()))
    then = pids()
    assert not set(then) & set(stays)
    with pytest.raises(RankFailure, match="rank 0: died\nexit code 3"):
        run_ranks(2, lambda: dist.get_rank() or os._exit(3))
    assert not set(pids()) & set(then)


def leave_a_thread() -> None:
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()


def leave_a_process() -> None:
    multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True).start()


@pytest.mark.parametrize(("leave", "what"), [(leave_a_thread, "thread forgotten"), (leave_a_process, "process ")])
def test_a_thread_or_a_process_that_is_left_fails_the_test_and_ends_the_ranks(leave, what):
    stays = pids()
    with pytest.raises(RankFailure, match=f"rank 0: left behind\n{what}"):
        run_ranks(2, leave)
    assert not set(pids()) & set(stays)


def keep_the_group() -> None:
    signal.kept_by_the_test = dist.distributed_c10d._get_default_group()  # in a module that is not restored


def test_a_process_group_that_something_keeps_ends_the_ranks():
    stays = pids()
    run_ranks(2, keep_the_group)
    assert not set(pids()) & set(stays)
