"""Memory that another process of the host maps, and that outlives the process that made it."""

import multiprocessing
import os
import signal

import pytest

from workbench.engine.backends.mappable_memory import mappable, mapped


def lend(port):
    memory, address = mappable(100)
    memory[:] = 7
    port.send(address)
    signal.pause()


def test_memory_outlives_a_process_that_is_killed():
    here, there = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=lend, args=(there,))
    process.start()
    address = here.recv()
    memory = mapped(address, 100)
    process.kill()
    process.join()
    assert memory.tolist() == [7] * 100
    with pytest.raises(OSError, match="No such file"):
        mapped(address, 100)
    for end in (here, there, process):
        end.close()


def test_an_address_holds_while_the_memory_does_and_no_longer():
    memory, address = mappable(10)
    memory[3] = 1
    assert mapped(address, 10)[3] == 1
    del memory
    with pytest.raises(OSError, match=f"/proc/{os.getpid()}/fd"):
        mapped(address, 10)
