from dataclasses import replace

import pytest

from workbench.errors import UsageError
from workbench.protocol.rank_messages import CellLine
from workbench.session.stall_notice import (
    AGAIN_S,
    MAX_TEXT,
    QUIET_S,
    VARIABLE,
    StallNotice,
    chosen_quiet_s,
    who_works,
)


class NoticeScenario:
    """A request, a clock that the test sets, and the notices."""

    def __init__(self):
        self.now, self.reported = 100.0, []
        self.standing = StallNotice(lambda: self.now)
        self.look("begun")

    def look(self, lines):
        self.standing.look(lines, lambda seconds: f"{seconds:.0f} s", self.reported.append)

    def after(self, seconds, lines):
        self.now += seconds
        self.look(lines)


def test_no_notice_while_output_arrives():
    scene = NoticeScenario()
    for number in range(10):
        scene.after(0.9 * QUIET_S, number)
    assert scene.reported == []


def test_the_notice_appears_is_renewed_and_removed():
    scene = NoticeScenario()
    scene.after(QUIET_S, "begun")
    scene.after(0.5 * AGAIN_S, "begun")
    assert scene.reported == ["3 s"]
    scene.after(0.5 * AGAIN_S, "begun")
    assert scene.reported == ["3 s", "4 s"]
    scene.after(0.1, "an output")
    scene.after(0.1, "an output")
    assert scene.reported == ["3 s", "4 s", ""]
    scene.after(QUIET_S, "an output")
    assert scene.reported[3:] == ["7 s"]


def test_long_stalls_are_reported_less_often():
    scene = NoticeScenario()
    for _ in range(3600 * 10):
        scene.after(0.1, "begun")
    assert len(scene.reported) < 200
    assert scene.reported[-1] != ""


def test_the_time_before_the_first_notice_is_chosen_by_the_environment(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert chosen_quiet_s() == QUIET_S
    monkeypatch.setenv(VARIABLE, "0.5")
    assert chosen_quiet_s() == 0.5
    for wrong in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(UsageError, match=f"{VARIABLE}='{wrong}' is no time in seconds; for example {VARIABLE}=5"):
            chosen_quiet_s()


BARRIER = CellLine(line=2, function="<module>", text="dist.barrier()")
SCRIPT = CellLine(line=9, function="<module>", text="train(args)", script="train.py")
STEP = CellLine(line=5, function="train_step", text="loss.backward()")


@pytest.mark.parametrize(
    ("working", "lines", "ended", "expected"),
    [
        (
            [1],
            {1: BARRIER},
            (0, 2, 3),
            "rank 1 has run for 3 s, in dist.barrier() at line 2 of the cell; ranks 0, 2-3 have ended",
        ),
        ([0, 1], {0: STEP, 1: STEP}, (), "ranks 0-1 have run for 3 s, in loss.backward() at line 5 of train_step"),
        (
            range(4),
            {0: BARRIER, 2: None, 3: BARRIER},
            (4,),
            "ranks 0, 3 have run for 3 s, in dist.barrier() at line 2 of the cell; rank 1 has run for 3 s without an "
            "answer; rank 2 has run for 3 s; rank 4 has ended",
        ),
        ([0], {0: replace(BARRIER, text="")}, (), "rank 0 has run for 3 s, at line 2 of the cell"),
        ([0], {0: SCRIPT}, (), "rank 0 has run for 3 s, in train(args) at line 9 of train.py"),
        (
            [0],
            {0: replace(SCRIPT, function="train", text="")},
            (),
            "rank 0 has run for 3 s, at line 9 of train in train.py",
        ),
    ],
)
def test_working_ranks_in_words(working, lines, ended, expected):
    assert who_works(3.2, working, lines, ended) == expected


def test_a_long_line_is_cut():
    for number, shown in ((MAX_TEXT, "x" * MAX_TEXT), (MAX_TEXT + 1, "x" * (MAX_TEXT - 1) + "…")):
        told = who_works(3, [0], {0: replace(BARRIER, text="x" * number)}, ())
        assert told == f"rank 0 has run for 3 s, in {shown} at line 2 of the cell"


def test_who_died_comes_first_and_has_not_ended():
    deaths = {3: "died (SIGKILL)", 1: "does not answer", 2: "died (SIGKILL)"}
    assert who_works(3, [0], {0: None}, (1, 2, 3, 4), deaths) == (
        "rank 1 does not answer; ranks 2-3 died (SIGKILL); rank 0 has run for 3 s; rank 4 has ended"
    )


def test_what_is_urgent_is_said_at_once_and_again_while_there_is_news():
    scene = NoticeScenario()
    scene.after(0.1, "begun")
    for number, seconds in enumerate((0.1, 0.1, AGAIN_S)):
        scene.now += seconds
        scene.standing.look(number, lambda seconds: f"{seconds:.1f} s", scene.reported.append, is_urgent=True)
    assert scene.reported == ["0.2 s", "1.3 s"]
    scene.after(0.1, "an output")
    assert scene.reported == ["0.2 s", "1.3 s", ""]
    scene.after(QUIET_S - 0.1, "an output")
    assert scene.reported == ["0.2 s", "1.3 s", ""]
