import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from workbench import __version__, cli, demo, doctor
from workbench.demo import DemoError
from workbench.errors import UsageError


def test_the_command_is_installed():
    (command,) = (entry for entry in entry_points(group="console_scripts") if entry.name == "workbench")
    assert command.load() is cli.main


@pytest.mark.parametrize("argv", [[], ["dmeo"], ["demo", "--fast"], ["doctor", "now"]])
def test_wrong_usage_shows_the_usage(argv, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(argv)
    assert left.value.code == 2
    usage = capsys.readouterr().err
    assert f"usage: workbench{f' {argv[0]}' if argv[:1] and argv[0] in {'demo', 'doctor'} else ''} [-h]" in usage


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("demo", "tour.trace"),
        ("lab", "copied into the current directory"),
        ("lab", "--port 9000"),
        ("doctor", "two ranks"),
    ],
)
def test_each_subcommand_describes_itself(word, words, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([word, "-h"])
    assert left.value.code == 0
    assert words in " ".join(capsys.readouterr().out.split())


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"workbench {__version__}\n"


def test_the_tour_of_the_clone_comes_first():
    tour = cli.find_tour()
    assert tour == Path(__file__).parents[1] / "notebooks" / "01_tour.ipynb"
    import nbformat

    nbformat.validate(nbformat.read(tour, as_version=4))


def test_the_tour_of_a_wheel(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "_CHECKOUT", tmp_path / "none")
    monkeypatch.setattr(cli, "_INSTALLED", tmp_path)
    with pytest.raises(UsageError, match=r"01_tour.ipynb is neither in .*none"):
        cli.find_tour()
    (tmp_path / cli.TOUR).touch()
    assert cli.find_tour() == tmp_path / cli.TOUR


def test_lab_is_reachable_from_this_machine_only(monkeypatch):
    started = []
    monkeypatch.setattr(cli.os, "execv", lambda program, argv: started.append((program, argv)) or sys.exit(0))
    with pytest.raises(SystemExit):
        cli.main(["lab", "--no-browser"])
    ((program, argv),) = started
    assert program == argv[0] == sys.executable
    assert "--ServerApp.ip=127.0.0.1" in argv
    assert argv[-2:] == ["--no-browser", str(cli.find_tour())]


def opened(monkeypatch, *flags):
    """Return the arguments that JupyterLab is started with."""
    started = []
    monkeypatch.setattr(cli.os, "execv", lambda program, argv: started.append(argv) or sys.exit(0))
    with pytest.raises(SystemExit):
        cli.main(["lab", *flags])
    return started[0][3:]


@pytest.mark.parametrize(
    "flags", [("--ServerApp.root_dir={}",), ("--ServerApp.root_dir", "{}"), ("--notebook-dir={}",)]
)
def test_the_user_s_folder_wins_and_has_the_tour(flags, tmp_path, monkeypatch):
    flags = [flag.format(tmp_path) for flag in flags]
    argv = opened(monkeypatch, *flags)
    assert argv == ["--ServerApp.ip=127.0.0.1", *flags, str(tmp_path / cli.TOUR)]
    assert (tmp_path / cli.TOUR).read_bytes() == cli.find_tour().read_bytes()
    from jupyterlab.labapp import LabApp  # its import would cost every worker that collects this file a second

    (app,) = (LabApp(),)
    app.parse_command_line(argv)  # "only accepts one value" if an option is given twice
    assert app.extra_args == [str(tmp_path / cli.TOUR)]


def test_the_user_s_address_wins_and_a_folder_around_the_tour_needs_no_copy(tmp_path, monkeypatch):
    root = f"--notebook-dir={cli.find_tour().parents[1]}"
    assert opened(monkeypatch, "--ip", "::1", root) == ["--ip", "::1", root, str(cli.find_tour())]
    with pytest.raises(UsageError, match=r"cannot copy the tour to .*: No such file"):
        cli._copied(cli.find_tour(), tmp_path / "missing")
    assert cli.main(["lab", f"--notebook-dir={tmp_path}/missing"]) == 1


def test_lab_copies_the_tour_of_a_wheel_once_and_reports_it(tmp_path, monkeypatch, capsys):
    installed, here = tmp_path / "package", tmp_path / "here"
    for folder in (installed, here):
        folder.mkdir()
    (installed / cli.TOUR).write_text("as shipped")
    monkeypatch.setattr(cli, "_CHECKOUT", tmp_path / "none")
    monkeypatch.setattr(cli, "_INSTALLED", installed)
    monkeypatch.chdir(here)
    opened = []
    monkeypatch.setattr(cli.os, "execv", lambda _program, argv: opened.append(argv[-1]) or sys.exit(0))
    for text in ("as shipped", "worked on"):
        with pytest.raises(SystemExit):
            cli.main(["lab"])
        assert (here / cli.TOUR).read_text() == text
        (here / cli.TOUR).write_text("worked on")
    assert opened == [str(here / cli.TOUR)] * 2
    assert capsys.readouterr().err == f"The tour was copied to {here / cli.TOUR}\n"


@pytest.mark.parametrize(("as_expected", "code"), [(True, 0), (False, 1)])
def test_demo_fails_if_the_counts_are_wrong(as_expected, code, tmp_path, monkeypatch, capsys):
    given = []
    monkeypatch.setattr(demo, "run", lambda *args: given.append(args) or as_expected)
    assert cli.main(["demo", "--out", str(tmp_path)]) == code
    assert given == [(cli.find_tour(), tmp_path)]
    assert ("differ from the expected ones" in capsys.readouterr().err) is not as_expected


def test_a_failed_demo_is_a_sentence_and_not_a_traceback(monkeypatch, capsys):
    def fail(*_args):
        raise DemoError("the tour failed in cell 3 of 9: %fsdp start")

    monkeypatch.setattr(demo, "run", fail)
    assert cli.main(["demo"]) == 1
    assert capsys.readouterr().err == "the tour failed in cell 3 of 9: %fsdp start\n"


def test_a_missing_package_is_a_sentence(monkeypatch, capsys):
    def fail(*_args):
        raise ModuleNotFoundError("No module named 'plotly'")

    monkeypatch.setattr(demo, "run", fail)
    assert cli.main(["demo"]) == 1
    assert "No module named 'plotly'\nThe installation is not complete" in capsys.readouterr().err


@pytest.mark.parametrize(("well", "code"), [(True, 0), (False, 1)])
def test_the_exit_status_of_doctor(well, code, monkeypatch):
    monkeypatch.setattr(doctor, "run", lambda: well)
    assert cli.main(["doctor"]) == code
