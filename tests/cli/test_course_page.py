"""Pages of the first notebooks: predictions bind, and what was measured is that of a run."""

import html
from dataclasses import replace

import nbformat
import nbformat.v4
import pytest

from tests.helpers.browser import figures, open_offline
from tests.helpers.course_notebooks import FOLDER
from workbench.cli import course_page
from workbench.cli.course_page import NOTEBOOKS, write_pages
from workbench.cli.notebook_page import to_page
from workbench.course.predictions import PREDICTION_MIME, QUESTION_MIME, PredictionReport
from workbench.errors import UsageError

NAME = NOTEBOOKS[0]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of the notebook that starts no ranks, of a real run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(course_page, "NOTEBOOKS", (NAME,))
        (found,) = write_pages(FOLDER, tmp_path_factory.mktemp("pages"), [].append)
    return found


def test_every_prediction_asks_and_is_measured_and_no_check_has_failed(page):
    text = page.read_text("utf-8")
    source = "\n".join(cell.source for cell in nbformat.read(FOLDER / f"{NAME}.ipynb", as_version=4).cells)
    assert (
        source.count("predict(") == text.count('<form class="fw-guess"') == text.count('<div class="fw-measured"') > 1
    )
    assert text.count('<span class="fw-distance">; no prediction</span>') == source.count(".reveal(")
    assert "CheckFailed" not in text
    assert text.count("Here the notebook checks your answer") == source.count("\ncheck(")
    assert "<title>One step of sharded training, replayed</title>" in text


@pytest.mark.browser
def test_what_follows_a_question_is_shown_once_a_guess_is_locked_and_a_guess_stays(page, chromium):
    with open_offline(chromium, page) as opened:
        ask, hidden = opened.page.locator("form.fw-guess"), opened.page.locator(".jp-Cell[hidden]")
        first, second = ask.nth(0), ask.nth(1)
        number = hidden.count()
        assert number > 10
        for wrong in ("", "two", "1/2"):
            first.get_by_label("Your guess").fill(wrong)
            first.get_by_role("button", name="Lock").click()
            assert first.get_by_role("status").inner_text() == "A guess is a number, such as 12."
        assert hidden.count() == number
        first.get_by_label("Your guess").fill("3")
        first.get_by_label("Your guess").press("Enter")
        assert first.get_by_role("status").inner_text() == "Locked: 3."
        assert first.get_by_label("Your guess").is_disabled()
        measured = opened.page.locator(".fw-measured").first
        assert "measured 2; you predicted 3: 1 too high (50%)" in measured.inner_text()
        assert 0 < hidden.count() < number, "the next question waits"
        assert second.is_visible()
        second.get_by_role("button", name="Show without a guess").press("Enter")
        assert hidden.count() == 0
        assert "; no prediction" in opened.page.locator(".fw-measured").nth(1).inner_text()
        assert all(each["width"] > 300 for each in figures(opened.page)), "also those that were hidden at first"
        opened.page.set_viewport_size({"width": 360, "height": 800})
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
        opened.page.reload()
        assert first.get_by_role("status").inner_text() == "Locked: 3."
        assert (opened.outside, opened.complaints) == ([], [])


EVIL = "<img src=x onerror='document.title=1'>"
DISTANCES = [("2", 2), ("3", 4), ("0.5", 0), ("1", 1.5), ("-1e3", 3), (EVIL, "a"), ("a", "a")]


@pytest.mark.browser
def test_the_distance_is_in_the_words_of_the_notebook_and_names_are_only_text(tmp_path, chromium):
    cells, reports = [], []
    for number, (guess, measured) in enumerate(DISTANCES):
        is_text = isinstance(measured, str)
        about = {"name": f"{EVIL}{number}", "question": f"How many {EVIL}?", "unit": "" if is_text else "<b>calls"}
        asked = {QUESTION_MIME: {**about, "choices": ["a", EVIL] if is_text else []}}
        shown = PredictionReport(**about, predicted=None, measured=measured)
        found = {"text/html": html.escape(shown.headline), PREDICTION_MIME: shown.record()}
        outputs = [nbformat.v4.new_output("display_data", data=each) for each in (asked, found)]
        cells += [nbformat.v4.new_code_cell(outputs=[each]) for each in outputs]
        reports.append(replace(shown, predicted=guess if is_text else float(guess)))
    page = tmp_path / "page.html"
    page.write_text(to_page(nbformat.v4.new_notebook(cells=cells), title="T", asks=True), "utf-8")
    with open_offline(chromium, page) as opened:
        for number, report in enumerate(reports):
            form = opened.page.locator("form.fw-guess").nth(number)
            if isinstance(report.measured, str):
                form.get_by_role("radio", name=str(report.predicted), exact=True).check()
            else:
                form.get_by_label("Your guess").fill(DISTANCES[number][0])
            form.get_by_role("button", name="Lock").click()
            assert opened.page.locator(".fw-measured").nth(number).inner_text().endswith(f": {report.distance}")
        assert (opened.page.title(), opened.page.locator("img").count(), opened.outside) == ("T", 0, [])


def test_a_page_that_cannot_be_written_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(course_page, "execute", lambda notebook, folder, say: notebook)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write .*00_replay.html: "):
        next(write_pages(FOLDER, tmp_path / "file"))
