"""The Firefox that is installed, without a window, driven by Puppeteer, whose packages ``package-lock.json`` names."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hatch_build
from tests.helpers.browser import PATIENCE_MS
from tests.helpers.built_panel import with_node
from tests.helpers.package_source import REPO

HERE = Path(__file__).parent
VIEWPORT = {"width": 1280, "height": 900}


@dataclass(frozen=True, kw_only=True)
class Click:
    """A click, and what is looked at afterwards.

    Attributes:
        place: selector of what is clicked, a quarter of its height below its top.
        share: where from its left (0) to its right (1).
        settled: a function in JavaScript; looked at once it returns true.
        look: a function in JavaScript that returns what is seen.
    """

    place: str
    share: float
    settled: str
    look: str


@dataclass(frozen=True, kw_only=True)
class PageResult:
    """What was seen.

    Attributes:
        seen: after each click.
        last: at the end.
        complaints: errors and warnings of the page and its console.
        requests: addresses that were asked for.
    """

    seen: list[Any]
    last: Any
    complaints: list[str]
    requests: list[str]


def look(firefox: str, file: Path, *, ready: str, clicks: Sequence[Click], last: str, shot: Path) -> PageResult:
    """Open a file in Firefox, and look at it.

    Args:
        firefox: the browser.
        file: the page.
        ready: a function in JavaScript; the first click comes once it returns true.
        clicks: done one after the other.
        last: a function in JavaScript that returns what is seen at the end.
        shot: where a picture of the page goes then.
    """
    request = {
        "firefox": firefox,
        "url": file.as_uri(),
        "viewport": VIEWPORT,
        "patience_ms": PATIENCE_MS,
        "ready": ready,
        "clicks": [asdict(click) for click in clicks],
        "last": last,
        "shot": str(shot),
    }
    _install()
    node = shutil.which("node", path=with_node()["PATH"])
    assert node is not None, "there is no Node"
    done = subprocess.run(
        [node, "drive.mjs"], cwd=HERE, input=json.dumps(request), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return PageResult(**json.loads(done.stdout))


def _install() -> None:
    (REPO / "build").mkdir(exist_ok=True)
    with (REPO / "build" / "firefox.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hatch_build.install_packages(HERE, with_node())
