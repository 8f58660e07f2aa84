"""The environment of a script: what it sees, and that all of it is undone."""

import builtins
import functools
import os
import signal
import sys
import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.forked_ranks import run_ranks
from workbench.runtime.group_membership import GroupMembership
from workbench.runtime.script_environment import as_under_torchrun

REPLACED = ("init_process_group", "destroy_process_group", "is_initialized", "new_group", "split_group")


def ranks(**facts):
    usual = {"rank": 0, "world_size": 1, "local_world_size": 1, "backend": "gloo", "device_type": "cpu"}
    return SimpleNamespace(**{**usual, **facts}, tracked=nullcontext)


BODIES = {}


def on_a_rank(body):
    """Run the body of a test in a process with a default process group of its own."""
    BODIES[body.__name__] = body

    @functools.wraps(body)
    def test(**arguments):
        run_ranks(1, call, body.__name__, arguments)

    return test


def call(name, arguments):
    BODIES[name](**arguments)


@contextmanager
def script(**facts):
    membership = GroupMembership(ranks(**facts)).install()
    try:
        with as_under_torchrun(("train.py", "--lr", "1"), "/scripts", membership):
            yield
    finally:
        membership.uninstall()


def everything():
    functions = [getattr(module, name) for module in (dist, distributed_c10d, device_mesh) for name in vars(module)]
    signals = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    torch_wide = [torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()]
    process = [sys.stdout, sys.stderr, print, sys.argv, list(sys.path), dict(os.environ)]
    return [functions, signals, torch_wide, process]


def change_all():
    dist.init_process_group()
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as scripts do
    sys.stdout.close()
    builtins.print = len
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    os.environ["OF_THE_SCRIPT"] = os.environ.pop("HOME")
    sys.path.append("/elsewhere")
    sys.argv.clear()


@pytest.mark.parametrize("raises", [False, True])
@on_a_rank
def test_all_that_a_script_changes_is_undone(raises):
    before = everything()
    with nullcontext() if not raises else pytest.raises(SystemExit), script():
        change_all()
        assert everything()[1:] != before[1:]
        if raises:
            sys.exit()
    assert everything() == before
    assert dist.is_initialized()


@on_a_rank
def test_a_script_sees_the_arguments_and_variables_of_torchrun():
    with script(rank=5, world_size=8, local_world_size=4):
        assert sys.argv == ["train.py", "--lr", "1"]
        assert sys.path[0] == "/scripts"
        assert [os.environ[name] for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")] == ["1", "2", "5"]
        assert dist.is_torchelastic_launched()


@on_a_rank
def test_joining_and_leaving_make_and_end_no_group():
    world = dist.group.WORLD
    with script():
        assert not dist.is_initialized()
        dist.init_process_group("gloo", world_size=1, rank=0)
        assert dist.is_initialized()
        assert dist.is_initialized is distributed_c10d.is_initialized
        dist.all_reduce(torch.ones(1))
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("gloo")
        dist.destroy_process_group()
        assert not dist.is_initialized()
        with pytest.raises(ValueError, match="has not been initialized"):
            dist.all_reduce(torch.ones(1))
        with pytest.raises(ValueError, match="has not been initialized"):
            dist.destroy_process_group()
        dist.init_process_group()
        assert dist.group.WORLD is world
        dist.destroy_process_group(dist.group.WORLD)
        assert not dist.is_initialized()
    assert dist.group.WORLD is world
    dist.all_reduce(torch.ones(1))


@on_a_rank
def test_a_mesh_joins_by_itself():
    with script():
        mesh = init_device_mesh("cpu", (1,))
        assert dist.is_initialized()
        assert mesh.size() == 1


@on_a_rank
def test_a_library_that_has_joined_in_an_earlier_script_goes_on():
    with script():
        dist.all_reduce(torch.ones(1))


@on_a_rank
def test_another_thread_always_has_the_group():
    found = []
    with script():
        thread = threading.Thread(target=lambda: found.append(dist.is_initialized()))
        thread.start()
        thread.join()
    assert found == [True]


@on_a_rank
def test_groups_of_the_script_are_real_and_have_no_timeout_that_a_stop_could_exceed():
    with script():
        dist.init_process_group()
        group = dist.new_group([0], timeout=distributed_c10d.timedelta(seconds=1))
        assert group is not dist.group.WORLD
        assert group._get_backend(torch.device("cpu")).options._timeout.days >= 1
        dist.destroy_process_group(group)
        assert group not in distributed_c10d._world.pg_map


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"world_size": 4}, r"asks for world_size=4, and there are 1 ranks: .* %fsdp start -n 4"),
        ({"rank": 3}, "asks for rank=3 on rank 0"),
        ({"backend": "nccl"}, "asks for nccl, and the ranks use gloo on cpu"),
        ({"backend": "cpu:mpi,cuda:nccl"}, "asks for cpu:mpi,cuda:nccl, and the ranks use gloo"),
    ],
)
@on_a_rank
def test_a_group_that_does_not_fit_is_refused(given, message):
    with script():
        with pytest.raises(ValueError, match=message):
            dist.init_process_group(**given)
        assert not dist.is_initialized()


@pytest.mark.parametrize("backend", [None, "gloo", "GLOO", "cpu:gloo,cuda:nccl"])
@on_a_rank
def test_a_backend_that_fits_is_taken(backend):
    with script():
        dist.init_process_group(backend)
        assert dist.is_initialized()


@pytest.mark.parametrize("name", REPLACED)
def test_torch_has_the_functions_that_are_replaced(name):
    assert getattr(dist, name) is getattr(distributed_c10d, name)
