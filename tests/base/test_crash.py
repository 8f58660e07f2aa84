"""A crash as faulthandler writes it, and the line of the user's code in it."""

import sysconfig

import pytest

from workbench.base.crash import Crash, read_crash

CELL = "/tmp/ipykernel_7/123.py"
CTYPES = f"{sysconfig.get_path('stdlib')}/ctypes/__init__.py"


def written(*threads, reason="Segmentation fault"):
    """Return what a process writes: its threads as lists of calls, innermost first; the first one got the signal."""
    stacks = [
        f"{'Thread' if ident else 'Current thread'} 0x{ident:02x} (most recent call first):\n"
        + "".join(f'  File "{file}", line {line} in {function}\n' for file, line, function in calls)
        for ident, calls in enumerate(threads)
    ]
    body = "\n".join(stacks) or "  <no Python frame>\n"
    return f"from C\nFatal Python error: {reason}\n\n{body}\nExtension modules: numpy._core (total: 1)\n"


@pytest.mark.parametrize(
    ("threads", "place"),
    [
        ([[(CTYPES, 519, "string_at"), (CELL, 3, "f"), (CELL, 4, "<module>")]], "line 3, in f"),
        ([[(CTYPES, 519, "string_at"), (CELL, 4, "<module>")]], "line 4 of the cell"),
        ([[("/home/me/ops.py", 8, "load"), (CELL, 3, "f")]], "line 8 of ops.py, in load; line 3, in f"),
        ([[("/home/me/train.py", 8, "<module>")]], "line 8 of train.py"),
        ([[], [(CTYPES, 1, "wait")], [(CELL, 2, "<module>")]], "line 2 of the cell, while another thread crashed"),
        ([[(CTYPES, 1, "wait"), ("<string>", 1, "<module>")]], "line 1 of __init__.py, in wait"),
        ([], ""),
    ],
)
def test_the_place_is_the_innermost_one_of_the_users_code(threads, place):
    crash = read_crash(written(*threads))
    assert (crash.signal, crash.place, crash.rest) == ("SIGSEGV", place, "from C\n")
    assert str(crash) == place


def test_the_last_crash_counts_and_one_of_python_itself_has_its_words():
    text = written([(CELL, 1, "f")]) + written([(CELL, 2, "f")], reason="deallocating None") + "later\n"
    crash = read_crash(text)
    assert (crash.signal, str(crash)) == ("", "deallocating None; line 2, in f")
    assert crash.rest == "from C\nfrom C\nlater\n"


def test_a_text_without_a_crash_has_no_reason():
    assert read_crash("all is well\n") == Crash(reason="", thread=None, stacks={}, rest="all is well\n")
