"""The page that replays a record, opened from a file in Firefox: it works there as it does in Chromium."""

import pytest

from tests.firefox.driver import VIEWPORT, Click, look
from tests.helpers.browser import open_offline
from tests.helpers.jupyterlab import SHOTS
from tests.helpers.simulated_job import example_trace
from tests.widgets.test_trace_page import LOOKS, READY
from workbench.export import export

pytestmark = [pytest.mark.thorough, pytest.mark.browser, pytest.mark.timeout(600)]

SHARES = (0.3, 0.55, 0.8)
SETTLED = "() => !document.querySelector('.fw-dashboard').dashboard.client.isWaiting"
AT = "(t_us) => document.querySelector('.fw-dashboard').dashboard.cursor.put(t_us)"

WIDTHS = "[...document.querySelectorAll('.fw-dashboard canvas')].map(({width}) => width)"
ACROSS, DOWN = 32, 12
# of every canvas its size, and its mean colours on white in a grid, which letters of another shape hardly change
PICTURES = f"""async () => {{
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  await frame();
  await frame();
  return [...document.querySelectorAll(".fw-dashboard canvas")].map((canvas) => {{
    const {{width, height}} = canvas, {{data}} = canvas.getContext("2d").getImageData(0, 0, width, height);
    const sums = Array.from({{length: {ACROSS * DOWN}}}, () => [0, 0, 0, 0]);
    for (let at = 0; at < data.length; at += 4) {{
      const x = (at / 4) % width, y = Math.floor(at / 4 / width), opaque = data[at + 3] / 255;
      const part = sums[Math.floor(y * {DOWN} / height) * {ACROSS} + Math.floor(x * {ACROSS} / width)];
      for (let k = 0; k < 3; k += 1) part[k] += opaque * data[at + k] + (1 - opaque) * 255;
      part[3] += 1;
    }}
    return {{width, height, colours: sums.map(([r, g, b, count]) => [r / count, g / count, b / count])}};
  }});
}}"""


def test_time_is_scrubbed_and_all_is_drawn_as_in_chromium(chromium, firefox, tmp_path):
    file = tmp_path / "run.html"
    export(example_trace(), file)
    SHOTS.mkdir(parents=True, exist_ok=True)
    clicks = [Click(place=".fw-memory", share=share, settled=SETTLED, look=LOOKS) for share in SHARES]
    there = look(firefox, file, ready=READY, clicks=clicks, last=PICTURES, shot=SHOTS / "page_firefox.png")
    assert there.complaints == []
    assert [url for url in there.requests if not url.startswith(("file:", "data:", "blob:"))] == []
    cursors = [seen["cursor"] for seen in there.seen]
    assert cursors == sorted(set(cursors))
    assert all(seen["moment"]["t_us"] <= seen["cursor"] for seen in there.seen)
    with open_offline(chromium, file) as here:
        here.page.wait_for_function(READY)
        for seen in there.seen:
            here.page.evaluate(AT, seen["cursor"])
            here.page.wait_for_function(SETTLED)
            assert here.page.evaluate(LOOKS) == seen
        widths = [picture["width"] for picture in there.last]
        scrollbar = here.page.evaluate(PICTURES)[-1]["width"] - widths[-1]  # of another width, or none
        here.page.set_viewport_size(VIEWPORT | {"width": VIEWPORT["width"] - scrollbar})
        here.page.wait_for_function(f"(widths) => {WIDTHS}.every((width, k) => width === widths[k])", arg=widths)
        drawn = here.page.evaluate(PICTURES)
    assert [(one["width"], one["height"]) for one in drawn] == [(one["width"], one["height"]) for one in there.last]
    for one, other in zip(drawn, there.last, strict=True):
        assert len({tuple(colour) for colour in other["colours"]}) > 20  # something is drawn
        assert differ_by(one, other) < 32


def differ_by(one, other):
    """By how much of 255 the mean colours of two pictures differ, in the part where they do most."""
    parts = zip(one["colours"], other["colours"], strict=True)
    return max(abs(a - b) for part in parts for a, b in zip(*part, strict=True))
