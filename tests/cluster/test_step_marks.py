import io

import pytest

from workbench.cluster.step_marks import StepMarks, without_marks


class Stream(io.StringIO):
    """Like ipykernel's: it knows the request for which it writes."""

    def __init__(self):
        super().__init__()
        self.parent_header = {"msg_id": "a"}


def written(*acts):
    """Return what a stream gets as the acts name a request, a step and a text."""
    stream = Stream()
    now = []
    StepMarks(stream, lambda: now[-1])
    for request, step, text in acts:
        stream.parent_header = {"msg_id": request}
        now.append(step)
        assert stream.write(text) == len(text)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("acts", "text", "steps"),
    [
        ([("a", None, "x\n"), ("a", None, "y")], "x\ny", ()),
        ([("a", 3, "x\n"), ("a", 3, "y\n")], "x\ny\n", ((0, 3),)),
        (
            [("a", None, "x\n"), ("a", 3, "y\n"), ("a", 4, "z"), ("a", None, "!")],
            "x\ny\nz!",
            ((2, 3), (4, 4), (5, None)),
        ),
        ([("a", 3, "x\n"), ("b", None, "y\n"), ("b", 3, "z")], "x\ny\nz", ((0, 3), (4, 3))),  # "b" is other messages
    ],
    ids=["outside steps", "one step", "several", "another request"],
)
def test_the_parts_of_a_text_have_the_steps_in_which_they_were_written(acts, text, steps):
    assert without_marks(written(*acts)) == (text, steps)


def test_no_text_of_a_user_is_taken_for_a_mark():
    assert without_marks("a \ue002 b \ue003") == ("a \ue002 b \ue003", ())


def test_what_is_no_text_is_refused_as_by_the_stream():
    stream = Stream()
    StepMarks(stream, lambda: 1)
    with pytest.raises(TypeError):
        stream.write(b"x")
