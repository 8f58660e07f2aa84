"""FSDP workbench: see, debug and teach sharded training from a notebook.

Importing this package is cheap: ``Workbench`` is imported at first use.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.workbench import Workbench

__version__ = "0.2.0"
INSTALL = "pip install 'fsdp-workbench[notebook]'"
"""What installs the packages for notebooks, pages and pictures."""

__all__ = ["Workbench", "__version__", "load_ipython_extension", "unload_ipython_extension"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562
    if name == "Workbench":
        try:
            from workbench.workbench import Workbench  # noqa: PLC0415 - lazy by design
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"Workbench needs more packages: {INSTALL} ({error})", name=error.name) from error
        return Workbench
    raise AttributeError(f"module 'workbench' has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:  # noqa: ANN401 - IPython passes its InteractiveShell
    """``%load_ext workbench``: register the ``%fsdp`` magics."""
    from workbench.base.open_files import raise_limit  # noqa: PLC0415 - lazy by design

    raise_limit()  # first: what follows opens files
    from workbench.cli.jupyter_extensions import has_panel, panel_notice  # noqa: PLC0415 - lazy by design
    from workbench.magics import register  # noqa: PLC0415 - lazy by design
    from workbench.panel import register as register_panel  # noqa: PLC0415 - lazy by design

    magics = register(shell)
    register_panel(magics.workbench, __version__, magics.on_close)
    notice = panel_notice()
    panel = ", or the icon with the shards" if has_panel() else ""
    sys.stdout.write("".join(f"{line}\n" for line in (notice, f"next: {magics.workbench.next_line}{panel}") if line))


def unload_ipython_extension(shell: Any) -> None:  # noqa: ANN401
    """``%unload_ext workbench``: stop the ranks and remove the magics."""
    from workbench.magics import unregister  # noqa: PLC0415 - lazy by design

    unregister(shell)
