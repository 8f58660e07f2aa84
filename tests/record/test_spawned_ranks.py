"""Scripts that start their ranks themselves: processes of torch.multiprocessing are recorded, others are not."""

import subprocess
import sys
from collections import Counter

import torch.multiprocessing as mp

from tests.helpers.scripts import written
from tests.helpers.warm_python import WARM
from tests.record.test_main import ENVIRON, MODEL, RECORD
from workbench.events import Edge, Kind
from workbench.record import __main__ as record
from workbench.trace import check, steps
from workbench.trace.read_recording import read

SPAWNS = f"""{MODEL}
def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{{store}}", rank=rank, world_size=2)
    model = build(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        train(model, optimizer, torch.ones(2, 16))
    if rank == 1:
        raise ValueError("the data of rank 1 are bad")

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, args=(sys.argv[1],), nprocs=2)
"""


def test_processes_that_a_script_spawns_are_the_ranks_of_its_recording(tmp_path):
    script = written(tmp_path, SPAWNS)
    command = [WARM.executable(), *RECORD, tmp_path / "out", script, tmp_path / "store"]
    ended = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 1
    assert "ProcessRaisedException" in ended.stderr
    found = read(tmp_path / "out")
    assert (sorted(found.ranks), check(found.trace), steps(found.trace)) == ([0, 1], [], [0, 1])
    line = SPAWNS.splitlines().index('        raise ValueError("the data of rank 1 are bad")') + 1
    end = found.ranks[1].end
    assert end.reason == "ValueError: the data of rank 1 are bad"
    assert f"{script}:{line} in " in end.frames[-1]
    assert found.ranks[1].start.program == (str(script), str(tmp_path / "store"))
    kinds = Counter(Kind(row["kind"]) for row in found.trace.rank(1).rows if row["edge"] == Edge.BEGIN)
    assert (kinds[Kind.ALL_GATHER], kinds[Kind.REDUCE_SCATTER]) == (2 * 3, 2 * 2)


def test_a_script_whose_processes_cannot_be_recorded_is_told_how_they_can(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = mp.start_processes
    lines = ("import os, subprocess, sys", "subprocess.run([sys.executable, '-c', ''])")
    record.main(["--out", str(tmp_path / "out"), str(written(tmp_path, "\n".join(lines)))])
    assert capsys.readouterr().err == (
        "workbench.record, rank 0: nothing was recorded, as this process trained nothing. If the script starts its"
        " ranks itself, let it use torch.multiprocessing.spawn, or start it by torchrun\n"
    )
    assert mp.start_processes is before
