import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Literal

import pytest

from workbench.cli.generate_front_end import EVENTS, STATIC, module, programs, type_of
from workbench.events import Kind
from workbench.protocol.arguments import argument


@pytest.mark.parametrize("path", programs(), ids=lambda path: path.name)
def test_generated_files_are_up_to_date(path):
    assert path.read_text("utf-8") == programs()[path], "run: python -m workbench.cli.generate_front_end"


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


class Colour(IntEnum):
    RED = 0
    BLUE = 2


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel."""

    spokes: int
    teeth: int = 0


@dataclass(frozen=True, kw_only=True)
class Cart:
    """A cart."""

    word: ClassVar[str] = "cart"
    wheels: tuple[Wheel, ...]
    load: float | None = None
    to: str = argument("which way", default="left", choices=("left", "right"))
    cargo: Any = field(default=None, metadata={"typescript": "Cargo"})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (bool, "boolean"),
        (int | float, "number"),
        (str | None, "string | null"),
        (memoryview, "number"),
        (Any, "unknown"),
        (Colour, "0 | 2"),
        (Literal["a", 'b"'], '"a" | "b\\""'),
        (tuple[int, ...], "readonly number[]"),
        (Sequence[str | None], "readonly (string | null)[]"),
        (dict[int, Wheel], "Readonly<Record<string, Wheel>>"),
        (tuple[tuple[Wheel, ...], ...], "readonly (readonly Wheel[])[]"),
    ],
)
def test_types(kind, text):
    assert type_of(kind) == text


def test_types_that_no_message_has_are_refused():
    with pytest.raises(TypeError, match="set"):
        type_of(set[int])


def test_a_module():
    assert module("Made.", [Cart], unions={"Any": [Cart, Wheel]}, constants={"VERSION": 3}, sent=[Cart]) == (
        """\
// Made.

export const VERSION = 3;

export interface Wheel { readonly spokes: number; readonly teeth: number; }

export interface Cart {
  readonly word: "cart";
  readonly wheels: readonly Wheel[];
  readonly load?: number | null;
  readonly to?: "left" | "right";
  readonly cargo?: Cargo;
}

export type Any =
  | Cart | Wheel;
"""
    )
