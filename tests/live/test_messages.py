"""The declarations themselves: what each holds can be sent, and says what it is."""

import dataclasses
import inspect
import re
import textwrap
from typing import get_args

import pytest

from workbench.live.messages import (
    VIEW_QUESTIONS,
    Answer,
    AskAt,
    GetState,
    Question,
    Refused,
    ViewAnswer,
    ViewQuestion,
    read_question,
    refusal,
)

MESSAGES = [*get_args(Question), *get_args(Answer)]


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description of a class, and of each of its attributes, from its docstring.

    Example: an entry ``host: its machine.`` -> ``{"host": "its machine."}``; attributes that share an entry, as in
    ``kind, edge: as the trace has them.``, share its text.
    """
    about, _, rest = text.partition("\n\nAttributes:\n")
    about = re.split(r"\n\n(?:Args|Raises|Returns|Yields|Example):", about)[0]
    found: dict[str, str] = {}
    entries = re.split(r"\n(?=\S)", textwrap.dedent(re.split(r"\n(?=\S)", rest)[0]))
    for entry in entries:
        head = re.match(r"(\w+(?:, \w+)*): ", entry)
        if head:
            found |= dict.fromkeys(head[1].split(", "), " ".join(entry[head.end() :].split()))
    return " ".join(about.split()), found


@pytest.mark.parametrize("union", [Question, Answer])
def test_each_word_belongs_to_one_message(union):
    words = [message.word for message in get_args(union)]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_every_message_documents_its_fields(message):
    fields = [field.name for field in dataclasses.fields(message)]
    assert fields[0] == ("view" if message in VIEW_MESSAGES else "number")
    attributes = {}
    for kind in reversed(message.__mro__[:-1]):  # inherited fields are described where they are declared
        about, own = read_docstring(inspect.getdoc(kind))
        assert about
        attributes |= own
    assert list(attributes) == fields


VIEW_MESSAGES = {*get_args(ViewQuestion), *get_args(ViewAnswer)} - {Refused}


def test_a_question_is_read_strictly_and_a_malformed_one_gets_an_answer():
    assert read_question({"word": "at", "view": "a", "t_us": 3}) == AskAt(view="a", t_us=3)
    assert read_question({"word": "look", "number": 1}) == GetState(number=1)
    with pytest.raises(ValueError, match="unknown question 'look'; known: feed, at") as refused:
        read_question(data := {"word": "look", "number": 1, "view": "a"}, VIEW_QUESTIONS)
    assert refusal(data, refused.value) == Refused(number=1, text=str(refused.value), view="a")
    assert (refusal(7, refused.value).number, refusal(None, refused.value).view) == (-1, "")
    assert (refusal({"number": True, "view": 3}, refused.value).number) == -1
