from dataclasses import replace

from workbench.events import FlatPart, Param, Unit
from workbench.replay.training import models
from workbench.trace.schema import Header


def make_unit(index, root=None, names=("w",), shape=(4, 4), retired=False):
    params = tuple(
        Param(
            fqn=name,
            shape=shape,
            global_shape=shape,
            dtype="float32",
            itemsize=4,
            shard_dim=0,
            rows_per_rank=(shape[0],),
            padded_rows=shape[0],
        )
        for name in names
    )
    return Unit(
        index=index,
        name="" if root in (None, index) else f"part{index}",
        root=index if root is None else root,
        params=params,
        reshard_after_forward=True,
        shard_size=1,
        compute_dtype="float32",
        reduce_dtype="float32",
        compute_itemsize=4,
        reduce_itemsize=4,
        retired=retired,
    )


def found(*units):
    return models(Header(units=units))


def test_units_belong_to_their_root():
    assert found(make_unit(0), make_unit(1, root=0, names=("b",))) == (0, 0)
    assert found(make_unit(0, root=-1), make_unit(1, root=-1, names=("b",))) == (0, 1)
    assert found() == ()


def test_a_rebuilt_model_is_a_new_one_even_with_the_same_names():
    assert found(make_unit(0), make_unit(1)) == (0, 1)


def test_an_unsharded_model_continues_with_any_units():
    old = make_unit(0, names=("a", "b"), retired=True), make_unit(1, root=0, names=("c",), retired=True)
    assert found(*old, make_unit(2, names=("a", "b", "c"))) == (0, 0, 0)
    assert found(*old, make_unit(2, names=("a", "b", "c"), retired=True), make_unit(3, names=("a",))) == (0, 0, 0, 0)


def test_an_unsharded_model_does_not_continue_with_other_parameters():
    assert found(make_unit(0, retired=True), make_unit(1, shape=(8, 4))) == (0, 1)
    assert found(make_unit(0, retired=True), make_unit(1, names=("other",))) == (0, 1)


def test_an_unsharded_model_continues_once():
    assert found(make_unit(0, retired=True), make_unit(1), make_unit(2)) == (0, 0, 2)


def test_a_model_that_continues_with_flat_parameters_is_the_same():
    parts = tuple(
        FlatPart(fqn=name, shape=(4, 2), global_shape=(4, 4), first=first) for name, first in (("a", 0), ("b", 8))
    )
    old = make_unit(0, names=("a", "b"), retired=True)
    flat = replace(make_unit(1, shape=(16,)).params[0], fqn="_flat_param", parts=parts)
    assert found(old, replace(make_unit(1), params=(flat,))) == (0, 0)
    assert found(replace(old, index=1, root=1, params=(flat,)), make_unit(2, names=("a",))) == (1, 1)
    other = replace(flat, parts=tuple(replace(part, global_shape=(2, 8)) for part in parts))
    assert found(old, replace(make_unit(1), params=(other,))) == (0, 1)
