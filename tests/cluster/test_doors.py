"""Which requests are open at a rank's doors; no rank needed."""

from workbench.cluster.doors import Doors
from workbench.cluster.pending import settle


class FakeWire:
    """Answers nothing by itself."""

    def exchange(self, rank, answer):
        return answer

    def cell(self, engine, code, exchange):
        self.answer = exchange


def test_a_rank_whose_answer_is_here_is_not_busy_even_if_nobody_has_noted_it_yet(monkeypatch):
    monkeypatch.setattr(Doors, "_dismiss", lambda *_: None)  # the thread that brought the answer does so a moment later
    wire = FakeWire()
    doors = Doors(wire, ["engine"])
    pending = doors.cell("pass", [0])
    assert doors.is_busy(0)
    settle(wire.answer.future, None)
    assert pending.done(0)
    assert not doors.is_busy(0)
