"""A warm Python runs command lines as a new interpreter does."""

import os
import signal
import subprocess

import pytest

from tests.helpers.waiting import wait_until
from tests.helpers.warm_python import WARM, torchrun


def run(*args, **options):
    return subprocess.run([WARM.executable(), *args], capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize(
    ("program", "code", "out", "err"),
    [
        ("import sys; print(sys.argv[1:], __name__); sys.exit(3)", 3, "['a', 'b'] __main__\n", ""),
        ("import sys; sys.exit('no data')", 1, "", "no data\n"),
        ("1 / 0", 1, "", "ZeroDivisionError: division by zero\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, "", ""),
        ("import atexit; atexit.register(print, 'over')", 0, "over\n", ""),
        ("import threading; threading.Thread(target=print, args=[1]).start()", 0, "1\n", ""),
        ("import sys; print(*{'torch', 'pytest', 'plotly', 'workbench'} & {*sys.modules})", 0, "torch\n", ""),
        (
            "import os, torch; print(os.environ['HERE'], torch.get_num_threads(), torch.rand(1).numel())",
            0,
            "x 1 1\n",
            "",
        ),
    ],
)
def test_it_ends_as_an_interpreter(program, code, out, err):
    done = run("-c", program, "a", "b", env=os.environ | {"HERE": "x", "OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout) == (code, out)
    assert done.stderr.endswith(err)


def test_a_script_a_module_and_files_beyond_the_standard_ones(tmp_path):
    (tmp_path / "beside.py").write_text("value = 7")
    (tmp_path / "script.py").write_text("import beside, sys; print(beside.value, __file__, sys.argv[0], sys.path[0])")
    path = str(tmp_path / "script.py")
    assert run(path).stdout.split() == ["7", path, path, str(tmp_path)]
    assert run("-m", "script", cwd=tmp_path).stdout.split()[0] == "7"
    read, write = os.pipe()
    assert run("-c", f"import os; os.write({write}, b'x')", pass_fds=[write]).returncode == 0
    assert os.read(read, 9) == b"x"
    os.close(read)
    os.close(write)


def test_a_fork_ends_with_its_command_and_gets_its_signals():
    program = "import time\ntry: print(1, flush=True); time.sleep(600)\nexcept KeyboardInterrupt: raise SystemExit(5)"
    for number, code in ((signal.SIGINT, 5), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)):
        with subprocess.Popen([WARM.executable(), "-c", program], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "1\n"
            process.send_signal(number)
        assert process.returncode == code
    wait_until(lambda: not WARM.forks())


def test_ranks_have_the_variables_of_torchrun(tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(total := torch.tensor(dist.get_rank()))\n"
        "sys.stdout.write(f'{total}\\n')\n"
        "sys.exit(dist.get_rank())\n"
    )
    done = torchrun(tmp_path / "train.py", num_ranks=3)
    assert (done.returncode, done.stdout) == (1, "3\n" * 3)
