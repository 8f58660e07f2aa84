"""What the README promises: commands, code, words, links."""

import re
import subprocess
import sys

import pytest

from tests import readme
from tests.source import REPO
from workbench.cli import main
from workbench.magics import command_lines
from workbench.protocol import commands
from workbench.protocol.commands import summary


def make_targets():
    makefile = (REPO / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY:(.*)$", makefile, re.MULTILINE).group(1).split()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in phony)
    return set(phony) - {"help"}


def test_the_make_commands_are_those_of_the_makefile():
    assert {readme.code(row[0])[0] for row in readme.table("command")} == {f"make {t}" for t in make_targets()}


def test_every_command_mentioned_exists():
    mentioned = set(re.findall(r"\bmake ([a-z]+)\b(?= |`|$)", "\n".join(readme.blocks("sh") + readme.inline_code())))
    assert mentioned
    assert mentioned <= make_targets()


def test_the_doctor_is_there(capsys):
    assert "`workbench doctor`" in readme.text()
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--help"])
    assert left.value.code == 0
    assert "usage: workbench doctor" in capsys.readouterr().out


def test_the_table_of_words_is_what_they_declare():
    declared = [
        [f"`%fsdp {w.example}`", "; ".join(filter(None, [summary(w), w.more]))] for w in command_lines.WORDS.values()
    ]
    assert [list(row) for row in readme.table("line")] == declared


def test_each_line_that_commands_ranks_is_written_as_the_commands_write_it():
    for word in set(commands.COMMANDS.values()) - {commands.Start}:  # whose line names a default
        assert commands.to_text(command_lines.parse_line(word.example)) == word.example


def test_the_cells_of_the_notebook_snippet_parse():
    (snippet,) = readme.blocks("ipython")
    lines = [line for line in snippet.splitlines() if line.startswith("%fsdp ")]
    assert [command_lines.parse_line(line.removeprefix("%fsdp ")).word for line in lines] == ["start"]


@pytest.mark.cluster
def test_the_five_lines_run(tmp_path):
    (program,) = readme.blocks("python")
    assert len([line for line in program.splitlines() if line]) == 5
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert "on 2 ranks, 81 elements in 4 parameters" in done.stdout
    assert "plotly" in (tmp_path / "layout.html").read_text(encoding="utf-8")


def test_what_is_linked_is_there():
    links = re.findall(r"\]\(([^)#]+)\)", readme.text())
    files = [link for link in links if "://" not in link] + ["LICENSE", "notebooks/01_tour.ipynb"]
    assert [file for file in files if not (REPO / file).exists()] == []


def test_files_named_for_reading_are_there():
    section = readme.text().partition("## Where to read")[2].partition("\n|")[0]
    named = [name for name in readme.code(section) if "/" in name or name.endswith(".py")]
    assert named
    assert [name for name in named if not (REPO / "workbench" / name).exists()] == []


def test_the_hooks_are_valid():
    subprocess.run(
        [sys.executable, "-m", "pre_commit", "validate-config", str(REPO / ".pre-commit-config.yaml")], check=True
    )
