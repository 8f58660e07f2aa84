"""Which tests a changed file is tried with."""

from pathlib import Path

import pytest

from tests.helpers.mutants import main, mirrored
from tests.helpers.package_source import PACKAGE, REPO

FILES = sorted(path.relative_to(REPO).as_posix() for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def test_every_file_of_the_package_but_the_demo_has_tests_there_are():
    assert [file for file in FILES if not mirrored(file)] == ["workbench/demo.py"]
    assert all((REPO / test).exists() for file in FILES for test in mirrored(file))


def test_tests_are_those_of_the_folder_or_of_the_file():
    assert mirrored("workbench/engine/classic/wrap.py") == ["tests/engine/classic"]
    assert mirrored("workbench/engine/backends/gloo.py") == ["tests/engine"]
    assert mirrored("workbench/clock.py") == ["tests/test_clock.py"]


def test_tests_of_a_folder_that_reads_its_sentences_are_there_too():
    assert "tests/views/test_comms.py" in mirrored("workbench/replay/collectives.py")
    assert mirrored("workbench/codec.py") == ["tests/test_codec.py", "tests/protocol"]


def test_a_file_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["workbench/nothing.py"])
    assert "no file of the repository is workbench/nothing.py" in capsys.readouterr().err
    assert not Path("workbench/nothing.py").exists()
