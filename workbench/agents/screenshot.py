"""A figure as a PNG, drawn by a Chromium of this machine without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import UsageError
from workbench.views.responsive import at_width

if TYPE_CHECKING:
    import plotly.graph_objects as go

VARIABLE = "WORKBENCH_CHROMIUM"
NAMES = (
    "chromium-headless-shell",  # the same pictures for two thirds of the CPU time: it has no window to draw
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
"""Programs that can draw, the first choice first."""

FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
TIMEOUT_S = 60.0
WIDTH, MARGIN, MAX_HEIGHT = 1000, 16, 3000
"""Size of a picture in pixels: its width, what its page adds to the height of the figure, and the largest height."""


def find_chromium() -> str | None:
    """Return the path of a Chromium or Chrome: the one that the environment names, else the first of :data:`NAMES`."""
    named = os.environ.get(VARIABLE)
    found = map(shutil.which, [named] if named else NAMES)
    return next((path for path in found if path), None)


def screenshot(figure: go.Figure) -> bytes:
    """Return a figure as a PNG.

    Raises:
        UsageError: there is no Chromium, or it did not draw.
    """
    chromium = find_chromium()
    if chromium is None:
        raise UsageError(f"no picture: it takes Chromium or Chrome; install one, or set {VARIABLE} to its path")
    figure = at_width(figure, WIDTH)
    height = min(int(figure.layout.height or 460) + MARGIN, MAX_HEIGHT)
    with tempfile.TemporaryDirectory(prefix="fsdp-picture-", ignore_cleanup_errors=True) as name:
        page, picture = Path(name) / "page.html", Path(name) / "picture.png"
        figure.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})
        flags = [f"--user-data-dir={name}/user", f"--screenshot={picture}", f"--window-size={WIDTH},{height}"]
        is_root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses to run for root
        command = [chromium, "--headless", "--hide-scrollbars", *FLAGS, *is_root, *flags, page.as_uri()]
        nowhere = subprocess.DEVNULL
        try:
            subprocess.run(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, timeout=TIMEOUT_S, check=True)
            return picture.read_bytes()
        except (OSError, subprocess.SubprocessError) as error:
            raise UsageError(f"no picture: {chromium} did not draw it ({error})") from error
