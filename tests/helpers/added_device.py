"""Add a kind of device to the workbench in one place, and start ranks on it from a notebook.

Run as ``python -m tests.helpers.added_device``, with :data:`LINE` inserted in the imported
``workbench/base/devices.py`` and nothing else changed.
"""

import time

import torch
from IPython.core.completer import provisionalcompleter

from tests.helpers.ipython_shell import ipython_shell
from tests.helpers.simulated_device import FakeDevice

LINE = '    "lagging": Device("tests.helpers.added_device:LaggingDevice"),\n'


class LaggingDevice(FakeDevice):
    """A device that computes on the CPU and reports later times."""

    def __init__(self, _device: torch.device) -> None:
        super().__init__(time.monotonic_ns)


MODEL = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).to(device)

def train_step():
    loss = model(torch.ones(4, 8, device=device)).square().mean()
    loss.backward()
    return loss.item()
"""


def main() -> None:
    from workbench.events import Kind
    from workbench.replay.device import on_device
    from workbench.trace import load

    with ipython_shell() as shell:
        shell.run_line_magic("load_ext", "workbench")
        try:
            line = "%fsdp start --device l"
            with provisionalcompleter():
                assert [found.text for found in shell.Completer.completions(line, len(line))] == ["lagging"]
            shell.run_line_magic("fsdp", "start -n 2 --device lagging")
            shell.run_cell_magic("fsdp", "", MODEL)
            shell.run_line_magic("fsdp", "shard model --wrap Linear")
            shell.run_line_magic("fsdp", "step 2")
            shell.run_line_magic("fsdp", "export run.trace")
        finally:
            shell.run_line_magic("fsdp", "stop")
    trace = load("run.trace")
    assert [info.device for info in trace.header.ranks] == ["lagging"] * 2
    assert trace.header.is_enqueued, "its clock is told"
    for rank in trace.ranks:
        assert Kind.DEVICE in rank.kinds
        assert on_device(rank, rank, trace.header) is not None, "when it came to what it was given"


if __name__ == "__main__":
    main()
