"""The magics in a real kernel, on a fake cluster: the contents of a saved notebook."""

import nbformat
import pytest
from nbconvert import HTMLExporter

from tests.helpers import json_schema
from tests.helpers.package_source import REPO
from workbench.cli.demo import execute
from workbench.views.theme import PLOTLY_MIME

SETUP = """
from tests.helpers.fake_cluster import FakeCluster, blocks, prints, raises
from workbench.magics import register
from workbench.workbench import Workbench

fakes = []
def factory(*args, **settings):
    fakes.append(FakeCluster(*args, **settings))
    return fakes[-1]
_ = register(get_ipython(), lambda *args, **settings: Workbench(*args, cluster_factory=factory, **settings))
"""
CELLS = {
    "setup": SETUP,
    "start": "%fsdp start -n 4\nfakes[-1].sharded()\nfakes[-1].script['step'] = fakes[-1].trains(3)",
    "step": "%fsdp step 3",
    "layout": "%fsdp layout\nx = 1",
    "script": "fakes[-1].script['cell'] = [prints(f'same\\n<b>{rank // 2}</b>\\n') for rank in range(4)]",
    "differ": "%%fsdp\nprint(...)",
    "failing": "fakes[-1].script['step'] = [blocks, raises('ValueError', 'no', line=3), blocks, blocks]\n%fsdp step 2",
    "usage": "%fsdp shrad",
    "json": "%fsdp status --json\n%fsdp comms --json",
    "stop": "%fsdp stop",
}


@pytest.fixture(scope="module")
def cells():
    """Outputs of each cell by name, and the whole notebook under ``notebook``."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS.values()])
    for name, cell in zip(CELLS, notebook.cells, strict=True):
        cell.metadata["tags"] = ["raises-exception"] if name in {"failing", "usage"} else []
    execute(notebook, REPO)
    found = {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}
    return {**found, "notebook": notebook}


def test_progress_is_one_output_with_its_end_in_it(cells):
    bars = [out for out in cells["step"] if "progressbar" in out.get("data", {}).get("text/html", "")]
    assert len(bars) == 1
    assert 'aria-valuenow="3"' in bars[0].data["text/html"]
    assert "3 of 3 steps" in bars[0].data["text/plain"]
    assert "3 steps, loss 4.5 -&gt; 4.3" in cells["step"][-1].data["text/html"]


def test_documents_are_the_lines_of_a_stream(cells):
    assert {output.get("name") for output in cells["json"]} == {"stdout"}
    lines = "".join(output.text for output in cells["json"]).splitlines()
    assert [json_schema.read(line)["type"] for line in lines] == ["StatusReport", "CommsReport"]


def test_a_figure_is_there_for_jupyterlab(cells):
    (figure,) = cells["layout"]
    assert set(figure.data) == {PLOTLY_MIME, "text/plain"}
    assert "Each of 4 ranks keeps" in figure.data["text/plain"]


def test_an_error_is_an_error_with_one_clean_text(cells):
    *_, error = cells["failing"]
    assert (error.output_type, error.ename) == ("error", "RankError")
    text = "\n".join(error.traceback)
    assert "rank 1 raised ValueError: no (line 3 of the cell)" in text
    assert "workbench/" not in text
    (bar,) = [out for out in cells["failing"] if "progressbar" in out.get("data", {}).get("text/html", "")]
    assert "rank 1 raised ValueError" in bar.data["text/html"]
    (usage,) = cells["usage"]
    assert (usage.output_type, usage.ename) == ("error", "UsageError")
    assert usage.traceback[0].startswith("UsageError: %fsdp has no command 'shrad', did you mean 'shard'?")


def test_output_of_ranks_is_saved_as_tabs_and_as_text(cells):
    same, upper, lower = cells["differ"]
    assert same.text == "same\n"
    assert upper.data["text/html"].count("<input ") == 5
    assert lower.data["text/plain"] == "--- ranks 0-1:\n<b>0</b>\n--- ranks 2-3:\n<b>1</b>"
    assert "&lt;b&gt;1&lt;/b&gt;" in lower.data["text/html"]


def test_the_notebook_as_a_page_shows_the_bar(cells):
    page, _ = HTMLExporter().from_notebook_node(cells["notebook"])
    assert 'aria-valuenow="3"' in page
    assert "width:100.0%" in page
