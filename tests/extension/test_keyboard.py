"""Keyboard and screen reader access to the panel and dashboard in JupyterLab; names contain HTML."""

import re
from itertools import pairwise

import pytest
from playwright.sync_api import expect

from tests.helpers.browser import PATIENCE_MS
from tests.helpers.built_panel import built_panel
from tests.helpers.jupyterlab import LONG_SCENES, jupyterlab, open_notebook
from tests.helpers.notebook_model import UNHURRIED
from tests.helpers.panel_page import dashboard, headline, panel, run, section, shot, tool

pytestmark = LONG_SCENES

EVIL = "<img src=x onerror=alert(1)>"
MODEL = f"""%%fsdp
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x).relu()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.add_module({EVIL!r}, Block())

    def forward(self, x):
        return self.get_submodule({EVIL!r})(self.blocks(x))

Net.__name__ = {EVIL!r}
model = Net()
opt = torch.optim.AdamW(model.parameters())

def train_step():
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss
"""
CELLS = ["%load_ext workbench", f"{MODEL}{UNHURRIED}", "%fsdp shard model --wrap Block"]

# of the focused element: its name, its position on the page, and how the focus is shown
FOCUSED = """() => {
  const found = document.activeElement, box = found.getBoundingClientRect(), style = getComputedStyle(found);
  const panel = document.querySelector(".fsdp-Panel");
  const name = found.ariaLabel ?? found.labels?.[0]?.innerText ?? found.innerText;
  return {tag: found.tagName, name: name.trim(), x: box.x, y: box.y + panel.scrollTop, height: box.height,
    isInside: panel.contains(found), outline: parseFloat(style.outlineWidth),
    isShown: style.outlineStyle !== "none"};
}"""

# record the texts of live regions below an element from now on, with repetitions
LISTEN = """(selector) => {
  const said = (window.said = []), regions = document.querySelector(selector).querySelectorAll("[role=status]");
  for (const region of regions) {
    new MutationObserver(() => said.push(region.textContent))
      .observe(region, {subtree: true, childList: true, characterData: true});
  }
}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory, chromium):
    """A JupyterLab with the panel open, on a notebook whose kernel has loaded the workbench."""
    expect.set_options(timeout=PATIENCE_MS)
    folder = tmp_path_factory.mktemp("lab")
    with (
        jupyterlab(folder, CELLS, panel=built_panel(), has_one_kernel=False) as url,
        open_notebook(url, chromium) as lab,
    ):
        lab.do(0)
        yield lab


def focused(lab):
    return lab.page.evaluate(FOCUSED)


def press(lab, *keys):
    for key in keys:
        lab.page.keyboard.press(key)


def enter(button):
    """Press Enter on a button once it is enabled: it is disabled until the kernel answers."""
    expect(button).to_be_enabled()
    button.press("Enter")


def nameless(lab, selector):
    """Return the roles of focusable elements without a name below an element, from the browser's accessibility tree."""
    devtools = lab.page.context.new_cdp_session(lab.page)
    root = devtools.send("DOM.getDocument")["root"]["nodeId"]
    node = devtools.send("DOM.querySelector", {"nodeId": root, "selector": selector})["nodeId"]
    found = devtools.send("Accessibility.queryAXTree", {"nodeId": node})["nodes"]
    devtools.detach()
    can_have_it = [
        each
        for each in found
        if any(p["name"] == "focusable" and p["value"]["value"] for p in each.get("properties", []))
    ]
    assert can_have_it
    return [each["role"]["value"] for each in can_have_it if not each.get("name", {}).get("value", "").strip()]


def to(lab, name):
    """Press Tab until the element called ``name`` has the focus."""
    seen = []
    while not (now := focused(lab))["name"].startswith(name):
        assert len(seen) < 60, f"{name} is not among {seen}"
        seen.append(now["name"])
        press(lab, "Tab")


def test_ranks_are_started_by_keyboard_and_the_focus_is_not_lost(lab):
    press(lab, "Escape", "Control+Alt+f")
    expect(tool(lab, "Start 4 ranks")).to_be_enabled()
    to(lab, "Ranks")
    press(lab, "Control+a", "2", "Tab", "c", "Tab", "Tab")  # skips the fields under More
    assert focused(lab)["name"] == "Start 2 ranks"
    enter(tool(lab, "Start 2 ranks"))
    expect(section(lab, "Ranks").get_by_role("listitem")).to_have_count(2)
    assert focused(lab)["isInside"], focused(lab)  # the form has gone
    for number in (1, 2):
        lab.do(number)
    expect(section(lab, "Units").get_by_role("treeitem")).to_have_count(5)


def test_tab_goes_as_one_reads_and_shows_where_it_is(lab):
    run(lab, "fsdp:open-panel")
    lab.page.evaluate("() => document.querySelector('.fsdp-Panel').focus()")
    press(lab, "Tab")
    found = []
    while (now := focused(lab))["isInside"]:
        assert now["isShown"], now
        assert now["outline"] >= 2, now
        found.append(now)
        press(lab, "Tab")
    assert len(found) > 15
    scrolled = [each for each in found if each["height"] < 100]  # a tree's item includes all items below it
    for before, after in pairwise(scrolled):
        is_below = after["y"] >= before["y"] + before["height"] / 2
        assert is_below or after["x"] > before["x"], (before, after)


def test_everything_that_can_have_the_focus_has_a_name(lab):
    section(lab, "Units").get_by_role("treeitem", name="blocks.0", exact=True).press("Enter")
    expect(section(lab, "Units").get_by_role("button", name="blocks.0.linear.weight")).to_be_visible()
    assert nameless(lab, ".fsdp-Panel") == []
    press(lab, "Enter")
    expect(section(lab, "Units").get_by_role("button", name="linear")).to_have_count(0)


def test_the_tree_goes_by_arrows_and_its_menu_by_a_key(lab):
    tree = section(lab, "Units")
    tree.get_by_role("treeitem").first.focus()
    press(lab, "End")
    assert focused(lab)["name"] == "blocks.1"
    press(lab, "Home", "ArrowDown")
    assert focused(lab)["name"] == EVIL
    press(lab, "ArrowDown")
    assert focused(lab)["name"] == "blocks"
    press(lab, "ArrowRight")
    assert focused(lab)["name"] == "blocks.0"
    press(lab, "ArrowLeft")
    assert focused(lab)["name"] == "blocks"
    press(lab, "ArrowDown", "ContextMenu")
    menu = lab.page.get_by_role("menu")
    expect(menu.get_by_text("Reshard This")).to_be_visible()
    shot(lab, "menu_by_keyboard")
    press(lab, "Escape")
    expect(menu.get_by_text("Reshard This")).to_have_count(0)
    lab.page.wait_for_function(f"() => ({FOCUSED})().name === 'blocks.0'")


def test_one_unit_is_resharded_from_its_menu(lab):
    tree = section(lab, "Units")
    tree.get_by_role("treeitem", name="blocks.1", exact=True).press("Shift+F10")
    lab.page.get_by_role("menu").get_by_text("Reshard This").click()
    form = section(lab, "Shard")
    expect(form.get_by_label("Model")).to_be_focused()
    expect(form.get_by_label("Model")).to_have_value("model.blocks.1")
    form.get_by_label("After forward").select_option("false")
    expect(form.get_by_role("row").first).to_have_text("units3")
    shot(lab, "reshard_unit")
    lab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    form.get_by_role("button", name="Reshard").click(button="right")
    lab.page.get_by_text("Copy as %fsdp Line").click()
    line = "%fsdp reshard model.blocks.1 --reshard-after-forward false"
    lab.page.wait_for_function("async (line) => (await navigator.clipboard.readText()) === line", arg=line)
    enter(form.get_by_role("button", name="Reshard"))
    expect(section(lab, "Commands")).to_contain_text(f"{line}resharded in place, model.blocks.1: 1 unit on 2 ranks")
    kept = tree.get_by_role("treeitem", name="blocks.1", exact=True)
    expect(kept.locator(".fsdp-Unit-row")).to_have_attribute("title", re.compile("reshard after forward: false"))


def test_a_screen_reader_announces_states_once_and_not_each_step(lab):
    lab.page.evaluate(LISTEN, ".fsdp-Panel")
    tool(lab, "Train 1 step").focus()
    lab.page.get_by_label("Training steps").fill("100000")
    enter(tool(lab, "Train 100000 steps"))
    for _ in range(3):
        before = headline(lab).inner_text()
        expect(headline(lab)).not_to_have_text(before)
    enter(tool(lab, "Pause inside the step"))
    expect(panel(lab).get_by_role("status", name="state of the ranks")).to_contain_text(" stopped ")
    assert focused(lab)["name"] == "Pause inside the step"  # it is disabled now, and keeps the focus
    announced = [words for words in lab.page.evaluate("said") if "step 100000" in words or " stopped " in words]
    assert len(announced) == len(set(announced)) <= 4, announced
    assert [" stopped " in words for words in announced].count(True) == 1


def test_breakpoints_are_cleared_one_after_the_other(lab):
    for event in ("forward:blocks.0", f"'forward:{EVIL}'"):
        lab.page.get_by_label("Event to stop before").fill(event.strip("'"))
        press(lab, "Enter")
        expect(section(lab, "Breakpoints")).to_contain_text(event.strip("'"))
    clear = section(lab, "Breakpoints").get_by_role("button", name="Clear breakpoint")
    enter(clear.first)
    expect(clear).to_have_count(1)
    assert focused(lab)["isInside"]
    assert lab.page.evaluate("() => document.querySelector('.fsdp-Breakpoints').contains(document.activeElement)")


def test_the_dashboard_has_names_keeps_the_focus_and_is_calm_for_readers(lab):
    run(lab, "fsdp:open-dashboard")
    expect(dashboard(lab).locator(".fw-badge")).to_contain_text("stopped")
    assert nameless(lab, ".fsdp-Dashboard") == []
    expect(dashboard(lab)).to_contain_text(EVIL)  # of its breakpoint
    lab.page.evaluate(LISTEN, ".fsdp-Dashboard .fw-head")
    following = dashboard(lab).get_by_role("button", name="next")
    for _ in range(3):
        expect(tool(lab, "Run to the next event")).to_be_enabled()  # the notebook has the stop, too
        where = dashboard(lab).locator(".fw-why").inner_text()
        enter(following)
        expect(dashboard(lab).locator(".fw-why")).not_to_have_text(where)
        expect(dashboard(lab).locator(".fw-badge")).to_contain_text("stopped")
        expect(following).to_be_focused()
    announced = lab.page.evaluate("said")
    assert any(words.startswith("stopped: ") for words in announced)
    assert all(words != again for words, again in pairwise(announced))
    shot(lab, "keyboard_dashboard")
    tool(lab, "Abort").click()
    expect(section(lab, "Ranks").locator(".fsdp-mod-idle")).to_have_count(2)


def test_names_are_not_interpreted_as_html(lab):
    for place in (".fsdp-Panel", ".fsdp-Dashboard", ".jp-Notebook"):
        assert lab.page.locator(f"{place} img[src=x]").count() == 0
    assert lab.errors == []
