"""Running a notebook without a browser, in a new kernel of this Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

from workbench.base import ports

START_TIMEOUT_S = 300  # of the notebook's kernel


@contextmanager
def notebook_client(
    notebook: NotebookNode,
    folder: Path,
    timeout_s: int,
    kind: type[NotebookClient] = NotebookClient,
    **options: Any,  # noqa: ANN401 - of nbclient
) -> Iterator[NotebookClient]:
    """Make the client that runs ``notebook`` in ``folder``, with a kernel that it starts.

    Args:
        notebook: the notebook, which receives the outputs.
        folder: where it runs.
        timeout_s: of each cell.
        kind: class of the client.
        options: of nbclient's ``NotebookClient``.
    """
    client = kind(
        notebook,
        timeout=timeout_s,
        startup_timeout=START_TIMEOUT_S,
        iopub_timeout=timeout_s,  # outputs have a channel of their own and may arrive after the reply
        resources={"metadata": {"path": str(folder)}},
        store_widget_state=False,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # else it warns that its loopback sockets are plain TCP
        **options,
    )
    # ignore kernels installed for the user: they may belong to another Python
    kernel = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), **ports.of_a_kernel())
    client.km = kernel
    try:
        yield client
    finally:
        # nbclient drops the manager of a kernel that does not start, but needs it when this process exits
        client.km = kernel
