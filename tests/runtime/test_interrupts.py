"""Ctrl-C on a rank: a flag that is raised at a safe point, and when it is raised at once."""

import os
import signal

import pytest

from workbench.engine.cancellable_waits import cancellation
from workbench.runtime.interrupts import Interrupts


@pytest.fixture
def flagged():
    """Interrupts, and how often their flag was set."""
    calls = []
    interrupts = Interrupts(lambda: calls.append(True))
    with interrupts.guarded():
        yield interrupts, calls


def ctrl_c(module="tests.user"):
    """Receive the signal while code of ``module`` runs."""
    exec("import os, signal\nos.kill(os.getpid(), signal.SIGINT)", {"__name__": module})


def in_the_engine():
    """Receive the signal while the engine works, which is called by the user's code."""
    exec("call()", {"__name__": "tests.user", "call": lambda: ctrl_c("workbench.engine.param_group")})


def test_the_first_one_only_sets_the_flag_and_the_next_check_raises_once(flagged):
    interrupts, calls = flagged
    ctrl_c()
    assert interrupts.is_flagged
    assert calls == [True]
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()
    interrupts.check()


def test_the_second_one_before_a_check_raises_at_once_in_user_code_and_clears_the_flag(flagged):
    interrupts, _ = flagged
    ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()
    assert not interrupts.is_flagged


def test_any_number_in_the_engine_only_set_the_flag(flagged):
    interrupts, calls = flagged
    for _ in range(3):
        in_the_engine()
    assert interrupts.is_flagged
    assert calls == [True] * 3


def test_the_first_one_after_an_abort_raises_at_once(flagged):
    interrupts, _ = flagged
    cancellation.cancel("aborted")
    try:
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
    finally:
        cancellation.reset()
    assert not interrupts.is_flagged


def test_a_cell_in_a_stopped_step_is_interrupted_at_once(flagged):
    with pytest.raises(KeyboardInterrupt):
        ctrl_c("workbench.runtime.held_eval")


def test_the_signal_handler_is_restored():
    before = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts(lambda: None)
    with interrupts.guarded():
        with interrupts.guarded():  # nested: the outer one stays
            ctrl_c()
        assert interrupts.is_flagged
    assert not interrupts.is_flagged
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
