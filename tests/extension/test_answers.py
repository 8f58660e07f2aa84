"""The front end's tests use what Python sends and computes: an example of each answer, and cases of each format."""

from typing import get_args

import pytest

from tests.helpers import example_answers, widget_cases
from workbench.base.codec import decode, encode
from workbench.live.messages import PanelAnswer


def test_the_front_ends_tests_have_the_examples_of_python():
    assert example_answers.FILE.read_text("utf-8") == example_answers.program(), (
        "run: python -m tests.helpers.example_answers"
    )


def test_the_widgets_tests_have_the_cases_of_python():
    assert widget_cases.FILE.read_text("utf-8") == widget_cases.program(), "run: python -m tests.helpers.widget_cases"


def test_there_is_one_example_of_each_answer_to_a_panel():
    assert [type(example) for example in example_answers.EXAMPLES] == list(get_args(PanelAnswer))


@pytest.mark.parametrize("example", example_answers.EXAMPLES, ids=lambda example: example.word)
def test_each_is_what_its_declaration_says(example):
    assert decode(type(example), encode(example), example.word) == example
