"""A process ends as an interpreter does after the same program."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, time
def late():
    threading.main_thread().join()
    print("thread")
threading.Thread(target=late).start()
atexit.register(print, "at exit")
print("begun")
{ends}
"""
AS_INTERPRETER = f"import sys\nexec({PROGRAM!r}.format(ends=sys.argv[1]))"
ENDED = f"""
import sys
from workbench.base.process_end import end_process
try:
    exec({PROGRAM!r}.format(ends=sys.argv[1]))
except BaseException as error:
    end_process(error)
end_process()
"""


def run(code, ends):
    return subprocess.run([sys.executable, "-c", code, ends], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("ends", "status", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit(True)", 1, ""),
        ("sys.exit('no such host')", 1, "no such host\n"),
        ("raise ValueError('boom')", 1, "ValueError: boom\n"),
    ],
)
def test_status_output_and_what_runs_at_the_end(ends, status, said):
    as_interpreter, done = run(AS_INTERPRETER, ends), run(ENDED, ends)
    assert (done.returncode, done.stdout) == (as_interpreter.returncode, as_interpreter.stdout)
    assert done.returncode == status
    assert done.stdout == "begun\nthread\nat exit\n"
    assert done.stderr.endswith(said)
    assert as_interpreter.stderr.endswith(said)
