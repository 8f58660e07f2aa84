"""Press Ctrl-C at a condition, not after a delay."""

import os
import signal

TOGETHER = "import torch.distributed as dist\ndist.barrier()\nprint('begins', flush=True)\n"
"""First lines of a cell: once its first output arrives, all ranks are in the cell."""


class CtrlCCallback:
    """A callback for ``on_progress`` or ``on_output`` that presses Ctrl-C after a step is done, or at the first output.

    Args:
        times: how often it presses, in immediate succession.
        anyway: whether it presses at the first call, whatever its argument.
    """

    def __init__(self, times=1, *, anyway=False):
        self._times, self._anyway = times, anyway
        self._has_pressed = False

    def __call__(self, sentence):
        if not self._has_pressed and (self._anyway or getattr(sentence, "done", 1)):
            self._has_pressed = True
            for _ in range(self._times):
                os.kill(os.getpid(), signal.SIGINT)
