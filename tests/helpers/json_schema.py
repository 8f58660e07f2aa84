"""The schema of the documents of ``--json``, stricter than what users get: it refuses members that it does not name."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema

from workbench.reports import schema_path


def check(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document that is valid, and that a strict JSON parser accepts."""
    _validator().validate(json.loads(json.dumps(document, allow_nan=False)))
    return document


def read(text: str) -> dict[str, Any]:
    """Return the only document in a text, which may hold nothing else."""
    (line,) = text.splitlines()
    return check(json.loads(line))


@cache
def _validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(schema_path().read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    for part in (schema, *schema["$defs"].values()):
        if "properties" in part:
            part["additionalProperties"] = False
    return jsonschema.Draft202012Validator(schema)
