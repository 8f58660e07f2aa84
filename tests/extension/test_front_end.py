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


def test_nothing_is_switched_off_in_a_file():
    files = [*(REPO / "workbench/widgets/static").glob("*.js"), *(REPO / "extension/src").rglob("*.ts*")]
    assert files
    found = {file.name: SWITCHED_OFF.findall(file.read_text("utf-8")) for file in files}
    assert {name: words for name, words in found.items() if words} == {}
