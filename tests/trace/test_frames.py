"""Calls of a stack as text: their place, and whether two ranks are in the same loops."""

import pytest

from workbench.trace.frames import (
    branch_apart,
    branch_past,
    error_handled,
    has_left_loop,
    lock_held,
    short_place,
    with_lines,
)

ABOVE = "/x/train.py:9 in <module>: main()"
IN_BOTH, IN_ONE = "/x/train.py:5 in main, loop 3, 4: f()", "/x/train.py:6 in main, loop 3: g()"
AROUND_LOOP = "/x/train.py:5 in main, loop 3, if 2 `rank == 0`, 4 `x`: f()"
IN_NONE, ELSEWHERE = "/x/train.py:7 in main: h()", "/x/eval.py:7 in check, loop 2: h()"


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ([ABOVE, IN_NONE], [ABOVE, IN_BOTH], True),
        ([ABOVE, IN_ONE], [ABOVE, IN_BOTH], True),
        ([ABOVE, IN_ONE, ELSEWHERE], [ABOVE, IN_ONE.replace(":6", ":8"), ELSEWHERE], False),
        ([ABOVE, IN_BOTH], [ABOVE, IN_ONE], False),
        ([ABOVE, IN_ONE], [ABOVE, IN_NONE], None),
        ([ABOVE, ELSEWHERE], [ABOVE, IN_BOTH], None),
        ([ABOVE], [ABOVE, IN_BOTH], None),
        # past the call of a function that loops
        ([ABOVE.replace(":9", ":10")], [ABOVE, IN_BOTH], True),
        ([ABOVE.replace(":9", ":8")], [ABOVE, IN_BOTH], None),
        ([ABOVE.replace(":9", ":10")], [ABOVE, IN_NONE], None),
        ([ABOVE, IN_ONE.replace(":6", ":8")], [ABOVE, IN_ONE, ELSEWHERE], None),  # in this turn, or in an earlier one
        ([ABOVE, IN_NONE], [ABOVE, AROUND_LOOP], False),  # it has not entered it
        # a crash leaves no loops
        ([ABOVE, IN_NONE.partition(": ")[0]], [ABOVE, IN_BOTH], None),
        ([IN_NONE], [ABOVE, IN_BOTH], True),  # a traceback begins further in
        (["/x/spawn.py:3 in start", ABOVE, IN_NONE], [ABOVE, IN_BOTH], True),
        ([], [], None),
        (["a line of another kind"], [ABOVE], None),
    ],
)
def test_whether_a_rank_has_left_the_loop_of_another(mine, theirs, expected):
    assert has_left_loop(mine, theirs) is expected


UNDER, UNDER_BOTH = (
    f"/x/train.py:{line} in main, loop 3{tests}: f()"
    for line, tests in ((8, ", if 6 `step > 2`, 7 `rank == 0`"), (9, ", if 6 `step > 2`"))
)

RETRY = "/x/train.py:9 in main, loop 3, if 6 `step > 2`, 7 `x`, except 8 `OSError`: f()"
HANDLES = "/x/train.py:9 in main, loop 3, after 7 `KeyError: 1, raised in data.py:2`: f()"
HOLDS = "/x/train.py:9 in main, loop 3, with 8 `self.lock`: f()"


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ([ABOVE, UNDER], [ABOVE, UNDER_BOTH], ("train.py:7", "if rank == 0")),
        ([ABOVE, UNDER, ELSEWHERE], [UNDER_BOTH], ("train.py:7", "if rank == 0")),
        ([ABOVE, UNDER], [ABOVE, IN_ONE], ("train.py:7", "if rank == 0")),
        ([ABOVE, RETRY], [ABOVE, IN_ONE], ("train.py:8", "except OSError")),
        ([ABOVE, HOLDS], [ABOVE, IN_ONE], None),
        ([ABOVE, HANDLES], [ABOVE, IN_ONE], None),
        ([ABOVE, UNDER_BOTH], [ABOVE, UNDER], None),
        ([ABOVE, UNDER], [ABOVE, IN_NONE], None),  # past the loop: another turn, perhaps
        ([ABOVE, AROUND_LOOP], [ABOVE, IN_NONE], ("train.py:2", "if rank == 0")),
        ([ABOVE, UNDER], [ABOVE, UNDER, ELSEWHERE], None),
        ([ABOVE, UNDER], [ELSEWHERE], None),
        ([UNDER.replace(", loop 3", "")], [IN_NONE.partition(": ")[0]], None),  # a crash leaves no branches
        ([], [ABOVE], None),
    ],
)
def test_the_branch_in_which_a_rank_is_alone(mine, theirs, expected):
    assert branch_apart(mine, theirs) == expected


CALLS = "/x/train.py:9 in main, loop 3, 8: callback(model)"
CALLED = "/x/calls.py:4 in callback, if 2 `step > 2`, 3 `rank == 0`: model(x)"
BEFORE = "/x/train.py:6 in main, loop 3, if 5 `step > 2`: train(model)"


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ([ABOVE, CALLS, CALLED], [ABOVE, BEFORE, ELSEWHERE], ("calls.py:3", "if rank == 0")),
        ([ABOVE, CALLS, ELSEWHERE, CALLED], [ABOVE, BEFORE], ("", "")),  # of what the call has called itself
        ([ABOVE, UNDER], [ABOVE, BEFORE], ("train.py:7", "if rank == 0")),
        ([ABOVE, UNDER_BOTH], [ABOVE, BEFORE], ("train.py:6", "if step > 2")),
        ([ABOVE, BEFORE], [ABOVE, CALLS, CALLED], None),  # the next turn, perhaps
        ([ABOVE, IN_NONE], [ABOVE, BEFORE], None),  # has left the loop
        ([CALLS.partition(": ")[0], CALLED], [BEFORE], None),  # a crash leaves no branches
        ([ELSEWHERE], [ABOVE], None),
    ],
)
def test_the_branch_of_a_rank_that_has_gone_on(mine, theirs, expected):
    assert branch_past(mine, theirs) == expected


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        ([ABOVE, "/x/train.py:8 in main, loop 3: with self.lock:"], ("train.py:8", "with self.lock")),
        ([ABOVE, "/x/train.py:8 in main, loop 3: with self.lock:", ELSEWHERE], ("train.py:8", "with self.lock")),
        ([ABOVE, HOLDS], None),
        ([], None),
    ],
)
def test_the_lock_that_another_rank_holds(mine, expected):
    assert lock_held(mine, [ABOVE, HOLDS, ELSEWHERE]) == expected


def test_the_error_that_is_handled():
    assert error_handled([ABOVE, HANDLES, ELSEWHERE]) == "KeyError: 1, raised in data.py:2"
    assert error_handled([ABOVE, RETRY]) == ""


def test_the_short_place():
    assert short_place(IN_BOTH) == "train.py:5"
    assert short_place("") == ""


def test_the_calls_that_a_crash_left_get_the_lines_of_an_earlier_stack():
    bare = [each.partition(",")[0] for each in (IN_BOTH, IN_ONE)]
    assert with_lines([*bare, ELSEWHERE], [ABOVE, IN_BOTH]) == (IN_BOTH, bare[1], ELSEWHERE)
