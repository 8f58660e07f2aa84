import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.reports.per_rank_tabs import (
    ALL_CHARS,
    CLEARED,
    CUT,
    FEW_CHARS,
    Pane,
    RankOutput,
    agreement,
    alone,
    apart,
    as_text,
    drawn,
    kept_chars,
    name_of,
    panes_of,
    panes_page,
    screen,
    tabs_page,
    token,
)

EVIL = "</pre><script>alert(1)</script><style>*{}</style>&amp;'\""


class Page(HTMLParser):
    """The content of a page: its elements with their attributes, and the text outside of style sheets."""

    def __init__(self, page):
        super().__init__()
        self.found, self.open, self.texts = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag != "input":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] != "style":
            self.texts.append(data)

    def all(self, tag):
        return [attrs for found, attrs in self.found if found == tag]


def written(*texts):
    return {rank: RankOutput(text=text) for rank, text in enumerate(texts)}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\n", "a\nb\n"),
        (" 1 %\r 50 %\r100 %\ndone", "100 %\ndone"),
        ("long line\rshort", "shortline"),
        ("a\r\nb\r\n", "a\nb\n"),
        ("ab\b\bc", "cb"),
        ("\b\bx", "x"),
        ("\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x07link\x1b]8;;\x07", "red link"),
        ("\x1b[2K\x1b[1Gbar\x00\x07", "bar"),
        ("cut \x1b[3", "cut "),
        ("tab\there", "tab\there"),
    ],
)
def test_terminal_control_characters(text, shown):
    assert screen(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            " 50%|#  | 1/2 [00:01<00:01,  1.2s/it, loss=3]\r100%|###| 2/2 [00:02<00:00,  1.1s/it, loss=2]",
            "100%|###| 2/2 [, loss=2]",
        ),
        ("[rank1]: <f at 0x7f0123456789>", "<f >"),
        ("  a  \n b", "  a\n b"),
    ],
)
def test_what_differs_between_processes_is_not_compared(text, shown):
    assert drawn(text) == shown


@pytest.mark.parametrize(
    ("mine", "yours", "is_same"),
    [
        ({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, True),
        ({"text/html": "<p id='a'>x</p>"}, {"text/html": "<p id='b'>x</p>"}, True),
        ({"text/html": "<p id='a'>x</p>"}, {"text/html": "<p id='b'>y</p>"}, False),
    ],
)
def test_displays_that_show_the_same_have_one_name(mine, yours, is_same):
    assert (name_of(mine) == name_of(yours)) == is_same


@given(st.text(st.sampled_from("ab\r\n\b\x1b[m0;\x07é\x00"), max_size=60))
def test_cursor_movements_are_removed(text):
    shown = screen(text)
    assert not set(shown) & set("\r\b\x1b\x07\x00")
    assert screen(shown) == shown


def test_the_first_rank_is_first_and_equal_texts_share_a_pane():
    panes = panes_of(written("b", "a", "b\n", "c"), 2)
    assert panes == (Pane(ranks=(0, 2), text="b"), Pane(ranks=(1,), text="a"), Pane(ranks=(3,), text="c"))
    assert apart(panes) == {1, 3}
    assert as_text(panes) == "--- ranks 0, 2:\nb\n--- rank 1:\na\n--- rank 3:\nc\n"
    assert as_text(panes_of(written("x", ""), 0)) == "--- rank 0:\nx\n--- rank 1:\n(no output)\n"


def test_truncated_output_says_so_and_begins_at_a_line():
    (pane,) = panes_of({0: RankOutput(text="alf a line\na line\n", is_cut=True)}, 0)
    assert pane.text == f"{CUT}\na line"
    (pane,) = panes_of({0: RankOutput(text="one long line", is_cut=True)}, 0)
    assert pane.text == f"{CUT}\none long line"
    (pane,) = panes_of({0: RankOutput(text=f"alf a line\nold\n{CLEARED}older\n{CLEARED}new\n", is_cut=True)}, 0)
    assert pane.text == "new"


def test_many_ranks_have_less_room_each_and_all_have_some():
    rooms = [kept_chars(num_ranks) for num_ranks in range(65)]
    assert rooms == sorted(rooms, reverse=True)
    assert all(room * num_ranks <= ALL_CHARS for num_ranks, room in enumerate(rooms))
    assert rooms[64] >= FEW_CHARS
    assert rooms[12] == ALL_CHARS // 12


def test_the_agreement_line():
    assert agreement(4) == "--- 4 ranks agree\n"
    assert alone(0, [1, 2, 3]) == "--- above: rank 0; ranks 1-3 wrote nothing\n"


def test_a_tab_a_rank_the_first_chosen_and_one_for_all():
    page = Page(tabs_page("wb-1", (0, 1, 2)))
    radios = page.all("input")
    assert [radio["id"] for radio in radios] == ["wb-1-r0", "wb-1-r1", "wb-1-r2", "wb-1-all"]
    assert {(radio["type"], radio["name"]) for radio in radios} == {("radio", "wb-1")}
    assert ["checked" in radio for radio in radios] == [True, False, False, False]
    assert page.texts == ["output of the ranks", "rank 0", "rank 1", "rank 2", "all"]
    assert "NAME" not in tabs_page("wb-1", (0,))


@pytest.mark.parametrize("is_live", [False, True])
def test_a_pane_for_each_text_that_its_ranks_tabs_show(is_live):
    panes = panes_of(written("a", "b", "a"), 0)
    text = panes_page("wb-1", panes, {1}, is_live=is_live)
    page = Page(text)
    assert [section["class"] for section in page.all("section")] == ["r0 r2", "r1"]
    assert page.texts == ["ranks 0, 2", "a", "rank 1", "b"]
    for rank in range(3):
        assert f"\n:has(#wb-1-r{rank}:checked) ~ * #wb-1-panes > :not(.r{rank}) {{display: none}}" in text
    assert "\nlabel:has(> #wb-1-r1)::after {content" in text
    assert ("column-reverse" in text) == is_live
    assert "NAME" not in text
    assert not re.search(r"(html|body|:root):has", text)  # a browser would restyle the whole page at each change of it


def test_output_of_ranks_is_escaped():
    page = Page(panes_page("wb-1", panes_of(written(EVIL, "b"), 0), (), is_live=False))
    assert EVIL in page.texts
    assert not page.all("script")
    assert len(page.all("style")) == 1


PNG = '<img src="data:image/png;base64,iVBOR" alt="&lt;Fig &quot;1&quot;&gt;">'


def with_displays(*displays):
    """Return a pane with displays between the lines a and b."""
    tokens = "".join(token(str(place)) for place in range(len(displays)))
    return Pane(ranks=(0,), text=f"a\n{tokens}b", displays={str(place): data for place, data in enumerate(displays)})


@pytest.mark.parametrize(
    ("data", "shown", "text"),
    [
        ({"text/html": "<b>x</b>", "text/plain": "x"}, "<div class='wb-html'><b>x</b></div>", "x"),
        ({"text/latex": "$<$"}, "<div class='wb-html'>$&lt;$</div>", "<display>"),
        ({"image/png": "iVB\nOR\n", "text/plain": '<Fig "1">'}, PNG, '<Fig "1">'),
        (
            {"image/svg+xml": "<svg/>"},
            '<img src="data:image/svg+xml;base64,PHN2Zy8+" alt="image/svg+xml">',
            "<display>",
        ),
        ({"text/markdown": "*m*", "text/plain": "m"}, "<pre><span>*m*</span></pre>", "*m*"),
        (
            {"application/json": {"é": [1]}},
            "<pre><span>{\n &quot;é&quot;: [\n  1\n ]\n}</span></pre>",
            '{\n "é": [\n  1\n ]\n}',
        ),
        ({}, "<pre><span>&lt;display&gt;</span></pre>", "<display>"),
    ],
)
def test_a_display_is_drawn_between_the_lines_around_it(data, shown, text):
    pane = with_displays(data)
    page = panes_page("wb-1", [pane], (), is_live=False)
    assert f"<div>rank 0</div><pre><span>a</span></pre>{shown}<pre><span>b</span></pre></section>" in page
    assert as_text([pane]) == f"--- rank 0:\na\n{text}\nb\n"


def test_a_display_that_is_gone_is_a_word():
    assert as_text([Pane(ranks=(0,), text=f"a\n{token('gone')}")]) == "--- rank 0:\na\n<display>\n"


def test_of_many_displays_the_newest_are_drawn(monkeypatch):
    monkeypatch.setattr("workbench.reports.per_rank_tabs.ALL_DISPLAY_CHARS", 4 * len(PNG))
    panes = [with_displays(*[{"image/png": "iVBOR", "text/plain": '<Fig "1">'}] * 3)] * 2
    parts = re.findall("<img|Fig", panes_page("wb-1", panes, (), is_live=False).replace(PNG, "<img"))
    assert parts == ["Fig", "<img", "<img"] * 2


def test_64_ranks_that_write_much_make_a_page_of_bounded_size():
    room = kept_chars(64)
    panes = panes_of({rank: RankOutput(text=f"{rank}\n" * room, is_cut=True) for rank in range(64)}, 0)
    assert len(panes_page("wb-1", panes, range(1, 64), is_live=True)) < 64 * 4 * room + 40_000
    assert len(tabs_page("wb-1", range(64))) < 25_000
