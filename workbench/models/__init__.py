"""Sharded models, one file per engine, and the events of those that the workbench's engine does not run.

``sharded_model.py`` says what is asked of a model. An engine's file has its class, and what it announces of the units:

- ``ours.py``: the workbench's engine, which announces its events itself;
- ``torch_fully_shard.py``: torch's ``fully_shard``;
- ``torch_wrapper.py``: torch's classic wrapper, ``FullyShardedDataParallel``;
- ``torch_ddp.py``: torch's ``DistributedDataParallel``;
- ``own.py``: an FSDP of your own, whose code announces its units;
- ``c10d.py``: collectives of no model: every one of a c10d program, through the hooks of process groups (torch 2.14 and
  newer), or else through the methods of ``ProcessGroup`` and the operators of functional collectives, which see what
  Python calls but not what C++ does, such as the reducer of DistributedDataParallel.

``engines.py`` loads the class of each row of ``ENGINES`` in ``events.py``, and watches torch's. Nothing changes in the
program that is watched: no argument, no result, no stream, no order. All uses of torch's private API are in
``_torch_private.py``.
"""
