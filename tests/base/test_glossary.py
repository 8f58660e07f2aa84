"""The glossary has every word that pictures show, once."""

from collections import Counter

import pytest

from tests.helpers import documents
from tests.helpers.package_source import REPO
from workbench.base.glossary import explained
from workbench.events import Category, Kind, Track, UnitState

UNSEEN = {Kind.ALLOC, Kind.FREE, Kind.METRIC, Kind.LOG, Kind.DEVICE}
"""Kinds of rows that are in no picture under their own name."""


def terms():
    text = (REPO / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if row != "term"]


def drawn():
    yield from (kind.words for kind in Kind if kind not in UNSEEN)
    yield from (category.words for category in Category)
    yield from (state.words for state in UnitState)
    yield from (track.value for track in Track)


@pytest.mark.parametrize("word", sorted(set(drawn())))
def test_a_word_of_a_picture_is_explained(word):
    assert word in terms()


def test_it_is_what_hover_texts_say():
    assert documents.GLOSSARY.read_text(encoding="utf-8").endswith(documents.glossary_tables())
    assert explained("time exposed") == "exposed: the part of communication that compute waits for"
    assert explained("of a grunit") == ""


def test_no_term_is_explained_twice():
    assert [term for term, count in Counter(terms()).items() if count > 1] == []


def test_it_is_linked_from_the_course():
    assert ("glossary.md", "") in documents.links(documents.documents()[REPO / "docs" / "course.md"])
