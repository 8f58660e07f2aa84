"""The pictures of README.md and docs/, drawn from the recording of the course: ``python -m tests.helpers.pictures``.

A Chromium draws them. Beside them is the fingerprint of what each shows, by which a test finds stale ones.
"""

import hashlib
import io
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import FloatRect, Page

from tests.helpers.browser import find_chromium, open_offline
from tests.helpers.package_source import REPO
from tests.helpers.replay_recording import RECORDING
from workbench.agents.screenshot import screenshot
from workbench.trace import load
from workbench.views import draw
from workbench.widgets.trace_page import page

FOLDER = REPO / "docs" / "images"
FINGERPRINTS = FOLDER / "fingerprints.json"
VIEWS = ("layout", "memory", "timeline", "states", "comms", "training")
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
NUM_FRAMES, FRAME_MS, LAST_MS = 36, 160, 1500
_WIDTH, _HEIGHT = 900, 1300
_STEP_SHARES = (0.72, 0.985)
"""Where the newest step begins and ends: shares of the width of the memory panel, through which the cursor goes."""
_SHOWN_SHARE = 0.5
"""Share of the timeline that is shown, from its top: that of two of the four ranks."""
_QUALITY = 80


NAMES = (*(f"dashboard-{scheme}.webp" for scheme in SCHEMES), *(f"{name}.webp" for name in VIEWS))
"""Names of all pictures."""


def fingerprints() -> dict[str, str]:
    """Return what each picture shows as a hash, by the picture's name."""
    trace = load(RECORDING)
    moving = [RECORDING.read_bytes(), str((NUM_FRAMES, _WIDTH, _STEP_SHARES, _SHOWN_SHARE)).encode()]
    return {f"dashboard-{scheme}.webp": _hash(*moving) for scheme in SCHEMES} | {
        f"{name}.webp": _hash(str(draw(name, trace).to_json(engine="json")).encode()) for name in VIEWS
    }


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _box(opened: Page, selector: str) -> FloatRect:
    box = opened.locator(selector).bounding_box()
    assert box is not None
    return box


def _frames(opened: Page, scheme: Scheme) -> Iterator[Image.Image]:
    """Yield the dashboard, as the cursor goes through a step."""
    opened.set_viewport_size({"width": _WIDTH, "height": _HEIGHT})
    opened.emulate_media(color_scheme=scheme)
    opened.reload()
    places = ("#dashboard", "#dashboard canvas.fw-memory", "#dashboard .fw-timeline canvas")
    whole, memory, timeline = (_box(opened, each) for each in places)
    bottom = timeline["y"] + timeline["height"] * _SHOWN_SHARE
    clip = {"x": whole["x"], "y": whole["y"], "width": whole["width"], "height": bottom - whole["y"]}
    begin, end = (memory["x"] + memory["width"] * share for share in _STEP_SHARES)
    opened.mouse.move(begin, memory["y"] + memory["height"] / 2)
    opened.mouse.down()
    for frame in range(NUM_FRAMES):
        opened.mouse.move(begin + (end - begin) * frame / (NUM_FRAMES - 1), memory["y"] + memory["height"] / 2)
        opened.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        yield Image.open(io.BytesIO(opened.screenshot(clip=clip))).convert("RGB")
    opened.mouse.up()


def main() -> None:
    """Draw the pictures that are stale, and remember what all show."""
    trace, chromium, now = load(RECORDING), find_chromium(), fingerprints()
    if chromium is None:
        raise SystemExit("pictures need Chromium")
    FOLDER.mkdir(exist_ok=True)
    before = json.loads(FINGERPRINTS.read_text(encoding="utf-8")) if FINGERPRINTS.exists() else {}
    stale = {name for name in NAMES if before.get(name) != now[name]}
    for name in VIEWS:
        if f"{name}.webp" in stale:
            image = Image.open(io.BytesIO(screenshot(draw(name, trace)))).convert("RGB")
            image.save(FOLDER / f"{name}.webp", quality=_QUALITY, method=6)
    schemes = [scheme for scheme in SCHEMES if f"dashboard-{scheme}.webp" in stale]
    if schemes:
        _draw_dashboards(chromium, page(trace, "A small GPT"), schemes)
    FINGERPRINTS.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")


def _draw_dashboards(chromium: str, text: str, schemes: Sequence[Scheme]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(text, encoding="utf-8")
        with open_offline(chromium, file) as opened:
            for scheme in schemes:
                first, *others = _frames(opened.page, scheme)
                durations = [FRAME_MS] * len(others) + [LAST_MS]
                options = {"duration": durations, "loop": 0, "quality": _QUALITY, "method": 6}
                first.save(FOLDER / f"dashboard-{scheme}.webp", save_all=True, append_images=others, **options)


if __name__ == "__main__":
    main()
