"""The steps between the decision to hold a rank and the report that it is held."""

import sys
import threading

import torch

from tests.helpers.booted_ranks import run
from tests.helpers.stopped_step import Channel, beside
from tests.runtime.test_gate import sharded
from workbench.engine.backends.base import Backend
from workbench.engine.backends.cpu import Cpu
from workbench.protocol.commands import Continue, Step
from workbench.runtime import rank as rank_module
from workbench.runtime.flush_before_hold import FlushBeforeHold

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


class Accelerator(Backend):
    """A device with the given function to synchronise."""

    def __init__(self, synchronise):
        super().__init__(CUDA)
        self.synchronize = lambda: synchronise(CUDA)


class Stream:
    """A stdout that keeps its text until it is flushed."""

    def __init__(self):
        self.kept, self.written = [], []

    def write(self, text):
        self.kept.append(text)

    def flush(self):
        self.written, self.kept = [*self.written, *self.kept], []


def test_before_a_hold_an_accelerator_is_synchronised_and_output_flushed(monkeypatch):
    waited, stream = [], Stream()
    monkeypatch.setattr(sys, "stdout", stream)
    sys.stdout.write("before the stop")
    assert FlushBeforeHold(Cpu(CPU))() is False
    assert "".join(stream.written) == "before the stop"
    assert FlushBeforeHold(Accelerator(waited.append))() is True
    assert waited == [CUDA]


def on_a_device(script, synchronise):
    """Run a step with a breakpoint at a backward, on a rank whose device appears to be a GPU."""
    sharded()
    Channel().break_at({"event": "backward", "unit": "blocks.1"})
    rank_module.this_rank().gate._quiet = FlushBeforeHold(Accelerator(synchronise))
    return beside(script, Step())


def synchronised_before_it_is_said():
    seen = []

    def synchronise(device):
        seen.append((str(device), threading.current_thread() is threading.main_thread(), Channel().where().held))

    done, held = on_a_device(lambda channel: channel.until_held(), synchronise)
    return done["steps_done"], seen, held.synchronised, held.kind.key


def test_the_device_is_synchronised_in_the_held_thread_before_the_rank_counts_as_held():
    assert run(1, synchronised_before_it_is_said) == [(1, [("cuda:1", True, None)], True, "backward")]


def let_go_meanwhile():
    channel, seen = Channel(), []

    def synchronise(device):
        channel.break_at()
        channel(Continue())
        seen.append(channel.where().commands)

    def ended(where):
        return where.commands == 2 and where.doing == ""  # the second is the step

    done, _ = on_a_device(lambda channel: channel.until(ended), synchronise)
    return done["steps_done"], seen


def test_a_rank_released_during_synchronisation_does_not_hold():
    assert run(1, let_go_meanwhile) == [(1, [2])]


def paused_on_the_cpu():
    sharded()
    Channel().break_at({"event": "backward"})
    done, held = beside(lambda channel: channel.until_held(), Step())
    return done["steps_done"], held.synchronised


def test_on_the_cpu_nothing_is_waited_for():
    assert run(1, paused_on_the_cpu) == [(1, False)]
