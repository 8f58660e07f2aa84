"""What the bench of faults counts and writes, from runs made by hand."""

from bench import faults
from bench.faults import BESIDE, CLEAN, FaultRun, Verdict, figure, missed, page, table


def run(fault, rule="", *, seed=0, engine="ours", **more):
    verdicts = (Verdict(instrument="lint", rule=rule, text="a <verdict>"),) if rule else ()
    return FaultRun(fault=fault, seed=seed, ranks=2, engine=engine, verdicts=verdicts, **more)


RIGHT = run("nan", "not-finite")
WRONG = run("nan", "precision", seed=1)
SILENT = run("nan", seed=2)
LEFT = run("oom", "OutOfMemoryError", after=RIGHT.verdicts)
REFUSED = run("bf16-master", engine="torch", refused="torch's FSDP <cannot>")
ALARM = run(CLEAN, "tiny-units")


def test_the_first_verdict_counts_and_none_may_be_left_after_the_removal():
    assert missed([RIGHT, run(CLEAN), REFUSED]) == []
    assert missed([WRONG, SILENT, LEFT, ALARM]) == [WRONG, SILENT, LEFT, ALARM]


def test_the_table_has_a_row_for_each_fault():
    assert table([run(CLEAN), RIGHT, WRONG, SILENT, LEFT, REFUSED]) == [
        [CLEAN, "1 of 1", "", ""],
        ["nan", "1 of 3", "precision x 1, no verdict x 1", ""],
        ["oom", "0 of 1", "OutOfMemoryError (and after its removal) x 1", ""],
        ["bf16-master", "0 of 0", "", "torch: torch's FSDP <cannot>"],
    ]


def test_the_matrix_counts_primary_verdicts():
    (heat,) = figure([RIGHT, WRONG, run("nan", "not-finite", seed=3), LEFT, REFUSED]).data
    assert (list(heat.y), list(heat.x)) == (["nan", "oom"], ["not-finite", "precision", "OutOfMemoryError"])
    assert [list(row) for row in heat.z] == [[2, 1, 0], [0, 0, 1]]


def test_the_page_is_escaped_and_says_what_was_asked_beside():
    text = page([RIGHT, WRONG, REFUSED, run("skip-collective", "other-collective", recorder="<none>")], BESIDE)
    assert "2 of 3 runs got the right verdict" in text
    assert "torch&#x27;s FSDP &lt;cannot&gt;" in text
    assert "<td>a &lt;verdict&gt;</td><td>&lt;none&gt;</td>" in text
    assert "TraceML" in text


def test_the_exit_status_says_whether_one_was_missed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(faults, "OUT", tmp_path / "made" / "faults.html")
    for found, status in (([RIGHT, run(CLEAN)], 0), ([RIGHT, SILENT], 1)):
        monkeypatch.setattr(faults, "runs", lambda *_, found=found: iter(found))
        assert faults.main(["--seeds", "1"]) == status
        assert f"{status} missed; wrote" in capsys.readouterr().out
    assert (tmp_path / "made" / "faults.json").exists()
