import io
import sys
from html.parser import HTMLParser

import pytest

from tests.helpers.ipython_shell import ipython_shell
from workbench.reports.step_progress import Progress
from workbench.widgets import progress as module
from workbench.widgets.progress import ProgressDisplay, facts, to_html, to_text

HALFWAY = Progress(done=20, total=40, step=20, loss=2.31271, step_ns=312e6, tokens_per_s=12_345.6)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class WellFormed(HTMLParser):
    """Collects text; raises on a tag that is closed out of order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.words = [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture
def shell(monkeypatch):
    """An IPython shell that looks like a notebook's kernel."""
    with ipython_shell() as shell:
        monkeypatch.setattr(shell, "kernel", object(), raising=False)
        published = []
        monkeypatch.setattr(
            shell.display_pub, "publish", lambda data, metadata=None, **kw: published.append((data, kw))
        )
        shell.published = published
        yield shell


def test_facts_name_their_units():
    assert facts(HALFWAY) == ["20 of 40 steps", "loss 2.313", "last step 312 ms", "12,346 tokens/s", "6.24 s to go"]
    assert facts(HALFWAY, "failed") == facts(HALFWAY)[:-1]
    assert facts(Progress(done=1, total=100_001, step_ns=207_890_000))[-1] == "5 h 46 min to go"
    assert facts(Progress(done=0, total=1)) == ["0 of 1 step"]


def test_text_is_one_line_with_a_bar():
    assert to_text(HALFWAY).startswith("[##########..........]  20 of 40 steps  loss 2.313")
    assert "\n" not in to_text(HALFWAY, note="note")


def test_html_is_well_formed_escaped_and_needs_no_script():
    page = to_html(HALFWAY, "failed", "rank 2 raised <script>alert(1)</script>")
    assert "rank 2 raised <script>alert(1)</script>" in WellFormed(page).words
    assert "<script" not in page
    assert "width:50.0%" in page
    assert 'aria-valuenow="20"' in page
    assert "http" not in page


@pytest.mark.parametrize("state", ["running", "done", "failed"])
def test_states_have_their_own_colour(state):
    others = {"running", "done", "failed"} - {state}
    assert all(to_html(HALFWAY, state) != to_html(HALFWAY, other) for other in others)


def test_a_notebook_gets_one_display_that_is_rewritten(shell):
    bar = ProgressDisplay(40)
    bar.update(HALFWAY)
    bar.update(HALFWAY)
    bar.update(Progress(done=40, total=40, step=39, loss=1.5))
    bar.close()
    ids = {kw["transient"]["display_id"] for _, kw in shell.published}
    assert len(ids) == 1
    assert [bool(kw.get("update")) for _, kw in shell.published] == [False, True, True]
    assert all({"text/html", "text/plain"} == set(data) for data, _ in shell.published)
    assert "40 of 40 steps" in shell.published[-1][0]["text/html"]


def test_a_failed_run_shows_the_reason_on_the_bar(shell):
    bar = ProgressDisplay(40)
    bar.update(HALFWAY)
    bar.close("rank 2 raised ZeroDivisionError\nand more")
    data, _ = shell.published[-1]
    assert "rank 2 raised ZeroDivisionError" in data["text/html"]
    assert "and more" not in data["text/html"]


def test_a_note_stays_next_to_the_bar_until_removed(shell):
    bar = ProgressDisplay(40)
    bar.update(HALFWAY)
    for words in ("rank 1 has run for 3 s", "rank 1 has run for 4 s", ""):
        bar.remark(words)
        bar.update(HALFWAY)
        page = shell.published[-1][0]["text/html"]
        assert ("rank 1" in page) == bool(words)
        assert words in page
    assert len(shell.published) == 4
    bar.remark("rank 1 hangs")
    bar.close()
    assert "hangs" not in shell.published[-1][0]["text/html"]


def test_a_failure_before_the_start_has_no_bar(shell):
    ProgressDisplay(40).close("nothing is sharded yet")
    assert shell.published == []


def test_a_terminal_gets_one_line_rewritten_in_place():
    stream = Terminal()
    bar = ProgressDisplay(40, stream=stream)
    bar.update(HALFWAY)
    bar.update(Progress(done=40, total=40))
    bar.close()
    text = stream.getvalue()
    assert text.count("\r") == 2
    assert text.count("\n") == 1
    assert text.endswith("\n")


def test_a_pipe_gets_the_last_line_only():
    stream = io.StringIO()
    bar = ProgressDisplay(40, stream=stream)
    bar.update(HALFWAY)
    bar.close("stopped")
    assert stream.getvalue() == to_text(HALFWAY, "failed", "stopped") + "\n"


def test_without_ipython_it_is_a_script(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython")
    assert not module.in_notebook()
