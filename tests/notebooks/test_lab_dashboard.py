"""The live dashboard in JupyterLab, in a real browser: it lives while a cell runs, and its cursor drives all panels."""

import pytest

from tests.integration.model import CELL
from tests.notebooks.lab import SHOTS, jupyterlab, opened

pytestmark = [pytest.mark.browser, pytest.mark.cluster, pytest.mark.timeout(900)]

CELLS = [
    "%load_ext workbench",
    "early = %fsdp dashboard\nearly",
    "%fsdp start -n 2 --device cpu",
    f"%%fsdp{CELL}",
    "%fsdp shard model --wrap Block",
    "dash = %fsdp dashboard\ndash",
    "canvas = %fsdp timeline --canvas\ncanvas",
    "%fsdp step 100000",
    "%fsdp back 60",
    "%fsdp back 0",
    "import threading\nfor widget in (early, dash, canvas): widget.close()\n"
    "print([t.name for t in threading.enumerate() if 'dash' in t.name])",
    "%fsdp stop",
]
EARLY, SHARD, SHOW, CANVAS, STEP, BACK, NEWEST, CLOSE, STOP = 1, 4, 5, 6, 7, 8, 9, 10, 11
VIEW = "document.querySelectorAll('.fw-dashboard')[1].dashboard"
TIMELINE = "document.querySelector('.fw-canvas').sight.timeline"
DEADLINE_S = 90  # a machine may be busy with other things


@pytest.fixture(scope="module")
def lab(tmp_path_factory, chromium):
    """The notebook, its dashboard shown and a long step running."""
    with jupyterlab(tmp_path_factory.mktemp("lab"), CELLS) as url, opened(url, chromium) as lab:
        for number in range(STEP):
            do(lab, number)
        show(lab)
        lab.page.wait_for_function(f"() => {VIEW}?.told !== undefined", timeout=DEADLINE_S * 1000)
        lab.run(STEP)
        waits(lab, "steps.length > 6")
        yield lab


def do(lab, number):
    """Run a cell to its end."""
    lab.run(number)
    lab.ends(number, DEADLINE_S)


def show(lab):
    """Bring the dashboard into view: out of sight it does not ask."""
    dash = lab.page.locator(".fw-dashboard").nth(1)
    dash.scroll_into_view_if_needed(timeout=DEADLINE_S * 1000)
    return dash


def waits(lab, what):
    """Wait until something is so of the dashboard."""
    lab.page.wait_for_function(f"() => {{ const d = {VIEW}; return d.{what}; }}", timeout=DEADLINE_S * 1000)


def get(lab, what):
    """Something of the dashboard."""
    return lab.page.evaluate(f"() => {{ const d = {VIEW}; return {what}; }}")


IS_ANSWERED = "isWaiting === false && !d.wanted && d.frame === 0 && !d.closeup.asked && !d.closeup.wanted"


def settles(lab):
    """Wait until what the dashboard knows is drawn, in all its panels, and what it asked of the cursor is answered."""
    waits(lab, IS_ANSWERED)
    lab.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")


def says(lab, words):
    """Wait until the dashboard says so."""
    lab.page.wait_for_function(
        "(words) => document.querySelectorAll('.fw-dashboard')[1].innerText.includes(words)",
        arg=words,
        timeout=DEADLINE_S * 1000,
    )


def shoot(lab, name):
    SHOTS.mkdir(parents=True, exist_ok=True)
    dash = show(lab)
    settles(lab)
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
    waits(lab, f"timeline.stats().rectangles > {before[2]}")
    assert get(lab, "d.end") > before[1]
    for words in ("ranks 0-1 alike", "peak ", "simplified: click for every change"):
        says(lab, words)
    assert "blocks.1" in str(get(lab, "d.units"))
    shoot(lab, "light")


def test_the_canvas_grows_while_the_cell_runs(lab):
    canvas = lab.page.locator(".fw-canvas")
    canvas.scroll_into_view_if_needed(timeout=DEADLINE_S * 1000)
    for _ in range(2):
        count = lab.page.evaluate(f"() => {TIMELINE}.stats().rectangles")
        lab.page.wait_for_function(f"() => {TIMELINE}.stats().rectangles > {count}", timeout=DEADLINE_S * 1000)
    SHOTS.mkdir(parents=True, exist_ok=True)
    (SHOTS / "canvas_light.png").write_bytes(canvas.screenshot())
    show(lab)


def test_the_cursor_holds_the_view_and_every_panel_shows_that_event(lab):
    dash = show(lab)
    waits(lab, "isLive")
    box = dash.locator(".fw-memory").bounding_box()
    lab.page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 40)
    lab.page.mouse.down()
    lab.page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 40, steps=4)
    lab.page.mouse.up()
    waits(lab, "moment !== null")
    assert not get(lab, "d.isLive")
    settles(lab)
    before = [look(lab, panel) for panel in PANELS]
    first = get(lab, "[d.moment.t_us, d.moment.seq, d.event.textContent]")
    assert get(lab, "d.timeline.stats().cursor === d.cursor")
    for _ in range(5):
        seq = get(lab, "d.moment.seq")
        dash.press("ArrowRight")
        waits(lab, f"moment.seq > {seq}")
    settles(lab)
    later = get(lab, "[d.moment.t_us, d.moment.seq, d.event.textContent]")
    assert later[1] > first[1]
    assert later[2] != first[2]
    assert get(lab, "[d.cursor, d.timeline.stats().cursor, d.moment.t_us]") == [later[0]] * 3
    after = [look(lab, panel) for panel in PANELS]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False] * 3
    shoot(lab, "cursor")
    dash.press("ArrowLeft")
    waits(lab, f"moment.seq < {later[1]}")  # by row: an arrival bears an earlier time than the row before it


DRAWN = """(() => {
    const {memory: [memory], states: [units]} = d.shown, width = d.about.classes.length;
    const last = memory.last("t", d.cursor);
    return {
        at: d.cursor,
        isExact: d.shown.exact === true,
        bytes: Array.from(memory.bytes.subarray(last * width, (last + 1) * width)),
        units: d.units.map((_, unit) => units[unit].state[units[unit].last("t", d.cursor)]),
        told: [d.moment.ranks[0].bytes, d.moment.ranks[0].units],
        inUse: d.moment.ranks[0].in_use,
        legend: Array.from(d.memoryLegend.querySelectorAll("b"), (number) => number.textContent),
        hint: d.hints[0].textContent,
    };
})()"""


def drawn_at_cursor(lab):
    """What is drawn where the cursor stands; it must be what the numbers say."""
    drawn = get(lab, DRAWN)
    assert drawn["isExact"]
    assert drawn["hint"] == ""
    assert [drawn["bytes"], drawn["units"]] == drawn["told"]
    sizes = [drawn["inUse"], *(size for size in drawn["bytes"] if size)]
    assert [in_bytes(text) for text in drawn["legend"]] == pytest.approx(sizes, rel=0.006)  # three digits
    return drawn


def in_bytes(text):
    """``"1.50 KiB"`` -> 1536."""
    number, unit = text.split()
    return float(number) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit)


def test_what_is_drawn_under_the_cursor_is_what_the_numbers_say(lab):
    dash = show(lab)
    box, seen = dash.locator(".fw-memory").bounding_box(), []
    for place in (0.95, 0.8, 0.65, 0.5, 0.35):
        lab.page.mouse.click(box["x"] + place * box["width"], box["y"] + 40)
        settles(lab)
        seen.append(drawn_at_cursor(lab))
        for key in (*["ArrowLeft"] * 4, "ArrowRight"):
            seq = get(lab, "d.moment.seq")
            dash.press(key)
            waits(lab, f"moment.seq !== {seq}")
            settles(lab)
            seen.append(drawn_at_cursor(lab))
    assert len({tuple(drawn["bytes"]) for drawn in seen}) > 2
    assert len({tuple(drawn["units"]) for drawn in seen}) > 2


def test_a_held_view_stays_while_training_goes_on_until_live_lets_go(lab):
    view, count = get(lab, "[d.timeline.stats().view.join(), d.steps.length]")
    waits(lab, f"steps.length > {count + 3}")
    assert get(lab, "d.timeline.stats().view.join()") == view
    show(lab).locator(".fw-live").click()
    waits(lab, "isLive")
    assert get(lab, "d.cursor") is None
    waits(lab, f"timeline.stats().view.join() !== '{view}'")


def test_dark_it_is_as_legible(lab):
    theme(lab, "Dark")
    shoot(lab, "dark")
    show(lab).locator(".fw-memory").click(position={"x": 600, "y": 40})
    shoot(lab, "cursor_dark")
    drawn_at_cursor(lab)
    show(lab).locator(".fw-live").click()
    canvas = lab.page.locator(".fw-canvas")
    canvas.scroll_into_view_if_needed(timeout=DEADLINE_S * 1000)
    lab.page.wait_for_function(f"() => {TIMELINE}.stats().isDark", timeout=DEADLINE_S * 1000)
    (SHOTS / "canvas_dark.png").write_bytes(canvas.screenshot())
    theme(lab, "Light")
    show(lab)


def theme(lab, name):
    """Change JupyterLab's theme; it loads anew, and all draw themselves again."""
    change = f"window.jupyterapp.commands.execute('apputils:change-theme', {{theme: 'JupyterLab {name}'}})"
    lab.page.evaluate(f"() => {change}")
    dark = ".fw-dark" if name == "Dark" else ":not(.fw-dark)"
    lab.page.wait_for_function(
        f"() => document.querySelectorAll('.fw-dashboard{dark}').length === 2", timeout=DEADLINE_S * 1000
    )


def test_buttons_stop_inside_the_running_step(lab):
    dash = show(lab)
    dash.locator(".fw-pause").click()
    dash.locator(".fw-continue:not([disabled])").wait_for(timeout=DEADLINE_S * 1000)
    waits(lab, "health.every(({state}) => state === 'held' || state === 'waiting')")
    where = get(lab, "d.health.find(({state}) => state === 'held').where")
    assert where.startswith(("before ", "in a wait"))  # as it happens to stand
    says(lab, f"held {where}")
    lab.ends(STEP, DEADLINE_S)  # the cell has returned, the step has not
    shoot(lab, "held")
    place = get(lab, "JSON.stringify(d.health)")
    dash.locator(".fw-next").click()
    waits(lab, f"health[0].state === 'held' && JSON.stringify(d.health) !== '{place}'")


def test_the_word_moves_the_cursor_and_lets_it_go(lab):
    dash = show(lab)
    waits(lab, "isLive")
    do(lab, BACK)
    show(lab)
    waits(lab, "isLive === false && d.moment !== null")
    settles(lab)
    told = get(lab, "[d.cursor, d.timeline.stats().cursor, d.now.t_us]")
    assert told[0] == told[1] < told[2]
    assert "60 events before the newest" in lab.cell(BACK).inner_text()
    shoot(lab, "back")
    assert drawn_at_cursor(lab)["at"] == told[0]
    zoom_out_until(lab, "hints[0].textContent.startsWith('simplified: zoom in')")
    shoot(lab, "simplified")
    seq = get(lab, "d.moment.seq")
    dash.press("ArrowRight")  # the person's hand is worth as much
    waits(lab, f"moment.seq > {seq}")
    assert not get(lab, "d.isLive")
    do(lab, NEWEST)
    show(lab)
    waits(lab, "isLive")
    assert get(lab, "[d.cursor, d.timeline.stats().cursor]") == [None, None]
    do(lab, BACK)
    show(lab)
    waits(lab, "isLive === false")


def zoom_out_until(lab, what):
    """Turn the wheel over the timeline until something is so of the dashboard."""
    box = show(lab).locator(".fw-timeline canvas").bounding_box()
    lab.page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 60)
    for _ in range(30):
        lab.page.mouse.wheel(0, 240)
        settles(lab)
        if get(lab, f"d.{what}"):
            return
    raise AssertionError(get(lab, "[d.timeline.stats().view, d.closeup.found?.exact, d.hints[0].textContent]"))


def test_a_continued_step_lets_the_cursor_go(lab):
    dash, count = show(lab), get(lab, "d.steps.length")
    dash.locator(".fw-continue").click()
    waits(lab, f"steps.length > {count + 3}")
    waits(lab, "isLive")
    dash.locator(".fw-abort").click()
    waits(lab, "health.every(({state}) => state === 'idle')")
    waits(lab, "said.includes('ready again')")


def test_closing_takes_everything_away(lab):
    do(lab, CLOSE)
    gone = "() => document.querySelectorAll('.fw-dashboard, .fw-canvas').length === 0"
    lab.page.wait_for_function(gone, timeout=DEADLINE_S * 1000)
    assert lab.cell(CLOSE).locator(".jp-OutputArea-output").last.inner_text().strip() == "[]"
    do(lab, STOP)


def test_nothing_is_fetched_from_elsewhere_and_nothing_complains(lab):
    assert lab.outside == []
    assert lab.errors == []
