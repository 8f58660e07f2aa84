"""The live dashboard in JupyterLab, in a real browser: it updates while a cell runs; its cursor drives all panels."""

import pytest

from tests.helpers.jupyterlab import LONG_SCENES, SHOTS, jupyterlab, open_notebook
from tests.helpers.notebook_model import CELL, UNHURRIED

pytestmark = LONG_SCENES

CELLS = [
    "%load_ext workbench",
    "early = %fsdp dashboard\nearly",
    "%fsdp start -n 2 --device cpu",
    f"%%fsdp{CELL}{UNHURRIED}",
    "%fsdp shard model --wrap Block",
    "dash = %fsdp dashboard\ndash",
    "canvas = %fsdp timeline --canvas\ncanvas",
    "%fsdp step 100000",
    "%fsdp back 60",
    "%fsdp back 0",
    "import threading\nfor widget in (early, dash, canvas): widget.close()\n"
    "for t in threading.enumerate(): t.name == 'dashboard: abort' and t.join()\n"  # it has reported and will end soon
    # where the panel is installed, a thread waits for it too
    "print([t.name for t in threading.enumerate() if 'dash' in t.name and t.name != 'dashboard: panel waits'])",
    "%fsdp stop",
]
EARLY, SHARD, SHOW, CANVAS, STEP, BACK, NEWEST, CLOSE, STOP = 1, 4, 5, 6, 7, 8, 9, 10, 11
VIEW = "document.querySelectorAll('.fw-dashboard')[1].dashboard"
TIMELINE = "document.querySelector('.fw-canvas').dashboard.timeline.chart"


@pytest.fixture(scope="module")
def lab(tmp_path_factory, chromium):
    """The notebook, with its dashboard shown and a long step running."""
    with jupyterlab(tmp_path_factory.mktemp("lab"), CELLS) as url, open_notebook(url, chromium) as lab:
        for number in range(STEP):
            do(lab, number)
        show(lab)
        waits(lab, "client.hasBegun")
        lab.run(STEP)
        waits(lab, "model.steps.length > 6")
        yield lab


def do(lab, number):
    """Run a cell to its end."""
    lab.run(number)
    lab.ends(number)


def show(lab):
    """Bring the dashboard into view: out of sight it requests nothing."""
    dash = lab.page.locator(".fw-dashboard").nth(1)
    dash.scroll_into_view_if_needed()
    return dash


def waits(lab, what, then="true"):
    """Wait until the condition ``what`` holds for the dashboard; return the value of ``then`` at that moment."""
    question = f"() => {{ const d = {VIEW}; return d && (d.{what}) && {{found: {then}}}; }}"
    return lab.page.wait_for_function(question, polling=POLL_MS).evaluate("(answer) => answer.found")


def get(lab, what):
    """Return the value of an expression on the dashboard."""
    return lab.page.evaluate(f"() => {{ const d = {VIEW}; return {what}; }}")


POLL_MS = 20  # not per frame: an update between two frames would never be found drawn
IS_ANSWERED = (
    "client.isWaiting === false && !d.client.wanted && d.frames.pending === 0 && !d.closeup.asked && !d.closeup.wanted"
)


def settles(lab, then="true"):
    """Wait until all panels are drawn from the dashboard's current data, and the cursor's requests are answered.

    Returns the value of ``then`` at such a moment.
    """
    waits(lab, IS_ANSWERED)
    lab.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")
    return waits(lab, IS_ANSWERED, then)


def wait_for_text(lab, words):
    """Wait until the dashboard contains ``words``."""
    lab.page.wait_for_function(
        "(words) => document.querySelectorAll('.fw-dashboard')[1].innerText.includes(words)", arg=words
    )


def shoot(lab, name):
    SHOTS.mkdir(parents=True, exist_ok=True)
    dash = show(lab)
    settles(lab)
    (SHOTS / f"dashboard_{name}.png").write_bytes(dash.screenshot())


def look(lab, panel):
    """Return the pixels of a panel."""
    return get(lab, f"d.root.querySelector('{panel}').toDataURL()")


PANELS = (".fw-memory", ".fw-states", ".fw-timeline canvas")


def test_a_dashboard_opened_before_the_start_shows_the_new_ranks(lab):
    early = lab.page.locator(".fw-dashboard").first
    early.scroll_into_view_if_needed()  # out of sight it requests nothing
    early.filter(has_text="ranks 0-1").filter(has_text="running").wait_for()
    early.filter(has_text="live").wait_for()
    assert "%fsdp start" not in early.inner_text()
    show(lab)


def test_it_is_updated_while_the_cell_runs(lab):
    before = get(lab, "[d.model.steps.length, d.model.end, d.timeline.chart.stats().rectangles]")
    waits(lab, f"model.steps.length > {before[0] + 3}")
    waits(lab, f"timeline.chart.stats().rectangles > {before[2]}")
    assert get(lab, "d.model.end") > before[1]
    for words in ("unsharded on rank", "peak "):
        wait_for_text(lab, words)
    get(lab, NOTE_HINTS)
    misses(lab, steps=30)  # more than fits into one answer
    waits(lab, "hinted.has('simplified: click for every change')")
    assert "blocks.1" in str(get(lab, "d.model.units"))
    shoot(lab, "light")


NOTE_HINTS = """(() => {
    d.hinted = new Set([d.memory.hint.textContent]);
    new MutationObserver(() => d.hinted.add(d.memory.hint.textContent)).observe(d.memory.hint, {childList: true});
})()"""  # on a slow machine it soon disappears again
STEPS_DONE = "(cell) => Number(cell.textContent.match(/step ([\\d,]+) of/)?.[1].replaceAll(',', ''))"


def misses(lab, steps):
    """Keep the dashboard out of sight for some steps."""
    cell = lab.cell(STEP).element_handle()
    get(lab, "d.root.closest('.jp-Cell').style.display = 'none'")
    waits(lab, "client.isAwake === false && !d.client.isAsking")
    begin = lab.page.wait_for_function(STEPS_DONE, arg=cell).json_value()
    lab.page.wait_for_function(f"(cell) => ({STEPS_DONE})(cell) > {begin + steps}", arg=cell)
    get(lab, "d.root.closest('.jp-Cell').style.display = ''")
    show(lab)


def test_the_canvas_grows_while_the_cell_runs(lab):
    canvas = lab.page.locator(".fw-canvas")
    canvas.scroll_into_view_if_needed()
    for _ in range(2):
        count = lab.page.evaluate(f"() => {TIMELINE}.stats().rectangles")
        lab.page.wait_for_function(f"() => {TIMELINE}.stats().rectangles > {count}")
    SHOTS.mkdir(parents=True, exist_ok=True)
    (SHOTS / "canvas_light.png").write_bytes(canvas.screenshot())
    show(lab)


SHOWN = """(() => {
    const {cursor, view: [from, to], plot} = d.timeline.chart.stats(), {us, moment: {t_us, seq}} = d.cursor;
    const pixel = (us - from) / (to - from) * plot.width;
    return {t_us, seq, text: d.head.event.textContent, cursors: [us, cursor], pixel};
})()"""


def test_the_cursor_holds_the_view_and_every_panel_shows_that_event(lab):
    dash = show(lab)
    waits(lab, "cursor.isLive")
    memory = dash.locator(".fw-memory")
    width = memory.bounding_box()["width"]
    memory.hover(position={"x": 0.7 * width, "y": 40})
    lab.page.mouse.down()
    box = memory.bounding_box()
    lab.page.mouse.move(box["x"] + 0.6 * width, box["y"] + 40, steps=4)
    lab.page.mouse.up()
    waits(lab, "cursor.moment !== null && !d.cursor.isLive")
    first = settles(lab, SHOWN)
    before = [look(lab, panel) for panel in PANELS]
    assert first["cursors"][0] == first["cursors"][1]
    count, later = 0, first
    while count < 5 or abs(later["pixel"] - first["pixel"]) < 2:  # several events may share a pixel
        dash.press("ArrowRight")
        waits(lab, f"cursor.moment.seq > {later['seq']}")
        count, later = count + 1, settles(lab, SHOWN)
    assert later["text"] != first["text"]
    assert later["cursors"] == [later["t_us"]] * 2
    after = [look(lab, panel) for panel in PANELS]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False] * 3
    shoot(lab, "cursor")
    dash.press("ArrowLeft")
    waits(lab, f"cursor.moment.seq < {later['seq']}")  # by row: an arrival's time is before that of the preceding row


DRAWN = """(() => {
    const {memory: [memory], states: [units]} = d.shown;
    const last = ({t, length}) => t.subarray(0, length).findLastIndex((when) => when <= d.cursor.us);
    return {
        at: d.cursor.us,
        isExact: d.shown === d.closeup.found?.history && d.closeup.found.isExact,
        bytes: Array.from(memory.bytes(last(memory))),
        units: d.model.units.map((_, unit) => units[unit].state[last(units[unit])]),
        told: [d.cursor.moment.ranks[0].bytes, d.cursor.moment.ranks[0].units],
        inUse: d.cursor.moment.ranks[0].in_use,
        legend: Array.from(d.memory.legend.querySelectorAll("b"), (number) => number.textContent),
        hint: d.memory.hint.textContent,
    };
})()"""


def drawn_at_cursor(lab):
    """Return what is drawn at the cursor, after checking it against the numbers."""
    zoom_in(lab)
    drawn = settles(lab, DRAWN)
    assert drawn["isExact"]
    assert drawn["hint"] == ""
    assert [drawn["bytes"], drawn["units"]] == drawn["told"]
    in_use, *by_class = [
        in_bytes(text) for text in drawn["legend"]
    ]  # of classes that are drawn anywhere in the picture
    sizes = [drawn["inUse"], *filter(None, drawn["bytes"])]
    assert [in_use, *filter(None, by_class)] == pytest.approx(sizes, rel=0.006)  # three digits
    return drawn


def zoom_in(lab):
    """Zoom in as far as the dashboard suggests: if step times vary a lot, many steps may be in view."""
    for _ in range(20):
        if not settles(lab, "d.memory.hint.textContent"):
            return
        show(lab).locator(".fw-timeline canvas").press("+")


def in_bytes(text):
    """Convert a text to bytes: ``"1.50 KiB"`` -> 1536."""
    number, unit = text.split()
    return float(number) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit)


def drawn_one_event_on(lab, key):
    """Return what is drawn after an arrow key."""
    seq = settles(lab, "d.cursor.moment.seq")
    show(lab).press(key)
    waits(lab, f"cursor.moment.seq !== {seq}")
    return drawn_at_cursor(lab)


def test_the_drawing_under_the_cursor_matches_the_numbers(lab):
    memory, seen = show(lab).locator(".fw-memory"), []
    width = memory.bounding_box()["width"]
    for percent in (95, 80, 65, 50, 35, *range(90, 0, -4)):
        memory.click(position={"x": percent / 100 * width, "y": 40})
        seen.append(drawn_at_cursor(lab))
        if len(seen) < 20:
            seen += [drawn_one_event_on(lab, key) for key in ("ArrowLeft", "ArrowLeft", "ArrowRight")]
        elif min(len({tuple(drawn[what]) for drawn in seen}) for what in ("bytes", "units")) > 2:
            break  # otherwise all may have been one long wait
    assert len({tuple(drawn["bytes"]) for drawn in seen}) > 2
    assert len({tuple(drawn["units"]) for drawn in seen}) > 2


def test_a_held_view_stays_until_live_is_clicked(lab):
    view, count = get(lab, "[d.timeline.view.join(), d.model.steps.length]")
    waits(lab, f"model.steps.length > {count + 3}")
    assert get(lab, "d.timeline.view.join()") == view
    show(lab).locator(".fw-live").click()
    assert waits(lab, "cursor.isLive", "d.cursor.us") is None
    waits(lab, f"timeline.view.join() !== '{view}'")


def test_dark_it_is_as_legible(lab):
    theme(lab, "Dark")
    shoot(lab, "dark")
    show(lab).locator(".fw-memory").click(position={"x": 600, "y": 40})
    shoot(lab, "cursor_dark")
    drawn_at_cursor(lab)
    show(lab).locator(".fw-live").click()
    canvas = lab.page.locator(".fw-canvas")
    canvas.scroll_into_view_if_needed()
    lab.page.wait_for_function(f"() => {TIMELINE}.stats().isDark")
    (SHOTS / "canvas_dark.png").write_bytes(canvas.screenshot())
    theme(lab, "Light")
    show(lab)


def theme(lab, name):
    """Change JupyterLab's theme; it is reloaded, and all dashboards are drawn again."""
    lab.change_theme(name)
    dark = ".fw-dark" if name == "Dark" else ":not(.fw-dark)"
    lab.page.wait_for_function(f"() => document.querySelectorAll('.fw-dashboard{dark}').length === 3")


STAND = "model.has('held') && d.model.health.every(({state}) => state === 'held' || state === 'waiting')"


def test_buttons_stop_inside_the_running_step(lab):
    dash = show(lab)
    dash.locator(".fw-pause").click()
    lab.ends(STEP)  # the ranks are stopped: the cell has returned, the step has not
    show(lab)
    where = waits(lab, STAND, "d.model.health.find(({state}) => state === 'held').where")
    assert where.startswith(("before ", "while waiting"))  # wherever the rank happens to be
    wait_for_text(lab, f"held {where}")
    shoot(lab, "held")
    place = waits(lab, STAND, "JSON.stringify(d.model.health)")
    dash.locator(".fw-next").click()
    waits(lab, f"{STAND} && JSON.stringify(d.model.health) !== '{place}'")


def test_back_moves_the_cursor_and_releases_it(lab):
    dash = show(lab)
    waits(lab, "cursor.isLive")
    do(lab, BACK)
    show(lab)
    waits(lab, "cursor.isLive === false && d.cursor.moment !== null")
    positions = settles(lab, "[d.cursor.us, d.timeline.chart.cursor, d.model.now.t_us]")
    assert positions[0] == positions[1] < positions[2]
    lab.reads(BACK, "60 events before the newest")
    shoot(lab, "back")
    assert drawn_at_cursor(lab)["at"] == positions[0]
    zoom_out_until(lab, "memory.hint.textContent.startsWith('simplified: zoom in')")
    shoot(lab, "simplified")
    seq = get(lab, "d.cursor.moment.seq")
    dash.press("ArrowRight")  # user input counts as much
    waits(lab, f"cursor.moment.seq > {seq}")
    assert not get(lab, "d.cursor.isLive")
    do(lab, NEWEST)
    show(lab)
    assert waits(lab, "cursor.isLive", "[d.cursor.us, d.timeline.chart.cursor]") == [None, None]
    do(lab, BACK)
    show(lab)
    waits(lab, "cursor.isLive === false")


def zoom_out_until(lab, what):
    """Turn the wheel over the timeline until the condition ``what`` holds for the dashboard."""
    box = show(lab).locator(".fw-timeline canvas").bounding_box()
    lab.page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 60)
    for _ in range(30):
        lab.page.keyboard.down("Control")
        lab.page.mouse.wheel(0, 60)
        lab.page.keyboard.up("Control")
        if settles(lab, f"d.{what}"):
            return
    raise AssertionError(get(lab, "[d.timeline.view, d.closeup.found?.isExact, d.memory.hint.textContent]"))


def test_a_continued_step_lets_the_cursor_go(lab):
    dash, count = show(lab), get(lab, "d.model.steps.length")
    dash.locator(".fw-continue").click()
    waits(lab, f"model.steps.length > {count + 3}")
    waits(lab, "cursor.isLive")
    dash.locator(".fw-abort").click()
    waits(lab, "model.health.every(({state}) => state === 'idle')")
    waits(lab, "sentence.reply.includes('idle again')")


def test_closing_takes_everything_away(lab):
    do(lab, CLOSE)
    gone = "() => document.querySelectorAll('.fw-dashboard, .fw-canvas').length === 0"
    lab.page.wait_for_function(gone)
    lab.reads(CLOSE, "]")
    assert lab.cell(CLOSE).locator(".jp-OutputArea-output").last.inner_text().strip() == "[]"
    do(lab, STOP)


def test_no_outside_requests_and_no_console_errors(lab):
    assert lab.outside == []
    assert lab.errors == []
