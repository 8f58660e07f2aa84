"""The claims of README.md and docs/: commands, code, lines, links, file names."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import documents, json_schema
from tests.helpers.package_source import PACKAGE, REPO, sources
from workbench.cli.main import _COMMANDS, main
from workbench.magics import command_lines
from workbench.protocol import commands
from workbench.reports import schema_path

OF_IPYPARALLEL = {"ipcontroller_config.py", "ipengine_config.py"}


def test_the_documents_of_json_are_valid():
    shown = documents.blocks("json", documents.documents()[REPO / "docs" / "machines.md"])
    assert [json_schema.check(json.loads(each))["command"] for each in shown] == ["break", "step"]


def make_targets():
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY:(.*)$", makefile, re.MULTILINE).group(1).split()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in phony)
    return set(phony) - {"help"}


def test_the_make_commands_are_those_of_the_makefile():
    assert {documents.code(row[0])[0] for row in documents.table("target")} == {f"make {t}" for t in make_targets()}


def test_every_command_mentioned_exists():
    mentioned = set(
        re.findall(r"\bmake ([a-z]+)\b(?= |`|$)", "\n".join(documents.blocks("sh") + documents.inline_code()))
    )
    assert mentioned
    assert mentioned <= make_targets()


def test_the_doctor_is_there(capsys):
    assert "`workbench doctor`" in documents.text()
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--help"])
    assert left.value.code == 0
    assert "usage: workbench doctor" in capsys.readouterr().out


@pytest.mark.parametrize("first_column", documents.COMMAND_TABLES)
def test_the_tables_of_commands_match_their_declarations(first_column):
    assert documents.table(first_column) == documents.command_rows(first_column), (
        "python -m tests.helpers.documents writes them"
    )


def test_the_table_of_rules_matches_the_rules():
    assert documents.table(documents.RULE_TABLE[0]) == documents.rule_rows(), (
        "python -m tests.helpers.documents writes it"
    )


def test_the_table_of_faults_matches_the_faults():
    assert documents.table("fault") == documents.fault_rows(), "python -m tests.helpers.documents writes it"


def test_the_table_of_engines_is_what_the_contract_tests():
    assert documents.table(documents.ENGINE_TABLE[0]) == documents.engine_rows(), (
        "python -m tests.helpers.documents writes it"
    )


def test_each_line_that_commands_ranks_is_written_as_the_commands_write_it():
    for word in set(commands.COMMANDS.values()) - {commands.Start}:  # its line names a default
        assert commands.to_text(command_lines.parse_line(word.example)) == word.example


def test_lines_of_fsdp_parse():
    """Every line between backticks or in a snippet, except those in the table, which have separate tests."""
    written = documents.inline_code() + [line for cell in notebook_cells() for line in cell.splitlines()]
    lines = {" ".join(line.removeprefix("%fsdp ").split()) for line in written if line.startswith("%fsdp ")}
    assert len(lines) > len(command_lines.WORDS)
    for line in lines:
        assert command_lines.parse_line(line, variable=lambda _name: "3"), line


def notebook_cells():
    """Return every cell of the notebook snippets; a `%%fsdp` cell counts as one."""
    return [cell for snippet in documents.blocks("ipython") for cell in snippet.strip().split("\n\n")]


def test_the_cells_of_the_notebook_snippets_parse():
    cells = notebook_cells()
    assert cells
    for cell in cells:
        body = cell.partition("\n")[2] if cell.startswith("%%") else cell
        ast.parse("\n".join(line for line in body.splitlines() if not re.match(r"(\w+ = )?%", line)))


def test_the_programs_parse():
    assert [ast.parse(program) for program in documents.blocks("python")]


@pytest.mark.cluster
def test_the_five_lines_run(tmp_path, capsys):
    (program,) = documents.blocks("python", documents.documents()[documents.README])
    assert len([line for line in program.splitlines() if line]) == 5
    exec(program.replace("layout.html", str(tmp_path / "layout.html")), {})
    assert "on 2 ranks, 81 elements in 4 parameters" in capsys.readouterr().out
    assert "plotly" in (tmp_path / "layout.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", documents.documents(), ids=lambda path: path.name)
def test_linked_files_exist(path):
    for file, heading in documents.links(documents.documents()[path]):
        target = Path(os.path.normpath(path.parent / file)) if file else path
        assert target.is_relative_to(REPO), file
        assert target.exists(), file
        assert not heading or heading in documents.headings(documents.documents()[target]), f"{file}#{heading}"


def test_every_document_can_be_reached_from_the_readme():
    texts = documents.documents()
    linked = {REPO / file for file, _ in documents.links(texts[documents.README]) if file}
    assert texts.keys() - linked == {documents.README}


def test_the_readme_is_short():
    assert len(documents.documents()[documents.README].splitlines()) <= 120


def is_there(name):
    return any((folder / name).exists() for folder in (REPO, PACKAGE))


@pytest.mark.parametrize("path", documents.documents(), ids=lambda path: path.name)
def test_named_files_exist(path):
    """Sources and folders are named by their path from the repository or from the package."""
    named = {
        name
        for name in documents.inline_code(documents.documents()[path])
        if re.fullmatch(r"[\w./-]+(\.(py|ts|js|ipynb|md)|/)", name)
    }
    assert sorted(name for name in named - OF_IPYPARALLEL if not is_there(name)) == []


def walks():
    """Return the diagrams of the architecture."""
    return documents.blocks("text", documents.documents()[REPO / "docs" / "architecture.md"])


def test_the_walks_name_existing_files():
    assert len(walks()) == 5
    files = {name for walk in walks() for name in re.findall(r"[\w/]+\.py\b|\b[a-z_]+/(?=[\s,])", walk)}
    assert sorted(name for name in files if not is_there(name)) == []


def test_the_walks_name_functions_of_the_file_before_them():
    file, found = "", []
    for line in (line for walk in walks() for line in walk.splitlines()):
        file = next(iter(re.findall(r"[\w/]+\.py\b", line)), file)
        found += [(file, name) for name in re.findall(r"\b(\w+)\(\)", line)]
    defined = {
        (source.path.as_posix(), node.name)
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert len(found) > 20
    assert [pair for pair in found if pair not in defined] == []


def test_the_hooks_are_valid():
    subprocess.run(
        [sys.executable, "-m", "pre_commit", "validate-config", str(REPO / ".pre-commit-config.yaml")], check=True
    )


def test_the_page_on_json_names_each_type_that_its_command_does_not():
    page = documents.documents()[REPO / "docs" / "machines.md"]
    schema = json.loads(schema_path().read_text("utf-8"))
    types = {each["title"] for each in schema["oneOf"]} - {"no report"}
    named = set(documents.inline_code(page))
    words = {word.title() for word in (*command_lines.WORDS, *_COMMANDS, "inspect", "eval")}
    assert {name for name in types - named if name.removesuffix("Report") not in words} == set()
    assert {name for name in named if re.fullmatch(r"\w+Report|Diagnosis", name)} <= types
