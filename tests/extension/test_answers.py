"""The front end's tests use what Python sends: an example of each answer, made from its declaration."""

from typing import get_args

import pytest

from tests.helpers import example_answers
from workbench.codec import decode, encode
from workbench.live.messages import PanelAnswer


def test_the_front_ends_tests_have_the_examples_of_python():
    assert example_answers.FILE.read_text("utf-8") == example_answers.program(), (
        "run: python -m tests.helpers.example_answers"
    )


def test_there_is_one_example_of_each_answer_to_a_panel():
    assert [type(example) for example in example_answers.EXAMPLES] == list(get_args(PanelAnswer))


@pytest.mark.parametrize("example", example_answers.EXAMPLES, ids=lambda example: example.word)
def test_each_is_what_its_declaration_says(example):
    assert decode(type(example), encode(example), example.word) == example
