"""The kernel's side of the panel in JupyterLab and of the dashboard beside a notebook, over comms."""

from workbench.panel.comm_target import register as register
