"""Completions on disk: parquet files that a killed run has written all of, and how they are read back.

::

    rollout --on_rollout--> completions_00012.parquet        at once, one file per optimizer step
                   |
                   +--latest--> printer, tracker              at the next log of training
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import TrainerCallback

from grpo_trainer.reports.guard import Guard, logger
from grpo_trainer.reports.tables import reward_columns

if TYPE_CHECKING:
    import pandas as pd

FOLDER = "completions"
"""Where completions lie in a run's output folder."""

FILE_PREFIX = "completions_"
_FILE = re.compile(rf"{FILE_PREFIX}(\d+)\.parquet")
_UNFINISHED = "_unfinished.parquet"  # readers of a folder of parquet files leave out names that begin so

Table = Mapping[str, Sequence[Any]]


class CompletionsWriter(TrainerCallback):
    """Writes every completion to parquet: one file per optimizer step for which any were drawn.

    ``completions_00012.parquet`` holds the rollouts that were collected for step 12. It is written as soon as they are
    scored, on the main process only, and is complete or not there. A step that is run again after a resume replaces
    its file. A run that starts anew moves the files of an earlier one aside, to ``completions.1`` or the next number
    that is free.

    Args:
        folder: where to write; made when the first file is written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._step = 0
        self._tables: list[Table] = []  # of that step
        self._begun_at = 0
        self._guard = Guard(f"the completions are not written to {self.folder}")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes room for a run that starts anew."""
        self._step, self._tables, self._begun_at = 0, [], state.global_step
        if state.global_step == 0 and state.is_world_process_zero:
            with self._guard:
                move_aside(self.folder)

    def on_rollout(self, args: Any, state: Any, control: Any, table: Table, **kwargs: Any) -> None:
        """Writes the completions of a rollout, together with those that were drawn for the same step before."""
        if not state.is_world_process_zero:
            return
        step = state.global_step + 1
        if step != self._step:
            self._step, self._tables = step, []
        self._tables.append(table)
        with self._guard:
            write_completions(self.folder / f"{FILE_PREFIX}{step:05d}.parquet", self._tables)

    def latest(self, state: Any) -> dict[str, list[Any]] | None:
        """What a log of training has to show: the completions of the last step for which any were drawn.

        A run that was resumed reads them from their file, so that its next log shows what it would have shown.

        Args:
            state: the Trainer's, its last log entry being the present log.

        Returns:
            The table; None if there is nothing that a log before did not show.
        """
        logged = max((entry["step"] for entry in state.log_history[:-1] if is_training_log(entry)), default=0)
        if self._tables:
            return merge_tables(self._tables) if self._step > logged else None
        earlier = {step: path for step, path in written(self.folder).items() if logged < step <= self._begun_at}
        if not earlier:
            return None
        import pyarrow.parquet as pq

        return pq.read_table(earlier[max(earlier)]).to_pydict()


def is_training_log(logs: Mapping[str, Any]) -> bool:
    """Whether a log holds figures of training, rather than those of an evaluation."""
    return "loss" in logs or "train_runtime" in logs


def write_completions(path: Path, tables: Sequence[Table]) -> None:
    """Writes tables of completions, one below the other, to a parquet file that is complete or not there.

    A reward that does not apply (None or NaN) becomes a null. Values of an extra column that are not of one kind are
    stored as JSON text. A column that a table lacks is null there.

    Args:
        path: the file; its folder is made.
        tables: one or more dicts of equally long lists.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(_UNFINISHED)
    pq.write_table(pa.table(_arrow_columns(merge_tables(tables))), unfinished)
    os.replace(unfinished, path)


def read_completions(output_dir: str | os.PathLike[str]) -> pd.DataFrame:
    """All completions that a run has written, as a pandas data frame.

    Args:
        output_dir: the run's output folder.

    Returns:
        One row per completion, in the order of the steps; NaN where a reward does not apply.

    Raises:
        FileNotFoundError: if there are none.
    """
    import pandas as pd
    import pyarrow.parquet as pq

    files = written(Path(output_dir) / FOLDER)
    if not files:
        raise FileNotFoundError(
            f"output_dir={os.fspath(output_dir)!r} holds no {FOLDER}/{FILE_PREFIX}*.parquet: they are written by a run "
            "with log_completions=True"
        )
    return pd.DataFrame(merge_tables([pq.read_table(path).to_pydict() for path in files.values()]))


def written(folder: Path) -> dict[int, Path]:
    """The files of completions in a folder.

    Args:
        folder: need not exist.

    Returns:
        Optimizer step -> file, ascending.
    """
    found = {int(m[1]): p for p in folder.iterdir() if (m := _FILE.fullmatch(p.name))} if folder.is_dir() else {}
    return dict(sorted(found.items()))


def move_aside(folder: Path) -> None:
    """Moves files of completions to ``folder.1``, or the next number that is free, and says so.

    Args:
        folder: what else it holds is left.
    """
    files = written(folder)
    if not files:
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    aside.mkdir()
    for path in files.values():
        path.rename(aside / path.name)
    logger.warning(
        "%s held completions of an earlier run (%d files, up to step %d): they are in %s now",
        *(folder, len(files), max(files), aside),
    )


def merge_tables(tables: Iterable[Table]) -> dict[str, list[Any]]:
    """Tables, one below the other.

    Args:
        tables: dicts of equally long lists.

    Returns:
        All their columns, in the order in which they first appear; None where a table lacks one.

    Example:
        >>> merge_tables([{"a": [1, 2]}, {"a": [3], "b": ["x"]}])
        {'a': [1, 2, 3], 'b': [None, None, 'x']}
    """
    tables = list(tables)
    columns: dict[str, list[Any]] = {name: [] for table in tables for name in table}
    for table in tables:
        rows = len(next(iter(table.values()), ()))
        for name, values in columns.items():
            values.extend(table.get(name, [None] * rows))
    return columns


def plain_rows(table: Table) -> tuple[list[str], list[list[Any]]]:
    """A table as a tracking service takes it: rows of numbers, truth values, texts and None, a column of one kind.

    Args:
        table: dict of equally long lists.

    Returns:
        The names of the columns, and the rows. Equal before and after a table was written to disk.
    """
    columns = {name: array.to_pylist() for name, array in _arrow_columns(table).items()}
    for name, values in columns.items():
        columns[name] = [v if isinstance(v, (bool, int, float, str, type(None))) else _as_text(v) for v in values]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def _arrow_columns(table: Table) -> dict[str, Any]:
    """Columns of one kind each. Rewards are numbers even where all are null: files of a run are of one kind too."""
    import pyarrow as pa

    figures = {*reward_columns(table), "advantage"} if "advantage" in table else set()
    return {name: _arrow_array(values, pa.float64() if name in figures else None) for name, values in table.items()}


def _arrow_array(values: Sequence[Any], kind: Any = None) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = [None if isinstance(v, float) and math.isnan(v) else v for v in values]
    try:
        array = pa.array(values, kind)
        if pa.types.is_nested(array.type):  # not all that arrow can nest can be written: {} cannot
            pq.write_table(pa.table({"": array}), pa.BufferOutputStream())
        return array
    except Exception:  # of many kinds: mixed types, whole numbers beyond 64 bits, lone surrogates
        return pa.array([None if v is None else _as_text(v) for v in values])


def _as_text(value: Any) -> str:
    """JSON, or Python's own way of writing it where JSON has none; what UTF-8 cannot hold becomes a question mark."""
    try:
        text = json.dumps(value, default=str)
    except (TypeError, ValueError):
        text = repr(value)
    return text.encode("utf-8", errors="replace").decode("utf-8")
