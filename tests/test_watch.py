"""What a program tells a recording: nothing where nothing records."""

import torch

from workbench import watch
from workbench.engine import probe


class Metrics:
    """A probe that keeps numbers."""

    def __init__(self):
        self.found = []

    def metric(self, name, value):
        self.found.append((name, value))


def test_a_number_goes_to_what_records_and_nowhere_else(monkeypatch):
    watch.log_metric("loss", 1)
    seen = Metrics()
    monkeypatch.setattr(probe, "active", seen)
    watch.log_metric("loss", torch.tensor(2.0))
    assert seen.found == [("loss", 2.0)]
