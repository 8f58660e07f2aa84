"""Clusters whose rank side is tests/cluster/fake_rank.py: nothing here needs torch."""

import os
from pathlib import Path

import pytest

from workbench.cluster import Cluster

RUNTIME = "tests.cluster.fake_rank"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def ranks_can_import_the_tests():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
        yield


@pytest.fixture(scope="module")
def cluster():
    """Three ranks that the tests of a module share; no test of it may kill one."""
    with Cluster(3, "cpu", runtime=RUNTIME) as started:
        yield started


@pytest.fixture
def make_cluster():
    """Makes clusters of this test alone."""
    made = []

    def make(num_ranks=2, **options):
        made.append(Cluster(num_ranks, options.pop("device", "cpu"), runtime=RUNTIME, **options))
        return made[-1]

    yield make
    for one in made:
        one.stop()
