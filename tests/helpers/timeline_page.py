"""A page with only a timeline in a real browser, for tests and benchmarks."""

import base64
import json
from contextlib import contextmanager

from tests.helpers.browser import open_offline
from workbench.widgets.js_bundle import joined

_PAGE = """<!doctype html><meta charset="utf-8"><title>timeline</title>
<style>
  body { margin: 24px; background: #ffffff }
  @media (prefers-color-scheme: dark) { body { background: #111418 } }
  body[data-jp-theme-light="true"] { background: #ffffff }
  body[data-jp-theme-light="false"] { background: #111418 }
  #place { width: 1200px }
</style>
<div id="place"></div>
<script>
const given = GIVEN;
const load = (text) => import(URL.createObjectURL(new Blob([text], {type: "text/javascript"})));
const place = document.getElementById("place");

// -- the drawing module on its own, with rectangles made up here

async function draw(tracks, data, units) {
  const {createTimeline} = await load(given.timeline);
  const canvas = document.createElement("canvas");
  place.append(canvas);
  const begin = performance.now();
  window.timeline = createTimeline(canvas, given.options);
  timeline.setTracks(tracks);
  timeline.setUnits(units);
  data.forEach((items, track) => timeline.append(track, items));
  await frame();
  await frame();
  return performance.now() - begin;
}

const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));

/** Bytes of a part of a canvas; of a copy, so that the canvas itself is never read back. */
function pixels(number, x, y, width, height) {
  const copy = new OffscreenCanvas(width, height).getContext("2d", {willReadFrequently: true});
  copy.drawImage(document.querySelectorAll("canvas")[number], -Math.round(x), -Math.round(y));
  return copy.getImageData(0, 0, width, height).data;
}

function made(perTrack, numRanks) {
  let seed = 7;
  const random = () => ((seed = (seed * 16807) % 2147483647) / 2147483647);
  const kinds = {compute: 1, "all-gather": 6, "reduce-scatter": 7, wait: 12};
  const tracks = [], data = [], n = perTrack;
  for (let rank = 0; rank < numRanks; rank++) for (const [name, kind] of Object.entries(kinds)) {
    tracks.push({name, rank});
    const items = {start: new Float64Array(n), end: new Float64Array(n), bytes: new Float64Array(n).fill(3.3e6),
      arrowFrom: new Float64Array(n).fill(NaN), unit: new Int16Array(n), kind: new Uint8Array(n).fill(kind),
      exposed: new Uint8Array(n).fill(name === "wait" ? 255 : 0)};
    for (let k = 0; k < n; k++) {
      items.start[k] = 100 * k + 30 * random();
      items.end[k] = items.start[k] + (name === "wait" ? 15 : 60) * (0.3 + random());
      items.unit[k] = k % 12;
      if (name === "compute" && k % 24 >= 12) items.kind[k] = 2;
    }
    data.push(items);
  }
  return [tracks, data, Array.from({length: 12}, (_, k) => `blocks.${k}`)];
}
</script>
"""


@contextmanager
def open_page(chromium, folder):
    """Open the page; its function ``draw`` draws a timeline."""
    alone = {name: joined(f"{name}.js") for name in ("timeline", "track", "look", "format")}
    given = {**alone, "options": {}}
    page = folder / "page.html"
    page.write_text(_PAGE.replace("GIVEN", json.dumps(given).replace("</", "<\\/")), encoding="utf-8")
    with open_offline(chromium, page) as opened:
        yield opened


def as_sent(message):
    """Return a message and its buffers as the page's ``model.receive`` takes them."""
    content, buffers = message
    return [content, [base64.b64encode(buffer).decode() for buffer in buffers]]
