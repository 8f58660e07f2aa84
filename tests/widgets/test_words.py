import re

from workbench.events import Kind
from workbench.widgets.modules import STATIC
from workbench.widgets.words import FILE, program


def test_the_front_ends_words_of_events_are_those_of_today():
    assert FILE.read_text(encoding="utf-8") == program(), "run: python -m workbench.widgets.words"


def test_no_script_has_numbers_or_colours_of_kinds_of_its_own():
    """A kind is compared with ``KIND.WAIT``, never with 12; greys of the page's own have other uses."""
    coloured = {
        colour for colour in re.findall(r"#[0-9a-f]{6}", program()) if len(set(re.findall("..", colour[1:]))) > 1
    }
    for script in STATIC.glob("*.js"):
        if script != FILE:
            text = script.read_text(encoding="utf-8")
            assert re.findall(r"\b(?:kind|state|category)\w* ?[!=]==? ?\d+", text) == [], script.name
            assert [colour for colour in coloured if colour in text] == [], script.name
            assert set(re.findall(r"\bKIND\.(\w+)", text)) <= set(Kind.__members__), script.name
