import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from workbench.cli import generate_schema
from workbench.reports import as_json, schema_path
from workbench.reports.json_document import document


def test_the_schema_is_up_to_date():
    assert schema_path().read_text("utf-8") == generate_schema.text(), "run: python -m workbench.cli.generate_schema"


def test_the_schema_is_a_schema_and_lets_later_members_pass():
    schema = json.loads(schema_path().read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    valid = jsonschema.Draft202012Validator(schema).is_valid
    found = document("stop")
    assert valid(found)
    assert valid({**found, "later": 1})
    assert not valid({**found, "version": 2})
    assert not valid({**found, "type": "StatusReport"})
    assert not valid({name: value for name, value in found.items() if name != "error"})


def test_every_member_is_described():
    """By the docstring of its dataclass; only the few that explain themselves are not."""
    schema = json.loads(schema_path().read_text("utf-8"))
    bare = {
        f"{name}.{member}"
        for name, kind in schema["$defs"].items()
        for member, found in kind.get("properties", {}).items()
        if "description" not in found
    }
    assert bare == set()


class Colour(Enum):
    RED = "r"
    DARK_BLUE = "b"


@dataclass(frozen=True)
class Wheel:
    """A wheel.

    Attributes:
        spokes: how many, ``0``
            for a disc.
        width, height: in :class:`~meters.Meter`.
    """

    spokes: int
    width: float
    height: float


@dataclass(frozen=True)
class Cart:
    """A cart."""

    computed = ("size",)
    internal = ("secret",)

    wheels: tuple[Wheel, ...]
    loads: Mapping[int, float | None]
    by_colour: Mapping[Colour, str]
    pair: tuple[int, str]
    words: Sequence[str]
    to: Literal["left", "right"]
    where: Path
    whole: NDArray[np.int64]
    real: NDArray[np.float64]
    secret: object = None

    @property
    def size(self) -> int:
        """How big it is.

        In wheels.
        """
        return len(self.wheels)


CART = Cart(
    wheels=(Wheel(0, 1.5, float("-inf")),),
    loads={-1: None, 2: float("nan")},
    by_colour={Colour.DARK_BLUE: "x"},
    pair=(1, "a"),
    words=["a"],
    to="left",
    where=Path("a/b"),
    whole=np.arange(2),
    real=np.array([1.0, np.inf]),
)
DATA = {
    "size": 1,
    "wheels": [{"spokes": 0, "width": 1.5, "height": "-inf"}],
    "loads": {"-1": None, "2": "nan"},
    "by_colour": {"dark_blue": "x"},
    "pair": [1, "a"],
    "words": ["a"],
    "to": "left",
    "where": "a/b",
    "whole": [0, 1],
    "real": [1.0, "inf"],
}


def schema_of_carts():
    definitions: dict[str, Any] = {}
    return {**generate_schema._schema_of(Cart, definitions), "$defs": definitions}


def test_a_value_becomes_data_that_its_schema_allows():
    assert as_json(CART) == DATA
    json.dumps(as_json(CART), allow_nan=False)
    jsonschema.validate(as_json(CART), schema_of_carts())


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 1.5},
        {"wheels": [{"spokes": 0, "width": 1.5}]},
        {"loads": {"a": None}},
        {"by_colour": {"DARK_BLUE": "x"}},
        {"pair": [1]},
        {"pair": ["a", 1]},
        {"to": "up"},
        {"where": 3},
        {"whole": [0.5]},
        {"real": ["infinite"]},
    ],
)
def test_a_schema_refuses_other_data(wrong):
    assert not jsonschema.Draft202012Validator(schema_of_carts()).is_valid(DATA | wrong)


def test_descriptions_come_from_docstrings():
    found = schema_of_carts()["$defs"]
    assert found["Cart"]["properties"]["size"]["description"] == "How big it is."
    assert found["Wheel"]["properties"]["spokes"]["description"] == "how many, 0 for a disc."
    assert found["Wheel"]["properties"]["height"]["description"] == "in meters.Meter."


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="no report has a"):
        generate_schema._schema_of(set[int], {})
