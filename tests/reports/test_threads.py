from workbench.protocol.rank_messages import Frame, Thread
from workbench.reports.pause_reports import WhereReport, WhereRow
from workbench.reports.threads import lines_of

WAIT = Frame(text="threading.py:331 in wait: acquire()", is_python=True)
SLICE = Frame(text="workbench/engine/cancellable_waits.py:196 in block: wait()")
GATE = Frame(text="workbench/runtime/gate.py:240 in _next_message: get()")
FORWARD = Frame(text="cell:21 in forward: x = block(x)", number=0)
STEP = Frame(text="cell:30 in train_step: loss = model(x)", number=1)
CALL = Frame(text="torch/nn/modules/module.py:1832 in inner: call()")
SELECT = Frame(text="selectors.py:468 in select: poll()", is_python=True)
READ = Frame(text="ipykernel/iostream.py:478 in _watch_pipe_fd: read()")


def main(*frames):
    return Thread(name="MainThread", is_main=True, frames=frames)


def other(name, *frames):
    return Thread(name=name, is_main=False, frames=frames)


IDLE = (other("Thread-2", READ, WAIT), other("Thread-3", READ, WAIT), other("IOPub", SELECT, READ))
WAITING = (main(WAIT, SLICE, CALL, FORWARD, CALL, STEP), *IDLE)
HELD = (main(GATE, CALL, FORWARD, CALL, STEP), *IDLE)


def test_equal_stacks_are_printed_once_with_user_frames_first():
    assert lines_of({0: WAITING, 1: HELD, 2: WAITING}) == [
        "ranks 0-2, MainThread:",
        "    0  cell:21 in forward: x = block(x)",
        "    1  cell:30 in train_step: loss = model(x)",
        "       and 4 library frames, now in workbench/engine/cancellable_waits.py:196 in block (ranks 0, 2); "
        "workbench/runtime/gate.py:240 in _next_message (rank 1)",
        "ranks 0-2, in library code alone: Thread-2, Thread-3, IOPub",
    ]


def test_ranks_in_different_user_code_are_separate():
    loads = other("loader", WAIT, Frame(text="data.py:3 in load", number=0))
    lines = lines_of({0: (main(STEP), loads), 1: HELD})
    assert [line for line in lines if not line.startswith(" ")] == [
        "rank 0, MainThread:",
        "rank 1, MainThread:",
        "rank 0, loader:",
        "rank 1, in library code alone: Thread-2, Thread-3, IOPub",
    ]
    assert lines[1:3] == ["    1  cell:30 in train_step: loss = model(x)", "rank 1, MainThread:"]


def test_without_requests_or_replies():
    assert lines_of({}) == lines_of({0: (), 1: ()}) == []
    assert "Thread" not in str(WhereReport(ranks=(WhereRow(rank=0, state="idle"),)))


def test_names_from_ranks_are_escaped():
    thread = Thread(name="<b>", is_main=True, frames=(Frame(text="a.py:1 in f", number=0), WAIT))
    report = WhereReport(ranks=(WhereRow(rank=0, state="held", stacks=(thread,)),))
    assert "&lt;b&gt;" in report._repr_html_()
    assert "<b>" in str(report)
