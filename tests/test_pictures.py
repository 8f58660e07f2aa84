"""The pictures of the documents show what the workbench draws now."""

import json
import re

import pytest

from tests.helpers import documents, pictures


def test_no_picture_is_stale():
    stored = json.loads(pictures.FINGERPRINTS.read_text("utf-8"))
    assert stored == pictures.fingerprints(), "python -m tests.helpers.pictures draws them anew"


def test_each_picture_is_shown_in_a_document_with_words_for_who_cannot_see_it():
    shown = set()
    for text in documents.documents().values():
        shown |= {name for words, name in re.findall(r"!\[([^\]]{20,})\]\([^)]*images/([\w-]+\.webp)\)", text)}
        shown |= set(re.findall(r'srcset="[^"]*images/([\w-]+\.webp)"', text))
        shown |= {name for name, _ in re.findall(r'src="[^"]*images/([\w-]+\.webp)" alt="([^"]{20,})"', text)}
    assert shown == set(pictures.NAMES)


@pytest.mark.parametrize("name", pictures.NAMES)
def test_a_picture_is_small(name):
    assert (pictures.FOLDER / name).stat().st_size <= 2**20
