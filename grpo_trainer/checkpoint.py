"""Checkpoints that are complete or not there, and what they hold besides the Trainer's own files.

A checkpoint is written into a folder of its own that no reader looks at, and renamed when its last file is there::

    out/_unfinished/checkpoint-12  ->  out/checkpoint-12

A run that is killed while it saves leaves at most the first, which is never read, and cleared away by the next run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from grpo_trainer.types import RolloutBatch

LOCK = "_in_use"
"""A file in the output folder that a run locks; like all that begins with an underscore, no hub is sent it."""
_REPLACED = "-replaced"
UNFINISHED = "_unfinished"
"""Folder of checkpoints that are being written. Uploads of an output folder leave out names that start so."""

_NAME = re.compile(r"checkpoint-(\d+)$")
_TRAINER_STATE = "trainer_state.json"
_SETTINGS = "run_settings.json"
_OPTIMIZER_FILES = ("optimizer*", "scheduler.pt", "global_step*")  # the last is DeepSpeed's folder


@dataclass(kw_only=True)
class RunState:
    """What the rest of a run depends on on one process, besides weights, optimizer, schedule and random numbers.

    Attributes:
        pending: micro-batches that have been collected and not been trained on, in order.
        metrics: figures since the last log.
        loss: sum of the losses since the last log.
        last_logged: optimizer step of the last log.
        loss_total: sum of the losses up to the last log.
        losses_since: optimizer step after which that sum begins.
        reference: weights of the reference policy, if they are not what they were at the start.
        entropy_bonus: coefficient and last entropy of an adaptive entropy bonus.
        kl_coefficient: the beta of now, if it moves.
        prompt_memory: pass rates of the prompts, and which come next.
        dynamic_sampling: groups that wait, and how far the prompts have been used.
        fits: most tokens of a forward pass for which memory has been found to suffice, if it has run out.
    """

    pending: list[RolloutBatch] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    loss: float = 0.0
    last_logged: int = 0
    loss_total: float = 0.0
    losses_since: int = 0
    reference: dict[str, torch.Tensor] = field(default_factory=dict)
    entropy_bonus: dict[str, float] = field(default_factory=dict)
    kl_coefficient: dict[str, float] = field(default_factory=dict)
    prompt_memory: dict[str, Any] = field(default_factory=dict)
    dynamic_sampling: dict[str, Any] = field(default_factory=dict)
    fits: int | None = None

    def save(self, folder: str | os.PathLike[str], rank: int) -> None:
        """Writes it into a checkpoint.

        Args:
            folder: the checkpoint.
            rank: of this process.
        """
        content = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        # as plain values, so that it can be read without running any code; a batch that waits several times, once per
        # pass over its rollout, is written once
        plain = {id(b): {f.name: getattr(b, f.name) for f in dataclasses.fields(b)} for b in self.pending}
        content["pending"] = [plain[id(b)] for b in self.pending]
        torch.save(content, state_file(folder, rank))

    @classmethod
    def load(cls, folder: str | os.PathLike[str], rank: int, device: torch.device | str = "cpu") -> RunState:
        """Reads it from a checkpoint.

        Args:
            folder: the checkpoint.
            rank: of this process.
            device: where the micro-batches are to be.

        Returns:
            The state.
        """
        content = torch.load(state_file(folder, rank), map_location="cpu", weights_only=True)
        batches = {id(plain): RolloutBatch(**plain).to(device) for plain in content["pending"]}
        return cls(**{**content, "pending": [batches[id(plain)] for plain in content["pending"]]})


def state_file(folder: str | os.PathLike[str], rank: int) -> Path:
    """Where the state of a process lies in a checkpoint."""
    return Path(folder) / f"run_state_{rank}.pt"


@contextlib.contextmanager
def writing(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A checkpoint in the making: yields where to write it, and puts it in its place if nothing was raised.

    One process calls this; others write into what it yields, and are done before it is left. What is put in its place
    has reached the disk, so that not even a machine that loses its power leaves half of it.

    Args:
        folder: where the checkpoint is to be, ``…/checkpoint-<step>``. One that is there already is replaced.

    Yields:
        The folder to write into.
    """
    final = Path(folder)
    draft = draft_of(final)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    yield draft
    for path in (*draft.rglob("*"), draft):
        _flush(path)
    if final.exists():
        old = draft.with_name(f"{draft.name}{_REPLACED}")
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)  # killed here, the next run puts it back
    os.rename(draft, final)
    _flush(final.parent)
    shutil.rmtree(draft.parent, ignore_errors=True)


def _flush(path: Path) -> None:
    """Makes the kernel write a file, or a folder's names, to the disk."""
    with contextlib.suppress(OSError):  # not every file system can, for a folder
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def draft_of(folder: str | os.PathLike[str]) -> Path:
    """Where a checkpoint is written before it is complete."""
    return Path(folder).parent / UNFINISHED / Path(folder).name


def clear_unfinished(output_dir: str | os.PathLike[str]) -> None:
    """Removes what a killed run left half-written, and puts back a checkpoint that it was about to replace."""
    unfinished = Path(output_dir) / UNFINISHED
    for old in unfinished.glob(f"*{_REPLACED}"):
        final = Path(output_dir) / old.name.removesuffix(_REPLACED)
        if not final.exists():
            os.rename(old, final)
    shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def sole_run(output_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, no other run may use the folder. The lock is the operating system's: it ends with the process.

    Args:
        output_dir: the output folder of a run; made if need be.

    Raises:
        ValueError: if another run uses it, or it cannot be written to.
    """
    folder = Path(output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=0)
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"output_dir={str(output_dir)!r} is in use by another run, whose checkpoints this one would overwrite. "
            "Wait for it, stop it, or give this run another output_dir"
        ) from error
    except OSError as error:
        raise ValueError(
            f"output_dir={str(output_dir)!r} cannot be written to ({error.strerror or error}); give another folder"
        ) from error
    try:
        yield
    finally:
        lock.release()


def checkpoints(output_dir: str | os.PathLike[str]) -> list[str]:
    """The checkpoints in a folder, the earliest step first.

    Args:
        output_dir: the output folder of a run; need not exist.

    Returns:
        Their paths.
    """
    folder = Path(output_dir)
    found = [(int(m[1]), p) for p in folder.iterdir() if (m := _NAME.search(p.name))] if folder.is_dir() else []
    return [str(path) for _, path in sorted(found) if (path / _TRAINER_STATE).is_file()]


def find_checkpoint(output_dir: str | os.PathLike[str], wanted: str | os.PathLike[str] | bool | None) -> str | None:
    """The checkpoint to go on from.

    Args:
        output_dir: the output folder of the run.
        wanted: a checkpoint's folder; True for the last one in ``output_dir``; False or None for none.

    Returns:
        Its folder; None to start anew, also if there is none in ``output_dir``.

    Raises:
        ValueError: if the folder that is asked for is no checkpoint, or holds weights only.
    """
    if wanted is None or wanted is False:
        return None
    known = checkpoints(output_dir)
    if wanted is True:
        if not known:
            return None
        wanted = known[-1]
    folder = Path(wanted)
    hint = f"the checkpoints in {output_dir}: {', '.join(Path(c).name for c in known) or 'none'}"
    if not folder.is_dir():
        raise ValueError(f"resume_from_checkpoint={str(wanted)!r}: there is no such folder; {hint}")
    if not (folder / _TRAINER_STATE).is_file():
        raise ValueError(
            f"resume_from_checkpoint={str(wanted)!r} is no checkpoint, since it holds no {_TRAINER_STATE}; {hint}"
        )
    if not any(any(folder.glob(pattern)) for pattern in _OPTIMIZER_FILES):
        raise ValueError(
            f"resume_from_checkpoint={str(wanted)!r} holds weights but no optimizer state (save_only_model=True), so "
            "the run cannot go on from it. To start a new run from these weights, give that folder as the model"
        )
    return str(folder)


def save_settings(folder: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
    """Writes the settings that a run's course depends on into a checkpoint, for people and for `changed_settings`."""
    text = json.dumps(dict(settings), indent=2, sort_keys=True, default=str)
    (Path(folder) / _SETTINGS).write_text(text + "\n", encoding="utf-8")


def changed_settings(folder: str | os.PathLike[str], settings: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What is set otherwise than when a checkpoint was written.

    Args:
        folder: the checkpoint.
        settings: those of now.

    Returns:
        Name -> (then, now); empty also if the checkpoint does not say.
    """
    path = Path(folder) / _SETTINGS
    if not path.is_file():
        return {}
    then = json.loads(path.read_text(encoding="utf-8"))
    now = json.loads(json.dumps(dict(settings), default=str))
    names = dict.fromkeys([*then, *now])
    return {n: (then.get(n), now.get(n)) for n in names if then.get(n) != now.get(n)}
