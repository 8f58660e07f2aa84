"""Fixtures for real ranks on a busy machine."""

import pytest

from tests.helpers.waiting import PATIENCE_S
from workbench.session import pause_protocol


@pytest.fixture
def every_rank_comes(monkeypatch):
    """Make a pause wait long for every rank; otherwise one that the busy machine delays would be reported as late."""
    monkeypatch.setattr(pause_protocol, "PAUSE_S", PATIENCE_S)
