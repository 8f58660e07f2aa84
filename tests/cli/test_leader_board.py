"""The leader board of a folder of results."""

import json
import re

import pytest

from workbench.cli import main as cli
from workbench.cli.leader_board import read_results, to_page
from workbench.errors import UsageError

ROW = re.compile(r"<tr[^>]*><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>(.*?)</tr>")


def put(path, score, **measured):
    checks = [
        {"name": "a <budget>", "score": score, "points": 4, "measured": measured},
        {"name": "other", "score": 1, "points": 1, "measured": {}},
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"report": {"checks": checks}}), "utf-8")


@pytest.fixture
def results(tmp_path):
    put(tmp_path / "<b>ann.json", 4, peak=2048, sent=1024)
    put(tmp_path / "eve.ipynb.json", 4, peak=1024, sent=1024)
    put(tmp_path / "class" / "bob.json", 2, peak=1, sent=1)
    put(tmp_path / "tim.json", 4, peak=1024, sent=1024)
    (tmp_path / "error.json").write_text('{"error": {"message": "cannot read"}}')
    (tmp_path / "nan.json").write_text('{"report": {"checks": [{"name": "x", "score": NaN, "points": 1}]}}')
    (tmp_path / "list.json").write_text("[1]")
    return tmp_path


def test_more_points_then_smaller_numbers_come_first_and_equal_ones_share_a_place(results):
    entries, others = read_results(results)
    assert others == ["error.json", "list.json", "nan.json"]
    budget, total = to_page(entries).split("<h2>")[1:]
    assert budget.startswith("a &lt;budget&gt;</h2>")
    rows = [found.groups() for found in ROW.finditer(budget)]
    assert [row[:3] for row in rows] == [
        ("1", "eve", "4 of 4"),
        ("1", "tim", "4 of 4"),
        ("3", "&lt;b&gt;ann", "4 of 4"),
        ("4", "class/bob", "2 of 4"),
    ]
    assert rows[2][3] == "<td>2.00 KiB</td><td>1.00 KiB</td>"
    assert [found.groups()[2] for found in ROW.finditer(total)] == ["5 of 5"] * 3 + ["3 of 5"]


def test_the_page_is_one_file_without_scripts(results):
    page = to_page(read_results(results)[0])
    assert not re.search(r"<script|<link|https?:|src=|<b>", page)


def test_the_command_writes_the_page_and_names_other_files(results, capsys):
    assert cli.main(["grade", str(results), "--board", str(results / "board.html")]) == 0
    assert capsys.readouterr().out == (
        f"4 results on {results}/board.html; not results of `workbench grade --json`: error.json, list.json, nan.json\n"
    )
    assert (results / "board.html").read_text("utf-8").startswith("<!doctype html>")


def test_a_folder_without_results_is_an_error(tmp_path, capsys):
    with pytest.raises(UsageError, match="has no results: write some first"):
        read_results(tmp_path)
    assert cli.main(["grade", str(tmp_path), "--board", "board.html"]) == 2
    assert "has no results" in capsys.readouterr().err
