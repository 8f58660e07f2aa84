"""All browser code is typed and linted: the panel's TypeScript and the widgets' JavaScript."""

import re

import pytest

from tests.helpers.built_panel import run_script
from tests.helpers.package_source import REPO
from tests.helpers.pairwise import quick

pytestmark = pytest.mark.timeout(600)  # the first run of a checkout fetches the compilers

SWITCHED_OFF = re.compile(r"@ts-(?:ignore|nocheck|expect-error)|eslint-disable|@type \{any\}|\bas any\b|: any\b")


@pytest.mark.parametrize("part", ["panel", "widgets"])
@pytest.mark.parametrize("tool", quick(["compile", "lint"], ["compile"]))
def test_the_compiler_and_the_linter_find_nothing(tool, part):
    run_script(f"{tool}:{part}")


MOST_FIELDS = 25
"""Of a class: one with more is about several things."""

CLASS = re.compile(r"^(?:export )?(?:default )?(?:abstract )?class (\w+).*?^}", re.MULTILINE | re.DOTALL)
ASSIGNED = re.compile(r"\bthis\.(#?\w+) = ")
DECLARED = re.compile(
    r"^  (?:(?:readonly|static|override|protected|private|public) )*(#?\w+)[?!]?(?:: | = )", re.MULTILINE
)


def sources():
    files = [*(REPO / "workbench/widgets/static").rglob("*.js"), *(REPO / "extension/src").rglob("*.ts*")]
    assert len(files) > 60
    return {file.relative_to(REPO).as_posix(): file.read_text("utf-8") for file in files}


def fields(text):
    """The number of fields of each class in a file."""
    return {found[1]: len({*ASSIGNED.findall(found[0]), *DECLARED.findall(found[0])}) for found in CLASS.finditer(text)}


def test_nothing_is_switched_off_in_a_file():
    assert {name: words for name, text in sources().items() if (words := SWITCHED_OFF.findall(text))} == {}


def test_no_class_has_too_many_fields():
    found = {f"{file}: {name}": count for file, text in sources().items() for name, count in fields(text).items()}
    assert {name: count for name, count in found.items() if count > MOST_FIELDS} == {}
    assert len(found) > 30


def test_the_fields_of_a_class_are_counted():
    javascript = "export class A {\n  constructor() {\n    this.a = this.b = 1;\n    this.a = 2;\n  }\n}\n"
    typescript = "class B extends C {\n  readonly #a: number;\n  b = 1;\n\n  d(): void {\n    this.#a = 2;\n  }\n}\n"
    assert fields(javascript + typescript) == {"A": 2, "B": 2}
