from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Literal

import pytest

from workbench.live.typescript import module, type_of
from workbench.protocol.arguments import argument


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
    to: str = field(default="left", metadata=argument("which way", choices=("left", "right")))
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
