"""The declarations themselves: what each holds can be sent, and says what it is."""

import dataclasses
import inspect
from typing import get_args

import pytest

from workbench.live.panel_messages import Answer, Question
from workbench.widgets.typescript import read_docstring

MESSAGES = [*get_args(Question), *get_args(Answer)]


def test_words_are_each_of_one_message():
    words = [message.word for message in MESSAGES]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.word)
def test_every_message_bears_a_number_and_says_what_each_field_is(message):
    fields = [field.name for field in dataclasses.fields(message)]
    assert fields[0] == "number"
    about, attributes = read_docstring(inspect.getdoc(message))
    assert about
    assert list(attributes) == fields
