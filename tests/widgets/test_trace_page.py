"""The page that replays a trace: complete, self-contained, and without foreign content."""

import json
import re
import time
from contextlib import contextmanager

import numpy as np
import pytest

from tests.helpers.aborted_steps import aborted
from tests.helpers.browser import open_offline, titles_follow_the_width
from tests.helpers.live_view import DashboardView
from tests.helpers.simulated_job import Setup, example_trace, simulate
from tests.views.test_contract import same_with_names
from tests.views.test_theme import contrast
from workbench.live.messages import AskFeed, read_question
from workbench.session.snapshot import ClusterSnapshot
from workbench.trace.columns import Trace
from workbench.widgets.trace_page import FIGURES, page

EVIL = """<script>hacked = 1</script>"'><img src=x onerror="hacked = 1"></script><!-- <a href="javascript:y">evil $z$"""

READY = f"() => document.querySelectorAll('.main-svg').length >= {len(FIGURES)} && document.querySelector('canvas')"
LOOKS = """async () => {
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  await frame();
  await frame();
  const view = document.querySelector(".fw-dashboard").dashboard;
  const said = (name) => document.querySelector(`.fw-dashboard .fw-${name}`).textContent;
  return {moment: view.cursor.moment, cursor: view.cursor.us, event: said("event"), ranks: said("ranks")};
}"""


@contextmanager
def opened_page(chromium, folder, trace, title="run"):
    """Yield the page of a trace, completely drawn."""
    (folder / "run.html").write_text(page(trace, title), encoding="utf-8")
    with open_offline(chromium, folder / "run.html") as opened:
        opened.page.wait_for_function(READY)
        yield opened


@pytest.mark.browser
def test_it_shows_the_dashboard_and_the_figures_without_requests(chromium, tmp_path):
    with opened_page(chromium, tmp_path, example_trace()) as opened:
        drawn = opened.page.evaluate(LOOKS)
        sizes = opened.page.evaluate(
            "() => [...document.querySelectorAll('.fw-timeline canvas, .main-svg')].map((e) => e.clientWidth)"
        )
        assert not opened.page.query_selector(".modebar-btn")  # its buttons would cover the titles
        about = opened.page.inner_text("header")
    assert "step ends" in drawn["event"]
    assert drawn["ranks"].startswith("ranks 0-3")
    assert min(sizes) > 300
    assert "A recording of 4 ranks, 3 steps (0 to 2), " in about
    assert (opened.outside, opened.complaints) == ([], [])


@pytest.mark.thorough
@pytest.mark.browser
def test_its_texts_match_the_kernel(chromium, tmp_path):
    trace, kernel = example_trace(), DashboardView()
    kernel.answer(AskFeed(), ClusterSnapshot(trace=trace), time.monotonic)
    answered = "() => !document.querySelector('.fw-dashboard').dashboard.client.isWaiting"

    def moment_of(question):
        answer, _ = kernel.answer(read_question(question), ClusterSnapshot(trace=trace), time.monotonic)
        return json.loads(json.dumps(answer["moment"]))

    with opened_page(chromium, tmp_path, trace) as opened:
        box = opened.page.locator(".fw-memory").bounding_box()
        for share in (0.3, 0.55, 0.8):
            opened.page.mouse.click(box["x"] + share * box["width"], box["y"] + 30)
            opened.page.wait_for_function(answered)
            shown = opened.page.evaluate(LOOKS)
            assert shown["moment"] == moment_of({"word": "at", "t_us": shown["cursor"]})
            assert shown["event"] == shown["moment"]["event"]
        for key, by in (("ArrowLeft", -1), ("ArrowLeft", -1), ("ArrowRight", 1)):
            before = shown["moment"]
            opened.page.keyboard.press(key)
            opened.page.wait_for_function(answered)
            shown = opened.page.evaluate(LOOKS)
            assert shown["moment"] == moment_of(
                {"word": "beside", "rank": before["rank"], "seq": before["seq"], "by": by}
            )
            assert shown["cursor"] == shown["moment"]["t_us"]
        assert opened.complaints == []


@pytest.mark.thorough
@pytest.mark.browser
def test_a_page_does_not_mention_a_kernel_and_is_never_live(chromium, tmp_path):
    """Even on a slow machine, before its trace is read."""
    with opened_page(chromium, tmp_path, example_trace(num_ranks=2, steps=1)) as opened:
        text = opened.page.evaluate(
            """() => {
              const view = document.querySelector(".fw-dashboard").dashboard;
              view.client.answeredAt = -1e9;
              view.model.status = null;
              view.picture();
              return [view.sentence.box.textContent, view.buttons.live.textContent];
            }"""
        )
    assert text == ["", "\u25cb latest"]


@pytest.mark.thorough
@pytest.mark.browser
def test_a_page_opens_at_the_last_complete_step(chromium, tmp_path):
    with opened_page(chromium, tmp_path, aborted(example_trace(num_ranks=2, steps=3), 2, 0.5)) as opened:
        begun, ended, view, end = opened.page.evaluate(
            """() => {
              const view = document.querySelector(".fw-dashboard").dashboard;
              const {length, columns: {t, ms}} = view.model.steps;
              return [t[length - 1] - 1000 * ms[length - 1], t[length - 1], view.timeline.view, view.model.end];
            }"""
        )
    assert view[0] <= begun < ended <= view[1] < end
    assert view[1] - ended < ended - begun


@pytest.mark.browser
def test_html_in_names_is_escaped_everywhere(chromium, tmp_path):
    trace = same_with_names(example_trace(num_ranks=2, steps=2), EVIL)
    with opened_page(chromium, tmp_path, trace, title=EVIL) as opened:
        found = opened.page.evaluate(
            """() => ({
              hacked: typeof hacked,
              scripts: document.scripts.length,
              strange: document.querySelectorAll("img, iframe, [onerror], a[href^='javascript']").length,
              title: document.title,
              heading: document.querySelector("h1").textContent,
              units: document.querySelector(".fw-dashboard").dashboard.model.units,
            })"""
        )
        assert (opened.outside, opened.complaints) == ([], [])
    assert (found["hacked"], found["scripts"], found["strange"]) == ("undefined", 3, 0)
    assert found["title"] == found["heading"] == EVIL
    assert any(EVIL in unit for unit in found["units"])


@pytest.mark.browser
def test_its_policy_blocks_other_scripts_and_requests(chromium, tmp_path):
    with opened_page(chromium, tmp_path, example_trace(num_ranks=1, steps=1)) as opened:
        opened.page.evaluate(
            """() => {
              const script = document.createElement("script");
              script.textContent = "window.hacked = 1";
              document.body.append(script);
              const image = "<img src='https://elsewhere/x.png' onerror='window.hacked = 2'>";
              document.body.insertAdjacentHTML("beforeend", image);
            }"""
        )
        assert (
            opened.page.evaluate("() => fetch('https://elsewhere/').then(() => 'fetched', (error) => error.name)")
            == "TypeError"
        )
        assert opened.page.evaluate("() => typeof hacked") == "undefined"
        assert any("Content Security Policy" in complaint for complaint in opened.complaints)


def test_only_its_two_scripts_may_run_and_both_are_complete():
    text = page(example_trace(num_ranks=1, steps=1), "run")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert policy.count("sha256-") == 2
    assert not re.search(r"unsafe-eval|script-src[^;]*unsafe-inline|https?:", policy)
    assert text.count("<script") == text.count("</script") == 3


DRESS = """() => {
  const styles = (places) => [...document.querySelectorAll(places)].map((place) => getComputedStyle(place));
  const colours = (name, places) => styles(places).map((style) => style[name]);
  const probe = document.createElement("i");
  probe.style.background = "Canvas";
  document.body.append(probe);
  const [page] = colours("backgroundColor", "body > i");
  probe.remove();
  const inks = colours("fill", ".gtitle, .gtitle-subtitle, .xtick text, .annotation text, .legendtext");
  const cards = colours("backgroundColor", ".fw-figure, .fw-figure .main-svg");
  return {page, inks, filled: [...cards, ...colours("fill", ".fw-figure .bg")]};
}"""
INKED = "(ink) => [...document.querySelectorAll('.gtitle, .legendtext')].every((e) => getComputedStyle(e).fill !== ink)"


# of the focused element: its name, its position, and whether the focus is visible
FOCUSED = """() => {
  const found = document.activeElement, {x, y} = found.getBoundingClientRect(), style = getComputedStyle(found);
  const isShown = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
  return [found.ariaLabel ?? found.innerText, y + scrollY, x, isShown];
}"""


@pytest.mark.thorough
@pytest.mark.browser
def test_all_of_it_is_reached_by_keyboard_in_the_order_in_which_one_reads(chromium, tmp_path):
    with opened_page(chromium, tmp_path, example_trace(num_ranks=4)) as opened:
        opened.page.wait_for_selector(".fw-peak:not([hidden])")
        found = []
        while len(found) < 5:
            opened.page.keyboard.press("Tab")
            found.append(opened.page.evaluate(FOCUSED))
        names = [name.partition(".")[0].partition(" ")[0] for name, *_ in found]
        assert names == ["Live", "freeze", "\u25cb", "peak", "Timeline"]
        assert [place for _, *place, _ in found] == sorted(place for _, *place, _ in found)
        assert all(is_shown for *_, is_shown in found)


@pytest.mark.thorough
@pytest.mark.browser
def test_figures_are_in_the_colours_of_the_page_and_follow_them(chromium, tmp_path):
    with opened_page(chromium, tmp_path, example_trace()) as opened:
        light = opened.page.evaluate(DRESS)
        opened.page.emulate_media(color_scheme="dark")
        opened.page.wait_for_function(INKED, arg=light["inks"][0])
        dark = opened.page.evaluate(DRESS)
        assert opened.complaints == []
    assert light["page"] == "rgb(255, 255, 255)" != dark["page"]
    for drawn in (light, dark):
        assert len(drawn["inks"]) > 10
        assert min(contrast(in_hex(ink), in_hex(drawn["page"])) for ink in drawn["inks"]) >= 7
        assert "rgb(255, 255, 255)" not in drawn["filled"]


@pytest.mark.thorough
@pytest.mark.browser
def test_figures_follow_the_width_of_the_window(chromium, tmp_path):
    with opened_page(chromium, tmp_path, example_trace()) as opened:
        assert titles_follow_the_width(opened.page)
        for width in (460, 200):  # a panel of JupyterLab may be as narrow
            opened.page.set_viewport_size({"width": width, "height": 900})
            opened.page.wait_for_function(f"document.documentElement.scrollWidth === {width}")
        assert opened.complaints == []


def in_hex(colour):
    """Convert ``rgb(255, 0, 16)`` to ``#ff0010``."""
    return "#" + "".join(f"{int(part):02x}" for part in re.findall(r"\d+", colour)[:3])


@pytest.mark.thorough
@pytest.mark.browser
def test_an_empty_trace_is_a_page_too(chromium, tmp_path):
    (tmp_path / "run.html").write_text(page(Trace.empty(), "nothing"), encoding="utf-8")
    with open_offline(chromium, tmp_path / "run.html") as opened:
        opened.page.wait_for_selector(".fw-dashboard")
        assert "no steps" in opened.page.inner_text("header")
        assert opened.complaints == []


def test_its_head_names_the_policy():
    trace = simulate(Setup(copies=2, reshard_after_forward=False))
    policy = "HSDP 2x2: 2 replicas, each sharded over 2 ranks; unsharded from forward to backward. Drag in a panel"
    assert f"3 steps (0 to 2), {trace.num_rows:,} events; {policy}" in page(trace, "run")


def test_a_hundred_steps_of_four_ranks_of_the_tours_size_take_at_most_10_mb():
    trace = simulate(Setup(num_ranks=4, num_units=6, steps=100))
    assert trace.num_rows > 95_000  # the tour's model records 240 events per step and rank
    rng, ranks = np.random.default_rng(0), []
    for r in trace.ranks:  # random times do not compress
        rows = r.rows.copy()
        rows["t_ns"] = rows["t_ns"][0] + np.cumsum(rng.integers(1_000, 4_000_000, len(rows)))
        ranks.append(r.__class__(r.rank, rows, r.start))
    assert len(page(Trace(trace.header, tuple(ranks)), "run").encode()) <= 10_000_000
