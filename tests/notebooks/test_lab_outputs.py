"""What ranks print, in JupyterLab, in a real browser: shown once if they agree, in tabs if they differ."""

import os

import pytest

from tests.helpers.jupyterlab import LONG_SCENES, SHOTS, jupyterlab, open_notebook

pytestmark = LONG_SCENES

NUM_RANKS = 3
EVIL = "</pre><script>document.title = 'evil'</script>"
WAITING = """%%fsdp
print("model built")
for turn in range(2):
    for line in range(40):
        print(f"rank {{rank}}, turn {{turn}}, line {{line}}")
    _ = open(f"{folder}/turn-{{turn}}-{{rank}}").read()"""
FIGURE = """%%fsdp
from IPython.display import HTML, SVG, display
import warnings
warnings.warn("careful")
display(HTML("<i>the same</i>"))
display(HTML(f"<table><tr><td>table of rank {rank}</td></tr></table>"))
display(SVG(f"<svg xmlns='http://www.w3.org/2000/svg' width='150' height='60'>"
            f"<circle cx='{30 + 40 * rank}' cy='30' r='25' fill='teal'/></svg>"))
print("after", rank)"""
AGREE, WAIT, TEXT, DRAW = range(2, 6)


def cells(folder):
    return [
        "%load_ext workbench",
        f"%fsdp start -n {NUM_RANKS} --device cpu",
        "%%fsdp\nprint('hello')",
        WAITING.format(folder=folder),
        f"%%fsdp\nprint({EVIL!r}, rank // 2)",
        FIGURE,
    ]


def outputs(cell):
    """Return the visible texts of a cell's outputs."""
    return [output.inner_text() for output in cell.locator(".jp-OutputArea-output").all()]


def seen(cell):
    """Return the texts of the visible panes."""
    return [pane.inner_text() for pane in cell.locator("section pre").all() if pane.is_visible()]


def tab(cell, name):
    return cell.get_by_role("radio", name=name)


def marks(cell):
    """Return the mark after the name of each tab."""
    return cell.locator("fieldset label").evaluate_all(
        "(tabs) => tabs.map((tab) => getComputedStyle(tab, '::after').content)"
    )


@pytest.fixture(scope="module")
def lab(tmp_path_factory, chromium):
    """The notebook with its ranks started, and a function that lets the ranks of the waiting cell continue."""
    folder = tmp_path_factory.mktemp("lab")
    for rank in range(NUM_RANKS):
        for turn in range(2):
            os.mkfifo(folder / f"turn-{turn}-{rank}")

    def go_on(turn):
        for rank in range(NUM_RANKS):
            (folder / f"turn-{turn}-{rank}").write_text("go")

    with jupyterlab(folder, cells(folder)) as url, open_notebook(url, chromium) as lab:
        for number in range(WAIT):
            lab.run(number)
            lab.ends(number)
        yield lab, go_on


def shot(lab, cell, name):
    SHOTS.mkdir(parents=True, exist_ok=True)
    for theme in ("Light", "Dark"):
        lab.change_theme(theme)
        (SHOTS / f"lab_{name}_{theme.lower()}.png").write_bytes(cell.screenshot())
    lab.change_theme("Light")


def test_equal_output_appears_once(lab):
    lab, _ = lab
    cell = lab.cell(AGREE)
    lab.reads(AGREE, "hello")
    (output,) = outputs(cell)
    assert output.splitlines() == ["hello", "--- 3 ranks agree"]


def test_tabs_grow_while_the_cell_runs_and_the_one_that_was_chosen_stays(lab):
    lab, go_on = lab
    lab.run(WAIT)
    cell = lab.cell(WAIT)
    cell.get_by_text("rank 0, turn 0, line 39").wait_for()
    tab(cell, "rank 2").check()
    cell.get_by_text("rank 2, turn 0, line 39").wait_for()
    assert sum("model built" in output for output in outputs(cell)) == 1
    shot(lab, cell, "by_rank_live")
    go_on(0)
    cell.get_by_text("rank 2, turn 1, line 39").wait_for()
    assert tab(cell, "rank 2").is_checked()
    (text,) = seen(cell)
    assert text.splitlines() == [f"rank 2, turn {turn}, line {line}" for turn in range(2) for line in range(40)]
    go_on(1)
    lab.ends(WAIT)
    tab(cell, "all").check()
    assert [text.splitlines()[0] for text in seen(cell)] == [f"rank {rank}, turn 0, line 0" for rank in range(3)]
    shot(lab, cell, "by_rank_all")


def test_arrow_keys_switch_tabs_and_output_is_escaped(lab):
    lab, _ = lab
    lab.run(TEXT)
    lab.ends(TEXT)
    cell = lab.cell(TEXT)
    tab(cell, "rank 0").focus()
    assert seen(cell) == [f"{EVIL} 0"]
    for _ in range(2):
        lab.page.keyboard.press("ArrowRight")
    assert tab(cell, "rank 2").is_checked()
    assert seen(cell) == [f"{EVIL} 1"]
    assert [("≠" in mark) for mark in marks(cell)] == [False, False, True, False]
    assert "evil" not in lab.page.title()


def test_figures_that_differ_are_in_tabs_and_equal_ones_appear_once(lab):
    lab, _ = lab
    lab.run(DRAW)
    lab.ends(DRAW)
    cell = lab.cell(DRAW)
    tables, pictures = cell.locator("td"), cell.locator("section img")
    pictures.nth(2).wait_for(state="attached")
    assert cell.locator("i").all_inner_texts() == ["the same"]
    for rank in range(NUM_RANKS):
        tab(cell, f"rank {rank}").check()
        assert [table.inner_text() for table in tables.all() if table.is_visible()] == [f"table of rank {rank}"]
        assert [picture.is_visible() for picture in pictures.all()] == [rank == other for other in range(NUM_RANKS)]
    tab(cell, "all").check()
    tops = {round(picture.bounding_box()["y"]) for picture in pictures.all()}
    assert len(tops) == 1  # side by side
    assert outputs(cell)[0].splitlines()[0] == "Cell, line 3: UserWarning: careful"
    shot(lab, cell, "by_rank_figures")


def test_no_outside_requests_and_no_console_errors(lab):
    lab, _ = lab
    assert lab.errors == []
    assert lab.outside == []
