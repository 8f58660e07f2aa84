"""How fluid the timeline is in a headless Chromium, drawn by the CPU: ``python -m tests.bench.timeline``.

Frames per second while panning and while zooming, 8 ranks of 4 rows, and the time from nothing to the first picture.
What the screen's rate allows is the most; the milliseconds say how much of a frame the drawing itself takes.
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.browser import find_chromium
from tests.widgets.timeline_page import open_page

SIZES = (500_000, 1_000_000)
RANKS, ROWS = 8, 4
FRAMES = 180

# each frame is drawn by the timeline's own loop; `at` is what is in view in frame k of n
_MEASURE = """async ([frames, move]) => {
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


def measure(num_rectangles: int) -> dict[str, object]:
    """Return the first paint in milliseconds, and fps and drawing times of each way to move."""
    chromium = find_chromium()
    if chromium is None:
        raise SystemExit("neither Chromium nor Chrome was found")
    with tempfile.TemporaryDirectory() as folder, open_page(chromium, Path(folder)) as opened:
        opened.page.evaluate(
            "([n, ranks]) => { window.all = made(n, ranks); }", [num_rectangles // (RANKS * ROWS), RANKS]
        )
        first_ms = opened.page.evaluate("draw(...all)")
        found = {move: opened.page.evaluate(_MEASURE, [FRAMES, move]) for move in ("pan", "zoom", "close")}
        return {"rectangles": opened.page.evaluate("timeline.stats().rectangles"), "first_paint_ms": first_ms, **found}


def main() -> None:
    """Measure and say."""
    for size in SIZES:
        sys.stdout.write(json.dumps(measure(size)) + "\n")


if __name__ == "__main__":
    main()
