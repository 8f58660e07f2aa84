"""The front end's tests are of what Python sends: an example of each answer, made of its declaration."""

from typing import get_args

import pytest

from tests.extension import answers
from workbench.codec import decode, encode
from workbench.panel.panel_messages import Answer


def test_the_front_ends_tests_have_the_examples_of_python():
    assert answers.FILE.read_text("utf-8") == answers.program(), "run: python -m tests.extension.answers"


def test_there_is_one_example_of_each_answer():
    assert [type(example) for example in answers.EXAMPLES] == list(get_args(Answer))


@pytest.mark.parametrize("example", answers.EXAMPLES, ids=lambda example: example.word)
def test_each_is_what_its_declaration_says(example):
    assert decode(type(example), encode(example), example.word) == example
