"""Workers for the reward functions that ask for them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from grpo_trainer.rewards.carry import carry
from grpo_trainer.rewards.pool import WorkerPool
from grpo_trainer.rewards.scoring import Reward
from grpo_trainer.runtime import processor_share


def start_pools(rewards: Sequence[Reward]) -> dict[str, WorkerPool]:
    """One pool for each kind of isolation that a function asks for, with as many workers as this process has cores.

    Args:
        rewards: the functions; each is told its place among those of its pool.

    Returns:
        Kind of isolation -> pool.

    Raises:
        ValueError: if a function cannot be carried to a worker, or a memory limit cannot be set on this system.
    """
    pools: dict[str, WorkerPool] = {}
    for isolation in ("process", "sandbox"):
        mine = [reward for reward in rewards if reward.options.isolation == isolation]
        if not mine:
            continue
        for index, reward in enumerate(mine):
            reward.index = index
            if reward.options.memory_limit is not None and sys.platform != "linux":
                raise ValueError(
                    f"reward function {reward.name!r} has memory_limit={reward.options.memory_limit}, which only Linux "
                    "enforces; leave it out"
                )
        pools[isolation] = WorkerPool(
            [carry(reward.name, reward.function) for reward in mine],
            size=processor_share(),
            once=isolation == "sandbox",
            imports=[name for reward in mine for name in reward.options.imports],
        )
    return pools
