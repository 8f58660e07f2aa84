"""Error messages for computing with a sharded parameter, shared by both APIs."""

from __future__ import annotations


def used_after_reshard(fqn: str, unit: str) -> str:
    """Return the message for a use of the full parameter ``fqn``, kept from before ``unit`` was resharded."""
    return (
        f"the full parameter {fqn!r} was read before unit {unit!r} was resharded and no longer has values: read it "
        "from its module on each use, and compute with it in the forward or between unshard() and reshard()"
    )


def is_sharded(fqn: str, call: str, within: str) -> str:
    """Return the message that ``fqn`` is sharded: ``call`` this instead, or compute ``within`` that."""
    return f"parameter {fqn!r} is sharded; call {call}, or compute {within}"


def assigned_whole(key: str) -> str:
    """Return the message that a state dict to assign has a whole tensor for the sharded parameter ``key``."""
    return (
        f"load_state_dict(assign=True): parameter {key!r} is sharded, and the state dict has a whole tensor for it; "
        "nothing was loaded. Call set_model_state_dict(model, state_dict, "
        "options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict"
    )


def of_another_mesh(key: str, saved: tuple[int, ...], now: tuple[int, ...]) -> str:
    """Return the message that a state dict has a DTensor of another mesh for the parameter ``key``."""
    then, here = ("x".join(map(str, shape)) for shape in (saved, now))
    return (
        f"load_state_dict: parameter {key!r} was saved on a mesh of {then} ranks, and is sharded over {here} here; "
        "nothing was loaded. Files of torch.save fit only the same mesh: save with "
        "torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=FOLDER), whose load fits any"
    )
