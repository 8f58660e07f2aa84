from __future__ import annotations

import re

import pytest

from tests.helpers.package_source import REPO
from workbench.base.text_formats import (
    byte_unit,
    format_bytes,
    format_duration,
    format_long,
    format_share,
    plural,
    time_unit,
)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (7_414_784, "7.07 MiB"),
        (100 * 2**20, "100 MiB"),
        (99.96 * 2**20, "100 MiB"),
        (3 * 2**30, "3.00 GiB"),
        (5000 * 2**40, "5000 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_bytes_are_written_with_three_digits(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [
        (0, "0.00 µs"),
        (600, "0.60 µs"),
        (1_500, "1.50 µs"),
        (1_234_567, "1.23 ms"),
        (65e9, "65.0 s"),
        (-2e6, "-2.00 ms"),
    ],
)
def test_durations_are_written_with_three_digits(duration_ns, text):
    assert format_duration(duration_ns) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.0415, "41.5 ms"),
        (59.4, "59.4 s"),
        (59.9, "1 min"),
        (75, "1 min 15 s"),
        (3_600, "1 h"),
        (20_789, "5 h 46 min"),
        (86_399, "23 h 59 min"),
        (90_000, "1 d 1 h"),
        (100_000_000, "1,157 d 9 h"),
    ],
)
def test_a_minute_and_more_is_written_in_whole_parts(duration_s, text):
    assert format_long(duration_s * 1e9) == text


def test_an_axis_gets_the_unit_of_its_largest_value():
    assert byte_unit(3 * 2**20) == (2**20, "MiB")
    assert time_unit(2e9) == (10**9, "s")


@pytest.mark.parametrize(("count", "text"), [(0, "0 ranks"), (1, "1 rank"), (12_000, "12,000 ranks")])
def test_plural(count, text):
    assert plural(count, "rank") == text


def test_a_share_is_in_per_cent_without_a_space_as_english_has_it():
    assert [format_share(part) for part in (0, 0.41, 1, 1.5)] == ["0%", "41%", "100%", "150%"]
    assert format_share(0.41234, 2) == "41.23%"


def test_no_other_place_writes_a_share():
    """Figures, reports, dashboard and panel format shares with one function in Python and one in JavaScript."""
    package, panel = REPO / "workbench", REPO / "extension" / "src"
    files = [path for path in package.rglob("*.py") if "labextension" not in path.parts]
    files += [*(package / "widgets" / "static").rglob("*.js"), *panel.rglob("*.ts"), *panel.rglob("*.tsx")]
    apart = re.compile(r"[\d}] %(?! ?[\w{(=])|\.\w*%\}")
    found = {
        str(path.relative_to(REPO)): line.strip()
        for path in files
        for line in path.read_text("utf-8").splitlines()
        if apart.search(line) and "{part:" not in line
    }
    on_ranks = {f"workbench/runtime/{name}.py" for name in ("verify", "lint_rules")}
    assert found.keys() <= {*on_ranks, "workbench/reports/per_rank_tabs.py"}  # the last is no share
