"""Why a program ended, from the text of its last error."""

import pytest

from workbench.engine.cancellable_waits import Cancellation
from workbench.replay.endings import Ending, ending_of, short_reason
from workbench.trace.recording import AFTER

GLOO = "RuntimeError: [/w/gloo/transport/tcp/pair.cc:561] Connection closed by peer [::1]:7. This is typically caused"
TIMED_OUT = "RuntimeError: [/w/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv operation"


@pytest.mark.parametrize(
    ("reason", "ending"),
    [
        ("", Ending.SUCCESS),
        ("ValueError: boom", Ending.ERROR),
        ("exit status 3", Ending.ERROR),
        ("KeyboardInterrupt", Ending.OUTSIDE),
        (GLOO, Ending.PEER),
        ("StepAborted: rank 2 raised ValueError", Ending.PEER),
        (TIMED_OUT, Ending.TIMEOUT),
        ("RuntimeError: Application timeout caused pair closure", Ending.TIMEOUT),
        ("SIGTERM", Ending.OUTSIDE),
        ("SIGABRT: Aborted", Ending.ABORTED),
        ("SIGSEGV: Segmentation fault", Ending.ERROR),
        ("DistBackendError: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", Ending.TIMEOUT),
        (f"ValueError: training failed{AFTER}{GLOO}", Ending.PEER),
        # of a loader, not of a collective
        ("ConnectionResetError: [Errno 104] Connection reset by peer", Ending.ERROR),
        ("RuntimeError: DataLoader timed out after 60 seconds", Ending.ERROR),
    ],
)
def test_every_ending(reason, ending):
    assert ending_of(reason) is ending


def test_the_short_text_has_neither_places_in_c_nor_advice_nor_lines():
    assert short_reason(f"{GLOO} by a crash, at line 3 of /x/train.py") == (
        "RuntimeError: Connection closed by peer [::1]:7"
    )
    assert short_reason(f"KeyError: 1{AFTER}{GLOO}") == (
        f"KeyError: 1{AFTER}RuntimeError: Connection closed by peer [::1]:7"
    )
    assert short_reason("ValueError: [1, 2] is not 3") == "ValueError: [1, 2] is not 3"


def test_a_rank_that_is_terminated_as_its_collective_has_failed_is_not_the_first():
    name = Cancellation.check_after_failure.__name__
    assert (
        ending_of("SIGTERM", ["/x/train.py:3 in main", f"/x/waits.py:74 in {name}", "/x/t.py:3 in wait"]) is Ending.PEER
    )
