"""The state dict settings of a tree of wrappers."""

import pytest
from torch import nn

from tests.helpers.forked_ranks import on_one_rank
from tests.helpers.small_models import make_net
from tests.helpers.wrapped_models import OURS, wrap_net
from workbench.engine.classic import StateDictSettings, StateDictType
from workbench.engine.classic.state_dict_settings import settings_of
from workbench.engine.classic.wrapper_state import wrapper_states_below


@on_one_rank
def test_one_setting_for_a_tree():
    model = wrap_net(OURS, make_net())
    assert settings_of(nn.Sequential(model)) == StateDictSettings.of(StateDictType.FULL_STATE_DICT)
    *_, last = wrapper_states_below(model)
    last.settings = StateDictSettings.of(StateDictType.LOCAL_STATE_DICT)
    assert settings_of(last.wrapper).state_dict_type is StateDictType.LOCAL_STATE_DICT
    with pytest.raises(ValueError, match="have different state dict types"):
        settings_of(model)
    with pytest.raises(ValueError, match="Linear contains no FullyShardedDataParallel"):
        settings_of(nn.Linear(1, 1))
