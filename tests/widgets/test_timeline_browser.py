"""The timeline in a real headless Chromium: drawing, pointer and keyboard."""

from pathlib import Path

import pytest

from tests.helpers.timeline_page import open_page
from workbench.base.glossary import MEANINGS
from workbench.base.text_formats import format_bytes, format_duration
from workbench.events import Kind
from workbench.views import theme

pytestmark = [pytest.mark.browser, pytest.mark.lasting_browser]

SHOTS = Path(__file__).parents[2] / "build" / "screenshots"


@pytest.fixture(scope="module")
def opened(chromium, tmp_path_factory):
    with open_page(chromium, tmp_path_factory.mktemp("timeline")) as opened:
        yield opened


@pytest.fixture
def page(opened):
    """The page with generated rectangles: three ranks of 3 x 40, over 1.2 ms."""
    opened.page.emulate_media(color_scheme="light")
    opened.page.reload()
    opened.page.evaluate("draw(...made(40, 3)).then(() => 0)")
    yield opened.page
    assert opened.complaints == []
    assert opened.outside == []


def stats(page):
    page.evaluate("frame().then(frame).then(() => 0)")
    return page.evaluate("timeline.stats()")


def point(page, name, t_us, rank=0):
    """Return the screen position of a time in a row."""
    now, box = stats(page), page.locator("canvas").bounding_box()
    row = [place for place in now["places"] if place["name"] == name][rank]
    share = (t_us - now["view"][0]) / (now["view"][1] - now["view"][0])
    return box["x"] + now["plot"]["left"] + share * now["plot"]["width"], box["y"] + row["y"] + row["height"] / 2


def colour_at(page, x, y):
    """Return the canvas's CSS colour at a screen position."""
    box = page.locator("canvas").bounding_box()
    return page.evaluate(
        """([x, y]) => {
            const found = pixels(0, x * devicePixelRatio, y * devicePixelRatio, 1, 1);
            return "#" + [...found.slice(0, 3)].map((part) => part.toString(16).padStart(2, "0")).join("");
        }""",
        [x - box["x"], y - box["y"]],
    )


def item(page, row, k):
    """Return the start and end of the generated rectangle k of a row."""
    return page.evaluate(f"(([tracks, data]) => [data[{row}].start[{k}], data[{row}].end[{k}]])(made(40, 3))")


def test_it_draws_each_kind_in_its_colour(page):
    now = stats(page)
    assert (now["rectangles"], now["rows"]) == (480, 12)
    page.evaluate("timeline.setView(450, 700)")
    for row, name, kind in [
        (0, "compute", Kind.FORWARD),
        (1, "all-gather", Kind.ALL_GATHER),
        (3, "wait", Kind.WAIT),
    ]:
        start, end = item(page, row, 5)
        assert colour_at(page, *point(page, name, start + 0.9 * (end - start))) == theme.KIND_COLOURS[kind]


def test_hovering_shows_kind_unit_bytes_duration_and_rank(page):
    start, end = item(page, 1, 7)
    page.mouse.move(*point(page, "all-gather", (start + end) / 2))
    text = page.get_by_role("tooltip").inner_text()
    duration = format_duration(1e3 * (end - start))
    assert text.splitlines() == [
        "all-gather of blocks.7",
        f"{format_bytes(3.3e6)} · {duration}",
        "hidden behind compute",
        f"rank 0, from {format_duration(1e3 * start)}",
    ]
    page.mouse.move(*point(page, "wait", sum(item(page, 3, 7)) / 2))
    assert "exposed" in page.get_by_role("tooltip").inner_text()
    page.mouse.move(5, 5)
    assert not page.get_by_role("tooltip", include_hidden=True).is_visible()


def test_a_row_of_other_collectives_has_the_name_of_their_only_kind(page):
    page.evaluate("timeline.setTracks([...made(1, 3)[0], {name: 'other', rank: 0}])")
    names = []
    for kind in (Kind.ALL_REDUCE, Kind.ALL_REDUCE, Kind.BROADCAST):
        page.evaluate("(kind) => timeline.append(12, {...made(2, 1)[1][0], kind: new Uint8Array(2).fill(kind)})", kind)
        names.append({each["name"] for each in stats(page)["places"]} - {"compute", "all-gather", "wait"})
    assert names == [{"reduce-scatter", "all-reduce"}] * 2 + [{"reduce-scatter", "other"}]


@pytest.mark.parametrize("width", [1200, 250])
def test_the_legend_says_what_its_words_mean(page, width):
    page.evaluate("(width) => { place.style.width = `${width}px`; }", width)
    stats(page)
    place, box = page.locator("#place").bounding_box(), page.locator("canvas").bounding_box()
    entries = page.evaluate("timeline.layout.legend")
    said = {}
    for entry in entries:
        page.mouse.move(box["x"] + entry["x"] + entry["width"] - 2, box["y"] + entry["y"] + 7)
        name, *said[entry["text"]] = page.get_by_role("tooltip").inner_text().splitlines()
        tip = page.get_by_role("tooltip").bounding_box()
        assert name == entry["text"]
        assert place["x"] <= tip["x"] <= tip["x"] + tip["width"] <= place["x"] + place["width"]
    assert said == {
        **{
            kind.words: [MEANINGS[kind.words]]
            for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
        },
        "wait (exposed)": [MEANINGS["wait"], f"exposed: {MEANINGS['exposed']}"],
    }
    page.mouse.move(box["x"] + entries[-1]["x"] + entries[-1]["width"] + 5, box["y"] + entries[-1]["y"] + 7)
    assert not page.get_by_role("tooltip").is_visible()


def test_names_are_text(page):
    page.evaluate("timeline.setUnits(Array.from({length: 12}, () => '<img src=x onerror=document.title=1>'))")
    page.mouse.move(*point(page, "compute", sum(item(page, 0, 3)) / 2))
    assert "<img src=x" in page.get_by_role("tooltip").inner_text()
    assert page.locator("img").count() == 0


def test_a_click_puts_the_cursor(page):
    page.evaluate("window.seen = []; timeline.onCursor((us) => seen.push(us)); timeline.follow(true)")
    page.mouse.click(*point(page, "compute", 1000))
    now = stats(page)
    assert now["cursor"] == pytest.approx(1000, abs=5)
    assert page.evaluate("seen") == [now["cursor"]]
    assert not now["isFollowing"]
    page.evaluate("timeline.setCursor(null)")
    assert stats(page)["cursor"] is None
    assert page.evaluate("seen.length") == 1  # the caller that sets it gets no event


def test_arrows_step_from_event_to_event(page):
    edges = sorted({t for row in range(4) for k in range(40) for t in item(page, row, k)})
    page.locator("canvas").focus()
    page.keyboard.press("Home")
    assert stats(page)["cursor"] == edges[0]
    found = []
    for _ in range(6):
        page.keyboard.press("ArrowRight")
        found.append(stats(page)["cursor"])
    assert found == edges[1:7]
    page.keyboard.press("ArrowLeft")
    assert stats(page)["cursor"] == edges[5]
    assert "blocks.0" in page.locator("canvas").get_attribute("aria-valuetext")
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    now = stats(page)
    assert now["cursor"] == max(t for t in edges if t < now["range"][1])


def test_arrows_move_the_view_along(page):
    page.locator("canvas").focus()
    page.evaluate("timeline.setView(0, 100)")
    page.keyboard.press("End")
    now = stats(page)
    assert now["view"][0] < now["cursor"] < now["view"][1]
    assert now["view"][1] - now["view"][0] == pytest.approx(100)


@pytest.mark.parametrize("is_focused", [True, False], ids=["after a click", "with Ctrl"])
def test_the_wheel_zooms_at_the_pointer(page, is_focused):
    before = stats(page)["view"]
    x, y = point(page, "compute", 2000)
    page.mouse.move(x, y)
    if is_focused:
        page.locator("canvas").focus()
        page.mouse.wheel(0, -240)
    else:
        page.keyboard.down("Control")
        page.mouse.wheel(0, -60)  # faster: a pinch is many of these
        page.keyboard.up("Control")
    now = stats(page)
    assert now["view"][1] - now["view"][0] < 0.7 * (before[1] - before[0])
    assert point(page, "compute", 2000)[0] == pytest.approx(x, abs=2)


@pytest.mark.parametrize("is_focused", [True, False], ids=["fully zoomed out", "not clicked into"])
def test_the_page_scrolls(page, is_focused):
    page.evaluate("document.body.style.height = '3000px'")
    page.screenshot()  # another thread scrolls: it learns the height when it draws
    if is_focused:
        page.locator("canvas").focus()
    else:
        page.evaluate("timeline.setView(1500, 2500)")
    before = stats(page)["view"]
    page.mouse.move(*point(page, "compute", 2000))
    page.mouse.wheel(0, 240)
    page.wait_for_function("scrollY > 0")
    assert stats(page)["view"] == pytest.approx(before)


def test_dragging_pans(page):
    page.evaluate("timeline.setView(1000, 2000)")
    x, y = point(page, "compute", 1500)
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 50, y, steps=3)
    page.mouse.move(x - 200, y, steps=3)
    page.mouse.up()
    now = stats(page)
    assert point(page, "compute", 1500)[0] == pytest.approx(x - 200, abs=2)
    assert now["cursor"] is None


def test_dragging_on_the_axis_scrubs(page):
    x, _ = point(page, "compute", 1000)
    top = page.locator("canvas").bounding_box()["y"] + 10
    page.mouse.move(x, top)
    page.mouse.down()
    page.mouse.move(point(page, "compute", 2000)[0], top, steps=4)
    page.mouse.up()
    assert stats(page)["cursor"] == pytest.approx(2000, abs=6)


def test_keys_zoom_pan_and_fit(page):
    page.locator("canvas").focus()
    whole = stats(page)["view"]
    page.keyboard.press("+")
    zoomed = stats(page)["view"]
    assert zoomed[1] - zoomed[0] == pytest.approx(0.6 * (whole[1] - whole[0]))
    page.keyboard.press("Shift+ArrowRight")
    assert stats(page)["view"][0] > zoomed[0]
    page.keyboard.press("-")
    page.keyboard.press("0")
    assert stats(page)["view"] == whole


def test_many_spans_are_drawn_in_mean_colours(page):
    """A pixel of the coarse level is as opaque as the share of its time that was occupied."""
    page.reload()
    page.evaluate("draw(...made(20000, 1)).then(() => 0)")
    x, y = point(page, "all-gather", 1e6)
    red, green, blue = (int(colour_at(page, x, y)[k : k + 2], 16) for k in (1, 3, 5))
    wanted = [int(theme.KIND_COLOURS[Kind.ALL_GATHER][k : k + 2], 16) for k in (1, 3, 5)]
    assert [red, green, blue] == pytest.approx(wanted, abs=12)  # the row shines through
    share = page.evaluate(
        """(() => {
            const {places, plot} = timeline.stats();
            const row = places.find((place) => place.name === "all-gather");
            const data = pixels(0, plot.left + 50, row.y + 5, 800, 1);
            let alpha = 0;
            for (let k = 3; k < data.length; k += 4) alpha += data[k] / 255 / 800;
            return alpha;
        })()"""
    )
    assert share == pytest.approx(0.48, abs=0.06)  # 60 x 0.8 of every 100 us


def test_of_too_many_the_later_ones_are_kept(page):
    page.evaluate("timeline.destroy(); document.querySelector('canvas').remove(); given.options.maxItems = 1000")
    page.evaluate("draw(...made(400, 3)).then(() => 0)")  # 12 tracks of 400
    now = stats(page)
    assert sum(now["counts"]) == now["rectangles"]
    assert 0 < now["rectangles"] <= 1000
    page.evaluate("timeline.fit()")
    assert stats(page)["view"][0] < 0  # the range covers the whole trace
    start, end = page.evaluate("(([tracks, data]) => [data[11].start[399], data[11].end[399]])(made(400, 3))")
    page.mouse.move(*point(page, "wait", (start + end) / 2, rank=2))
    assert stats(page)["hovered"]["start"] == start


def test_detailed_spans_replace_coarse_ones(page):
    before = stats(page)
    page.evaluate("timeline.setClose(made(5, 3)[1])")
    close = stats(page)
    assert (close["isClose"], close["counts"]) == (True, [5] * 12)
    assert [close["view"], close["places"]] == [before["view"], before["places"]]
    page.evaluate("timeline.append(0, made(50, 3)[1][0])")  # items that arrive meanwhile are kept
    page.evaluate("timeline.setClose(null)")
    assert stats(page)["counts"] == [90, *[40] * 11]


def test_dark_pages_get_light_ink(page):
    assert not stats(page)["isDark"]
    page.emulate_media(color_scheme="dark")
    assert stats(page)["isDark"]
    page.evaluate("document.body.dataset.jpThemeLight = 'true'")
    assert not stats(page)["isDark"]
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    page.emulate_media(color_scheme="light")
    assert stats(page)["isDark"]
    page.evaluate("delete document.body.dataset.jpThemeLight")


def test_it_has_a_name_a_role_and_a_ring(page):
    canvas = page.get_by_role("slider")
    assert "Timeline" in canvas.get_attribute("aria-label")
    assert float(canvas.get_attribute("aria-valuemax")) == pytest.approx(stats(page)["range"][1], abs=1)
    assert canvas.get_attribute("data-lm-suppress-shortcuts")  # otherwise JupyterLab takes the arrow keys
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "CANVAS"
    assert "2px" in canvas.evaluate("(canvas) => canvas.style.outline")


def test_it_follows_its_place(page):
    width = page.evaluate("document.querySelector('canvas').width")
    page.evaluate("place.style.width = '700px'")
    page.wait_for_function(f"document.querySelector('canvas').width < {width}")
    session = page.context.new_cdp_session(page)
    screen = {"width": 1280, "height": 900, "deviceScaleFactor": 2, "mobile": False}
    session.send("Emulation.setDeviceMetricsOverride", screen)
    page.wait_for_function("devicePixelRatio === 2")
    page.evaluate("place.style.width = '800px'")
    page.wait_for_function("document.querySelector('canvas').width === 1600")
    session.send("Emulation.clearDeviceMetricsOverride")
    page.wait_for_function("devicePixelRatio === 1")


def test_late_spans_are_sorted_in(page):
    before = stats(page)
    page.evaluate(
        """timeline.append(0, {start: new Float64Array([50.5, 10.25]), end: new Float64Array([51, 11]),
            bytes: new Float64Array(2), arrowFrom: new Float64Array(2).fill(NaN), unit: new Int16Array(2),
            kind: new Uint8Array([3, 3]), exposed: new Uint8Array(2)})"""
    )
    page.mouse.move(*point(page, "compute", 50.75))
    assert stats(page)["counts"][0] == before["counts"][0] + 2
    assert stats(page)["hovered"]["word"] == "optimizer"


def test_following_shows_the_latest(page):
    page.evaluate("timeline.setView(0, 500); timeline.follow(true)")
    now = stats(page)
    assert now["view"][0] < now["range"][1] < now["view"][1]
    assert now["view"][1] - now["view"][0] == pytest.approx(500)


def test_after_destroy_nothing_listens(page):
    page.evaluate("timeline.destroy()")
    frames = page.evaluate("timeline.stats().frames")
    page.mouse.move(400, 100)
    page.mouse.wheel(0, -100)
    page.emulate_media(color_scheme="dark")
    page.evaluate("frame().then(frame).then(() => 0)")
    assert page.evaluate("timeline.stats().frames") == frames
    assert page.locator("[role=tooltip]").count() == 0


def test_a_hold_is_a_thin_line_with_its_duration(page):
    page.evaluate("timeline.setHolds([[600, 17.9e6]])")
    ((hold,),) = (stats(page)["holds"],)
    box = page.locator("canvas").bounding_box()
    empty = box["y"] + stats(page)["plot"]["top"] + 1
    assert colour_at(page, box["x"] + hold["x"], empty) != colour_at(page, box["x"] + hold["x"] + 3, empty)
    page.mouse.move(box["x"] + hold["x"] + 2, empty + 30)
    assert page.get_by_role("tooltip").inner_text() == "ranks held or idle for 17.9 s: cut out"
    page.mouse.move(box["x"] + hold["x"] + 40, empty)
    stats(page)
    assert not page.get_by_text("17.9 s: cut out").is_visible()
