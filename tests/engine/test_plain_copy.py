"""A plain copy of a sharded model copies each attribute of its modules once, and shares only those that refuse it."""

import functools

from torch import nn

from tests.helpers.forked_ranks import run_cases
from workbench import engine
from workbench.engine.classic import FullyShardedDataParallel
from workbench.engine.classic import unwrapping as classic_undo
from workbench.engine.unsharding import plain_copy


class CountsCopies:
    """Counts its copies; ``refusing`` makes copying fail."""

    def __init__(self, *, refusing=False):
        self.copies, self.refusing = 0, refusing

    def __deepcopy__(self, memo):
        self.copies += 1
        if self.refusing:
            raise TypeError("not to be copied")
        return CountsCopies()


def copied_with(api, *, refusing):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.counted = CountsCopies()
    model.other = CountsCopies(refusing=refusing)
    sharded = engine.fully_shard(model) if api == "fully_shard" else FullyShardedDataParallel(model)
    copy = plain_copy(sharded, {}) if api == "fully_shard" else classic_undo.plain_copy(sharded, {})[0]
    inner = copy if hasattr(copy, "counted") else copy.module
    return model.counted.copies, inner.counted is model.counted, inner.other is model.other


COPIES = {
    f"{api} {refusing}": functools.partial(copied_with, api, refusing=refusing)
    for api in ("fully_shard", "classic")
    for refusing in (False, True)
}


def test_an_attribute_is_copied_once_and_shared_only_if_it_refuses():
    for found in run_cases(2, COPIES):
        for api in ("fully_shard", "classic"):
            assert found[f"{api} False"] == (1, False, False)
            assert found[f"{api} True"][1:] == (False, True)
