"""What a session tells of ranks that another notebook controls."""

from dataclasses import replace

import pytest

from workbench.events import Edge, Kind
from workbench.protocol.rank_messages import Hold, Position, StepPosition
from workbench.session.session import ended_of

HOLD = Hold(place=StepPosition(0, 0), kind=Kind.FORWARD, edge=Edge.BEGIN)
IN, OVER = Position(doing="step", commands=3), Position(commands=3)


@pytest.mark.parametrize(
    ("positions", "ended"),
    [
        ((IN, OVER), {1}),
        ((IN, IN), set()),
        ((OVER, OVER), None),  # between steps
        ((IN,), None),  # the other one is lost, or does not answer
        ((IN, replace(OVER, commands=2)), None),  # it has not begun
        ((IN, replace(IN, held=HOLD)), None),  # stopped
        ((IN, replace(OVER, given_up=True)), None),  # aborted
        ((replace(IN, doing="verify"), OVER), None),
        ((replace(IN, doing="run"), OVER), {1}),
    ],
)
def test_which_ranks_have_ended_is_told_only_where_that_is_clear(positions, ended):
    assert ended_of(dict(enumerate(positions)), 2) == ended
