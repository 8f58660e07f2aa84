"""How soon and how smoothly the browser shows what ranks do: ``python -m bench.pixels``.

:func:`measure_pixels`: from an event on a rank to the moment the dashboard has drawn it, in a headless Chromium inside
JupyterLab, while two ranks train; all on this machine. Rows have the rank's CLOCK_MONOTONIC, and the page has a
different clock, ``performance.now()``. Their offset is read many times, each between two readings of CLOCK_MONOTONIC,
and the quickest reading counts (``clock_error_ms`` is half of its duration). An event counts as drawn at the end of its
frame. All ends of compute spans are events, so the number that arrives with one answer does not matter. ``ready_ms``:
from running the cell ``%fsdp dashboard`` to the first answer drawn.

:func:`measure_long`: the same for a growing trace of 8 ranks x 200,000 rows, and frames per second while the dashboard
follows it and while its cursor is dragged.

:func:`measure_scrub`: frames per second, and states received per second, while a dashboard's cursor is dragged over a
trace of 512 ranks.

:func:`measure_timeline`: frames per second while the timeline pans and zooms over 500,000 rectangles, and the time to
the first picture of 1,000,000; 8 ranks of 4 rows. The screen's rate is the maximum; the milliseconds show the share of
a frame that the drawing itself takes.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from tests.helpers.browser import find_chromium
from tests.helpers.jupyterlab import NotebookPage, jupyterlab, open_notebook
from tests.helpers.notebook_model import CELL
from tests.helpers.package_source import REPO
from tests.helpers.timeline_page import open_page
from workbench.live.live_spans import NUM_TRACKS

NUM_RANKS = 2
SAMPLE_S = 12.0
RECTANGLES, FIRST_RECTANGLES = 500_000, 1_000_000
RANKS, ROWS = 8, 4
FRAMES = 180

CELLS = [
    "%load_ext workbench",
    f"%fsdp start -n {NUM_RANKS} --device cpu",
    f"%%fsdp{CELL}",
    "%fsdp shard model --wrap Block",
    "dash = %fsdp dashboard\ndash",
    "%fsdp step 1000000",
    "print(max(view._origin_ns for view in dash._views._views.values()))",
    "dash.close()\n%fsdp stop",
]
SHOW, STEP, ORIGIN, STOP = 4, 5, 6, 7

# milliseconds from running the cell that shows a dashboard until it has drawn its first answer
READY = """async (number) => {
  const panel = window.jupyterapp.shell.currentWidget;
  panel.content.activeCellIndex = number;
  panel.content.deselectAll();
  const begin = performance.now();
  window.jupyterapp.commands.execute("notebook:run-cell");
  const view = () => document.querySelector(".fw-dashboard")?.dashboard;
  for (;;) {
    await new Promise(requestAnimationFrame);
    if (view()?.client.hasBegun && !view().frames.pending) break;
    document.querySelector(".fw-dashboard")?.scrollIntoView({block: "center"}); // out of sight it does not ask
  }
  return performance.now() - begin;
}"""

# for each drawn event: its time (microseconds from the view's origin), the arrival of its answer, and the time it was
# drawn; for each answer: the times of its request and its arrival
_WATCH = """(tracksOfARank) => {
  const d = document.querySelector(".fw-dashboard").dashboard;
  const [events, answers] = [window.events, window.answers] = [[], []];
  let came = [];
  const channel = new MessageChannel(), waiting = [];
  channel.port1.onmessage = () => {
    const now = performance.now();
    waiting.splice(0).forEach(([t, at]) => events.push([t, at, now]));
  };
  const {client, takeNews, picture} = d, {receive} = client;
  client.receive = function (answer, buffers) {
    if (answer.word === "feed") answers.push([this.askedAt, performance.now()]);
    receive.call(this, answer, buffers);
  };
  d.takeNews = function (news, tables) {
    const at = performance.now(), {spans} = tables;
    if (news.restart) came = []; // all of it again
    else spans.track.forEach((track, k) => {
      if (track % tracksOfARank === 0) came.push([spans.start[k] + spans.duration[k], at]);
    });
    takeNews.call(this, news, tables);
  };
  d.picture = function () {
    const isDrawn = picture.call(this);
    waiting.push(...came);
    came = [];
    channel.port2.postMessage(0); // arrives when the frame is over
    return isDrawn;
  };
}"""


def measure_pixels(sample_s: float = SAMPLE_S) -> dict[str, Any]:
    """Return ``median_ms`` and ``p95_ms`` from an event to its pixels, ``samples``, and where the time goes."""
    with _notebook(CELLS) as lab:
        for number in range(SHOW):
            lab.do(number)
        ready_ms = lab.page.evaluate(READY, SHOW)
        lab.run(STEP)
        lab.page.wait_for_function("() => document.querySelector('.fw-dashboard').dashboard.model.steps.length > 5")
        lab.page.evaluate(_WATCH, NUM_TRACKS)
        lab.page.wait_for_timeout(sample_s * 1000)
        found = lab.page.evaluate("({events, answers})")
        return _in_ms(found, clock_of(lab.page), _stop(lab)) | {"ready_ms": ready_ms}


@contextmanager
def _notebook(cells: Sequence[str]) -> Iterator[NotebookPage]:
    with (
        tempfile.TemporaryDirectory() as folder,
        jupyterlab(Path(folder), cells) as url,
        open_notebook(url, chromium()) as lab,
    ):
        yield lab


def _stop(lab: NotebookPage) -> int:
    """End the training; return the view's origin on the ranks' clock, in nanoseconds."""
    lab.page.locator(".fw-abort").click()
    lab.ends(STEP)
    for number in (ORIGIN, STOP):
        lab.do(number)
    return int(lab.cell(ORIGIN).locator(".jp-OutputArea-output").inner_text())


def clock_of(page: Page) -> tuple[float, float]:
    """Return how far CLOCK_MONOTONIC is ahead of the page's clock, and the error of that, in milliseconds."""
    looks = []
    for _ in range(200):
        before = time.monotonic_ns()
        there = page.evaluate("performance.now()")
        after = time.monotonic_ns()
        looks.append(((after - before) / 2e6, (after + before) / 2e6 - there))
    error, ahead = min(looks)
    return ahead, error


def _in_ms(found: dict[str, list[list[float]]], clock: tuple[float, float], origin_ns: int) -> dict[str, Any]:
    ahead, error = clock
    happened = [origin_ns / 1e6 + t_us / 1e3 - ahead for t_us, _, _ in found["events"]]  # on the page's clock
    took = sorted(drawn - at for at, (_, _, drawn) in zip(happened, found["events"], strict=True))
    answers = found["answers"]
    periods = [later[0] - sent[0] for sent, later in pairwise(answers)]
    return {
        "median_ms": statistics.median(took),
        "p95_ms": took[int(0.95 * len(took))],
        "samples": len(took),
        "clock_error_ms": error,
        "to_answer_ms": statistics.median(
            received - at for at, (_, received, _) in zip(happened, found["events"], strict=True)
        ),
        "draw_ms": statistics.median(drawn - received for _, received, drawn in found["events"]),
        "period_ms": statistics.median(periods),
        "round_trip_ms": statistics.median(received - sent for sent, received in answers),
    }


# ---- long runs

LONG_CELLS = [
    f"""
import sys, threading, time
sys.path.insert(0, {str(REPO)!r})
from tests.helpers.long_trace import long_trace
from workbench.session.snapshot import pulse
from workbench.trace.columns import RankTrace, Trace
from workbench.widgets.dashboard import DashboardWidget

class Growing:
    rate = 2_000  # rows a second and rank
    def __init__(self):
        self.trace, self.begin = long_trace(8, 240_000), None
    def pulse(self):
        self.begin = self.begin or time.monotonic()
        count = 200_000 + int(self.rate * (time.monotonic() - self.begin))
        parts = tuple(RankTrace(r.rank, r.rows[:count], r.start) for r in self.trace.ranks)
        doing = dict.fromkeys(range(8), {{"doing": "step", "step": 1}})
        return pulse(Trace(self.trace.header, parts), [True] * 8, doing)
    def activity(self):
        return ()

growing = Growing()
""",
    "dash = DashboardWidget(growing)\ndash",
    "dash.close()",
]

# frames while it follows, and while a mouse drags the cursor back and forth; then the duration of the cursor's answers
_LONG = """async ([seconds]) => {
  const d = document.querySelector(".fw-dashboard").dashboard;
  const measure = async (each) => {
    const gaps = [];
    let before = performance.now();
    for (const end = before + 1000 * seconds; before < end; ) {
      each((end - before) / (1000 * seconds));
      await new Promise(requestAnimationFrame);
      const now = performance.now();
      gaps.push(now - before);
      before = now;
    }
    gaps.sort((a, b) => a - b);
    const took = gaps.reduce((sum, gap) => sum + gap, 0);
    return {fps: 1000 * gaps.length / took, p95_ms: gaps[Math.floor(0.95 * gaps.length)]};
  };
  const following = await measure(() => {});
  const scrubbing = await measure((left) => d.cursor.put(d.model.end * (0.97 + 0.02 * Math.sin(20 * left))));
  const trips = [];
  for (let k = 0; k < 30; k++) {
    while (d.client.isWaiting) await new Promise((done) => setTimeout(done, 1));
    const begin = performance.now();
    d.cursor.put(d.model.end * (k + 1) / 31);
    while (d.client.isWaiting) await new Promise((done) => setTimeout(done, 1));
    trips.push(performance.now() - begin);
  }
  d.cursor.follow();
  trips.sort((a, b) => a - b);
  return {following, scrubbing, cursor_ms: trips[15], rectangles: d.timeline.chart.stats().rectangles};
}"""


def measure_long(seconds: float = 5.0) -> dict[str, Any]:
    """Return how soon a dashboard on a growing trace of 8 ranks x 200,000 rows is ready, and its frames per second."""
    with _notebook(LONG_CELLS) as lab:
        lab.do(0)
        ready_ms = lab.page.evaluate(READY, 1)
        found = lab.page.evaluate(_LONG, [seconds])
        lab.do(2)
    return {
        "ready_ms": ready_ms,
        **{f"{name}_following": value for name, value in found["following"].items()},
        **{f"{name}_scrubbing": value for name, value in found["scrubbing"].items()},
        "cursor_ms": found["cursor_ms"],
        "rectangles": found["rectangles"],
    }


# ---- many ranks

SCRUB_CELLS = [
    f"""
import sys
sys.path.insert(0, {str(REPO)!r})
from bench.traces import SCALES
from tests.helpers.many_ranks import trace_of
from workbench.session.snapshot import ClusterSnapshot
from workbench.widgets.dashboard import DashboardWidget

class Still:
    def __init__(self, trace):
        self.found = ClusterSnapshot(trace=trace, record="scale.trace")
    def pulse(self):
        return self.found
    def activity(self):
        return None

still = Still(trace_of(SCALES["SIZE"]))
""",
    "dash = DashboardWidget(still)\ndash",
    "dash.close()",
]

_SCRUB = """async ([seconds]) => {
  const d = document.querySelector(".fw-dashboard").dashboard;
  let told = 0, frames = 0, drawing = 0;
  const {cursor, frames: {draw}} = d, {takeMoment} = cursor;
  cursor.takeMoment = function (...answer) { told += 1; takeMoment.apply(this, answer); };
  d.frames.draw = () => {
    const begin = performance.now(), isDrawn = draw();
    drawing += performance.now() - begin;
    return isDrawn;
  };
  const gaps = [], begin = performance.now(), end = begin + 1000 * seconds;
  for (let before = begin; before < end; frames++) {
    cursor.put(d.model.begin + (d.model.end - d.model.begin) * (0.5 + 0.48 * Math.sin((before - begin) / 700)));
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    gaps.push(now - before);
    before = now;
  }
  const took = (performance.now() - begin) / 1000;
  gaps.sort((a, b) => a - b);
  return {fps: frames / took, moments: told / took, p95_ms: gaps[Math.floor(0.95 * gaps.length)],
    draw_ms: drawing / frames};
}"""


def measure_scrub(size: str = "long", seconds: float = 6.0) -> dict[str, Any]:
    """Return ``fps`` and ``moments`` per second while the cursor is dragged over a trace of 512 ranks.

    The cursor first passes over the whole trace once, so that cached results exist.
    """
    with _notebook([cell.replace("SIZE", size) for cell in SCRUB_CELLS]) as lab:
        lab.do(0)
        ready_ms = lab.page.evaluate(READY, 1)
        lab.page.evaluate(_SCRUB, [seconds])
        found = lab.page.evaluate(_SCRUB, [seconds])
        lab.do(2)
    return {"ready_ms": ready_ms, **found}


# ---- the timeline

# the timeline's own loop draws each frame; `views` give the range in view in frame k of n
_MOVE = """async ([frames, move]) => {
  const {range: [low, high]} = timeline.stats();
  const views = {
    pan: (s) => [low + 0.9 * s * (high - low), low + (0.9 * s + 0.1) * (high - low)],
    zoom: (s) => {
      const half = (high - low) / 2 * 1e-5 ** s, at = low + 0.37 * (high - low);
      return [at - half, at + half];
    },
    close: (s) => { const span = (high - low) / 400; return [low + s * 40 * span, low + (s * 40 + 1) * span]; },
  };
  const times = [], begin = performance.now();
  for (let k = 0; k < frames; k++) {
    timeline.setView(...views[move](k / frames));
    await frame();
    times.push(timeline.stats().drawMs);
  }
  times.sort((a, b) => a - b);
  const took = performance.now() - begin;
  return {fps: 1000 * frames / took, median_ms: times[frames >> 1], p95_ms: times[Math.floor(0.95 * frames)]};
}"""


def measure_timeline() -> dict[str, Any]:
    """Return ``fps_pan`` and ``fps_zoom`` at this number of ``rectangles``, and ``first_paint_ms`` of twice as many."""
    with tempfile.TemporaryDirectory() as folder, open_page(chromium(), Path(folder)) as opened_page:
        page = opened_page.page
        first_ms = _first_paint(page, FIRST_RECTANGLES)
        page.reload()
        _first_paint(page, RECTANGLES)
        found = {move: page.evaluate(_MOVE, [FRAMES, move]) for move in ("pan", "zoom", "close")}
        return {
            **{f"fps_{move}": moved["fps"] for move, moved in found.items()},
            **{f"{move}_p95_ms": moved["p95_ms"] for move, moved in found.items()},
            "rectangles": page.evaluate("timeline.stats().rectangles"),
            "first_paint_ms": first_ms,
        }


def _first_paint(page: Page, num_rectangles: int) -> float:
    page.evaluate("([n, ranks]) => { window.all = made(n, ranks); }", [num_rectangles // (RANKS * ROWS), RANKS])
    return page.evaluate("draw(...all)")


def chromium() -> str:
    """Return the path of the browser; exit if there is none."""
    found = find_chromium()
    if found is None:
        raise SystemExit("neither Chromium nor Chrome was found")
    return found


def main() -> None:
    """Measure and print the results."""
    for measure in (measure_timeline, measure_pixels, measure_long, measure_scrub):
        sys.stdout.write(json.dumps(measure()) + "\n")


if __name__ == "__main__":
    main()
