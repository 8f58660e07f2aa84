import pytest

from workbench.errors import UsageError
from workbench.protocol.messages import Names
from workbench.session.names import check_function, check_model, everywhere, shard_first

FULL = Names(modules=("model",), variables=("model", "train_step", "_hidden"))
BARE = Names(variables=("train_step",))


def never(name):
    return False


def test_a_name_on_every_rank_is_fine():
    check_model({0: FULL, 1: FULL}, "model.blocks.0", never)
    check_function({0: FULL, 1: BARE}, "train_step", never)
    check_model({}, "model", never)


@pytest.mark.parametrize(
    ("names", "model", "in_notebook", "says"),
    [
        ({0: FULL, 1: BARE, 2: FULL, 3: BARE}, "model", never, "is on ranks 0, 2, not on ranks 1, 3"),
        ({0: BARE, 1: BARE}, "net", lambda name: name == "net", "put the code that defines it in a %%fsdp cell"),
        ({0: BARE}, "net", never, "define it in a %%fsdp cell"),
        ({0: FULL}, "modle", never, "did you mean 'model'? the ranks have model"),
        ({0: FULL}, "zzz.blocks", never, "no rank has a model named 'zzz': the ranks have model"),
    ],
)
def test_a_missing_model_says_where_it_is_or_what_there_is(names, model, in_notebook, says):
    with pytest.raises(UsageError) as caught:
        check_model(names, model, in_notebook)
    assert says in str(caught.value)


def test_a_missing_function_names_near_ones():
    with pytest.raises(UsageError, match="did you mean 'train_step'"):
        check_function({0: BARE}, "trainstep", never)
    with pytest.raises(UsageError, match="define it in a %%fsdp cell"):
        check_function({0: BARE}, "zzz", never)


def test_many_names_are_cut():
    many = Names(modules=tuple(f"m{i:02}" for i in range(20)))
    with pytest.raises(UsageError, match=r"m11, \.\.\."):
        check_model({0: many}, "zzz", never)


def test_what_to_run_before_a_step():
    assert "first %fsdp shard model" in str(shard_first({0: FULL}, "step"))
    assert "build a model in a %%fsdp cell" in str(shard_first({}, "step"))


def test_private_names_are_not_offered():
    assert everywhere({0: FULL, 1: BARE}, "variables") == ["model", "train_step"]
