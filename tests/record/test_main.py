"""``python -m workbench.record`` on real scripts: unchanged results, and a recording however the ranks end."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.scripts import written
from tests.helpers.waiting import wait_until
from tests.helpers.warm_python import WARM, torchrun
from workbench import Workbench
from workbench.cli import main as cli
from workbench.errors import TraceError
from workbench.events import Edge, Kind
from workbench.models._torch_private import HAS_HOOKS
from workbench.record import __main__ as record
from workbench.reports.run_where import where
from workbench.session import recorded_run
from workbench.trace import check, steps
from workbench.trace.read_recording import read

ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}
RECORD = ("-m", "workbench.record", "--out")

MODEL = """
import os, sys, threading
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
    def forward(self, x):
        return x + torch.tanh(self.linear(x))

def build(num_blocks=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), *(Block() for _ in range(num_blocks)), nn.Linear(16, 1))
    for block in model[1:-1]:
        fully_shard(block)
    return fully_shard(model)

def train(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
"""

TRAIN = (
    MODEL
    + """
if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mine = torch.Generator().manual_seed(dist.get_rank())
    for step in range(3):
        loss = train(model, optimizer, torch.randn(8, 16, generator=mine))
        sys.stdout.write(f"{sys.argv[1:]} {dist.get_rank()} {step} {loss.hex()}\\n")
        sys.stdout.flush()
    dist.destroy_process_group()
"""
)


def by_hand(folder, script, variables, *flags):
    """Start two ranks as a launcher does that tells them their place by ``variables``; return them."""
    rank, size = variables
    return [
        subprocess.Popen(
            [WARM.executable(), *RECORD, folder, *flags, script],
            env={**ENVIRON, rank: str(number), size: "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (0, 1)
    ]


def init(folder, variables):
    """Return a line that makes a process group without the variables of torchrun."""
    rank = f"int(os.environ[{variables[0]!r}])"
    return f'\ndist.init_process_group("gloo", init_method="file://{folder}/store", rank={rank}, world_size=2)\n'


SLURM, MPI = ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")


# ---- torchrun


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Folder of a run by torchrun itself, and what it printed with and without being recorded."""
    folder = tmp_path_factory.mktemp("recorded")
    script = written(folder, TRAIN)
    arguments = (script, "--lr", "-m", "--out")
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = (*launch, *RECORD, folder / "out", *arguments)
    with_it = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=250, check=False)
    return folder / "out", with_it, torchrun(*arguments)


def test_losses_are_bit_equal_with_and_without(recorded):
    _, with_it, without = recorded
    assert with_it.returncode == without.returncode == 0, with_it.stderr + without.stderr
    assert len(without.stdout.splitlines()) == 6
    assert "['--lr', '-m', '--out'] 1 2 0x" in without.stdout  # the script's own arguments
    assert sorted(with_it.stdout.splitlines()) == sorted(without.stdout.splitlines())


def test_an_error_about_a_sharded_parameter_gets_a_note(tmp_path):
    fails = TRAIN.replace("    dist.destroy", "    model[1].linear(torch.ones(2, 16))\n    dist.destroy")
    ended = torchrun("-m", "workbench.record", "--out", tmp_path / "out", written(tmp_path, fails))
    assert ended.returncode != 0
    assert "[workbench] parameter '1.linear.weight' is sharded; unit '1' is sharded: freed after its b" in ended.stderr
    assert "fix: call model[1](...), or compute between model[1].unshard() and model[1].reshard()" in ended.stderr


def test_four_blocks_and_a_root_give_nine_all_gathers_and_five_reduce_scatters_a_step(recorded):
    folder, *_ = recorded
    trace = Workbench.open(folder).trace
    assert steps(trace) == [0, 1, 2]
    assert [part.rank for part in trace.ranks] == [0, 1]
    for part in trace.ranks:
        rows = part.rows[part.rows["edge"] == Edge.BEGIN]
        found = Counter((int(row["step"]), Kind(row["kind"])) for row in rows)
        for step in range(3):
            assert (found[step, Kind.ALL_GATHER], found[step, Kind.REDUCE_SCATTER]) == (9, 5)
            assert found[step, Kind.STEP] == found[step, Kind.OPTIMIZER] == 1


def test_the_recording_is_a_valid_trace_that_names_its_program(recorded):
    folder, *_ = recorded
    found = read(folder)
    assert check(found.trace) == []
    assert found.notes == ()
    assert {unit.name for unit in found.trace.header.units} == {"", *"1234"}
    for rank, known in found.ranks.items():
        assert known.start.program == (str(folder.parent / "train.py"), "--lr", "-m", "--out")
        assert (known.start.rank, known.end.reason, known.is_cut) == (rank, "", False)
    assert found.trace.header.clocks == ()
    assert {info.sees_cpp for info in found.trace.header.ranks} == {HAS_HOOKS}


def test_a_run_that_has_ended_is_not_stalled(recorded, capsys):
    folder, *_ = recorded
    assert cli.main(["where", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "the run has ended"


def test_every_file_belongs_to_the_user_alone(recorded):
    folder, *_ = recorded
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.rec")} == {0o600}


def test_a_watcher_that_fails_leaves_the_program_as_it_is_and_the_recording_says_so(recorded, tmp_path, capsys):
    *_, without = recorded
    broken = TRAIN.replace(
        '    dist.init_process_group("gloo")',
        '    dist.init_process_group("gloo")\n'
        "    from workbench.models import _torch_private\n"
        "    _torch_private.is_gathering = None",
    )
    folder = tmp_path / "out"
    ended = torchrun("-m", "workbench.record", "--out", folder, written(tmp_path, broken), "--lr", "-m", "--out")
    assert (ended.returncode, sorted(ended.stdout.splitlines())) == (0, sorted(without.stdout.splitlines()))
    (sentence,) = {line.partition(": ")[2] for line in ended.stderr.splitlines() if line.startswith("workbench")}
    why = r"\(TypeError: 'NoneType' object is not callable, at line \d+ of torch_fully_shard\.py\)"
    unseen = r"units of torch's fully_shard are not seen from here on; the program continues"
    assert re.fullmatch(rf"watching FSDPParamGroup\.wait_for_unshard of torch \S+ failed {why}: {unseen}", sentence)
    found = read(folder)
    assert (found.notes, check(found.trace)) == ((f"ranks 0, 1: {sentence}",), [])
    assert steps(found.trace)[:3] == [0, 1, 2]  # without forwards, the end of a step begins the next one
    assert cli.main(["where", str(folder)]) == 0
    assert sentence in "".join(capsys.readouterr())


def test_a_folder_with_a_recording_is_refused_before_training_begins(recorded):
    folder, *_ = recorded
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = subprocess.run(
        [WARM.executable(), *RECORD, folder, folder.parent / "train.py"],
        env=ENVIRON,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"workbench.record, rank 0: {folder} has a recording of rank 0 already: choose another --out, or delete it\n"
    )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# ---- other launchers, and programs that end in other ways

WORKERS = (
    MODEL
    + """
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return torch.full((16,), float(index)), os.getpid()

if __name__ == "__main__":
    INIT
    model = build(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    talkers = [threading.Thread(target=sys.stdout.write, args=(f"thread {n}\\n",)) for n in range(3)]
    for talker in talkers:
        talker.start()
    workers = set()
    for x, pids in torch.utils.data.DataLoader(Numbers(), batch_size=8, num_workers=2):
        train(model, optimizer, x)
        workers |= set(pids.tolist())
    assert len(workers) == 2 and os.getpid() not in workers
    dist.destroy_process_group()
    plain = nn.Linear(4, 4)
    plain(torch.ones(4)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
"""
)


def test_workers_of_a_data_loader_threads_and_an_early_end_of_the_group_under_srun(tmp_path):
    script = written(tmp_path, WORKERS.replace("INIT", init(tmp_path, SLURM).strip()))
    ranks = by_hand(tmp_path / "out", script, SLURM)
    outputs = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert all(sorted(out.splitlines()) == ["thread 0", "thread 1", "thread 2"] for out, _ in outputs)
    found = read(tmp_path / "out")
    assert (found.notes, check(found.trace)) == ((), [])
    assert {rank: known.end.reason for rank, known in found.ranks.items()} == {0: "", 1: ""}
    assert steps(found.trace) == [0, 1]
    assert len({info.pid for info in found.trace.header.ranks}) == 2


def test_distributed_data_parallel_has_its_all_reduces(tmp_path):
    """With torch 2.14 or newer those of its reducer, else only those that Python code issues."""
    script = written(
        tmp_path,
        f"{MODEL}{init(tmp_path, SLURM)}\n"
        "model = nn.parallel.DistributedDataParallel(nn.Linear(16, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for step in range(3):\n"
        "    train(model, optimizer, torch.ones(2, 16))\n"
        "    total = torch.ones(5)\n"
        "    dist.all_reduce(total)\n"
        "dist.destroy_process_group()\n",
    )
    ranks = by_hand(tmp_path / "out", script, SLURM)
    outputs = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    found = read(tmp_path / "out")
    assert (found.notes, check(found.trace)) == ((), [])
    assert steps(found.trace) == [0, 1, 2]
    reducers = [17 * 4] * HAS_HOOKS
    for part in found.trace.ranks:
        calls = part.rows[(part.rows["kind"] == Kind.ALL_REDUCE) & (part.rows["edge"] == Edge.BEGIN)]
        ends = part.rows[(part.rows["kind"] == Kind.ALL_REDUCE) & (part.rows["edge"] == Edge.END)]
        assert calls["num_bytes"].tolist() == [*reducers, 20] * 3
        assert sorted(ends["comm_seq"].tolist()) == calls["comm_seq"].tolist()


RAISES = "raise ValueError('the data of rank 1 are bad')"


def test_ranks_that_raise_or_exit_under_mpirun_say_so(tmp_path):
    script = written(
        tmp_path,
        f"{MODEL}{init(tmp_path, MPI)}\n"
        "model = build(1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "train(model, optimizer, torch.ones(2, 16))\n"
        "def check(rank):\n"
        "    if rank == 1:\n"
        f"        {RAISES}\n"
        "    sys.exit(3)\n"
        "check(dist.get_rank())\n",
    )
    ranks = by_hand(tmp_path / "out", script, MPI)
    outputs = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [3, 1], outputs
    line = Path(script).read_text().splitlines().index(f"        {RAISES}") + 1
    assert "ValueError: the data of rank 1 are bad" in outputs[1][1]
    found = read(tmp_path / "out")
    assert (found.notes, check(found.trace), steps(found.trace)) == ((), [], [0])
    report = where(found, time.time_ns())
    words = {"rank 0 failed": "exit status 3", "rank 1 failed": "ValueError: the data of rank 1 are bad"}
    assert all(report.cause.verdict.count(f"{who}") == 1 and how in report.headline for who, how in words.items())
    raised = f"{script}:{line} in check, if {line - 1} `rank == 1`: {RAISES}"
    exits = f"{script}:{line + 1} in check: sys.exit(3)"
    assert {each.users_frame for each in report.positions} == {raised, exits}
    assert report.is_stalled


def test_a_rank_that_is_killed_is_named_and_what_it_wrote_is_read(tmp_path, monkeypatch, capsys):
    """Rank 1 hangs between two steps, in the user's code; its stack is written, then it is killed."""
    out = tmp_path / "out"
    script = written(
        tmp_path,
        f"{MODEL}{init(tmp_path, SLURM)}\n"
        "model = build(2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for step in range(3):\n"
        "    if step == 2 and dist.get_rank() == 1:\n"
        "        threading.Event().wait()  # hangs\n"
        "    train(model, optimizer, torch.ones(2, 16))\n",
    )
    ranks = by_hand(out, script, SLURM)
    try:

        def has_stacks(found):
            return len(found.ranks) == 2 and all(
                known.quiet
                and known.quiet[-1].seq == found.trace.rank(rank).end_seq
                and 1 in found.trace.rank(rank).steps
                for rank, known in found.ranks.items()
            )

        wait_until(lambda: has_stacks(read_if_there(out)), 200)
        waits, hangs = where(read(out), time.time_ns()).positions
        assert waits.pending.absent == (1,)
        assert hangs.users_frame.startswith(f"{script}:")
        place = "in <module>, loop 33, if 34 `step == 2 and dist.get_rank() == 1`"
        assert hangs.users_frame.endswith(f"{place}: threading.Event().wait()  # hangs")
        assert hangs.frames[0] == hangs.users_frame  # none of runpy's and the recording's before it
        ranks[1].send_signal(signal.SIGKILL)
        ranks[1].wait(60)
        ranks[0].communicate(timeout=100)  # its collective fails, or it is released by the end of rank 1
        later_ns = time.time_ns() + 60 * 10**9
        monkeypatch.setattr(recorded_run, "time", SimpleNamespace(time_ns=lambda: later_ns))
        assert cli.main(["where", str(out)]) == 1
        said = capsys.readouterr().out
        assert re.match(r"rank 1 was killed first; rank 0 failed [\d.]+ m?s later because its peer", said)
        assert "threading.Event().wait()  # hangs" in said  # its last stack
        found = read(out)
        assert check(found.trace) == []
        assert found.ranks[1].end is None
        assert steps(found.trace) == [0, 1, 2]
        assert found.trace.rank(1).steps.tolist() == [0, 1]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def read_if_there(folder):
    """Return a recording, or an empty one while no rank has written its first frame."""
    from workbench.trace.columns import Trace
    from workbench.trace.read_recording import Recording

    try:
        return read(folder)
    except (TraceError, FileNotFoundError):
        return Recording(trace=Trace.empty())


# ---- within this process: arguments, modules, scripts that end


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run ``main`` here with a script's text, as a run of one rank; return its error and its recorded end."""
    monkeypatch.setattr(sys, "argv", ["workbench.record"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def go(text, *arguments, flags=()):
        script = written(tmp_path, text)
        try:
            record.main(["--out", str(tmp_path / "out"), *flags, str(script), *arguments])
        except BaseException as error:  # noqa: BLE001 - it is compared
            return error, read(tmp_path / "out").ranks[0].end
        return None, read(tmp_path / "out").ranks[0].end

    return go


def test_a_script_runs_as_by_python(run, tmp_path, capsys):
    (tmp_path / "helper.py").write_text("value = 7")
    error, end = run(
        "import sys, helper\nvalue = 9\n"
        "print(__name__, sys.argv[1:], helper.value, __file__ == sys.argv[0], sys.modules['__main__'].value)\n",
        "--lr",
        "1",
    )
    assert (error, end.reason, end.frames) == (None, "", ())
    assert capsys.readouterr().out == "__main__ ['--lr', '1'] 7 True 9\n"
    sys.modules.pop("helper")


@pytest.mark.parametrize(
    ("text", "kind", "reason", "frame"),
    [
        ("import sys\nsys.exit(3)", SystemExit, "exit status 3", "2 in <module>: sys.exit(3)"),
        (
            "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise SystemExit(3)",
            SystemExit,
            "exit status 3; after ZeroDivisionError: division by zero",
            "4 in <module>, except 3 `ZeroDivisionError`: raise SystemExit(3)",
        ),
        ("import sys\nsys.exit()", SystemExit, "", "2 in <module>: sys.exit()"),
        ("import sys\nwhile 1:\n    sys.exit(0)", SystemExit, "", "3 in <module>, loop 2: sys.exit(0)"),
        ("import sys\nsys.exit('no data')", SystemExit, "exit: no data", "2 in <module>: sys.exit('no data')"),
        (
            "def f():\n    for x in y:\n        raise ValueError('bad')\n\ny = [1]\nf()",
            ValueError,
            "ValueError: bad",
            "3 in f, loop 2: raise ValueError('bad')",
        ),
        (
            "import json\n\ntry:\n    json.loads('')\nexcept ValueError:\n    raise KeyError(1)",
            KeyError,
            "KeyError: 1; after JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
            "6 in <module>, except 5 `ValueError`: raise KeyError(1)",
        ),
        (
            "raise ValueError('a\\n  b\\n' + 'x' * 9999)",
            ValueError,
            f"ValueError: a b {'x' * 496}",
            "1 in <module>: raise",
        ),
        ("raise KeyboardInterrupt", KeyboardInterrupt, "KeyboardInterrupt", "1 in <module>: raise KeyboardInterrupt"),
        ("1 +", SyntaxError, "SyntaxError: invalid syntax (train.py, line 1)", ""),
    ],
)
def test_how_a_script_ends_is_written(run, tmp_path, text, kind, reason, frame):
    error, end = run(text)
    assert type(error) is kind
    assert end.reason == reason
    users = [each for each in end.frames if str(tmp_path) in each]
    assert users[-1].startswith(f"{tmp_path / 'train.py'}:{frame}") if frame else not users


def test_an_error_of_a_worker_has_the_line_of_the_worker(run):
    traceback = (
        'Original Traceback (most recent call last):\\n  File "/x/data.py", line 7, in get\\n    f()\\nKeyError: 9'
    )
    _, end = run(f"raise ValueError('Caught KeyError in worker 0.\\n{traceback}')")
    assert end.reason == "ValueError: Caught KeyError in worker 0. KeyError: 9"
    assert end.frames[-1] == "/x/data.py:7 in get"


def test_a_module_is_run_by_its_name(run, tmp_path, monkeypatch, capsys):
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(
        "import sys\nprint(__name__, __package__, sys.argv[1:])\nraise ValueError('bad')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="bad"):
        record.main(["--out", str(tmp_path / "out"), "-m", "some_package.train", "-x", "1"])
    assert capsys.readouterr().out == "__main__ some_package ['-x', '1']\n"
    found = read(tmp_path / "out").ranks[0]
    assert found.end.reason == "ValueError: bad"
    assert found.end.frames[-1].startswith(f"{package / 'train.py'}:3 in <module>: raise")
    assert found.start.program == ("some_package.train", "-x", "1")


def test_a_restart_of_torchrun_has_a_folder_of_its_own(run, tmp_path, monkeypatch):
    run("")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    record.main(["--out", str(tmp_path / "out"), str(tmp_path / "train.py")])
    assert read(tmp_path / "out" / "restart1").ranks[0].end.reason == ""
    assert read(tmp_path / "out").notes == (
        f"the run was restarted: its later part is in {tmp_path / 'out' / 'restart1'}",
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "the following arguments are required: --out, script, args"),
        (["train.py"], "the following arguments are required: --out"),
        (["--out", "o"], "the following arguments are required: script"),
        (["--out", "o", "none.py"], "there is no script none.py"),
        (["--out", "o", "--max-mb", "0", "none.py"], "--max-mb must be at least 1"),
        (["--out", "o", "--every", "0", "none.py"], "--every must be at least 1"),
        (["--out", "o", "--keep", "-1", "none.py"], "argument --keep: expected a whole number, got '-1'"),
        (["--out", "o", "--keep", "few", "none.py"], "argument --keep: expected a whole number, got 'few'"),
        (["--out", "o", "--fast", "none.py"], "unrecognized arguments: --fast"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(arguments, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        record.main(arguments)
    assert left.value.code == 2
    assert why.removesuffix(", args") in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_wrong_environment_is_refused(tmp_path, monkeypatch, capsys):
    script = written(tmp_path, "")
    monkeypatch.setenv("RANK", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as left:
        record.main(["--out", str(tmp_path / "o"), str(script)])
    assert left.value.code == 2
    assert "RANK is 'x', expected a whole number" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("out", "why"),
    [
        ("{0}/file", "--out {0}/file is not a folder"),
        ("{0}/file/below", "cannot write to --out {0}/file/below: Not a directory"),
        ("/proc/none", "cannot write to --out /proc/none: No such file or directory"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused(out, why, tmp_path, monkeypatch, capsys):
    script = written(tmp_path, "raise AssertionError('it must not run')")
    (tmp_path / "file").touch()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as left:
        record.main(["--out", out.format(tmp_path), str(script)])
    assert left.value.code == 2
    assert capsys.readouterr().err == f"workbench.record, rank 0: {why.format(tmp_path)}\n"


def test_a_torch_that_cannot_be_recorded_runs_the_script_nevertheless(tmp_path, monkeypatch, capsys):
    from workbench.record import rank_recording

    def unknown(_):
        raise AttributeError("no attribute 'unshard'")

    monkeypatch.setattr(rank_recording, "Watch", unknown)
    record.main(["--out", str(tmp_path / "out"), str(written(tmp_path, "print('trained')"))])
    said = capsys.readouterr()
    assert said.out == "trained\n"
    assert said.err == "workbench.record, rank 0: this run is not recorded: AttributeError: no attribute 'unshard'\n"
    assert read(tmp_path / "out").ranks[0].stop.reason == """AttributeError("no attribute 'unshard'")"""


def test_a_disk_with_too_little_room_is_said(run, capsys):
    huge = 1 << 30  # MB
    error, end = run("print('trained')", flags=("--max-mb", str(huge)))
    assert (error, end.reason) == (None, "")
    said = capsys.readouterr()
    assert said.out == "trained\n"
    assert re.fullmatch(
        rf"workbench.record, rank 0: \S+ has \d+ MB free, and its ranks may write {huge} MB; see --max-mb\n", said.err
    )
