"""The live dashboard in JupyterLab, in a real browser: it lives while a cell runs, and its cursor drives all panels."""

import pytest

from tests.integration.model import CELL
from tests.notebooks.lab import SHOTS, jupyterlab, opened

pytestmark = [pytest.mark.browser, pytest.mark.cluster, pytest.mark.timeout(300)]

CELLS = [
    "%load_ext workbench",
    "early = %fsdp dashboard\nearly",
    "%fsdp start -n 2 --device cpu",
    f"%%fsdp{CELL}",
    "%fsdp shard model --wrap Block",
    "dash = %fsdp dashboard\ndash",
    "%fsdp step 100000",
    "import threading\nearly.close()\ndash.close()\nprint([t.name for t in threading.enumerate() if 'dash' in t.name])",
    "%fsdp stop",
]
EARLY, SHARD, SHOW, STEP, CLOSE, STOP = 1, 4, 5, 6, 7, 8
VIEW = "document.querySelectorAll('.fw-dashboard')[1].dashboard"


@pytest.fixture(scope="module")
def lab(tmp_path_factory, chromium):
    """The notebook, its dashboard shown and a long step running."""
    with jupyterlab(tmp_path_factory.mktemp("lab"), CELLS) as url, opened(url, chromium) as lab:
        for number in range(STEP):
            lab.run(number)
            lab.ends(number)
        lab.page.locator(".fw-dashboard").nth(1).scroll_into_view_if_needed()  # out of sight it does not ask
        lab.page.wait_for_function(f"() => {VIEW}?.told !== undefined", timeout=20_000)
        lab.run(STEP)
        waits(lab, "steps.length > 6", 60)
        yield lab


def waits(lab, what, timeout_s=20.0):
    """Wait until something is so of the dashboard."""
    lab.page.wait_for_function(f"() => {{ const d = {VIEW}; return d.{what}; }}", timeout=timeout_s * 1000)


def get(lab, what):
    """Something of the dashboard."""
    return lab.page.evaluate(f"() => {{ const d = {VIEW}; return {what}; }}")


def shoot(lab, name):
    SHOTS.mkdir(parents=True, exist_ok=True)
    dash = lab.page.locator(".fw-dashboard").nth(1)
    dash.scroll_into_view_if_needed()
    lab.page.wait_for_timeout(400)
    (SHOTS / f"dashboard_{name}.png").write_bytes(dash.screenshot())


def look(lab, panel):
    """The pixels of a panel."""
    return get(lab, f"d.root.querySelector('{panel}').toDataURL()")


PANELS = (".fw-memory", ".fw-states", ".fw-timeline canvas")


def test_without_ranks_it_said_what_to_do(lab):
    assert "%fsdp start" in lab.page.locator(".fw-dashboard").first.inner_text()


def test_it_is_told_what_happens_while_the_cell_runs(lab):
    before = get(lab, "[d.steps.length, d.end, d.timeline.stats().rectangles]")
    waits(lab, f"steps.length > {before[0] + 3}")
    after = get(lab, "[d.steps.length, d.end, d.timeline.stats().rectangles]")
    assert all(new > old for new, old in zip(after, before, strict=True))
    text = lab.page.locator(".fw-dashboard").nth(1).inner_text()
    assert "ranks 0-1 alike" in text
    assert "peak " in text
    assert "blocks.1" in str(get(lab, "d.units"))
    shoot(lab, "light")


def test_the_cursor_holds_the_view_and_every_panel_shows_that_event(lab):
    dash = lab.page.locator(".fw-dashboard").nth(1)
    dash.scroll_into_view_if_needed()
    waits(lab, "isLive")
    box = dash.locator(".fw-memory").bounding_box()
    lab.page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 40)
    lab.page.mouse.down()
    lab.page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 40, steps=4)
    lab.page.mouse.up()
    waits(lab, "moment !== null && !d.isWaiting && !d.wanted")
    assert not get(lab, "d.isLive")
    lab.page.wait_for_timeout(300)
    before = [look(lab, panel) for panel in PANELS]
    first = get(lab, "[d.moment.t_us, d.moment.seq, d.event.textContent]")
    assert get(lab, "d.timeline.stats().cursor === d.cursor")
    for _ in range(5):
        seq = get(lab, "d.moment.seq")
        lab.page.keyboard.press("ArrowRight")
        waits(lab, f"moment.seq > {seq}")
    lab.page.wait_for_timeout(300)
    later = get(lab, "[d.moment.t_us, d.moment.seq, d.event.textContent]")
    assert later[1] > first[1]
    assert later[2] != first[2]
    assert get(lab, "[d.cursor, d.timeline.stats().cursor, d.moment.t_us]") == [later[0]] * 3
    after = [look(lab, panel) for panel in PANELS]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False] * 3
    lab.page.keyboard.press("ArrowLeft")
    waits(lab, f"moment.seq < {later[1]}")  # by row: an arrival bears an earlier time than the row before it


def test_a_held_view_stays_while_training_goes_on_until_live_lets_go(lab):
    view, count = get(lab, "[d.timeline.stats().view.join(), d.steps.length]")
    waits(lab, f"steps.length > {count + 3}")
    assert get(lab, "d.timeline.stats().view.join()") == view
    lab.page.locator(".fw-dashboard").nth(1).locator(".fw-live").click()
    waits(lab, "isLive")
    assert get(lab, "d.cursor") is None
    waits(lab, f"timeline.stats().view.join() !== '{view}'")


def test_dark_it_is_as_legible(lab):
    lab.page.evaluate("() => window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    lab.page.wait_for_selector(".fw-dashboard.fw-dark", timeout=20_000)
    shoot(lab, "dark")
    lab.page.evaluate("() => window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Light'})")
    lab.page.wait_for_selector(".fw-dashboard:not(.fw-dark)", timeout=20_000)


def test_buttons_stop_inside_the_running_step_and_go_on(lab):
    dash = lab.page.locator(".fw-dashboard").nth(1)
    dash.locator(".fw-pause").click()
    dash.locator(".fw-continue:not([disabled])").wait_for(timeout=20_000)
    waits(lab, "health.every(({state}) => state === 'held' || state === 'waiting')")
    assert "held before" in dash.locator(".fw-ranks").inner_text()
    lab.ends(STEP)  # the cell has returned, the step has not
    shoot(lab, "held")
    place = get(lab, "JSON.stringify(d.health)")
    dash.locator(".fw-next").click()
    waits(lab, f"health[0].state === 'held' && JSON.stringify(d.health) !== '{place}'")
    count = get(lab, "d.steps.length")
    dash.locator(".fw-continue").click()
    waits(lab, f"steps.length > {count + 3}")
    dash.locator(".fw-abort").click()
    waits(lab, "health.every(({state}) => state === 'idle')")
    waits(lab, "said.includes('ready again')")


def test_closing_takes_everything_away(lab):
    lab.run(CLOSE)
    lab.ends(CLOSE)
    lab.page.wait_for_function("() => document.querySelectorAll('.fw-dashboard').length === 0", timeout=20_000)
    assert lab.cell(CLOSE).locator(".jp-OutputArea-output").inner_text().strip() == "[]"
    lab.run(STOP)
    lab.ends(STOP)


def test_nothing_is_fetched_from_elsewhere_and_nothing_complains(lab):
    assert lab.outside == []
    assert lab.errors == []
