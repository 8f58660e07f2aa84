import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.helpers import json_schema
from tests.helpers.recorded_run import record
from tests.helpers.scripts import RECIPE, written
from tests.helpers.trace_strategies import example_trace
from tests.helpers.warm_python import WARM
from workbench import INSTALL, __version__
from workbench.base.fault import Fault
from workbench.cli import demo, doctor, lint_script
from workbench.cli import main as cli
from workbench.cli.demo import Communication, DemoError, DemoReport
from workbench.cli.doctor import Diagnosis, Finding, Verdict
from workbench.errors import RankError, UsageError
from workbench.reports.verify_report import VerifyReport
from workbench.session import script_ranks
from workbench.trace import save
from workbench.trace.recording import RunEnd


def test_the_command_is_installed():
    (command,) = (entry for entry in entry_points(group="console_scripts") if entry.name == "workbench")
    assert command.load() is cli.main


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["dmeo"],
        ["demo", "--fast"],
        ["doctor", "now"],
        ["view"],
        ["view", "run.trace", "more"],
        ["where"],
        ["where", "out", "--fast"],
        ["grade"],
        ["grade", "a.ipynb", "--fast"],
        ["lint"],
        ["lint", "train.py", "-n", "two"],
        ["verify"],
        ["verify", "train.py", "-n", "two"],
        ["calibrate", "-n", "two"],
        ["calibrate", "--device", "simulated"],
        ["mcp", "--port", "9000"],
        ["skill", "folder", "more"],
    ],
)
def test_wrong_usage_shows_the_usage(argv, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(argv)
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert f"usage: workbench{f' {argv[0]}' if argv[:1] and argv[0] != 'dmeo' else ''} [-h]" in said


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("demo", "tour.trace"),
        ("lab", "copied into the current directory"),
        ("lab", "--port 9000"),
        ("doctor", "two ranks"),
        ("course", "stay as they are"),
        (
            "grade",
            "The exit status is 0 if all checks passed, 1 if some failed or never ran, and 2 if the notebook could",
        ),
        ("view", "a page that replays it in any browser"),
        (
            "verify",
            "The exit status is 0 if the steps are the same, 1 if they are not, and 2 if they could not be compared",
        ),
        ("calibrate", "write how far the plan was off. Nothing else should be at work meanwhile"),
        ("mcp", "Without --control, tools that change ranks or write files are not offered"),
        ("skill", "fsdp-workbench/SKILL.md in a folder"),
        ("where", "The exit status is 1 if the run is stalled, or a rank failed or was killed, and 2 if the folder"),
    ],
)
def test_each_subcommand_describes_itself(word, words, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([word, "-h"])
    assert left.value.code == 0
    assert words in " ".join(capsys.readouterr().out.split())


def test_the_skill_is_printed_or_written(tmp_path, capsys):
    assert cli.main(["skill"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("---\nname: fsdp-workbench\n")
    for _ in range(2):  # an earlier version is replaced
        assert cli.main(["skill", str(tmp_path)]) == 0
        file = Path(capsys.readouterr().out.strip())
        assert (file, file.read_text("utf-8")) == (tmp_path / "fsdp-workbench" / "SKILL.md", text)
        file.write_text("old")
    assert cli.main(["skill", str(file)]) == 1
    assert capsys.readouterr().err == f"cannot write {file}/fsdp-workbench/SKILL.md: Not a directory\n"


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"workbench {__version__}\n"


def test_the_tour_of_the_clone_comes_first():
    tour = cli.find_tour()
    assert tour == Path(__file__).parents[2] / "notebooks" / "01_tour.ipynb"
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


def demo_report(folder, as_expected=True):
    sent = Communication(
        num_steps=1, calls=9, num_bytes=100, expected_calls=9 if as_expected else 8, expected_bytes=100
    )
    files = {"page": folder / "tour.html", "trace": folder / "tour.trace"}
    return DemoReport(**files, seconds=1.5, communication=sent, losses=((3.0, 3.3),))


@pytest.mark.parametrize(("as_expected", "code"), [(True, 0), (False, 1)])
def test_demo_fails_if_the_counts_are_wrong(as_expected, code, tmp_path, monkeypatch, capsys):
    given = []
    monkeypatch.setattr(demo, "run", lambda *args: given.append(args[:2]) or demo_report(tmp_path, as_expected))
    assert cli.main(["demo", "--out", str(tmp_path)]) == code
    assert given == [(cli.find_tour(), tmp_path)]
    assert ("differ from the expected ones" in capsys.readouterr().err) is not as_expected


def test_a_failed_demo_is_a_sentence_and_not_a_traceback(monkeypatch, capsys):
    def fail(*_args):
        raise DemoError("the notebook failed in cell 3 of 9: %fsdp start")

    monkeypatch.setattr(demo, "run", fail)
    assert cli.main(["demo"]) == 1
    assert capsys.readouterr().err == "the notebook failed in cell 3 of 9: %fsdp start\n"


def test_a_missing_package_is_a_sentence(monkeypatch, capsys):
    def fail(*_args):
        raise ModuleNotFoundError("No module named 'plotly'")

    monkeypatch.setattr(demo, "run", fail)
    assert cli.main(["demo"]) == 1
    assert capsys.readouterr().err == f"workbench demo needs more packages: {INSTALL} (No module named 'plotly')\n"


@pytest.mark.parametrize(("well", "code"), [(True, 0), (False, 1)])
def test_the_exit_status_of_doctor(well, code, monkeypatch):
    found = Diagnosis((Finding("python", Verdict.GOOD if well else Verdict.BAD, "3.12"),))
    monkeypatch.setattr(doctor, "run", lambda: found)
    assert cli.main(["doctor"]) == code


# ---- view and where


def test_where_says_that_a_run_goes_on_and_leaves_with_0(tmp_path, capsys):
    record(tmp_path)
    assert cli.main(["where", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[:2] == [
        "the run continues, at step 1",
        "  rank  state  step  last event       ago",
    ]
    assert said.err == ""


def test_where_says_that_a_run_is_stalled_and_leaves_with_1(tmp_path, capsys):
    record(tmp_path, ranks=[0], ago_s=3600)
    assert cli.main(["where", str(tmp_path)]) == 1
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "rank 0 has recorded no event for 1 h"
    assert last == "  note: no readable recording of rank 1, of 2 ranks"


def test_where_says_that_a_rank_failed_and_leaves_with_1(tmp_path, capsys):
    record(tmp_path, end=RunEnd(t_ns=time.monotonic_ns(), reason="exit status 3"))
    assert cli.main(["where", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "ranks 0-1 failed: exit status 3"


def test_a_recording_cannot_command_the_terminal(tmp_path, capsys):
    record(tmp_path, end=RunEnd(t_ns=time.monotonic_ns(), reason="\x1b]0;mine\x07 \x9b2J \u202e é"))
    assert cli.main(["where", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[0] == "ranks 0-1 failed: \ufffd]0;mine\ufffd \ufffd2J \ufffd é"


def test_where_of_a_recording_loads_nothing_of_commands_and_other_tools(tmp_path):
    record(tmp_path)
    program = (
        f"import sys; from workbench.cli.main import main; main(['where', {str(tmp_path)!r}]); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = [name for name in done.stdout.splitlines()[-1].split() if name.startswith("workbench.")]
    assert not [name for name in loaded if name.startswith(("workbench.protocol", "workbench.importers"))]
    assert "workbench.trace.read_recording" in loaded
    assert len(loaded) <= 47


def test_where_leaves_with_2_if_there_is_nothing_to_read(tmp_path, capsys):
    assert cli.main(["where", str(tmp_path / "none")]) == 2
    assert capsys.readouterr() == ("", f"cannot read {tmp_path}/none: No such file or directory\n")
    assert cli.main(["where", str(tmp_path)]) == 2
    assert capsys.readouterr() == (
        "",
        f"{tmp_path} is a folder without the recording of a rank, such as rank0.0000.rec\n",
    )
    (tmp_path / "file").touch()
    assert cli.main(["where", str(tmp_path / "file")]) == 2
    assert capsys.readouterr() == ("", f"cannot read {tmp_path}/file: Not a directory\n")


def test_view_writes_a_recording_as_a_page_and_says_what_it_lacks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "out", ranks=[0])
    assert cli.main(["view", "out"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("wrote out.html")
    assert said.err == "note: no readable recording of rank 1, of 2 ranks\n"
    assert "<title>out</title>" in (tmp_path / "out.html").read_text(encoding="utf-8")


def test_view_writes_some_steps_of_a_trace_where_it_is_told(tmp_path, capsys):
    save(example_trace(num_ranks=2, num_units=2, steps=4), tmp_path / "run.trace")
    page = tmp_path / "page.html"
    assert cli.main(["view", str(tmp_path / "run.trace"), "--steps=-2..", "--out", str(page)]) == 0
    assert "steps 2-3" in capsys.readouterr().out
    assert page.exists()


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["view", "none.trace"], "there is no file 'none.trace'"),
        (["view", "."], ". is a folder without the recording of a rank, such as rank0.0000.rec"),
        (["view", "out", "--steps", "9"], "the trace has no step 9; its steps are: 0-1"),
        (["view", "out", "--steps", "x"], "steps are written 5, 3..5"),
        (["view", "out", "--out", "page.pdf"], "'page.pdf' has no known format"),
        (["view", "out", "--out", "none/page.html"], "there is no folder none"),
    ],
)
def test_view_says_what_is_wrong_and_leaves_with_1(argv, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "out")
    assert cli.main(argv) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert why in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


# ---- --json


def test_where_as_json_has_the_same_status(tmp_path, capsys):
    record(tmp_path, ranks=[0], ago_s=3600)
    assert cli.main(["where", "--json", str(tmp_path)]) == 1
    found = json_schema.read(capsys.readouterr().out)
    assert (found["command"], found["type"], found["error"]) == ("where", "RunWhereReport", None)
    assert found["report"]["is_stalled"]
    assert found["report"]["ranks"][0]["state"] == "silent"
    assert found["report"]["ranks"][0]["for_ns"] >= 3600 * 10**9
    assert found["report"]["notes"] == ["no readable recording of rank 1, of 2 ranks"]


def test_where_as_json_that_reads_nothing(tmp_path, capsys):
    assert cli.main(["where", str(tmp_path / "none"), "--json"]) == 2
    said = capsys.readouterr()
    assert json_schema.read(said.out)["error"]["type"] == "TraceError"
    assert json_schema.read(said.out)["error"]["message"] == said.err.rstrip("\n")


def test_view_as_json_names_the_page_and_what_it_lacks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "out", ranks=[0])
    assert cli.main(["view", "out", "--json"]) == 0
    found = json_schema.read(capsys.readouterr().out)
    assert found["report"]["path"] == "out.html"
    assert found["report"]["num_bytes"] == (tmp_path / "out.html").stat().st_size
    assert found["notices"] == ["no readable recording of rank 1, of 2 ranks"]
    assert cli.main(["view", "out", "--steps", "9", "--json"]) == 1
    assert "no step 9" in json_schema.read(capsys.readouterr().out)["error"]["message"]


@pytest.mark.parametrize(("verdict", "code"), [(Verdict.NOTE, 0), (Verdict.BAD, 1)])
def test_doctor_as_json(verdict, code, monkeypatch, capsys):
    for name in ("python", "packages", "machine", "devices", "collectives", "widgets", "panel", "self_test"):
        monkeypatch.setattr(doctor, name, lambda: iter([Finding("python", verdict, "3.12", "do")]))
    assert cli.main(["doctor", "--json"]) == code
    found = json_schema.read(capsys.readouterr().out)["report"]
    assert found["is_well"] is (code == 0)
    assert (
        found["findings"] == [{"name": "python", "verdict": verdict.name.lower(), "found": "3.12", "advice": "do"}] * 8
    )


def test_demo_as_json_has_its_progress_elsewhere(tmp_path, monkeypatch, capsys):
    def run(notebook, folder, say):
        say("[1/2] start")
        return demo_report(folder, as_expected=False)

    monkeypatch.setattr(demo, "run", run)
    assert cli.main(["demo", "--json", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    found = json_schema.read(said.out)["report"]
    assert (found["trace"], found["communication"]["as_expected"]) == (str(tmp_path / "tour.trace"), False)
    assert said.err.startswith("[1/2] start\nSome collectives differ")


def test_a_failed_demo_and_a_missing_package_are_documents(monkeypatch, capsys):
    for error in (DemoError("in cell 3"), ModuleNotFoundError("No module named 'plotly'")):
        monkeypatch.setattr(demo, "run", lambda *_args, error=error: (_ for _ in ()).throw(error))
        assert cli.main(["demo", "--json"]) == 1
        assert str(error) in json_schema.read(capsys.readouterr().out)["error"]["message"]


# ---- workbench verify


VERIFIED = VerifyReport(
    num_params=4,
    max_abs_diff=0.0,
    max_rel_diff=0.0,
    worst_param="weight",
    equal_bits=4,
    ok=True,
    tolerance="rtol 0.001",
    loss_sharded=1.0,
    loss_reference=1.0,
)


class FakeRanks:
    """Stands for ranks whose script gives ``report`` or raises it."""

    report = VERIFIED
    calls: tuple = ()

    def __init__(self, num_ranks, on_output):
        FakeRanks.calls = (num_ranks,)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def take_our_engine(self):
        FakeRanks.calls += ("our engine",)

    def run_script(self, script, args):
        FakeRanks.calls += ((script, tuple(args)),)

    def verify(self, model, fn, *, repeat):
        FakeRanks.calls += ((model, fn),)
        if isinstance(self.report, Exception):
            raise self.report
        return self.report


@pytest.fixture
def fake_ranks(tmp_path, monkeypatch):
    """Run ``workbench verify train.py`` on ranks that need no time."""
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    for module in (script_ranks, lint_script):
        monkeypatch.setattr(module, "ScriptRanks", FakeRanks)


@pytest.mark.parametrize("word", ["lint", "verify"])
def test_a_script_that_is_not_there_is_refused_before_ranks_start(word, fake_ranks, capsys):
    FakeRanks.calls = ()
    assert cli.main([word, "trian.py"]) == 2
    assert "there is no script trian.py in" in capsys.readouterr().err
    assert FakeRanks.calls == ()


@pytest.mark.parametrize(
    ("report", "status"),
    [
        (VERIFIED, 0),
        (replace(VERIFIED, ok=False), 1),
        (replace(VERIFIED, faults=(Fault(rule="stale-optimizer", verdict="unit 0 did not move"),)), 1),
        (replace(VERIFIED, not_finite=("weight",)), 2),
        (UsageError("no model is sharded"), 2),
        (RankError("rank 0 raised", rank=0, ename="E", evalue="e", traceback=""), 2),
    ],
)
def test_verify_ends_with_what_it_found(report, status, fake_ranks, monkeypatch, capsys):
    monkeypatch.setattr(FakeRanks, "report", report)
    assert cli.main(["verify", "train.py", "-n", "3", "--lr", "1e-3", "--fn", "fit", "--json", "more"]) == status
    assert FakeRanks.calls == (3, "our engine", ("train.py", ("--lr", "1e-3", "more")), ("", "fit"))
    said = capsys.readouterr()
    document = json_schema.read(said.out)
    assert document["command"] == "verify"
    if isinstance(report, UsageError):
        assert said.err.startswith("train.py cannot be verified: no model is sharded\nThe script must shard a model")


def test_verify_passes_what_follows_two_hyphens_to_the_script(fake_ranks, capsys):
    assert cli.main(["verify", "train.py", "--", "-n", "3"]) == 0
    assert FakeRanks.calls[:3] == (2, "our engine", ("train.py", ("-n", "3")))
    assert capsys.readouterr().out.startswith("sharded training is the same as unsharded: 4 parameters")


def test_a_script_for_torchrun_is_verified(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", WARM.executable())
    script = tmp_path / "train.py"
    script.write_text(RECIPE)
    assert cli.main(["verify", str(script)]) == 0
    assert cli.main(["verify", str(script), "--scale", "2"]) == 1
    same, other = capsys.readouterr().out.split("sharded training is ")[1:]
    assert same.startswith("the same as unsharded: 4 parameters")
    assert "gradients are summed over the 2 ranks instead of averaged" in other
