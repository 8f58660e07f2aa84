"""Faults that stall, slow down or end the ranks of a notebook are named, and the ranks train on without them."""

import pytest

from bench.faults import CLEAN, Bench
from tests.helpers.waiting import wait_until
from workbench.protocol.fault_kinds import KINDS

HANGS = ("skip-collective", "uneven-batches")
ENDS = ("straggler", "wrong-order", "oom", "disk-full", "kill-during-save", "kill", CLEAN)


TIMED = ("straggler", CLEAN)
"""On a busy machine another rank may be slow for some steps; it is not slow again and again."""


def check(bench, names):
    for seed, name in enumerate(names):
        if name in TIMED:
            wait_until(lambda name=name, seed=seed: bench.run(name, seed).is_named)
            continue
        found = bench.run(name, seed)
        assert found.refused == ""
        assert found.is_named, found
        assert found.verdicts


@pytest.mark.parametrize("engine", ["ours", pytest.param("torch", marks=pytest.mark.thorough)])
def test_faults_of_live_ranks_are_named(engine):
    with Bench(2, engine, has_replicas=False) as bench:
        check(bench, (*HANGS, *ENDS))


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["ours", "torch"])
def test_faults_of_four_ranks_are_named(engine):
    with Bench(4, engine, has_replicas=True) as bench:
        check(bench, ("drifting-replica", "no-sync-left-on", "nan", HANGS[0]))


def test_every_fault_is_tried():
    """Here, or in tests/runtime/test_faults.py, which needs no notebook."""
    here = {*HANGS, *ENDS} - {CLEAN}
    assert here == {name for name, kind in KINDS.items() if kind.shown_by not in {"lint", "verify"}}
