"""A real IPython shell for tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from ipykernel.compiler import XCachingCompiler
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config


@contextmanager
def ipython_shell() -> Iterator[InteractiveShell]:
    """Yield the shell that ``get_ipython()`` returns within the body; it writes only to a temporary folder."""
    InteractiveShell.clear_instance()
    with tempfile.TemporaryDirectory() as folder:
        config = Config(HistoryManager={"enabled": False}, InteractiveShell={"colors": "nocolor"})
        shell = InteractiveShell.instance(config=config, ipython_dir=folder, compiler_class=XCachingCompiler)
        try:
            yield shell
        finally:
            shell.restore_sys_module_state()
            InteractiveShell.clear_instance()
