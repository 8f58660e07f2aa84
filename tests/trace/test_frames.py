"""Calls of a stack as text: their place, and whether two ranks are in the same loops."""

import pytest

from workbench.trace.frames import has_left_loop, short_place, with_lines

ABOVE = "/x/train.py:9 in <module>: main()"
IN_BOTH, IN_ONE = "/x/train.py:5 in main, loop 3, 4: f()", "/x/train.py:6 in main, loop 3: g()"
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


def test_the_short_place():
    assert short_place(IN_BOTH) == "train.py:5"
    assert short_place("") == ""


def test_the_calls_that_a_crash_left_get_the_lines_of_an_earlier_stack():
    bare = [each.partition(",")[0] for each in (IN_BOTH, IN_ONE)]
    assert with_lines([*bare, ELSEWHERE], [ABOVE, IN_BOTH]) == (IN_BOTH, bare[1], ELSEWHERE)
