import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.protocol.arguments import (
    Argument,
    argument,
    argument_of,
    count,
    number,
    rank,
    ranks,
    several,
    truth,
    with_variables,
    without_variables,
)

NO_RANKS = "expected ranks such as 1,3 or 0-2, got "


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (number, "1", 1),
        (number, "12", 12),
        (count("0: none"), "0", 0),
        (rank, "0", 0),
        (ranks, "1,3", (1, 3)),
        (ranks, "5, 0-2,1", (0, 1, 2, 5)),
        (ranks, "2-2", (2,)),
        (several, "Block,Embedding", ("Block", "Embedding")),
        (several, " a , ,b,", ("a", "b")),
        (truth, "true", True),
        (truth, "false", False),
    ],
)
def test_texts_are_read(read, text, value):
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (number, "0", "expected a whole number of at least 1, got '0'"),
        (number, "-1", "expected a whole number of at least 1, got '-1'"),
        (number, "x", "expected a whole number of at least 1, got 'x'"),
        (count("0: none"), "-1", "expected a whole number, 0: none, got '-1'"),
        (rank, "-1", "expected a rank such as 1, got '-1'"),
        (ranks, "1,x", f"{NO_RANKS}'1,x'"),
        (ranks, "1-", f"{NO_RANKS}'1-'"),
        (ranks, "-1", f"{NO_RANKS}'-1'"),
        (ranks, "", f"{NO_RANKS}''"),
        (truth, "True", "expected true or false, got 'True'"),
    ],
)
def test_texts_of_another_form_are_refused(read, text, message):
    with pytest.raises(ValueError, match=r".+") as caught:
        read(text)
    assert str(caught.value) == message


def test_variables_are_inserted_and_doubled_braces_are_single_ones():
    assert with_variables("{n}-{m}.trace {{n}} { } {} {a b}", {"n": "3", "m": "x"}.__getitem__) == (
        "3-x.trace {n} { } {} {a b}"
    )


@given(st.text("{}nm ", max_size=12))
def test_a_text_without_variables_is_that_text_again(text):
    assert with_variables(without_variables(text), {}.__getitem__) == text


def test_an_argument_is_a_text_of_any_form_if_nothing_else_is_declared():
    known = argument_of(argument("a file", metavar="FILE"))
    assert known == Argument(about="a file", metavar="FILE")
    assert known.read(" as it is ") == " as it is "
