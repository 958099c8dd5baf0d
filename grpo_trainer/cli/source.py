"""From the name of a dataset to the rows of one of its splits: files, folders, the hub, tasks of the package."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_trainer.cli.arguments import DatasetEntry
from grpo_trainer.gym import PREFIX, load_gym_task
from grpo_trainer.registry import suggest
from grpo_trainer.tasks import load_task

_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_ONE_SPLIT = (
    "it has one split only, train, so there is nothing to evaluate on but what is trained on: hold rows out with "
    "test_split_size, name a part of it (dataset_train_split: train[:-64], dataset_test_split: train[-64:]), give a "
    "folder with several splits, or set eval_strategy: no"
)


def load_rows(entry: DatasetEntry, *, seed: int, streaming: bool, evaluates: bool = False) -> Any:
    """The rows of one split, as they are.

    Args:
        entry: names the dataset and the split.
        seed: of a task that comes with the package.
        streaming: read rows as they are needed.
        evaluates: whether they are to be evaluated on, for the error.

    Returns:
        A ``datasets.Dataset``, or an ``IterableDataset`` if it is streamed.

    Raises:
        ValueError: if the file, the split or a part of it is not there.
        OSError: if the hub cannot be reached.
    """
    from datasets import load_dataset

    files = files_of(entry.path)
    base = re.sub(r"\[.*", "", entry.split)
    if files is not None and base != "train":
        raise ValueError(_ONE_SPLIT if evaluates else f"files have one split, train, and no {entry.split!r}")
    splits = None if files is not None else _splits_here(str(entry.path), seed)
    if splits is not None:
        if evaluates and set(splits) == {"train"} and base != "train":
            raise ValueError(_ONE_SPLIT)
        rows = _part(splits, entry.split)
        return rows.to_iterable_dataset() if streaming else rows
    if files is None:
        where: dict[str, Any] = {"path": entry.path, "name": entry.name, "data_dir": entry.data_dir}
        where["data_files"] = entry.data_files
    else:
        where = {"path": kind_of(files), "data_files": files}
    if not streaming:
        return load_dataset(**where, split=entry.split)
    rows = load_dataset(**where, split=base, streaming=True)
    return _part_of_stream(rows, entry.split)


def files_of(path: str | list[str]) -> list[str] | None:
    """The files that a name stands for.

    Args:
        path: a file, a pattern of files, or a list of files; or a folder or a name on the hub.

    Returns:
        The files, in order; None for a folder or a name on the hub.

    Raises:
        ValueError: if a file is not there, or no file fits the pattern.
    """
    if isinstance(path, list):
        missing = [name for name in path if not _is_file(name)]
        if missing or not path:
            raise ValueError(
                f"there is no such file: {', '.join(missing)}" if missing else "the list of files is empty"
            )
        return path
    if _is_file(path):
        return [path]
    if Path(path).is_dir():
        return None
    if any(sign in path for sign in "*?["):
        found = sorted(name for name in glob.glob(path, recursive=True) if Path(name).is_file())
        if not found:
            raise ValueError("no file fits this pattern")
        return found
    if _kind(path) is not None:
        raise ValueError("there is no such file")
    return None


def kind_of(files: list[str]) -> str:
    """The loader of ``datasets`` for files.

    Args:
        files: at least one.

    Returns:
        ``json``, ``csv`` or ``parquet``.

    Raises:
        ValueError: if there is none for one of them, or they are of several kinds.
    """
    kinds = {_kind(name) for name in files}
    if len(kinds) == 1 and None not in kinds:
        return str(kinds.pop())
    odd = next((name for name in files if _kind(name) is None), None)
    told = f"{odd} is none of {', '.join(_KINDS)}" if odd else f"they are of several kinds: {', '.join(sorted(kinds))}"  # type: ignore[arg-type]
    raise ValueError(f"the files cannot be read as one dataset: {told}")


def _is_file(name: str) -> bool:
    return Path(name).is_file() or ("://" in name and _kind(name) is not None)


def _kind(name: str) -> str | None:
    path = Path(name)
    if path.suffix in _COMPRESSED:
        path = path.with_suffix("")
    return _KINDS.get(path.suffix)


def _splits_here(name: str, seed: int) -> dict[str, Any] | None:
    """The splits of a task of the package or of a folder that ``save_to_disk`` wrote; None for others."""
    if name.startswith("builtin:"):
        train, heldout = load_task(name, seed)
        return {"train": train, "test": heldout}
    if name.startswith(PREFIX):
        train, heldout = load_gym_task(name, seed)
        return {"train": train, "test": heldout}
    folder = Path(name)
    if not ((folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()):
        return None
    from datasets import load_from_disk

    saved = load_from_disk(name)
    return dict(saved) if isinstance(saved, Mapping) else {"train": saved}


def _part(splits: Mapping[str, Any], spec: str) -> Any:
    """A split, or the part of it that ``train[:10%]`` names, or several, joined by ``+``."""
    from datasets import ReadInstruction, concatenate_datasets

    if spec in splits:
        return splits[spec]
    for name in re.findall(r"(?:^|\+)([^\[+]+)", spec):
        if name not in splits:
            raise ValueError(f"there is no split {name!r}.{suggest(name, splits)} Its splits: {', '.join(splits)}")
    parts = ReadInstruction.from_spec(spec).to_absolute({name: len(rows) for name, rows in splits.items()})
    return concatenate_datasets([splits[p.splitname].select(range(p.from_ or 0, p.to)) for p in parts])


def _part_of_stream(rows: Any, spec: str) -> Any:
    """A stream, or the part of it between two row numbers."""
    _, bracket, inside = spec.partition("[")
    if not bracket:
        return rows
    found = re.fullmatch(r"(\d*):(\d*)\]", inside)
    if not found:
        raise ValueError(
            f"{spec!r} needs the number of rows, which a stream does not tell: give rows from the start, such as "
            "train[:1000] or train[1000:], or set dataset_streaming: false"
        )
    start, end = (int(number) if number else None for number in found.groups())
    rows = rows.skip(start) if start else rows
    return rows.take(end - (start or 0)) if end is not None else rows
