"""What tests on real ranks need when the machine is busy with others."""

import pytest

from tests.helpers.waiting import PATIENCE_S
from workbench.session import pause_protocol


@pytest.fixture
def every_rank_comes(monkeypatch):
    """A pause waits for every rank; it would name one that the machine does not let run for a moment as late."""
    monkeypatch.setattr(pause_protocol, "PAUSE_S", PATIENCE_S)
