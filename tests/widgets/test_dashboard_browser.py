"""The dashboard in a real headless Chromium, with a fake model as the kernel: its requests and their timing."""

import json
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.browser import open_offline
from tests.helpers.device_trace import on_devices
from tests.helpers.package_source import REPO
from tests.helpers.pairwise import quick
from tests.helpers.simulated_job import Setup, example_trace, simulate, with_loss
from tests.helpers.timeline_page import as_sent
from tests.helpers.waiting import wait_until
from tests.widgets.test_dashboard import HELD, FakeWorkbench, ask, of_others, prefix
from workbench.errors import UsageError
from workbench.events import RANK_TRACKS
from workbench.live.overview import slowest
from workbench.protocol.breakpoints import Breakpoint
from workbench.protocol.commands import NEXT
from workbench.session.snapshot import ActiveRequest
from workbench.trace.columns import Trace
from workbench.widgets.dashboard import DashboardWidget
from workbench.widgets.js_bundle import STATIC, joined

pytestmark = pytest.mark.browser

SHOTS = REPO / "build" / "screenshots"

PAGE = """<!doctype html><meta charset="utf-8"><title>dashboard</title>
<div id="place" style="width: 1200px"></div>
<script>
const given = GIVEN;
const model = {
  asked: [], calls: [],
  get: () => given.about,
  on(_name, call) { this.calls.push(call); },
  off() {},
  send(question) { this.asked.push(question); },
  receive([answer, buffers]) {
    const bytes = buffers.map((text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)));
    this.calls.forEach((call) => call(answer, bytes.map(({buffer}) => new DataView(buffer))));
  },
};
async function show() {
  const address = URL.createObjectURL(new Blob([given.program], {type: "text/javascript"}));
  (await import(address)).default.render({model, el: document.getElementById("place")});
  window.view = document.querySelector(".fw-dashboard").dashboard;
}
</script>
"""


@pytest.fixture
def shown(chromium, tmp_path, kept):
    """A page with a dashboard that has its first answer, and the dashboard's kernel side."""
    with showing(chromium, tmp_path, kept(DashboardWidget(FakeWorkbench()))) as found:
        yield found


@contextmanager
def showing(chromium, tmp_path, widget):
    """Yield the page and the widget; see the fixture."""
    given = {"program": joined("dashboard.js"), "about": widget.about}
    file = tmp_path / "page.html"
    file.write_text(PAGE.replace("GIVEN", json.dumps(given).replace("</", "<\\/")), encoding="utf-8")
    with open_offline(chromium, file) as opened:
        opened.page.evaluate("show().then(() => 0)")
        opened.page.evaluate("() => new Promise(requestAnimationFrame)")
        head = opened.page.locator(".fw-badge").inner_text(), opened.page.locator(".fw-live").inner_text()
        assert head == ("", "\u25cf live"), "nothing was told yet"
        answer(opened.page, widget, "feed")
        opened.page.wait_for_function("view.frames.pending === 0")  # it is drawn
        yield opened.page, widget
        assert opened.complaints == []


NOTES = "[view.memory, view.states, view.timeline].map(({note}) => note.textContent)"


def test_it_names_the_clock_of_each_panel(chromium, tmp_path, kept):
    widget = kept(DashboardWidget(FakeWorkbench(on_devices(example_trace()))))
    with showing(chromium, tmp_path, widget) as (page, _):
        page.wait_for_function("view.states.note.textContent.includes('host')")
        notes = page.evaluate(
            "[view.memory.note, view.states.note, view.timeline.note].map((note) => note.textContent)"
        )
    memory, states, timeline = notes
    assert " · in host order and host time · backward of" in memory
    assert states == "unsharded on ranks 0-3: none · in host order and host time"
    assert timeline.startswith("times are measured on the GPU, within 6.00 µs · drag to pan")


def test_with_one_clock_no_clock_is_named(shown):
    page, _ = shown
    notes = page.evaluate(NOTES)
    assert not any("times" in note or "host" in note for note in notes)


TAKE = """(what) => {
    const isIt = ({word, wait}) => word === what && !wait, found = model.asked.findLast(isIt);
    model.asked = model.asked.filter((question) => !isIt(question));
    return found;
}"""


def answer(page, widget, what):
    """Wait for a request, answer it, and return it."""
    question = page.wait_for_function(TAKE, arg=what).json_value()
    more = {key: value for key, value in question.items() if key not in {"view", "word"}}
    page.evaluate("(message) => model.receive(message)", as_sent(ask(widget, what, question["view"], **more)))
    return question


def test_cursor_text_is_requested_again_with_the_window(shown):
    """If new rows arrived between the two answers, numbers and picture would contradict each other."""
    page, widget = shown
    page.evaluate("view.cursor.put(view.model.end / 2)")
    first = answer(page, widget, "at")
    answer(page, widget, "window")
    again = answer(page, widget, "at")
    assert again == first | {"number": again["number"]}
    page.wait_for_function(
        "!view.client.isWaiting && !view.client.wanted && view.frames.pending === 0 && !view.closeup.wanted"
    )
    assert {question["word"] for question in page.evaluate("model.asked")} <= {"feed"}
    assert page.evaluate("view.cursor.moment.t_us") <= page.evaluate("view.cursor.us")


LOOKS = """() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done({
    said: view.sentence.box.textContent,
    live: view.buttons.live.textContent,
    isPressed: view.buttons.live.getAttribute("aria-pressed"),
    loss: view.steps.cards[0].number.textContent,
    isEmpty: view.body.style.display === "none",
    ranks: view.ranks.list.innerText,
}))))"""


def look(page, widget):
    """Send the page an update, and return what it then shows."""
    news = as_sent(ask(widget, "feed", page.evaluate("view.client.id")))
    page.evaluate("(message) => model.receive(message)", news)
    return page.evaluate(LOOKS)


@pytest.mark.parametrize("where", ["view.root", "view.timeline.chart.canvas"])
def test_only_keys_without_a_modifier_are_kept_from_jupyterlab(shown, where):
    """Lumino ignores a key pressed in an element with the attribute; its listener is on the document."""
    page, _ = shown
    kept = page.evaluate(
        f"""() => ["l", "ArrowLeft", "Control", "Alt", "Meta"].map((name) => {{
            let isKept = null;
            const look = (event) => {{ isKept = event.target.closest("[data-lm-suppress-shortcuts]") !== null; }};
            document.addEventListener("keydown", look, {{capture: true, once: true}});
            const more = {{Control: {{ctrlKey: true}}, Alt: {{altKey: true}}, Meta: {{metaKey: true}}}}[name];
            const key = more ? "c" : name;
            {where}.dispatchEvent(new KeyboardEvent("keydown", {{key, bubbles: true, ...more}}));
            return isKept;
        }})"""
    )
    assert kept == [True, True, False, False, False]


@pytest.mark.parametrize(("loss", "text"), [(float("nan"), "NaN"), (float("inf"), "inf")])
def test_a_nonfinite_loss_is_shown_and_a_missing_one_is_not(chromium, tmp_path, kept, loss, text):
    workbench = FakeWorkbench(with_loss(example_trace(), 2, loss))
    with showing(chromium, tmp_path, kept(DashboardWidget(workbench))) as (page, widget):
        assert look(page, widget)["loss"] == text
        trace = of_others(workbench.trace)
        names = tuple("accuracy" if name == "loss" else name for name in trace.header.strings)
        workbench.trace = Trace(replace(trace.header, strings=names), trace.ranks)
        assert look(page, widget)["loss"] == "\u2013"


@pytest.mark.parametrize(("width", "rows"), [(300, [1, 2, 1]), (500, [1, 3]), (800, [1, 3]), (880, [4]), (1280, [4])])
def test_its_cards_are_all_in_a_row_or_the_ranks_above_the_others(shown, width, rows):
    page, _ = shown
    give_width(page, width)
    tops = page.evaluate("[...document.querySelectorAll('.fw-card')].map((card) => card.getBoundingClientRect().top)")
    assert [tops.count(top) for top in sorted(set(tops))] == rows


@pytest.mark.parametrize("width", quick([500, 880, 1050, 1280], [880]))
def test_the_rank_that_waits_least_is_read_whole_in_its_card(shown, width):
    page, _ = shown
    give_width(page, width)
    late = slowest(np.array([(15, 98_800_000)], [("waits_least", "<i2"), ("spread_ns", "<i8")])[0])
    page.evaluate("(late) => { view.model.late = late; view.cursor.follow(); }", late)
    page.wait_for_function("(late) => view.frames.pending === 0 && view.ranks.late.textContent === late", arg=late)
    assert page.evaluate("view.ranks.late.parentElement.scrollWidth <= view.ranks.late.parentElement.clientWidth")


PLACES = """() => ["memory", "states"].map((name) => view[name].sheet.canvas.getBoundingClientRect().top)"""
CUT = """() => [...view.ranks.list.querySelectorAll(".fw-rank")].map((row) => {
    const [line, card] = [row, view.ranks.list].map((element) => element.getBoundingClientRect());
    return line.height !== 20 || line.top < card.top || line.bottom > card.bottom;
})"""


def test_the_layout_is_stable_while_the_cursor_moves(chromium, tmp_path, kept):
    trace = simulate(Setup(num_ranks=4, num_units=3, steps=2, late=1))
    with showing(chromium, tmp_path, kept(DashboardWidget(FakeWorkbench(trace)))) as (page, widget):
        page.add_style_tag(content=(STATIC / "dashboard.css").read_text("utf-8"))
        page.evaluate("() => { place.style.width = '760px'; }")
        lines, classes, places = set(), set(), set()
        for share in (0.999, 0.2, 0.35, 0.5, 0.65, 0.8, 1):
            page.evaluate("(share) => view.cursor.put(share * view.model.end)", share)
            answer(page, widget, "at")
            page.wait_for_function("!view.client.isWaiting && view.frames.pending === 0")
            rows = page.evaluate(CUT)
            assert not any(rows[:4])
            lines.add(len(rows))
            classes.add(page.evaluate("view.cursor.moment.ranks[0].bytes.filter((bytes) => bytes > 0).length"))
            places.add(tuple(page.evaluate(PLACES)))
        assert min(len(lines), len(classes)) > 1, "else nothing could move"
        assert len(places) == 1


def give_width(page, width):
    """Set the dashboard's width in pixels, with its own style sheet."""
    page.add_style_tag(content=(STATIC / "dashboard.css").read_text("utf-8"))
    page.evaluate("(width) => { place.style.width = `${width}px`; }", width)


LONGEST = """(names) => {
    const pen = document.createElement("canvas").getContext("2d");
    pen.font = `12px ${getComputedStyle(view.root).fontFamily}`;
    return Math.max(...names.map((name) => pen.measureText(name).width));
}"""


@pytest.mark.parametrize("width", quick([300, 500, 900], [300]))
def test_names_of_lanes_have_room_next_to_the_timeline(shown, width):
    page, _ = shown
    give_width(page, width)
    page.wait_for_function("(width) => view.timeline.chart.stats().plot.width < width", arg=width - 60)
    longest = page.evaluate(LONGEST, [track.value for track in RANK_TRACKS])
    assert 60 < longest < page.evaluate("view.timeline.chart.stats().plot.left") - 10


def test_the_panels_follow_the_timeline_when_a_key_moves_it(shown):
    page, _ = shown
    pictures = "[view.memory, view.states].map(({sheet}) => sheet.canvas.toDataURL())"
    before = page.evaluate(pictures)
    page.evaluate("view.timeline.chart.canvas.dispatchEvent(new KeyboardEvent('keydown', {key: '+'}))")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")  # no later
    assert not set(page.evaluate(pictures)) & set(before)


def test_the_first_picture_on_a_dark_page_has_the_colours_of_dark_pages(shown):
    page, _ = shown
    page.add_style_tag(content=(STATIC / "dashboard.css").read_text("utf-8"))
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("view.root.classList.contains('fw-dark') && view.frames.pending === 0")
    first = page.evaluate("view.memory.sheet.canvas.toDataURL()")
    page.evaluate("view.picture()")
    assert page.evaluate("view.memory.sheet.canvas.toDataURL()") == first


PEAK = """() => {
    const {peak} = view.memory, boxes = [peak, view.memory.note].map((each) => each.getBoundingClientRect());
    const [button, note] = boxes;
    return {text: peak.textContent, isWhole: peak.scrollWidth <= peak.clientWidth && button.right <= note.right + 1};
}"""


@pytest.mark.parametrize("width", quick([300, 360, 900], [300]))
def test_the_peak_text_is_not_cut(shown, width):
    page, _ = shown
    give_width(page, width)
    assert page.evaluate("[place.scrollWidth, view.root.offsetWidth]") == [width, width]
    text = page.evaluate(PEAK)
    assert text["text"].startswith("peak ")
    assert ", step " in text["text"]
    assert text["isWhole"]


def test_numbers_of_a_step_name_it(shown):
    page, widget = shown
    notes = "view.steps.cards.map(({ note }) => note.textContent)"
    last = page.evaluate("view.model.steps.columns.step[view.model.steps.length - 1]")
    assert page.evaluate(notes) == [f"step {last}"] * 3
    page.evaluate("view.cursor.put(view.model.steps.columns.t[0] - 1)")
    answer(page, widget, "at")
    page.wait_for_function(f"{notes}.every((note) => note === 'step 0')")


def test_it_reports_the_end_and_then_shows_new_ranks(shown):
    page, widget = shown
    workbench = widget._views._workbench
    working = look(page, widget)
    assert (working["live"], working["isPressed"], working["said"]) == ("\u25cf live", "true", "")
    assert working["loss"] != "\u2013"

    workbench.alive[1], workbench.losses = False, {1: "died: the process was killed by SIGKILL"}
    over = look(page, widget)
    assert (over["live"], over["isPressed"]) == ("\u25cb latest", "false")
    assert over["said"].startswith(
        "rank 1 died: the process was killed by SIGKILL. No further step can run: %fsdp heal"
    )
    assert over["ranks"].startswith("rank 1gone"), "first, as there may be no room for all"
    enabled = set(page.locator(".fw-buttons button:not([aria-disabled='true'])").all_inner_texts())
    assert enabled <= {"pause", "abort", "freeze view", "\u25cb latest"}
    assert over["loss"] == working["loss"]

    workbench.running, workbench.losses = False, {}
    stopped = look(page, widget)
    assert stopped["live"] == "\u25cb latest"
    assert " · " in stopped["ranks"] or "ends" in stopped["ranks"]  # their last events
    assert stopped["said"].startswith("No ranks are running")

    trained = of_others(workbench.trace)
    workbench.running, workbench.alive, workbench.trace = True, [True] * 4, prefix(trained, 0)
    begun = look(page, widget)
    assert (begun["live"], begun["isPressed"], begun["loss"], begun["isEmpty"]) == (
        "\u25cf live",
        "true",
        "\u2013",
        True,
    )
    assert begun["said"].startswith("No step has run yet: %fsdp step 5 calls train_step()")

    workbench.trace = trained
    again = look(page, widget)
    assert (again["loss"], again["isEmpty"], again["said"]) == (working["loss"], False, "")


LAST_STEP = """() => {
    const {length, columns: {t, ms}} = view.model.steps;
    return [t[length - 1], ms[length - 1]];
}"""


def test_at_a_glance(shown):
    """Status and reason, gathered units, owner of the ranks; a held step while ranks continue; the cause of a death."""
    page, widget = shown
    assert page.locator(".fw-badge").inner_text() == "\u25b6 training"
    assert page.locator(".fw-foot").inner_text().startswith("4 ranks on ")
    assert "unsharded on rank" in page.evaluate("view.states.note.textContent")
    assert page.evaluate("view.steps.cards[2].number.textContent").endswith("%")
    page.locator(".fw-hold").click()
    step = page.evaluate(LAST_STEP)
    held = page.evaluate("({live: view.cursor.isLive, cursor: view.cursor.us, view: view.timeline.chart.stats().view})")
    assert (held["live"], held["cursor"]) == (False, pytest.approx(step[0], abs=0.001))
    assert held["view"][0] < step[0] - 1000 * step[1] < step[0] < held["view"][1]
    workbench = widget._views._workbench
    workbench.alive[2], workbench.losses = False, {2: "died: the process was killed by SIGKILL"}
    look(page, widget)
    assert page.locator(".fw-badge").inner_text() == "\u2715 ranks died"
    assert page.locator(".fw-why").inner_text() == "rank 2 died: the process was killed by SIGKILL"


def test_next_has_sizes_and_break_takes_an_event(chromium, tmp_path, kept):
    class Stops(FakeWorkbench):
        def pulse(self):
            return replace(super().pulse(), under_way=ActiveRequest(words="%fsdp step 40", is_stopped=True))

        def next(self, what, *, background):
            self.pressed.append(("next", what, background))

        def break_add(self, event):
            self.pressed.append(("break", event))

    workbench = Stops(positions=dict.fromkeys(range(4), replace(HELD, fault="random")))
    with showing(chromium, tmp_path, kept(DashboardWidget(workbench))) as (page, widget):
        page.wait_for_function("view.buttons.buttons.get('next').ariaDisabled === 'false'")
        assert page.locator(".fw-fault-on").inner_text() == "fault on \u2715"
        assert page.locator(".fw-size option").all_inner_texts() == list(NEXT)
        page.locator(".fw-size").select_option("unit")
        page.locator(".fw-next").click()
        assert page.locator(".fw-break").get_attribute("aria-disabled") == "true"  # which event is not typed yet
        page.locator(".fw-place").fill("all_gather:blocks.2")
        page.locator(".fw-place").press("Enter")
        presses = [question for question in page.evaluate("model.asked") if question["word"] == "press"]
        for question in presses:
            widget._handle_custom_msg(question, [])
        wait_until(lambda: len(workbench.pressed) == 2)
    assert set(workbench.pressed) == {("next", "unit", True), ("break", "all_gather:blocks.2")}


class WorkbenchWithBreakpoints(FakeWorkbench):
    """A workbench with breakpoints."""

    def __init__(self):
        super().__init__(positions=dict.fromkeys(range(4), HELD))
        self.breakpoints = {1: Breakpoint(id=1, event="all_gather", unit="blocks.2")}

    def pulse(self):
        return replace(super().pulse(), breakpoints=tuple(self.breakpoints.values()))

    def step(self, *, background):
        self.pressed.append(("step", background))

    next = step

    def break_add(self, event):
        number = max(self.breakpoints, default=0) + 1
        self.breakpoints[number] = Breakpoint(id=number, event=event)

    def break_on(self, number):
        self._switch(number, is_on=True)

    def break_off(self, number):
        self._switch(number, is_on=False)

    def _switch(self, number, *, is_on):
        self.breakpoints[number] = replace(self.breakpoints[number], is_on=is_on)

    def break_clear(self, number):
        del self.breakpoints[number]


STOPS = """() => ({
    isSeen: view.breakpoints.box.checkVisibility(),
    rows: [...view.breakpoints.box.querySelectorAll("li")].map((row) => [
        row.querySelector("label").textContent,
        row.querySelector("input").checked,
        row.querySelector("button").getAttribute("aria-label"),
    ]),
    focus: document.activeElement.getAttribute("aria-label") ?? document.activeElement.parentNode.textContent,
})"""


def carry_out(page, widget):
    """Carry out the pressed button's request, and send the page the result."""
    (question,) = page.evaluate("model.asked.filter(({word}) => word === 'press')")
    page.evaluate("model.asked = model.asked.filter(({word}) => word !== 'press')")
    before = len(widget.sent)
    widget._handle_custom_msg(question, [])
    wait_until(lambda: len(widget.sent) > before)
    look(page, widget)
    return question["button"], question["argument"], page.evaluate(STOPS)


@pytest.mark.thorough
def test_breakpoints_are_listed_switched_and_cleared_with_the_keyboard_alone(chromium, tmp_path, kept):
    workbench = WorkbenchWithBreakpoints()
    with showing(chromium, tmp_path, kept(DashboardWidget(workbench))) as (page, widget):
        first = ["all_gather:blocks.2", True, "Clear breakpoint all_gather:blocks.2"]
        assert page.evaluate(STOPS)["rows"] == [first]
        text = "forward:<img src=x onerror=alert(1)> --rank 1 --when 'num_bytes > 1e6'"
        unit = text.split(" --rank", maxsplit=1)[0].partition(":")[2]
        workbench.breakpoints[2] = Breakpoint(id=2, event="forward", unit=unit, rank=1, when="num_bytes > 1e6")
        workbench.breakpoints[3] = Breakpoint(id=3, event="optimizer")
        look(page, widget)
        listed = page.evaluate(STOPS)
        assert listed["isSeen"]
        assert listed["rows"] == [first, *([t, True, f"Clear breakpoint {t}"] for t in (text, "optimizer"))]
        assert page.evaluate("view.root.querySelector('img')") is None

        page.locator(".fw-hold").focus()
        page.locator(".fw-live").press("Tab")  # leaves the buttons: the list is next
        assert page.evaluate(STOPS)["focus"] == "all_gather:blocks.2"
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        assert page.evaluate(STOPS)["focus"] == text
        page.keyboard.press("Space")
        word, number, now = carry_out(page, widget)
        assert (word, number, now["focus"]) == ("break off", "2", text)
        assert [is_on for _, is_on, _ in now["rows"]] == [True, False, True]
        for theme in ("light", "dark"):
            picture(page, theme)
        page.keyboard.press("Space")
        assert carry_out(page, widget)[:2] == ("break on", "2")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        word, number, now = carry_out(page, widget)
        assert (word, number, now["focus"]) == ("break clear", "2", "Clear breakpoint optimizer")
        page.keyboard.press("Enter")
        assert carry_out(page, widget)[2]["focus"] == "Clear breakpoint all_gather:blocks.2"
        page.keyboard.press("Enter")
        now = carry_out(page, widget)[2]
        assert (now["isSeen"], now["rows"]) == (False, [])
        assert now["focus"].startswith("Live dashboard")


def picture(page, theme):
    """Save a screenshot of the dashboard."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.emulate_media(color_scheme=theme)
    if theme == "light":
        page.add_style_tag(content=":root { color-scheme: light dark }")
        page.add_style_tag(content=(STATIC / "dashboard.css").read_text("utf-8"))
    page.evaluate(LOOKS)
    (SHOTS / f"breakpoints_{theme}.png").write_bytes(
        page.locator(".fw-dashboard").screenshot()
    )  # given a path, Playwright would leave a thread


def test_a_failed_switch_returns_to_the_actual_state(chromium, tmp_path, kept):
    workbench = WorkbenchWithBreakpoints()
    with showing(chromium, tmp_path, kept(DashboardWidget(workbench))) as (page, widget):
        page.get_by_role("checkbox").click()
        workbench.break_off = lambda number: (_ for _ in ()).throw(UsageError(f"there is no breakpoint {number}"))
        assert carry_out(page, widget)[2]["rows"][0][1]
        page.evaluate("(answer) => model.receive([answer, []])", widget.sent[-2][0])
        assert look(page, widget)["said"] == "there is no breakpoint 1"


def test_a_view_without_buttons_lists_no_breakpoints(chromium, tmp_path, kept):
    """For example the page of a trace, or the timeline alone."""
    timeline = kept(DashboardWidget(WorkbenchWithBreakpoints(), panels=("timeline",)))
    with showing(chromium, tmp_path, timeline) as (page, _):
        listed = page.evaluate(STOPS)
        assert (listed["isSeen"], listed["rows"]) == (False, [])
