"""%fsdp: convert text and commands, run them, display results - nothing else. Never imports torch."""

from workbench.magics.shell import register as register
from workbench.magics.shell import unregister as unregister
