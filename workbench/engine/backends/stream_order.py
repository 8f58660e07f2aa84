"""The order between the work of a communication context's streams; here for devices without streams."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from workbench.engine.backends.device_clock import Event


class Streams:
    """Streams of one communication context, and the dependencies between them.

    This class is for devices without streams: work runs in the order it is issued, so every method is a no-op.
    """

    @property
    def are_there(self) -> bool:
        """True if work runs on streams, asynchronously to the host."""
        return False

    def gathering(self) -> AbstractContextManager[object]:
        """Return a context for work that prepares an all-gather's input."""
        return nullcontext()

    def reducing(self, *, after_compute: bool) -> AbstractContextManager[object]:
        """Return a context for the work of reductions; with ``after_compute`` it follows the compute issued so far."""
        return nullcontext()

    def trailing(self, *_outputs: torch.Tensor) -> AbstractContextManager[object]:
        """Return a context for work after reduce-scatters; it follows the work issued so far to the current stream."""
        return nullcontext()

    def shards_changed(self, event: Event) -> None:
        """Make later all-gathers wait for the optimizer step: for ``event``, or for all compute issued so far."""

    def was_read(self) -> None:
        """Let the next all-gather reuse the memory of the all-gather that was just copied out or waited for."""

    def join(self) -> None:
        """Make compute wait until full gradients are read, so that it can reuse their memory."""

    def join_all(self) -> None:
        """Make compute wait for the reduced gradients as well."""
