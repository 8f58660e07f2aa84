"""A page without a kernel, in a real browser, gives the same answers about a trace as the kernel."""

import base64
import json
import time

import numpy as np
import pytest

from tests.helpers.browser import open_offline
from tests.helpers.device_trace import on_devices
from tests.helpers.held_ranks import stopped_before
from tests.helpers.live_view import DashboardView
from tests.helpers.simulated_job import Setup, example_trace, simulate
from tests.widgets.test_dashboard import prefix
from workbench.events import Category, Kind
from workbench.live import state_at
from workbench.live.messages import AskFeed, read_question
from workbench.live.packing import COLUMNS
from workbench.session.snapshot import ClusterSnapshot
from workbench.trace.columns import Trace
from workbench.widgets.js_bundle import joined
from workbench.widgets.recorded import packed

HARNESS = """<!doctype html><meta charset="utf-8"><title>a record</title>
<script>
const given = GIVEN;
async function load() {
  const address = (program) => URL.createObjectURL(new Blob([program], {type: "text/javascript"}));
  window.made = Object.assign({}, ...await Promise.all(given.programs.map((program) => import(address(program)))));
}
const runs = [];
async function open(text) {
  return runs.push(new made.RecordedRun(await made.unzipped(text))) - 1;
}
function ask([run, questions]) {
  return questions.map((question) => {
    const [answer, buffers] = made.answerOf(runs[run], {view: "a", number: 1, ...question});
    const bytes = buffers.map(({buffer, byteOffset, byteLength}) => new Uint8Array(buffer, byteOffset, byteLength));
    return [answer, bytes.map((found) => btoa(Array.from(found, (byte) => String.fromCharCode(byte)).join("")))];
  });
}
</script>
"""


def one_behind(trace):
    """Return the trace with fewer rows of rank 1, as in a hang."""
    return Trace(trace.header, tuple(prefix(trace, 150).rank(r.rank) if r.rank == 1 else r for r in trace.ranks))


RUNS = {
    "alike": example_trace,
    "in two copies": lambda: simulate(Setup(num_ranks=4, copies=2, steps=2, activations=True)),
    "a second one": lambda: example_trace().slice(first=1),
    "held": lambda: stopped_before(example_trace(), Kind.ALL_GATHER, number=4),
    "on devices": lambda: on_devices(example_trace()),
    "hangs": lambda: one_behind(example_trace()),
    "one rank": lambda: example_trace(num_ranks=1),
    "nothing": Trace.empty,
}


@pytest.fixture(scope="module")
def reader(chromium, tmp_path_factory):
    """A page that looks up a trace."""
    file = tmp_path_factory.mktemp("recorded") / "page.html"
    names = ("kernel", "recorded_run", "window_changes")
    given = json.dumps({"programs": [joined(f"record/{name}.js") for name in names]}).replace("</", "<\\/")
    file.write_text(HARNESS.replace("GIVEN", given), encoding="utf-8")
    with open_offline(chromium, file) as opened:
        opened.page.evaluate("load().then(() => 0)")
        yield opened.page
        assert opened.complaints == []


class PageAndKernel:
    """A trace in the page and in the kernel."""

    def __init__(self, page, trace):
        self.page, self.pulse, self.answers = page, ClusterSnapshot(trace=trace), DashboardView()
        self.number = page.evaluate("(text) => open(text)", base64.b64encode(packed(trace)).decode())
        first, _ = self.answers.answer(AskFeed(), self.pulse, time.monotonic)
        self.end = first["now"]["t_us"] if first.get("now") else 0.0

    def kernel(self, question):
        answer, buffers = self.answers.answer(read_question({"number": 1, **question}), self.pulse, time.monotonic)
        return json.loads(json.dumps({**answer, "view": "a"})), buffers

    def ask(self, questions):
        """Yield both sides' answers to each request."""
        answers = self.page.evaluate("(given) => ask(given)", [self.number, questions])
        for question, (answer, buffers) in zip(questions, answers, strict=True):
            yield self.kernel(question), (answer, [base64.b64decode(text) for text in buffers])


@pytest.fixture(scope="module", params=RUNS)
def both(reader, request):
    return PageAndKernel(reader, RUNS[request.param]())


def test_the_ranks_at_any_time_match_the_kernel(both):
    rng = np.random.default_rng(0)
    known = [r.rows["t_ns"] for r in both.pulse.trace.ranks]
    times = [*rng.uniform(-10.0, 1.1 * both.end + 10, 150).round(3).tolist(), 0, both.end, 1e15]
    for rows in known:
        times += [float(np.round((t - known[0][0]) / 1e3, 3)) for t in rng.choice(rows, 20).tolist()]
    count = 0
    for (ours, _), (theirs, _) in both.ask([{"word": "at", "t_us": t} for t in times]):
        assert theirs == ours
        count += ours["moment"] is not None
    assert count == (len(times) if both.pulse.trace.num_rows else 0)


def test_the_ranks_some_events_after_any_row_match_the_kernel(both):
    rng = np.random.default_rng(1)
    questions = [{"word": "beside", "rank": 99, "seq": 0, "by": 1}]
    for r in both.pulse.trace.ranks:
        seqs = rng.integers(r.start.seq - 5, r.end_seq + 5, 40).tolist()
        questions += [
            {"word": "beside", "rank": r.rank, "seq": seq, "by": by}
            for seq, by in zip(seqs, rng.choice([-700, -3, -1, 0, 1, 2, 900], 40).tolist(), strict=True)
        ]
    for (ours, _), (theirs, _) in both.ask(questions):
        assert theirs == ours


def tables(answer, buffer):
    """Return the tables of an answer, as the browser reads them."""
    found, at = {}, 0
    for table, columns in COLUMNS.items():
        found[table] = {}
        for name, code in columns:
            width = len(Category) if (table, name) == ("memory", "bytes") else 1
            count = answer["counts"][table] * width
            found[table][name] = np.frombuffer(buffer, f"<{code}", count, at).reshape(answer["counts"][table], width)
            at += -(-found[table][name].nbytes // 8) * 8
    assert at == len(buffer)
    return found


def drawn(table, *keys):
    """Return what a figure of a table shows: by key, (time, values) of each change; the last row of a time counts."""
    values = next(name for name in table if name not in {"t", *keys})
    found = {}
    for k, t in enumerate(table["t"][:, 0].tolist()):
        series = found.setdefault(tuple(int(table[key][k, 0]) for key in keys), {})
        series[t] = table[values][k].tolist()
    return {
        key: [(t, v) for (t, v), b in zip(s.items(), [None, *s.values()], strict=False) if v != b]
        for key, s in found.items()
    }


def test_changes_in_a_window_match_the_kernel(both):
    rng = np.random.default_rng(2)
    ends = np.sort(rng.uniform(-50, 1.05 * both.end + 50, (12, 2)).round(3)).tolist()
    ends += [[0, both.end], [both.end, both.end + 10]]
    questions = [{"word": "window", "from_us": a, "to_us": b} for a, b in ends]
    for (ours, (mine,)), (theirs, (other,)) in both.ask(questions):
        assert ours["exact"]
        assert {**theirs, "counts": {}} == {**ours, "counts": {}}
        here, there = tables(ours, mine), tables(theirs, other)
        assert drawn(there["memory"], "group") == drawn(here["memory"], "group")
        assert drawn(there["states"], "group", "unit") == drawn(here["states"], "group", "unit")


def test_a_window_of_too_many_changes_is_left_to_the_first_picture(reader):
    both = PageAndKernel(reader, example_trace())
    for change, is_exact in (("20_000", True), ("10", False)):
        answer = reader.evaluate(f"made.windowOf(runs[{both.number}], 0, {both.end}, {change})")
        assert answer["exact"] is is_exact
        assert bool(answer["tables"]["memory"]["t"]) is is_exact


def test_the_first_answer_matches_the_kernel_and_then_nothing_is_new(both):
    (answer, _), (again, empty) = both.page.evaluate(
        f"ask([{both.number}, [{{word: 'feed', wait: false}}, {{word: 'feed', wait: true}}]])"
    )
    first, _ = DashboardView().answer(AskFeed(), both.pulse, time.monotonic)
    first = json.loads(json.dumps(first))
    for name in ("now", "peaks", "units", "order", "groups", "tracks", "holds", "clock", "open"):
        assert answer.get(name) == first.get(name)
    assert set(again["counts"].values()) == {0}
    assert empty == [""]
    assert not again["restart"]


def test_event_names_of_all_rows_match_the_kernel():
    for trace in (example_trace(), stopped_before(example_trace(), Kind.ALL_GATHER, number=4)):
        rows = trace.ranks[0].rows.copy()
        rows["kind"][50:700] = Kind.ALLOC  # more than the lookup searches backwards
        found = state_at.events_up_to(rows)
        assert found.tolist() == [state_at._event_at(rows, place) for place in range(len(rows))]
    assert state_at.events_up_to(rows[:0]).tolist() == []
