"""The environment variables of a rank: those that torchrun would set."""

import os

import torch.distributed as dist

from tests.helpers.booted_ranks import run
from workbench.base.ports import LOOPBACK, LOOPBACK_INTERFACE
from workbench.runtime import rank as rank_module

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")


def found():
    return [os.environ.get(name) for name in (*NAMES, "MASTER_PORT", "NCCL_SOCKET_IFNAME")]


def before_and_after_it_leaves():
    before = found()
    dist.barrier()  # a rank that leaves first closes the connection that the other may still be opening
    rank_module.shutdown()
    return before, found()


def test_ranks_have_the_variables_of_torchrun_while_they_are_ranks(monkeypatch):
    for name in (*NAMES, "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    results = run(2, before_and_after_it_leaves)
    for rank, (during, after) in enumerate(results):
        assert during[:6] == [str(rank), "2", str(rank), "2", LOOPBACK, LOOPBACK_INTERFACE]
        assert during[6].isdecimal()
        assert during[7] is None  # NCCL finds its interface within a host
        assert after == [None] * 8
    assert len({during[6] for during, _ in results}) == 1


def test_an_interface_that_the_user_has_named_stays(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    for during, after in run(1, before_and_after_it_leaves):
        assert during[5] == after[5] == LOOPBACK_INTERFACE
