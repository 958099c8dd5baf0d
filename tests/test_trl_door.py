from __future__ import annotations

import pytest
import trl.rewards
from trl.scripts.grpo import GRPOScriptArguments

from grpo_trainer.trl_door import PEER_REWARDS, is_conversational, peer_reward


def test_a_prompt_is_conversational_as_the_peer_tells_it():
    assert is_conversational([{"role": "user", "content": "hi"}])
    assert not is_conversational("hi")


@pytest.mark.parametrize("name", PEER_REWARDS)
def test_the_rewards_are_those_of_the_peers_command_line(name):
    assert f"`{name}`" in GRPOScriptArguments.__dataclass_fields__["reward_funcs"].metadata["help"]
    if name != "get_soft_overlong_punishment":  # which makes a function
        assert peer_reward(name) is getattr(trl.rewards, name)


def test_the_punishment_of_overlong_completions_has_the_peers_limits():
    ids = [[0] * length for length in (1024, 1088, 1280, 2000)]
    assert peer_reward("get_soft_overlong_punishment")(completion_ids=ids) == [0.0, -0.25, -1.0, -1.0]
    ids = [[0] * length for length in (50, 75, 101)]
    own = peer_reward("get_soft_overlong_punishment", max_completion_len=100, soft_punish_cache=50)
    assert own(completion_ids=ids) == [0.0, -0.5, -1.0]
    with pytest.raises(ValueError, match="takes max_completion_len and soft_punish_cache, not limit"):
        peer_reward("get_soft_overlong_punishment", limit=3)
