"""Which tests a changed file is tried with."""

import subprocess
from pathlib import Path

import pytest

from tests.helpers import mutants
from tests.helpers.mutants import main, mirrored
from tests.helpers.package_source import PACKAGE, REPO

FILES = sorted(path.relative_to(REPO).as_posix() for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def test_every_file_of_the_package_but_the_demo_has_tests_there_are():
    assert [file for file in FILES if not mirrored(file)] == ["workbench/cli/demo.py"]
    assert all((REPO / test).exists() for file in FILES for test in mirrored(file))


def test_tests_are_those_of_the_folder_or_of_the_file():
    assert mirrored("workbench/engine/classic/wrap.py") == ["tests/engine/classic"]
    assert mirrored("workbench/engine/backends/gloo.py") == ["tests/engine"]
    assert mirrored("workbench/base/clock.py") == ["tests/base/test_clock.py"]


def test_tests_of_a_folder_that_reads_its_sentences_are_there_too():
    assert "tests/views/test_comms.py" in mirrored("workbench/replay/collectives.py")
    assert mirrored("workbench/base/codec.py") == ["tests/base/test_codec.py", "tests/protocol"]


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        (
            "noise\nFAILED tests/base/test_clock.py::test_now - assert 1 == 2\nERROR tests/base/test_ports.py\n",
            "tests fail without any change: tests/base/test_clock.py::test_now, tests/base/test_ports.py; "
            "log says why\n",
        ),
        ("a traceback\n", "mutmut cannot run tests/base/test_clock.py; log says why\n"),
    ],
)
def test_tests_that_fail_without_any_change_are_named(monkeypatch, tmp_path, capsys, log, sentence):
    def fail(*_):
        (tmp_path / "log").write_text(log)
        raise subprocess.CalledProcessError(1, "mutmut")

    monkeypatch.setattr(mutants, "mutate", fail)
    monkeypatch.setattr(mutants, "copy", lambda: None)
    monkeypatch.setattr(mutants, "COPY", tmp_path)
    monkeypatch.setattr(mutants, "REPO", tmp_path)
    for name in ("workbench/base/clock.py", "tests/base/test_clock.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert main(["workbench/base/clock.py"]) == 2
    assert capsys.readouterr().err == sentence


@pytest.mark.parametrize("outcomes", [{"a": "timeout", "b": "timeout"}, {"a": "timeout", "b": "killed"}])
def test_changes_that_all_ran_out_of_time_were_not_tried(monkeypatch, tmp_path, outcomes):
    monkeypatch.setattr(mutants, "COPY", tmp_path)
    monkeypatch.setattr(mutants, "_run", lambda *_, **__: None)
    monkeypatch.setattr(mutants, "_outcomes", lambda: outcomes)
    if "killed" in outcomes.values():
        assert mutants.mutate(["workbench/base/clock.py"], [], jobs=1) == outcomes
    else:
        with pytest.raises(subprocess.CalledProcessError):
            mutants.mutate(["workbench/base/clock.py"], [], jobs=1)


def test_a_file_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["workbench/nothing.py"])
    assert "no file of the repository is workbench/nothing.py" in capsys.readouterr().err
    assert not Path("workbench/nothing.py").exists()
