"""A record as one self-contained page: the dashboard over it, and figures of what the dashboard does not show.

The page opens from a file, without a server, a network or Python. It runs two scripts, its own and plotly's; its
content security policy allows only these, by hash, and no fetches. The record is base64 text, and names of modules,
ranks and metrics are only ever inserted as text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json

from plotly.offline import get_plotlyjs

from workbench.base.text_formats import plural
from workbench.reports.status_report import sharded_models
from workbench.trace.columns import Trace, steps
from workbench.views import draw
from workbench.widgets.js_bundle import STATIC, joined
from workbench.widgets.recorded import packed

FIGURES = ("layout", "comms", "training")
"""The views that the dashboard does not have."""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<!-- written by %fsdp export -->
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><p>{about}</p></header>
<main>
<div id="dashboard"></div>
<div class="fw-figures" id="figures">
{figures}
</div>
</main>
<script type="application/octet-stream" id="record">{record}</script>
<script>{plotly}</script>
<script type="module">{program}</script>
</body>
</html>
"""


def page(trace: Trace, title: str) -> str:
    """Return the page of a record.

    Args:
        trace: the record.
        title: title of the page; any text.
    """
    figures = {name: json.loads(str(draw(name, trace).to_json())) for name in FIGURES}
    program, plotly = joined("page.js"), get_plotlyjs()
    return _PAGE.format(
        policy=content_policy(plotly, program),
        title=html.escape(title),
        about=html.escape(_about(trace)),
        style="".join((STATIC / name).read_text("utf-8") for name in ("dashboard.css", "figures.css", "page.css")),
        figures="\n".join(f'<div class="fw-figure"><div id="{name}"></div></div>' for name in FIGURES),
        record=base64.b64encode(packed(trace, {"figures": figures})).decode(),
        plotly=plotly,
        program=program,
    )


def _about(trace: Trace) -> str:
    found = steps(trace)
    ran = f"{plural(len(found), 'step')} ({found[0]} to {found[-1]})" if found else "no steps"
    policy = dict.fromkeys(phrase for model in sharded_models(trace.header) for phrase in model.policy)
    what = [f"A recording of {plural(len(trace.ranks), 'rank')}, {ran}, {plural(trace.num_rows, 'event')}", *policy]
    return (
        f"{'; '.join(what)}. "
        "Drag in a panel or on the axis to move the cursor; the left and right arrow keys move by one event."
    )


def content_policy(*scripts: str) -> str:
    """Return the content security policy of a page that runs these scripts, and fetches nothing.

    Raises:
        ValueError: a script contains the end of a script.
    """
    for script in scripts:
        if "</script" in script.lower() or "<!--" in script:
            raise ValueError("a script of the page contains </script or <!--")
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            "style-src 'unsafe-inline'",  # plotly sets inline styles
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
