from hypothesis import given
from hypothesis import strategies as st

from workbench.reports.tables import WIDTH, Table


def test_columns_are_aligned():
    table = Table(head=("rank", "state"), rows=[("0", "held"), ("10", "no answer")])
    assert table.lines() == ["rank  state", "0     held", "10    no answer"]


def test_all_texts_are_escaped():
    page = Table(head=("<a>", "b"), rows=[("<i>", "&")]).html()
    assert "<a>" not in page
    assert "<i>" not in page
    assert "&lt;i&gt;" in page


widths = st.lists(st.integers(1, WIDTH - 20), min_size=1, max_size=12)


@given(widths)
def test_a_wide_table_wraps_with_its_labels(widths):
    head = ["name", *(f"{place}".rjust(width, "x") for place, width in enumerate(widths))]
    table = Table(head=head, rows=[["label", *("y" for _ in widths)]])
    lines = table.lines()
    assert all(len(line) <= WIDTH for line in lines)
    assert [text for line in lines[::2] for text in line.split()[1:]] == head[1:]
    assert all(line.startswith("label") for line in lines[1::2])
    assert sum(line.count("y") for line in lines[1::2]) == len(widths)
