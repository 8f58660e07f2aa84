"""The kernel's side of the panel in JupyterLab: its questions and answers over a comm."""

from workbench.panel.comm_targets import register as register
