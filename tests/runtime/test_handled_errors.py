"""The error that a thread handles, and the frame that does."""

import threading
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from workbench.runtime.handled_errors import handled_error


def fails():
    raise ValueError("`x`")


def retries(look):
    try:
        fails()
    except ValueError:
        look()


class Phase(SimpleNamespace):
    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.look()
        return True


def leaves(look):
    with Phase(look=look):
        fails()


@contextmanager
def yields(look):
    try:
        yield
    finally:
        look()


def leaves_a_generator(look):
    with yields(look):
        fails()


@pytest.mark.parametrize(
    ("run", "frame"), [(retries, "retries"), (leaves, "leaves"), (leaves_a_generator, "yields")], ids=lambda each: ""
)
def test_the_error_that_a_call_handles(run, frame):
    found = []
    with suppress(ValueError):
        run(lambda: found.append(handled_error(threading.get_ident())))
    ((at, words),) = found
    line = fails.__code__.co_firstlineno + 1
    assert at.f_code.co_name == frame
    assert words.split("`")[1:] == [f"ValueError: 'x', raised in test_handled_errors.py:{line}", ""]


def test_no_error_is_handled():
    assert handled_error(threading.get_ident()) is None
    assert handled_error(-1) is None
