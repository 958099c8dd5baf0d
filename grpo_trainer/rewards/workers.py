"""Workers for the reward functions that ask for them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_trainer.rewards import worker as program
from grpo_trainer.rewards.carry import carry
from grpo_trainer.rewards.pool import WorkerPool, Wrap
from grpo_trainer.rewards.scoring import Reward
from grpo_trainer.runtime import processor_share

LEAST_WORKERS = 2
"""Also on one core: while one runs into its time limit, another goes on."""
WORKER_SECONDS = 30 * 86_400.0
"""Processor seconds of a sandboxed worker, which serves a whole run; a call's own limit is its ``time_limit``."""
WORKER_MEMORY = 8 << 30
"""Bytes of address space of a sandboxed worker, unless a function asks for more by its ``memory_limit``."""
WORKER_PROCESSES = 64
"""Most processes of a sandboxed worker."""
WORKER_FILE = 64 << 20
"""Most bytes of a file that a sandboxed worker writes; what it writes is gone when it ends."""


def start_pools(rewards: Sequence[Reward]) -> dict[str, WorkerPool]:
    """One pool for each kind of isolation that a function asks for: a worker for each core of this process.

    Args:
        rewards: the functions; each is told its place among those of its pool.

    Returns:
        Kind of isolation -> pool.

    Raises:
        ValueError: if a function cannot be carried to a worker, or this system has no memory limits or no sandbox.
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
        once = isolation == "sandbox"  # what one completion does to its process must not reach the next
        folders = readable_folders() if once else None
        memory = max([WORKER_MEMORY, *(reward.options.memory_limit or 0 for reward in mine)])
        pools[isolation] = WorkerPool(
            [carry(reward.name, reward.function, folders) for reward in mine],
            size=max(LEAST_WORKERS, processor_share()),
            once=once,
            wrap=sandbox_wrap(folders, memory) if folders is not None else None,
            imports=[name for reward in mine for name in reward.options.imports],
        )
    return pools


def readable_folders() -> list[Path]:
    """What a sandboxed worker may read: Python, the packages that are installed, and this one.

    Returns:
        Folders.
    """
    installed = [entry for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages")]
    package = Path(program.__file__).resolve().parents[1]
    return [Path(p) for p in dict.fromkeys([sys.prefix, sys.base_prefix, *installed, str(package)])]


def sandbox_wrap(folders: Sequence[Path], memory: int) -> Wrap:
    """How a worker's command is run in a sandbox.

    Args:
        folders: what it may read.
        memory: bytes of address space.

    Returns:
        Command -> command.

    Raises:
        ValueError: if there is no sandbox here.
    """
    try:
        sandbox = importlib.import_module("grpo_trainer.rewards.sandbox")
        sandbox.require_sandbox()
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f"isolation='sandbox' is not possible here: {error}. Set isolation='process' if the function runs no text "
            "that a model has written"
        ) from error
    limits = sandbox.Limits(
        seconds=WORKER_SECONDS,
        memory_bytes=memory,
        processes=WORKER_PROCESSES,
        file_bytes=WORKER_FILE,
        output_bytes=program.MAX_REPLY,
    )
    return lambda argv: sandbox.sandbox_command(argv, limits=limits, readable=folders)
