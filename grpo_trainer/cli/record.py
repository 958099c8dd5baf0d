"""What a quickstart keeps in its folder between its parts, and what becomes of that when a new one begins."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_trainer.cli.heldout import Measure
from grpo_trainer.cli.run_file import FILE

RECORD = "run.json"
"""What a stopped run needs to be gone on with; it also marks the folder as one that quickstart may tidy."""
KEPT_SECONDS = 1800
"""An earlier run that trained for so long is moved aside by a new one rather than removed."""


@dataclass(kw_only=True)
class Record:
    """What a run keeps in its folder between its parts.

    Attributes:
        settings: the recipe's settings, to tell whether a resumed run is the same run.
        before: the measure before training.
        train_seconds: seconds that the parts so far took to train.
        peak_rss_bytes: most memory of the parts so far.
    """

    settings: dict[str, Any]
    before: Measure
    train_seconds: float = 0.0
    peak_rss_bytes: int = 0

    def save(self, folder: Path) -> None:
        """Writes it."""
        write_json(folder / RECORD, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Record:
        """Reads it."""
        from grpo_trainer.reports.summary import Interval

        content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        before = content.pop("before")
        return cls(before=Measure(**{**before, "reward": Interval(*before["reward"])}), **content)


def make_way(folder: Path, say: Callable[[str], None]) -> None:
    """Takes what an earlier quickstart made out of its folder, and nothing else; other folders are left alone.

    A run that trained for long is moved aside, with what is needed to go on with it; a short one is removed.

    Args:
        folder: the output folder.
        say: prints a line.
    """
    made = _made_by_quickstart(folder)
    if not made:
        return
    names = ", ".join(dict.fromkeys(str(path.relative_to(folder).parts[0]) for path in made))
    seconds = _trained_seconds(folder)
    if seconds < KEPT_SECONDS:
        say(f"removing an earlier run from {folder}, which trained for {seconds:.0f} s: {names}")
        for path in made:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return
    aside = next(path for n in itertools.count(1) if not (path := folder.with_name(f"{folder.name}-{n}")).exists())
    for path in made:
        target = aside / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)
    say(f"an earlier run in {folder} trained for {seconds / 60:.0f} minutes, so it is moved to {aside}: {names}")
    if not (aside / "summary.json").is_file():
        say(f"to go on with it: the same settings with --resume --output_dir {aside}")


def _made_by_quickstart(folder: Path) -> list[Path]:
    from grpo_trainer.reports.completions import FILE_PREFIX

    if not (folder / RECORD).is_file():
        return []
    files = [folder / name for name in ("summary.json", "reward_curve.png", "model", FILE, RECORD)]
    tables = folder.glob(f"completions/{FILE_PREFIX}*.parquet")
    return [path for path in (*checkpoints_in(folder), *tables, *files) if path.exists()]


def _trained_seconds(folder: Path) -> float:
    """How long the run in a folder trained. One that was killed did not say; its last checkpoint tells."""
    try:
        said = Record.load(folder).train_seconds
    except (OSError, ValueError, KeyError, TypeError):
        said = 0.0
    begun = (folder / RECORD).stat().st_mtime
    return said + max([0.0, *(path.stat().st_mtime - begun for path in checkpoints_in(folder))])


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints that a trainer wrote."""
    states = folder.glob("checkpoint-*/trainer_state.json")
    return [state.parent for state in states if state.parent.name.removeprefix("checkpoint-").isdigit()]


def write_json(path: Path, content: Any) -> None:
    """Writes a file that is complete or not there."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
