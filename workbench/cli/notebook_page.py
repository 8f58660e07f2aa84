"""Conversion of an executed notebook to one self-contained HTML file with figures, styles and plotly.js."""

from __future__ import annotations

import copy
import html
import json
from typing import Any

import plotly.io
from nbconvert import HTMLExporter
from nbconvert.preprocessors import HighlightMagicsPreprocessor
from nbformat import NotebookNode
from plotly.offline import get_plotlyjs

from workbench.course.predictions import NO_PREDICTION, PREDICTION_MIME, QUESTION_MIME
from workbench.views.theme import CONFIG, PLOTLY_MIME
from workbench.widgets.js_bundle import STATIC, joined

# widgets need a kernel, and nbconvert's rendering of their last state fetches its script from the network
_WIDGET = "application/vnd.jupyter.widget-view+json"

# nbconvert's page, without the scripts that it would fetch for formulas, diagrams, widgets, require.js and jQuery
_TEMPLATE = """
{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js -%}
<script>{{ resources.plotly_js }}</script>
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{{ resources.policy }}">
<style>{{ resources.figures_css }}</style>
{%- endblock -%}
{%- block html_head_css -%}
<style>@media screen and (prefers-color-scheme: dark) { {{ resources.dark_css }} }</style>
{%- endblock -%}
{%- block body_footer -%}
<script type="module">{{ resources.figures_js }}</script>
{{ super() }}
{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block jupyter_widgets -%}{%- endblock -%}
"""


_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
)

_QUESTION = """\
<form class="fw-guess" data-name="{name}" data-unit="{unit}">
<fieldset><legend>Predict: {question}</legend>
{fields}
<div><button>Lock</button><button type="button" class="fw-skip">Show without a guess</button></div></fieldset>
<p role="status">The page goes on when you have locked a guess.</p>
</form>"""


def to_page(notebook: NotebookNode, *, title: str, asks: bool = False) -> str:
    """Return the HTML of ``notebook`` with its saved outputs; it opens without a network.

    Args:
        notebook: an executed notebook; not changed.
        title: of the page.
        asks: whether what follows a prediction is hidden until the reader of the page has locked a guess.
    """
    notebook = copy.deepcopy(notebook)
    notebook.metadata["title"] = title
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for output in cell.outputs if asks else ():
                output.get("data", {}).update(_asked(output.get("data", {})))
            cell.outputs = [drawn for output in cell.outputs if (drawn := _without_kernel(output)) is not None]
    exporter = HTMLExporter(raw_template=_TEMPLATE, exclude_input_prompt=True, exclude_output_prompt=True)
    template_files = exporter.environment.loader
    assert template_files is not None  # the exporter makes one
    exporter.register_preprocessor(HighlightMagicsPreprocessor(languages={"%%fsdp": "python"}), enabled=True)
    inside = {
        "dark_css": template_files.get_source(exporter.environment, "static/theme-dark.css")[0],
        "plotly_js": get_plotlyjs(),
        "figures_css": "".join((STATIC / name).read_text("utf-8") for name in ("figures.css", "guesses.css")),
        "policy": _POLICY,
        "figures_js": joined("notebook.js"),
    }
    page, _ = exporter.from_notebook_node(notebook, resources=inside)
    return str(page)


def _asked(data: dict[str, Any]) -> dict[str, str]:
    """Return the form of a question, or what was measured with a place for the distance; empty for another output."""
    if QUESTION_MIME in data:
        return {"text/html": _form(data[QUESTION_MIME])}
    if PREDICTION_MIME not in data:
        return {}
    record = data[PREDICTION_MIME]
    name, measured = html.escape(record["name"]), html.escape(json.dumps(record["measured"]))
    shown = data["text/html"].replace(NO_PREDICTION, f'<span class="fw-distance">{NO_PREDICTION}</span>', 1)
    return {"text/html": f'<div class="fw-measured" data-name="{name}" data-measured="{measured}">{shown}</div>'}


def _form(record: dict[str, Any]) -> str:
    escaped = {name: html.escape(record[name]) for name in ("name", "unit", "question")}
    choices = [
        f'<input type="radio" name="guess" value="{each}"> {each}' for each in map(html.escape, record["choices"])
    ]
    number = f'Your guess <input name="guess" inputmode="decimal" size="10" autocomplete="off"> {escaped["unit"]}'
    fields = "".join(f"<label>{each}</label>" for each in choices or [number])
    return _QUESTION.format(**escaped, fields=fields)


def _without_kernel(output: NotebookNode) -> NotebookNode | None:
    """Return ``output`` in a form that a plain page can show; None if it needs a kernel."""
    data: dict[str, Any] = output.get("data", {})
    if PLOTLY_MIME in data:
        output["data"] = {"text/html": _figure_div(data[PLOTLY_MIME])}
    if "text/html" in data:
        data.pop(_WIDGET, None)
    return None if _WIDGET in data else output


def _figure_div(figure: dict[str, Any]) -> str:
    """Return a div that draws ``figure`` in a page that includes plotly.js."""
    config = figure.get("config", {}) | CONFIG
    bare = {key: figure[key] for key in ("data", "layout", "frames") if key in figure}
    return str(plotly.io.to_html(bare, config=config, include_plotlyjs=False, full_html=False, validate=False))
