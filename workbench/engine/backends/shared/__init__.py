"""Collectives of ranks that share the memory of a host; only :class:`workbench.engine.backends.cpu.Cpu` uses them.

The engine does not depend on them: without them, ranks on CPUs communicate over gloo (``WORKBENCH_COMM=gloo``) and get
the same results.

- ``shared_memory``     memory that all ranks of a host have mapped, and when a rank may write to it
- ``shared_comm``       all-gather and reduce-scatter that read it in place
- ``hierarchical_comm`` both for several hosts: shared memory within a host, gloo between hosts
- ``shared_selection``  which unit uses which of these
"""
