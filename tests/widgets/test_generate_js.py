import re

import pytest

from workbench.events import Kind
from workbench.widgets.generate_js import programs
from workbench.widgets.js_bundle import STATIC


@pytest.mark.parametrize("name", programs())
def test_what_is_made_of_python_is_that_of_today(name):
    assert (STATIC / name).read_text(encoding="utf-8") == programs()[name], (
        "run: python -m workbench.widgets.generate_js"
    )


def test_no_script_has_numbers_or_colours_of_kinds_of_its_own():
    """Scripts compare a kind with ``KIND.WAIT``, never with 12; greys are allowed, as pages use them otherwise, too."""
    known = re.findall(r"#[0-9a-f]{6}", programs()["events.js"])
    coloured = {colour for colour in known if len(set(re.findall("..", colour[1:]))) > 1}
    for script in STATIC.rglob("*.js"):
        if script.name not in programs():
            text = script.read_text(encoding="utf-8")
            assert re.findall(r"\b(?:kind|state|category)\w* ?[!=]==? ?\d+", text) == [], script.name
            assert [colour for colour in coloured if colour in text] == [], script.name
            assert set(re.findall(r"\bKIND\.(\w+)", text)) <= set(Kind.__members__), script.name
