"""A Python that has imported torch already: a command line runs in a fork of it, which saves some seconds of CPU.

What a fork runs has what an interpreter has that has imported torch, and nothing of what the tests imported.
"""

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.helpers import leaks, warm_runpy
from workbench.base.ports import LOOPBACK, reserved_port
from workbench.cluster.processes import is_running

_HERE = str(Path(warm_runpy.__file__).parent)
_ASK = """\
#!{python} -IS
import sys
sys.path.insert(0, {here!r})
from warm_runpy import ask
ask({socket!r}, sys.argv[1:], {in_forks!r})
"""


class WarmPython:
    """A warm Python, which starts when it is first asked for.

    Args:
        environment: in which it imports torch; that of this process if None.
        is_inherited: let also the programs of the forks start others in forks, as their ``sys.executable``.

    Attributes:
        processes: its own process, while it runs.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, *, is_inherited: bool = False) -> None:
        self.processes: frozenset[psutil.Process] = frozenset()
        self._environment, self._is_inherited = environment, is_inherited
        leaks.KEPT.append(self)
        atexit.register(self.end)

    def executable(self) -> str:
        """Return the path of a program that command lines begin with instead of ``sys.executable``."""
        if not self.processes:
            self._folder = tempfile.TemporaryDirectory()
            path, socket = Path(self._folder.name, "python"), str(Path(self._folder.name, "socket"))
            in_forks = str(path) if self._is_inherited else ""
            path.write_text(_ASK.format(python=sys.executable, here=_HERE, socket=socket, in_forks=in_forks))
            path.chmod(0o700)
            self._process = subprocess.Popen(
                [sys.executable, warm_runpy.__file__, socket],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environment,
            )
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == b"ready\n"
            self.processes = frozenset({psutil.Process(self._process.pid)})
        return str(Path(self._folder.name, "python"))

    def forks(self) -> list[psutil.Process]:
        """Return the forks that run."""
        found = [fork for process in self.processes for fork in process.children(recursive=True)]
        return [fork for fork in found if is_running(fork)]

    def end(self) -> None:
        """End it."""
        if self.processes:
            self._process.communicate(b"end")
            self._folder.cleanup()
            self.processes = frozenset()


WARM = WarmPython()


def torchrun(
    *command: object, num_ranks: int = 2, python: WarmPython = WARM, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command line of Python on warm ranks with the variables of torchrun, and one thread each."""
    of_all = {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(reserved_port()),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    line = [python.executable(), *map(str, command)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        ranks = [
            subprocess.Popen(
                line,
                cwd=cwd,
                env={**os.environ, **of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=out,
                stderr=err,
            )
            for rank in range(num_ranks)
        ]
        try:
            codes = [rank.wait(250) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(line, next(filter(None, codes), 0), out.read(), err.read())
