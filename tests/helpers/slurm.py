"""A Slurm cluster of this machine alone: its three daemons, with their own files and ports, started and ended here."""

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.helpers.network_hosts import find
from tests.helpers.waiting import wait_until
from workbench.base.ports import LOOPBACK, reserved_port

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "srun")

CONFIG = """
ClusterName=workbench
SlurmctldHost={host}({loopback})
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
KillWait=2
NodeName={host} NodeAddr={loopback} CPUs=8 Sockets=8 CoresPerSocket=1 ThreadsPerCore=1 State=UNKNOWN
PartitionName=open Nodes={host} Default=YES MaxTime=INFINITE State=UP
PartitionName=closed Nodes={host} MaxTime=INFINITE State=DOWN
"""


def why_not() -> str:
    """Return why this machine cannot run Slurm; empty if it can."""
    if sys.platform != "linux":
        return "Slurm is for Linux"
    if os.getuid() != 0:
        return "only root can start Slurm's daemons"
    missing = [name for name in NEEDED if find(name) is None]
    return f"not installed: {', '.join(missing)}; on Debian: apt-get install slurm-wlm munge" if missing else ""


@contextmanager
def slurm(directory: Path) -> Iterator[Path]:
    """Run a Slurm of one node with 8 slots and two partitions; one of them, ``closed``, starts no jobs.

    Yields:
        The path of its configuration, for the variable ``SLURM_CONF``.
    """
    for name in ("state", "spool"):
        (directory / name).mkdir()
    key = directory / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    config = directory / "slurm.conf"
    config.write_text(
        CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            loopback=LOOPBACK,
            directory=directory,
            controller_port=reserved_port(),
            node_port=reserved_port(),
        )
    )
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munge = [f"--{option}={directory}/munge.{name}" for option, name in files.items()]
    with ExitStack() as last:
        run = functools.partial(_serve, last, directory, {**os.environ, "SLURM_CONF": str(config)})
        # --force, as munged objects to pytest's directories, which are for one user; all clients here are that user
        run("munged", "--foreground", "--force", *munge)
        wait_until((directory / "munge.socket").exists)
        run("slurmctld", "-D", "-i")
        run("slurmd", "-D")
        wait_until(lambda: _output_of(config, "sinfo", "--noheader", "--format=%T", "--partition=open") == "idle")
        yield config


def jobs(config: Path) -> list[str]:
    """Return the ids of the jobs that wait, run or are ending."""
    return _output_of(config, "squeue", "--noheader", "--format=%A").split()


def cancel(config: Path, job: str) -> None:
    """End a job as its queue would."""
    _output_of(config, "scancel", job)


def _serve(last: ExitStack, directory: Path, environment: dict[str, str], name: str, *arguments: str) -> None:
    log = last.enter_context((directory / f"{name}.log").open("wb"))
    command = [find(name) or name, *arguments]
    served = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    last.callback(served.wait)
    last.callback(served.terminate)


def _output_of(config: Path, program: str, *arguments: str) -> str:
    command = [find(program) or program, *arguments]
    environment = {**os.environ, "SLURM_CONF": str(config)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.strip()
