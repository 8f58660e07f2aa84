import pytest

from workbench.errors import UsageError
from workbench.session.breakpoint_table import Breakpoints


def test_they_are_numbered_and_removed():
    points = Breakpoints()
    first = points.add("wait", None, rank=None, when=None)
    points.add("forward", "head", rank=1, when="step > 2")
    assert [b.id for b in points] == [1, 2]
    assert [str(b) for b in points][1] == "forward:head --rank 1 --when 'step > 2'"
    assert [b.once for b in points] == [False, False]
    assert points.named(first.id) == "breakpoint 1: wait"
    assert points.named(9) == "breakpoint 9"
    assert points.clear(1) == 1
    with pytest.raises(UsageError, match="there is no breakpoint 1; breakpoints: 2"):
        points.clear(1)
    assert points.clear(None) == 1
    with pytest.raises(UsageError, match="there is no breakpoint 7; none is set"):
        points.clear(7)


def test_they_are_turned_off_and_on():
    points = Breakpoints()
    points.add("wait", None, rank=None, when=None)
    points.add("forward", None, rank=None, when=None)
    assert points.switch(2, is_on=False) == 1
    assert [b.is_on for b in points] == [True, False]
    assert points.switch(None, is_on=False) == 2
    assert [b.is_on for b in points] == [False, False]
    assert points.switch(None, is_on=True) == 2
    with pytest.raises(UsageError, match=r"^there is no breakpoint 7; breakpoints: 1, 2$"):
        points.switch(7, is_on=True)
