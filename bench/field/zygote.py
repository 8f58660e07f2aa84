"""Start ranks, and answer questions about their recordings, by forking a process that has imported all of it.

A script whose ranks are started by torchrun spends most of its time importing torch, in every rank. Here each line on
standard input is an order: a script to run with the recorder, with the environment that torchrun sets, whose ranks are
ended when one fails, as by torchrun; or a folder to ask about. What comes of it is written to files.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

GRACE_S = 30.0  # between SIGTERM and SIGKILL


def main() -> None:
    import accelerate  # noqa: F401
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401
    import transformers.models.bert.modeling_bert
    import transformers.models.llama.modeling_llama  # noqa: F401

    import workbench.record  # noqa: F401
    from workbench import Workbench
    from workbench.reports import as_json

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        order = json.loads(line)
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if "where" in order:
            _write(order["answer"], {"report": as_json(Workbench.open(order["where"]).where())})
            os._exit(0)
        return _launch(order)


def _write(path: str, document: dict[str, Any]) -> None:
    """Write a document so that a reader finds all of it or nothing."""
    beside = Path(f"{path}.new")
    beside.write_text(json.dumps(document))
    beside.rename(path)


def _launch(order: dict[str, Any]) -> None:
    """Run a script on ranks, write the pid of this process first, and the exit status in the end."""
    _write(f"{order['out']}.pid", {"pid": os.getpid()})
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks: dict[int, int] = {}
    for rank in range(order["ranks"]):
        pid = os.fork()
        if not pid:
            return _run(order, rank, port)
        ranks[pid] = rank
    status, deadline = 0, float("inf")
    while ranks:
        pid, how = os.waitpid(-1, os.WNOHANG)
        if not pid:
            if time.monotonic() > deadline:
                _signal(ranks, signal.SIGKILL)
            time.sleep(0.1)
            continue
        ranks.pop(pid, None)
        if how and not status:
            status, deadline = 1, time.monotonic() + GRACE_S
            _signal(ranks, signal.SIGTERM)
    _write(f"{order['out']}.status", {"status": status})
    os._exit(0)


def _signal(pids: dict[int, int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def _run(order: dict[str, Any], rank: int, port: int) -> None:
    """Become a rank: run the script under the recorder, and return when it has ended."""
    os.setsid()
    null, log = os.open(os.devnull, os.O_RDONLY), os.open(f"{order['out']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": order["ranks"], "LOCAL_WORLD_SIZE": order["ranks"]}
    os.environ.update({name: str(value) for name, value in world.items()}, GROUP_RANK="0", **order["env"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.chdir(Path(order["out"]).parent)
    # torch's pool of threads does not survive the fork: renewed here, before two threads do so at once and end the rank
    sys.modules["torch"].set_num_threads(1)
    sys.argv = ["workbench.record", "--out", order["out"], order["script"], *order["args"]]
    runpy.run_module("workbench.record", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
