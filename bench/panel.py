"""How soon the panel appears and shows changes, in a headless Chromium inside JupyterLab.

:func:`measure_panel`: while two ranks train in the background, a step's end on the slower rank is a change of state. It
counts as shown at the end of the frame in which the panel first shows this number of steps or more (steps may be
quicker than the panel's requests; skipped ones count as well, with their longer wait). The ranks' times and the page's
are aligned as in :mod:`bench.pixels`. The first paint is from the pointer's press on the panel's icon to the end of the
frame that has all ranks, in a page whose panel was never shown, on a kernel with ranks and a model. ``recovers_ms`` is
from the SIGKILL of one of two training ranks to the end of the frame in which the panel names it.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.pixels import chromium, clock_of
from tests.helpers.built_panel import built_panel, bundle_bytes
from tests.helpers.jupyterlab import NotebookPage, begin, jupyterlab, open_notebook
from tests.helpers.notebook_model import CELL
from workbench.replay import training
from workbench.trace import load
from workbench.trace.columns import Trace

NUM_RANKS = 2
SAMPLE_S = 12.0
PAINTS = 3
RECORD = "bench.trace"
CELLS = [
    f"%load_ext workbench\n%fsdp start -n {NUM_RANKS} --device cpu",
    f"%%fsdp{CELL}",
    "%fsdp shard model --wrap Block",
    "%fsdp step 1000000 --background",
    "%fsdp abort",
    f"%fsdp export {RECORD}",
    "%fsdp step 1000000 --background",
    "%fsdp stop",
]
STEP, AGAIN, STOP = 3, 6, 7

_TAB = ".jp-SideBar [data-id='fsdp-workbench-panel']"

# milliseconds from the next press to the end of the frame that shows this number of ranks
_PAINT = """(count) => {
  const rows = () => [...document.querySelectorAll(".fsdp-Panel .fsdp-Rank")].filter((row) => row.offsetHeight > 0);
  window.painted = new Promise((done) => {
    document.addEventListener("pointerdown", () => {
      const pressed = performance.now(), channel = new MessageChannel();
      channel.port1.onmessage = () => done(performance.now() - pressed);
      const look = () => {
        if (rows().length === count) channel.port2.postMessage(0); // arrives when the frame is over
        else requestAnimationFrame(look);
      };
      requestAnimationFrame(look);
    }, {capture: true, once: true});
  });
}"""

# the numbers of steps that the panel showed, and the end of each number's first frame
_WATCH = """() => {
  const shown = (window.shown = []), waiting = [], channel = new MessageChannel();
  channel.port1.onmessage = () => {
    const now = performance.now();
    waiting.splice(0).forEach((steps) => shown.push([steps, now]));
  };
  let last = "";
  new MutationObserver(() => {
    const said = /(\\d+) of \\d+ steps/.exec(document.querySelector(".fsdp-Headline")?.textContent ?? "")?.[1];
    if (said === undefined || said === last) return;
    waiting.push(Number((last = said)));
    requestAnimationFrame(() => channel.port2.postMessage(0));
  }).observe(document.querySelector(".fsdp-Panel"), {subtree: true, childList: true, characterData: true});
}"""

# the end of the frame in which the panel shows that rank 1 died
_GONE = """() => {
  const channel = new MessageChannel();
  window.gone = new Promise((done) => {
    channel.port1.onmessage = () => done(performance.now());
    const look = () => {
      if (/rank 1 died/.test(document.querySelector(".fsdp-Headline")?.textContent)) channel.port2.postMessage(0);
      else requestAnimationFrame(look);
    };
    requestAnimationFrame(look);
  });
}"""


def measure_panel(sample_s: float = SAMPLE_S) -> dict[str, Any]:
    """Return ``median_ms`` and ``p95_ms`` of changes, ``first_paint_ms``, ``recovers_ms`` and ``bundle_kb``."""
    panel = built_panel()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with jupyterlab(folder, CELLS, panel=panel) as url, open_notebook(url, chromium()) as lab:
            for number in range(STEP):
                lab.do(number)
            paints = [_paint(lab, url) for _ in range(PAINTS)]
            lab.do(STEP)
            lab.page.evaluate(_WATCH)
            lab.page.wait_for_timeout(sample_s * 1000)
            shown, (ahead, error) = lab.page.evaluate("shown"), clock_of(lab.page)
            for number in range(STEP + 1, AGAIN):
                lab.do(number)
            recovers_ms = _recovers(lab)
            lab.do(STOP)
        ends = [end - ahead for end in step_ends_ms(load(folder / RECORD))]
    took = sorted(delays(ends, shown))
    return {
        "median_ms": statistics.median(took),
        "p95_ms": took[int(0.95 * len(took))],
        "samples": len(took),
        "states": len(shown),
        "clock_error_ms": error,
        "first_paint_ms": statistics.median(paints),
        "first_paints_ms": paints,
        "recovers_ms": recovers_ms,
        "bundle_kb": bundle_bytes(panel) / 1e3,
    }


def _paint(lab: NotebookPage, url: str) -> float:
    begin(lab.page, url)
    lab.page.evaluate(_PAINT, NUM_RANKS)
    lab.page.click(_TAB)
    took: float = lab.page.evaluate("painted")
    return took


def _recovers(lab: NotebookPage) -> float:
    """Return the milliseconds from the death of rank 1 during training until the panel names it."""
    lab.do(AGAIN)
    lab.page.wait_for_function("() => / of \\d+ steps/.test(document.querySelector('.fsdp-Headline').textContent)")
    title = lab.page.locator(".fsdp-Panel .fsdp-Rank").nth(1).get_attribute("title") or ""
    lab.page.evaluate(_GONE)
    ahead, _ = clock_of(lab.page)
    killed_ms = time.monotonic_ns() / 1e6 - ahead
    psutil.Process(int(title.rsplit(maxsplit=1)[1])).kill()
    named_ms: float = lab.page.evaluate("gone")
    return named_ms - killed_ms


def step_ends_ms(trace: Trace) -> list[float]:
    """Return the time at which each step had ended on every rank, on the ranks' clock."""
    ends = [training.advance(training.start(), rank.rows).steps["end_ns"] for rank in trace.ranks]
    return [max(of_ranks) / 1e6 for of_ranks in zip(*ends, strict=False)]


def delays(ends_ms: Sequence[float], shown: Sequence[tuple[int, float]]) -> list[float]:
    """Return the delay until each step's end was shown, for steps that ended while the panel was watched.

    Args:
        ends_ms: the ends of steps 0, 1, ...
        shown: the numbers of ended steps that were shown, each with its time; in order of time.
    """
    took: list[float] = []
    before = shown[0][0]  # the first number has no known time of change
    for num_steps, at_ms in shown[1:]:
        took += [at_ms - ends_ms[step] for step in range(before, num_steps)]
        before = max(before, num_steps)
    return took


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure_panel()) + "\n")
