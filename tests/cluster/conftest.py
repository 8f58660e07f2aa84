"""Clusters whose rank side is tests/helpers/fake_rank.py: these tests need no torch."""

import os
from pathlib import Path

import pytest

from tests.helpers.fake_rank import GetThreadState
from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench.cluster import Cluster

RUNTIME = "tests.helpers.fake_rank"
ROOT = Path(__file__).parents[2]
FOREVER_S = 1e6
"""A timeout longer than any test: a call that returns has not waited for it."""


def texts(pending, rank, kind="stdout"):
    """Return a rank's output, joined from all its pieces."""
    return "".join(output.text for output in pending.outputs(rank) if output.kind == kind)


def wait_until_held(cluster, ranks=None):
    """Wait until the main threads of ``ranks`` are in ``fake_rank.hold`` or ``spin``."""

    def are_held():
        replies = cluster.ask(GetThreadState(), ranks, timeout_s=PATIENCE_S)
        return all(reply.held for reply in replies.values())

    wait_until(are_held)


@pytest.fixture(autouse=True, scope="module")
def ranks_can_import_the_tests():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
        yield


@pytest.fixture(scope="module")
def cluster():
    """Three ranks shared by a module's tests; no test may kill one."""
    with Cluster(3, "cpu", runtime=RUNTIME) as started:
        yield started


@pytest.fixture
def make_cluster():
    """Makes clusters for one test."""
    made = []

    def make(num_ranks=2, **options):
        made.append(Cluster(num_ranks, options.pop("device", "cpu"), runtime=RUNTIME, **options))
        return made[-1]

    yield make
    for one in made:
        one.stop()
