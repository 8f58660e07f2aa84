"""Details that old scripts rely on, as with torch's wrapper: environment variables, warnings, deprecated arguments."""

import itertools
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.known_warnings import OLD_CALLS, SHARDED_TENSOR, ignoring_warnings
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.wrapped_models import CPU, OURS, THEIRS, adam, assert_same_tree, kept, whole, wrap_net

FSDP = OURS.FullyShardedDataParallel


@contextmanager
def environment(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


# ---- evaluation in full precision


class RecordsDtypes(nn.Module):
    """Records the dtypes of its inputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0))
        self.seen = []

    def forward(self, x):
        self.seen.append((x.dtype, self.linear.weight.dtype, self.table.dtype))
        return self.linear(x) + self.table.to(x.dtype)


def evaluates(api, value, use_orig_params):
    torch.manual_seed(0)
    inner = [RecordsDtypes(), RecordsDtypes()]
    precision = api.MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16, cast_forward_inputs=True)
    with environment("FSDP_USE_FULL_PREC_IN_EVAL", value):
        model = api.FullyShardedDataParallel(
            nn.Sequential(*inner),
            auto_wrap_policy=api.ModuleWrapPolicy({RecordsDtypes}),
            mixed_precision=precision,
            device_id=CPU,
            use_orig_params=use_orig_params,
        )
        optimizer = adam(model.parameters())
        found = []
        for step in range(6):
            model.train(step not in {2, 3})
            x = torch.linspace(-1, 1, 12).view(3, 4) * (dist.get_rank() + step + 1)
            if step == 3:
                with torch.no_grad():
                    found.append(model(x).detach())
                continue
            out = model(x)
            found.append(out.detach())
            out.float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return found, list(whole(model).values()), [module.seen for module in inner]


def evaluates_as_torchs():
    for value in (None, "0", "1"):
        for use_orig_params in (False, True):
            ours, theirs = (evaluates(api, value, use_orig_params) for api in (OURS, THEIRS))
            assert ours[2] == theirs[2]
            assert ((torch.float32,) * 3 in ours[2][0]) == (value == "1")
            for mine, other in zip(ours[0], theirs[0], strict=True):
                torch.testing.assert_close(mine, other)
            torch.testing.assert_close(ours[1], theirs[1])


def test_eval_is_in_full_precision_if_the_environment_asks_for_it():
    run_ranks(2, evaluates_as_torchs)


# ---- a module's own __setattr__


class RecordsAssignments(nn.Linear):
    """Records assignments to its parameters."""

    noted: list

    def __setattr__(self, name, value):
        if name in {"weight", "bias"} and "noted" in vars(self):
            self.noted.append(name)
        super().__setattr__(name, value)


def what_is_noted(api, value, use_orig_params):
    with environment("FSDP_USE_UNSAFE_SETATTR", value):
        linear = RecordsAssignments(4, 4)
        model = api.FullyShardedDataParallel(linear, use_orig_params=use_orig_params, device_id=CPU)
        vars(linear)["noted"] = noted = []
        counts = []
        loss = model(torch.ones(2, 4)).sum()
        counts.append(set(noted))
        noted.clear()
        loss.backward()
        with api.FullyShardedDataParallel.summon_full_params(model):
            counts.append(set(noted))
        names = [name for name, _ in model.named_parameters()]
    return counts, names


def notes_as_torchs():
    for value, use_orig_params in itertools.product((None, "0", "1"), (False, True)):
        ours, theirs = (what_is_noted(api, value, use_orig_params) for api in (OURS, THEIRS))
        assert ours == theirs
        assert ours[0] == [set() if value == "1" else {"weight", "bias"}] * 2


def test_a_modules_own_setattr_is_called_unless_the_environment_says_otherwise():
    run_ranks(2, notes_as_torchs)


# ---- warnings


def warned(api, make, **options):
    """Return the UserWarnings of wrapping a model."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        api.FullyShardedDataParallel(make(), device_id=CPU, **options)
    return [str(each.message) for each in caught if each.category is UserWarning]


class PartlyFrozen(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 2))
        self[0].requires_grad_(False)


class HasFrozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = PartlyFrozen(), PartlyFrozen()

    def forward(self, x):
        return self.first(x) + self.second(x)


class HasNorm(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4))


def warns_as_torchs():
    cases = [
        (lambda: nn.ModuleList([nn.Linear(2, 2)]), lambda api: {}, "around ModuleList, which has no forward"),
        (lambda: nn.ModuleDict({"a": nn.Linear(2, 2)}), lambda api: {}, "around ModuleDict, which has no forward"),
        (
            HasFrozen,
            lambda api: {"auto_wrap_policy": api.ModuleWrapPolicy({PartlyFrozen}), "use_orig_params": True},
            "allocates gradients of 30 elements, of which 10 are trained",
        ),
        (
            HasNorm,
            lambda api: {
                "auto_wrap_policy": api.ModuleWrapPolicy({nn.Linear}),
                "mixed_precision": api.MixedPrecision(torch.bfloat16),
            },
            "every BatchNorm1d becomes a separate unit",
        ),
        (HasNorm, lambda api: {"auto_wrap_policy": api.ModuleWrapPolicy({nn.Linear})}, ""),
        (HasNorm, lambda api: {"mixed_precision": api.MixedPrecision(torch.bfloat16)}, ""),
    ]
    for make, options, expected in cases:
        ours, theirs = (warned(api, make, **options(api)) for api in (OURS, THEIRS))
        assert len(ours) == len(theirs), (ours, theirs)
        assert bool(ours) == bool(expected)
        assert all(expected in message for message in ours), (expected, ours)


def test_costly_mistakes_are_warned_about_as_by_torch():
    run_ranks(2, warns_as_torchs)


# ---- optimizers' state dicts


def trained(api, **options):
    model = wrap_net(api, make_net(num_blocks=2), **options)
    optimizer = adam(model.parameters())
    loss_of(model, batch(dist.get_rank(), 0)).backward()
    optimizer.step()
    return model, optimizer


def calls_of(api, use_orig_params, form):
    """Call every function that takes ``optim_input``; return the results, and whether each call warned."""
    model, optimizer = trained(api, use_orig_params=use_orig_params)
    plain = make_net(num_blocks=2)
    api = api.FullyShardedDataParallel
    found = []

    def call(fn, *args, **kwargs):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = fn(*args, **kwargs)
            found.append(kept(made))  # on a CPU torch's next gather overwrites the values
        found.append(any("optim_input" in str(e.message) and e.category is FutureWarning for e in caught))
        return made

    full = call(api.full_optim_state_dict, model, optimizer, form(model), rank0_only=False)
    call(api.shard_full_optim_state_dict, full, model, form(model))
    call(api.scatter_full_optim_state_dict, full if dist.get_rank() == 0 else None, model, optim_input=form(model))
    key = (OURS if api is FSDP else THEIRS).OptimStateKeyType.PARAM_ID
    if form is not in_groups:
        places = call(api.rekey_optim_state_dict, full, key, plain, list(plain.parameters()))
        call(api.rekey_optim_state_dict, places, type(key).PARAM_NAME, plain, list(plain.parameters()))
    call(api.full_optim_state_dict, model, optimizer, rank0_only=False)
    return found, kept(optimizer.state_dict()["state"])


def not_empty(states):
    """Return the states of pieces that have elements."""
    return {key: state for key, state in states.items() if state["exp_avg"].numel()}


def assert_same_keys(ours, theirs):
    """Compare the keys if they are names; other keys differ, because torch's padding shifts which pieces a rank has."""
    if any(isinstance(key, str) for key in (*ours, *theirs)):
        assert ours.keys() == theirs.keys()
    else:
        assert ours
        assert theirs


def as_list(model):
    return list(model.parameters())


def in_groups(model):
    return [{"params": list(model.parameters())}]


def takes_optim_input():
    for use_orig_params in (False, True):
        for form in (as_list, in_groups):
            (ours, own), (theirs, _) = (calls_of(api, use_orig_params, form) for api in (OURS, THEIRS))
            for each in ours[2:6:2]:  # the loaded state equals the saved one
                assert_same_tree(not_empty(each["state"]), not_empty(own))
            for each in (ours[-2], *ours[8:-2:2]):  # keyed by name again
                assert_same_tree(each["state"], ours[0]["state"])
            assert ours[1::2] == theirs[1::2] == [True] * (len(ours) // 2 - 1) + [False]
            for mine, other in zip(ours[::2], theirs[::2], strict=True):
                assert mine.keys() == other.keys()
                assert_same_keys(mine["state"], other["state"])  # not the values: torch's next gather overwrites them
                assert [group["params"] for group in mine["param_groups"]] == [
                    group["params"] for group in other["param_groups"]
                ]


def test_optim_input_is_taken_with_a_warning():
    run_ranks(2, takes_optim_input)


def without_groups(api, use_orig_params):
    model, optimizer = trained(api, use_orig_params=use_orig_params)
    kind, config = api.StateDictType.FULL_STATE_DICT, api.FullOptimStateDictConfig(offload_to_cpu=False)
    api = api.FullyShardedDataParallel
    with ignoring_warnings(*OLD_CALLS, *SHARDED_TENSOR):
        api.set_state_dict_type(model, kind, None, config)
        saved = api.optim_state_dict(model, optimizer, {"state": optimizer.state_dict()["state"]})
        return saved, api.optim_state_dict_to_load(model, optimizer, saved)


def takes_state_alone():
    for use_orig_params in (False, True):
        ours, theirs = (without_groups(api, use_orig_params) for api in (OURS, THEIRS))
        assert [set(each) for each in ours] == [set(each) for each in theirs] == [{"state"}] * 2
        assert_same_tree(kept(ours[0]), kept(theirs[0]))
        assert_same_keys(ours[1]["state"], theirs[1]["state"])


def test_a_state_dict_without_groups_is_taken():
    run_ranks(2, takes_state_alone)


def three_layers(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))


def of_an_ignored_layer(api, use_orig_params):
    """Save and load, in every way, the state of an optimizer that also has an ignored layer's parameters."""
    fsdp = api.FullyShardedDataParallel
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))

    def made(seed):
        plain = three_layers(seed)
        policy = api.ModuleWrapPolicy({nn.Linear})
        options = {"use_orig_params": use_orig_params, "device_mesh": mesh, "device_id": CPU}
        model = fsdp(plain, ignored_modules=[plain[1]], auto_wrap_policy=policy, **options)
        return model, adam(model.parameters())

    def train(model, optimizer):
        for _ in range(2):  # the same data on all ranks: gradients of the ignored layer are not reduced
            model(torch.linspace(-1, 1, 12).view(3, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def back(make):
        model, optimizer = made(1)
        model.load_state_dict(values)
        loaded = make(model, optimizer)
        keys = list(loaded["state"])
        optimizer.load_state_dict(loaded)
        train(model, optimizer)
        return keys, kept(dict(model.state_dict()))

    model, optimizer = made(0)
    train(model, optimizer)
    values = kept(dict(model.state_dict()))
    own = [kept(optimizer.state[param]) for param in model.module[1].parameters()]
    if api is OURS:  # the saved state is a copy, as for all other parameters
        kind, config = api.StateDictType.FULL_STATE_DICT, api.FullOptimStateDictConfig(offload_to_cpu=False)
        fsdp.set_state_dict_type(model, kind, None, config)
        for state in fsdp.optim_state_dict(model, optimizer)["state"].values():
            state["exp_avg"].zero_()
        assert_same_tree([kept(optimizer.state[param]) for param in model.module[1].parameters()], own)
        fsdp.set_state_dict_type(model, kind)
    full = kept(fsdp.full_optim_state_dict(model, optimizer, rank0_only=False))
    sharded = fsdp.sharded_optim_state_dict(model, optimizer)
    places = fsdp.rekey_optim_state_dict(full, api.OptimStateKeyType.PARAM_ID, three_layers())
    names = fsdp.rekey_optim_state_dict(places, api.OptimStateKeyType.PARAM_NAME, three_layers())
    given = kept(full) if dist.get_rank() == 0 else None
    flat = list(fsdp.flatten_sharded_optim_state_dict(sharded, model, optimizer)["state"])
    split = kept(sharded)
    backs = [  # copies, because an optimizer steps the tensors that it loads
        back(lambda m, o: fsdp.shard_full_optim_state_dict(kept(full), m, optim=o)),
        back(lambda m, o: fsdp.scatter_full_optim_state_dict(given, m, optim=o)),
        back(lambda m, o: fsdp.optim_state_dict_to_load(m, o, kept(full))),
    ]
    if api is OURS:  # on a CPU torch's next gather overwrites what its wrapper offloads
        train(model, optimizer)
        for saved in (full, names, split):
            assert_same_tree([saved["state"][f"1.{name}"] for name in ("weight", "bias")], own)
        for _, trained_on in backs:
            assert_same_tree(trained_on, kept(dict(model.state_dict())))
    states = [{key: list(each) for key, each in saved["state"].items()} for saved in (full, sharded, places, names)]
    kinds = [type(value).__name__ for name in ("1.weight", "1.bias") for value in sharded["state"][name].values()]
    groups = [saved["param_groups"] for saved in (full, sharded, places, names)]
    return [states, kinds, groups, list(whole(model))], [flat, *(keys for keys, _ in backs)]


def keeps_what_is_ignored():
    for use_orig_params in (False, True):
        with ignoring_warnings(*OLD_CALLS, *SHARDED_TENSOR):
            ours, theirs = (of_an_ignored_layer(api, use_orig_params) for api in (OURS, THEIRS))
        assert_same_tree(ours[0], theirs[0])
        if not use_orig_params:
            assert ours[1] == theirs[1]


def test_the_optimizers_state_of_an_ignored_parameter_is_kept_as_torchs():
    run_ranks(2, keeps_what_is_ignored)
