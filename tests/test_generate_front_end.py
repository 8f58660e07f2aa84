import re

import pytest

from workbench.events import Kind
from workbench.generate_front_end import EVENTS, STATIC, programs


@pytest.mark.parametrize("path", programs(), ids=lambda path: path.name)
def test_generated_files_are_up_to_date(path):
    assert path.read_text("utf-8") == programs()[path], "run: python -m workbench.generate_front_end"


def test_no_script_defines_its_own_numbers_or_colours_of_kinds():
    """Scripts compare a kind with ``KIND.WAIT``, never with 12; greys are allowed, as pages use them otherwise, too."""
    known = re.findall(r"#[0-9a-f]{6}", programs()[EVENTS])
    coloured = {colour for colour in known if len(set(re.findall("..", colour[1:]))) > 1}
    for script in STATIC.rglob("*.js"):
        if script not in programs():
            text = script.read_text(encoding="utf-8")
            assert re.findall(r"\b(?:kind|state|category)\w* ?[!=]==? ?\d+", text) == [], script.name
            assert [colour for colour in coloured if colour in text] == [], script.name
            assert set(re.findall(r"\bKIND\.(\w+)", text)) <= set(Kind.__members__), script.name
