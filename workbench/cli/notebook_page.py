"""Conversion of an executed notebook to one self-contained HTML file with figures, styles and plotly.js."""

from __future__ import annotations

import copy
from typing import Any

import plotly.io
from nbconvert import HTMLExporter
from nbconvert.preprocessors import HighlightMagicsPreprocessor
from nbformat import NotebookNode
from plotly.offline import get_plotlyjs

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


def to_page(notebook: NotebookNode, *, title: str) -> str:
    """Return the HTML of ``notebook`` with its saved outputs; it opens without a network.

    Args:
        notebook: an executed notebook; not changed.
        title: of the page.
    """
    notebook = copy.deepcopy(notebook)
    notebook.metadata["title"] = title
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [drawn for output in cell.outputs if (drawn := _without_kernel(output)) is not None]
    exporter = HTMLExporter(raw_template=_TEMPLATE, exclude_input_prompt=True, exclude_output_prompt=True)
    template_files = exporter.environment.loader
    assert template_files is not None  # the exporter makes one
    exporter.register_preprocessor(HighlightMagicsPreprocessor(languages={"%%fsdp": "python"}), enabled=True)
    inside = {
        "dark_css": template_files.get_source(exporter.environment, "static/theme-dark.css")[0],
        "plotly_js": get_plotlyjs(),
        "figures_css": (STATIC / "figures.css").read_text("utf-8"),
        "figures_js": joined("notebook.js"),
    }
    html, _ = exporter.from_notebook_node(notebook, resources=inside)
    return str(html)


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
