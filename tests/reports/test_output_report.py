import re

import pytest

from workbench.reports.output_report import OutputLine, OutputReport


def line(text="loss 2.5", ranks=(0, 1), step=11, kind="stdout"):
    return OutputLine(ranks=ranks, kind=kind, text=text, step=step, t_s=0.0)


@pytest.mark.parametrize(
    ("fields", "headline"),
    [
        ({"lines": ()}, "no output of all ranks"),
        ({"lines": (line(),)}, "1 line of all ranks"),
        ({"lines": (line(), line()), "rank": 2, "is_cut": True}, "the newest 2 lines of rank 2"),
        ({"lines": (line(),), "num_dropped": 3}, "1 line of all ranks; 3 older lines not kept"),
    ],
)
def test_the_headline_says_whose_lines_they_are_and_whether_there_were_more(fields, headline):
    assert OutputReport(**fields).headline == headline


def test_each_line_has_its_time_ranks_and_step():
    names = [name for name, _ in OutputReport(lines=(line(), line(ranks=(), step=None, kind="notice"))).facts()]
    assert [re.sub(r"\d\d:\d\d:\d\d", "TIME", name) for name in names] == ["TIME ranks 0-1 step 11", "TIME ---"]


def test_text_is_escaped_and_keeps_its_spaces():
    page = OutputReport(lines=(line("  <b>&"),))._repr_html_()
    assert re.search(r'<span style="white-space:pre-wrap;[^"]*">  &lt;b&gt;&amp;</span>', page)
