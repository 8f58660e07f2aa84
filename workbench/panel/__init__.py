"""The kernel's side of the panel in JupyterLab: what it asks and is told, over a comm."""

from workbench.panel.comm_targets import register as register
