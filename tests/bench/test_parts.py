"""The parts of a step's time: a meter with a clock that the test moves, then one in a training process."""

import pytest

from bench.cases import OURS_GLOO, Case
from bench.parts import Meter, MeteredStep, Part, budget, measure_parts
from bench.processes import on_ranks
from workbench.engine import probe
from workbench.events import Edge, Kind
from workbench.zoo import GPTConfig

TINY = Case(
    name="tiny",
    config=GPTConfig(vocab_size=16, num_blocks=2, width=8, num_heads=2, max_tokens=128),
    num_ranks=2,
)
UNIT = 3


class Code:
    """A fake Python frame, as a profile function sees it."""

    def __init__(self, file, qualname="f"):
        self.f_code = self
        self.co_filename, self.co_qualname = file, qualname


class MeterTimeline:
    """Moves a meter through time."""

    def __init__(self):
        self.now_ns = 0
        self.meter = Meter("/engine", lambda: self.now_ns)

    def at(self, t_ns):
        self.now_ns = t_ns
        return self.meter

    def enter(self, t_ns, frame):
        self.at(t_ns).profile(frame, "call", None)

    def leave(self, t_ns, frame):
        self.at(t_ns).profile(frame, "return", None)

    def event(self, t_ns, kind, edge, unit=UNIT):
        self.at(t_ns).event(kind, edge, unit, 0, None, None)

    @property
    def parts(self):
        return {part.name: total for part, total in self.meter.total_ns.items() if total}


@pytest.fixture
def story():
    return MeterTimeline()


HOOK, INNER = Code("/engine/fsdp_state.py"), Code("/engine/deeper/param.py")
MODEL, ELSEWHERE = Code("/model.py"), Code("/engineer.py")
WAIT = Code("/engine/backends/async_work.py", "PendingWork.wait")
GATHER = Code("/engine/comm.py", "GlooAllGather.__call__")


def test_time_outside_of_the_engine_is_nobodys(story):
    story.enter(1, MODEL)
    story.enter(2, ELSEWHERE)
    story.leave(50, ELSEWHERE)
    story.leave(60, MODEL)
    assert story.parts == {}


def test_a_hook_counts_from_entry_to_exit_including_its_calls(story):
    for begin in (10, 100):
        story.enter(begin, HOOK)
        story.enter(begin + 2, INNER)
        story.enter(begin + 3, MODEL)
        story.leave(begin + 5, MODEL)
        story.leave(begin + 6, INNER)
        story.leave(begin + 7, HOOK)
    assert story.parts == {"HOOKS": 14}


def test_the_example_of_the_docstring(story):
    story.enter(0, HOOK)
    story.event(1, Kind.COPY_IN, Edge.BEGIN)
    story.event(3, Kind.COPY_IN, Edge.END)
    story.event(4, Kind.ALL_GATHER, Edge.BEGIN)
    story.enter(5, GATHER)
    story.leave(13, GATHER)
    story.event(20, Kind.WAIT, Edge.BEGIN)
    story.enter(21, WAIT)
    story.leave(51, WAIT)
    story.event(52, Kind.WAIT, Edge.END)
    story.leave(53, HOOK)
    assert story.parts == {"HOOKS": 1 + 2 + 7 + 1, "COPIES": 2, "ISSUE": 8, "WIRE": 32}


def test_waiting_without_a_span_is_waiting(story):
    story.enter(0, HOOK)
    story.enter(1, WAIT)
    story.leave(8, WAIT)
    story.leave(9, HOOK)
    assert story.parts == {"HOOKS": 2, "WIRE": 7}


@pytest.mark.parametrize(("ended", "part"), [(Kind.ALL_GATHER, "COPIES"), (Kind.REDUCE_SCATTER, "SUM")])
def test_a_copy_out_belongs_to_the_units_last_collective(story, ended, part):
    story.event(0, Kind.REDUCE_SCATTER, Edge.END)
    story.event(0, ended, Edge.END)
    story.event(0, Kind.REDUCE_SCATTER, Edge.BEGIN)  # a collective that only begins has not ended
    story.event(0, Kind.ALL_GATHER, Edge.END, unit=UNIT + 1)
    story.event(1, Kind.COPY_OUT, Edge.BEGIN)
    story.event(9, Kind.COPY_OUT, Edge.END)
    assert story.parts == {part: 8}


def test_an_exception_in_a_span_ends_it_with_its_hook(story):
    story.enter(0, HOOK)
    story.event(2, Kind.WAIT, Edge.BEGIN)
    story.leave(10, HOOK)
    story.event(20, Kind.WAIT, Edge.END)  # of a span that is not open
    assert story.parts == {"HOOKS": 2, "WIRE": 8}


def test_clear_begins_at_zero(story):
    story.enter(0, HOOK)
    story.leave(10, HOOK)
    story.at(11).clear()
    assert story.parts == {}


def test_the_budget_adds_up_to_the_metered_step():
    fast = MeteredStep(50_000_000, 1_000_000, dict.fromkeys((p.value for p in Part), 0))
    slow = MeteredStep(90_000_000, 4_000_000, {p.value: 2_000_000 * i for i, p in enumerate(Part)})
    found = budget([[slow, fast], [fast, slow]], step_ms=85.0, alone_ms={"wall": 60.0, "optimizer": 6.0})
    assert found.pop("above_alone_ms") == 25
    metered = found.pop("above_alone_metered_ms")
    assert metered == 30
    assert sum(found.values()) == metered
    assert (found["wire_ms"], found["hooks_ms"], found["optimizer_ms"]) == (0, 8, -2)


def test_a_step_of_the_engine_has_all_parts(monkeypatch):
    monkeypatch.setattr("bench.training.WARM_UP", 1)
    for (step,) in on_ranks(2, measure_parts, TINY, OURS_GLOO, 1):
        assert set(step.parts_ns) == {part.value for part in Part}
        assert all(ns > 0 for ns in step.parts_ns.values())
        assert sum(step.parts_ns.values()) + step.optimizer_ns < step.wall_ns
    assert probe.active is None
