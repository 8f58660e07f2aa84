"""A notebook runs in a kernel of its own, in a folder, and the kernel has ended afterwards."""

import asyncio

import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from workbench.cli.notebook_run import notebook_client

pytestmark = pytest.mark.cluster


def test_a_notebook_runs_in_its_folder_and_its_kernel_ends(tmp_path):
    notebook = new_notebook(cells=[new_code_cell("import os\nprint(os.getcwd(), os.getpid())")])
    with notebook_client(notebook, tmp_path, 60) as client:
        asyncio.run(client.async_execute())
    folder, pid = notebook.cells[0].outputs[0].text.split()
    assert folder == str(tmp_path)
    assert int(pid) != psutil.Process().pid
    assert not psutil.pid_exists(int(pid))
