"""State dict settings of a tree of wrappers and its optimizers."""

from __future__ import annotations

from torch import nn

from workbench.engine.classic.options import StateDictSettings
from workbench.engine.classic.wrapper_state import wrapper_states_below


def settings_of(module: nn.Module) -> StateDictSettings:
    """Return the common settings of the wrappers in the tree of ``module``; FULL_STATE_DICT by default.

    Raises:
        ValueError: there is no wrapper, or the wrappers have different settings.
    """
    found = [state.settings for state in wrapper_states_below(module)]
    if not found:
        raise ValueError(f"{type(module).__name__} contains no FullyShardedDataParallel")
    differs = next((settings for settings in found if settings != found[0]), None)
    if differs is not None:
        raise ValueError(
            f"the wrappers in {type(module).__name__} have different state dict types, {found[0]} and {differs}; call "
            "set_state_dict_type on the outermost module"
        )
    return found[0]
