import copy
import json

import nbformat.v4
import plotly.graph_objects as go
import plotly.io
import pytest

from tests.helpers.browser import OUTWARD, figures, mode_bars, open_offline, titles_follow_the_width
from tests.helpers.jupyterlab import SHOTS
from tests.helpers.simulated_job import example_trace
from workbench.cli.notebook_page import to_page
from workbench.cluster.pending_replies import Output
from workbench.reports.explain_report import linked
from workbench.reports.explanations import explain
from workbench.session.outputs import written_at_once
from workbench.views import draw, theme
from workbench.views.theme import PLOTLY_MIME

OUTLINE = 3  # pixels of the line around marked events
FIGURE = json.loads(go.Figure(go.Bar(y=[3, 1, 2]), layout={"title": "a </script> in its title"}).to_json())
WIDGET = {"application/vnd.jupyter.widget-view+json": {"model_id": "m"}, "text/plain": "IntProgress(value=0)"}


def notebook():
    def shown(data):
        return nbformat.v4.new_output("display_data", data=data)

    return nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell("# A title"),
            nbformat.v4.new_code_cell("%fsdp memory", outputs=[shown({PLOTLY_MIME: FIGURE, "text/plain": "figure"})]),
            nbformat.v4.new_code_cell("%fsdp step", outputs=[shown(WIDGET)]),
            nbformat.v4.new_code_cell("print(1)", outputs=[nbformat.v4.new_output("stream", text="1 < 2\n")]),
            nbformat.v4.new_code_cell(
                "%fsdp timeline", outputs=[shown({PLOTLY_MIME: FIGURE | {"config": {"displaylogo": False}}})]
            ),
        ]
    )


def test_it_names_nothing_outside():
    page = to_page(notebook(), title="T")
    assert "src=" not in page.partition("</head>")[2]
    assert "<link" not in page
    assert "cdnjs" not in page
    assert "unpkg" not in page


def test_plotly_is_inside_once():
    page = to_page(notebook(), title="T")
    one = to_page(nbformat.v4.new_notebook(), title="T")
    assert page.count("plotly.js v") == one.count("plotly.js v") == 1
    assert page.count("Plotly.newPlot(") - one.count("Plotly.newPlot(") == 2


def test_widgets_are_left_out_and_text_is_escaped():
    page = to_page(notebook(), title="a <b> title")
    assert "IntProgress" not in page
    assert "1 &lt; 2" in page
    assert "<title>a &lt;b&gt; title</title>" in page


def test_a_widget_with_html_is_shown_as_html():
    output = nbformat.v4.new_output("display_data", data=WIDGET | {"text/html": "<b>the question</b>"})
    cell = nbformat.v4.new_code_cell("predict()", outputs=[output])
    page = to_page(nbformat.v4.new_notebook(cells=[cell]), title="T")
    assert "<b>the question</b>" in page
    assert "IntProgress" not in page


def test_code_for_the_ranks_is_coloured_below_its_first_line():
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%%fsdp\nimport torch")])
    book.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}  # of a notebook that ran
    assert '<span class="nn">torch</span>' in to_page(book, title="T")


def test_the_notebook_is_left_as_it_was():
    given = notebook()
    before = copy.deepcopy(given)
    to_page(given, title="T")
    assert given == before


@pytest.mark.browser
def test_a_browser_without_network_draws_it(tmp_path, chromium):
    (tmp_path / "page.html").write_text(to_page(notebook(), title="T"), encoding="utf-8")
    with open_offline(chromium, tmp_path / "page.html") as opened:
        opened.page.wait_for_function("document.querySelectorAll('.plotly-graph-div .main-svg').length >= 2")
        drawn = figures(opened.page)
        assert len(drawn) == 2
        assert all(f["width"] > 300 and f["height"] > 200 and f["marks"] >= 3 for f in drawn)
        assert opened.outside == []
        assert opened.complaints == []


@pytest.mark.browser
def test_no_button_over_a_figure_leaves_the_page(tmp_path, chromium):
    """Figures of ours and of others in a notebook, a figure as a page, and one written without its configuration."""
    fig = draw("layout", example_trace())
    shown = nbformat.v4.new_output("display_data", data=fig._repr_mimebundle_())
    book = notebook()
    book.cells.append(nbformat.v4.new_code_cell("%fsdp layout", outputs=[shown]))
    pages = {"book": to_page(book, title="T"), "page": fig.to_html(), "bare": plotly.io.to_html(fig)}
    for name, page in pages.items():
        (tmp_path / "page.html").write_text(page, "utf-8")
        with open_offline(chromium, tmp_path / "page.html") as opened:
            figures(opened.page)
            bars = mode_bars(opened.page)
            SHOTS.mkdir(parents=True, exist_ok=True)
            opened.page.locator(".plotly-graph-div").last.hover(position={"x": 40, "y": 40})
            (SHOTS / f"mode_bar_{name}.png").write_bytes(opened.page.screenshot())
        assert len(bars) == (3 if name == "book" else 1)
        links = [title for bar in bars for title in bar if OUTWARD.search(title)]
        assert len(links) == (name == "bare"), "the link to the site of plotly, where its configuration is not given"
        assert all("Download plot as a PNG" in bar for bar in bars)


@pytest.mark.browser
def test_text_of_figures_has_the_colour_of_the_pages_text(tmp_path, chromium):
    drawn = nbformat.v4.new_output("display_data", data={PLOTLY_MIME: json.loads(theme.figure("A title").to_json())})
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%fsdp memory", outputs=[drawn])])
    (tmp_path / "page.html").write_text(to_page(book, title="T"), encoding="utf-8")
    with open_offline(chromium, tmp_path / "page.html") as opened:
        opened.page.wait_for_selector(".gtitle")
        found = []
        for scheme in ("light", "dark"):
            opened.page.emulate_media(color_scheme=scheme)
            title = opened.page.evaluate("getComputedStyle(document.querySelector('.gtitle')).fill")
            ink, behind = opened.page.evaluate(
                "(({color, backgroundColor}) => [color, backgroundColor])(getComputedStyle(document.body))"
            )
            assert title == ink
            found.append(behind)
        assert found == ["rgb(255, 255, 255)", "rgb(17, 17, 17)"]  # the page's, not what the browser has for a page


@pytest.mark.browser
def test_evidence_of_an_explanation_marks_its_events_in_the_figure_below(tmp_path, chromium):
    trace = example_trace()
    found = explain(trace, "step")
    figure = draw(found.picture.view, trace, **found.picture.options, marks=found.marks)
    data = [linked(found, figure), figure._repr_mimebundle_()]
    cells = [
        nbformat.v4.new_code_cell(
            "%fsdp explain step", outputs=[nbformat.v4.new_output("display_data", data=each) for each in data]
        )
        for _ in range(2)
    ]
    page = to_page(nbformat.v4.new_notebook(cells=cells), title="T")
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    with open_offline(chromium, tmp_path / "page.html") as opened:
        figures(opened.page)
        first, second = (opened.page.locator(".jp-CodeCell").nth(number) for number in range(2))
        outline = f'.shapelayer path[style*="stroke-width: {OUTLINE}px"]'
        second.get_by_role("button", name=found.answer.evidence[1]).press("Enter")
        second.locator(outline).wait_for()
        assert first.locator(outline).count() == 0  # the figure of its own cell
        second.locator(".updatemenu-button").first.click()
        second.locator(outline).wait_for(state="detached")
        assert opened.complaints == []


EVIL = "</pre><img src=x onerror='document.title = 1'><script>document.title = 2</script>"


def by_rank(*texts):
    """Return the outputs of a cell whose ranks wrote ``texts``."""
    outputs: list[Output] = []
    written_at_once(dict(enumerate(texts)), outputs.append)
    return [nbformat.v4.new_output("display_data", data=output.data) for output in outputs]


@pytest.mark.browser
def test_tabs_of_ranks_need_no_script(tmp_path, chromium):
    cells = [("one", by_rank("a\n", "b\n", "a\n")), ("two", by_rank("c\n", f"{EVIL}\n"))]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code, outputs=outputs) for code, outputs in cells])
    page = to_page(book, title="T").replace(
        "<head>",
        "<head><meta http-equiv='Content-Security-Policy' content=\"\
default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:\">",
    )
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    with open_offline(chromium, tmp_path / "page.html") as opened:
        one, two = (opened.page.locator(".jp-CodeCell").nth(number) for number in range(2))

        def seen(cell):
            return [pane.inner_text() for pane in cell.locator("section pre").all() if pane.is_visible()]

        assert (seen(one), seen(two)) == (["a"], ["c"])
        one.get_by_role("radio", name="rank 1").check()
        assert (seen(one), seen(two)) == (["b"], ["c"])
        one.get_by_role("radio", name="rank 2").check()
        assert seen(one) == ["a"]
        one.get_by_role("radio", name="all").check()
        two.get_by_role("radio", name="rank 1").check()
        assert (seen(one), seen(two)) == (["a", "b"], [EVIL])
        assert opened.page.title() == "T"


@pytest.mark.thorough
@pytest.mark.browser
def test_figures_follow_the_width_of_the_window(tmp_path, chromium):
    """A narrow figure is higher, as its title and its legend take more lines."""
    given = json.loads(draw("timeline", example_trace()).to_json())
    drawn = nbformat.v4.new_output("display_data", data={PLOTLY_MIME: given})
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%fsdp timeline", outputs=[drawn])])
    (tmp_path / "page.html").write_text(to_page(book, title="T"), encoding="utf-8")
    with open_offline(chromium, tmp_path / "page.html") as opened:
        (wide,) = figures(opened.page)
        assert titles_follow_the_width(opened.page)
        (narrow,) = figures(opened.page)
        assert narrow["height"] >= wide["height"] + 50
        around = "(graph) => graph.parentElement.getBoundingClientRect().height"
        assert opened.page.eval_on_selector(".plotly-graph-div", around) >= narrow["height"]
        assert opened.complaints == []
