"""An engine that ends while the channels to all engines are opened; needs no processes."""

import pytest

from workbench.cluster import Cluster
from workbench.cluster import cluster as cluster_module
from workbench.cluster.channels import Channels

ENGINES = ("engine a", "engine b")


class FakePlace:
    """A place with two engines; either it knows the end of a process, or only the controller does."""

    tells_ends, deadline = True, 0.0

    def __init__(self, *, knows_ends):
        self.knows_ends, self.ended = knows_ends, set()

    def wait_for_controller(self):
        return "connection file"

    def wait_for_engines(self, registered):
        return ENGINES

    def is_running(self, rank):
        return not (self.knows_ends and rank in self.ended)

    def ending(self, rank):
        return "the process was killed by SIGKILL"

    def log_tail(self, rank):
        return ""

    def ask_why_gone(self, report):
        report("")


@pytest.fixture(params=[True, False], ids=["its process ended", "the controller found it gone"])
def losses(request, monkeypatch):
    """The losses that are known if engine b, rank 1, ends just before its channel is open."""
    place = FakePlace(knows_ends=request.param)
    cluster = Cluster(2, "cpu")

    class FakeWire:
        def __init__(self, *_):
            pass

        def engines(self):
            return {engine: rank for rank, engine in enumerate(ENGINES) if rank not in place.ended}

    class SlowDoors(Channels):
        def __init__(self, wire, engines):
            super().__init__(wire, engines)
            if engines:
                place.ended.add(1)
                cluster._on_exit(1) if place.knows_ends else cluster._on_gone(ENGINES[1])

    monkeypatch.setattr(cluster_module, "Wire", FakeWire)
    monkeypatch.setattr(cluster_module, "Channels", SlowDoors)
    cluster._provider = place
    cluster._connect(place)
    return cluster.losses()


def test_an_engine_that_ends_before_its_door_is_open_is_reported_once_it_is(losses):
    assert list(losses) == [1]
    assert losses[1].startswith("died: the process")
