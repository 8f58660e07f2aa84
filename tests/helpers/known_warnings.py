"""Warnings that tests cause on purpose, by topic: everything else that warns fails a test."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

Known = tuple[str, type[Warning]]
"""A pattern of the beginning of its text, without a colon; and its class."""

NO_SHARD: tuple[Known, ...] = (
    ("The `NO_SHARD` sharding strategy is deprecated", FutureWarning),
    ("FSDP is switching to use `NO_SHARD`", UserWarning),
    ("When using ``NO_SHARD`` for ``ShardingStrategy``", UserWarning),
    (r"FullyShardedDataParallel. on one rank, \w+ is the same as NO_SHARD", UserWarning),
)
SHARDED_TENSOR: tuple[Known, ...] = (
    ("Please use DTensor instead", FutureWarning),
    ("`_get_pg_default_device` will be deprecated", UserWarning),
    ("Multiple backends are registered", UserWarning),
)
OLD_CALLS: tuple[Known, ...] = (
    (r"FSDP.state_dict_type\(\) and", FutureWarning),
    ("`load_state_dict` is deprecated", FutureWarning),
    (r"``FullyShardedDataParallel.\w+``is being deprecated", FutureWarning),
    ("The `optim_input` argument is deprecated", FutureWarning),
    ("optim_input is deprecated", FutureWarning),
)
FROZEN_BESIDE_TRAINED: tuple[Known, ...] = (
    (r"\S+ has both parameters with requires_grad=True and False", UserWarning),
    (r"'\S+' is trained and '\S+' is frozen in one unit", UserWarning),
)
UPCAST: tuple[Known, ...] = (
    ("Upcasted low precision parameters", UserWarning),
    ("FSDP upcast of low precision parameters", UserWarning),
)
OF_TORCHS_FSDP2: tuple[Known, ...] = (
    (r"FSDP2-wrapped module \(\w+\) returned a view", UserWarning),
    ("Full backward hook is firing when gradients are computed", UserWarning),
)


@contextmanager
def ignoring_warnings(*known: Known) -> Iterator[None]:
    """Ignore these warnings inside; also a decorator."""
    with warnings.catch_warnings():
        for text, kind in known:
            warnings.filterwarnings("ignore", text, kind)
        yield
