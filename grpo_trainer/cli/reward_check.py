"""What is wrong with the rewards of a recipe, found out before a run is paid for: texts with a known verdict, scored.

::

    rows -> references (in every usual form), empty, nonsense, answers of other rows, samples of the model
              -> each reward, by itself and timed -> a line per reward, and sentences about what is off
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from grpo_trainer.rewards.base import RewardInputs, RewardLog, RewardSet

REFERENCE_COLUMNS = ("answer", "solution", "canonical_solution", "reference")
"""Columns in which a reference is looked for, the first that is there."""
FORMS: tuple[tuple[str, str], ...] = (
    ("as it is", "{}"),
    ("after ####", "Worked out.\n#### {}"),
    ("in a box", "So it is \\boxed{{{}}}."),
    ("in answer tags", "<think>\nWorked out.\n</think>\n<answer>\n{}\n</answer>"),
    ("in answer tags, boxed", "<think>\nWorked out.\n</think>\n<answer>\n\\boxed{{{}}}\n</answer>"),
    ("after opened thinking", "Worked out.\n</think>\n<answer>\n{}\n</answer>"),
    ("as a code block", "```python\n{}\n```"),
    ("as a code block in answer tags", "<think>\nWorked out.\n</think>\n<answer>\n```python\n{}\n```\n</answer>"),
)
"""Name and text of the ways in which a model may give an answer. What counts is the one that scores best."""
NONSENSE = {
    "empty": "",
    "nonsense": "asdf qwer",
    "no answer": "I do not know.",
    "empty tags": "<think> </think> <answer> </answer>",
    "all numbers": ", ".join(map(str, range(101))),
}
UNGRADED = {"language_consistency", "readability", "soft_overlong", "repetition", "cosine_length", "relative_length"}
"""Rewards of the library whose best value is not 1, or not for a right answer."""


@dataclass
class Line:
    """What one reward did.

    Attributes:
        name: of the reward.
        weight: in the sum.
        reference: mean over the rows of the best form; None without references.
        nonsense: highest value of a text that says nothing.
        sampled: mean over the model's samples.
        spread: share of the sampled prompts whose completions differ in it.
        none: share of all completions for which it was None.
        milliseconds: per completion.
        troubles: completions on which it failed or ran out of time.
    """

    name: str
    weight: float
    reference: float | None = None
    nonsense: float | None = None
    sampled: float | None = None
    spread: float | None = None
    none: float = 0.0
    milliseconds: float = 0.0
    troubles: dict[str, int] = field(default_factory=dict)


@dataclass
class Report:
    """What was found.

    Attributes:
        lines: one for each reward.
        off: sentences about what is wrong.
        notes: sentences about what could not be checked.
        signal: share of the sampled prompts whose totals differ; None without samples.
        form: the form in which most references scored best.
    """

    lines: list[Line]
    off: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    signal: float | None = None
    form: str | None = None


class Scorer:
    """Scores texts by each reward of a set by itself, so that each is timed and a failure is that of one.

    Args:
        rewards: the set; its workers are left alone, each reward has its own.
        encode: text -> token ids.
    """

    def __init__(self, rewards: RewardSet, encode: Callable[[str], list[int]]) -> None:
        from grpo_trainer.rewards.base import RewardSet

        self.names, self.weights, self.options = rewards.names, rewards.weights.tolist(), rewards.options
        self.functions, self.encode = rewards.functions, encode
        self.lines = [Line(name, weight) for name, weight in zip(self.names, self.weights, strict=True)]
        self._sets = [
            RewardSet([function], names=[name], options=[options])
            for function, name, options in zip(rewards.functions, rewards.names, rewards.options, strict=True)
        ]
        self._seen = [0] * len(self.lines)
        self._nones = [0] * len(self.lines)
        self._seconds = [0.0] * len(self.lines)
        self.failures: dict[str, str] = {}

    def score(
        self, rows: Sequence[Mapping[str, Any]], texts: Sequence[str], group_sizes: Sequence[int] | None = None
    ) -> tuple[list[list[float]], list[RewardLog | None]]:
        """Scores one batch.

        Args:
            rows: N dataset rows.
            texts: N completions.
            group_sizes: completions of each prompt, one after the other; None: one of each.

        Returns:
            R lists of N values, NaN for None and for what failed; and R logs, None for what failed.
        """
        inputs = self.inputs(rows, texts, group_sizes)
        columns: list[list[float]] = []
        logs: list[RewardLog | None] = []
        for place, (line, single) in enumerate(zip(self.lines, self._sets, strict=True)):
            start = time.perf_counter()
            values, log = [math.nan] * len(texts), None
            if line.name not in self.failures:
                try:
                    found, log = single.score(inputs)
                    values = found[:, 0].tolist()
                except Exception as error:  # a reward's own, whatever it is
                    self.failures[line.name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
            self._seconds[place] += time.perf_counter() - start
            self._seen[place] += len(texts)
            self._nones[place] += sum(map(math.isnan, values))
            troubles = {} if log is None else {what: count for what, count in log.troubles.items() if count}
            for what, count in troubles.items():
                line.troubles[what.rpartition("/")[2]] = line.troubles.get(what.rpartition("/")[2], 0) + count
            columns.append(values)
            logs.append(log)
        for line, seen, nones, seconds in zip(self.lines, self._seen, self._nones, self._seconds, strict=True):
            line.none, line.milliseconds = nones / max(1, seen), 1000 * seconds / max(1, seen)
        return columns, logs

    def inputs(
        self, rows: Sequence[Mapping[str, Any]], texts: Sequence[str], group_sizes: Sequence[int] | None = None
    ) -> RewardInputs:
        """The batch in the form of the contract: messages for conversations, texts else."""
        from grpo_trainer.rewards.base import RewardInputs

        completions = [
            text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
            for row, text in zip(rows, texts, strict=True)
        ]
        return RewardInputs(
            rows=[dict(row) for row in rows],
            completions=completions,
            completion_ids=[self.encode(text) for text in texts],
            group_sizes=[1] * len(texts) if group_sizes is None else list(group_sizes),
        )

    def totals(self, columns: Sequence[Sequence[float]]) -> list[float]:
        """The weighted sums, over the rewards that apply."""
        return [
            sum(weight * value for weight, value in zip(self.weights, each, strict=True) if not math.isnan(value))
            for each in zip(*columns, strict=True)
        ]

    def warm_up(self, row: Mapping[str, Any]) -> None:
        """Scores one text and forgets it, so that no start of a worker and no import is timed."""
        self.score([row], ["warm-up"])
        self._seen, self._nones = [0] * len(self.lines), [0] * len(self.lines)
        self._seconds = [0.0] * len(self.lines)
        for line in self.lines:
            line.troubles.clear()

    def close(self) -> None:
        """Ends the workers."""
        for single in self._sets:
            single.close()


def references_of(rows: Sequence[Mapping[str, Any]], column: str | None) -> tuple[str | None, list[str | None]]:
    """The reference answers of some rows.

    Args:
        rows: dataset rows.
        column: where they stand; None takes the first of `REFERENCE_COLUMNS` that is there.

    Returns:
        The column, None if there is none; and a text for each row, None where it has none.

    Raises:
        ValueError: if the column that is asked for is not there.
    """
    known = list(dict.fromkeys(name for row in rows for name in row))
    if column is not None and column not in known:
        raise ValueError(f"--reference {column}: there is no such column; there are {', '.join(known)}")
    column = column or next((name for name in REFERENCE_COLUMNS if name in known), None)
    found = [None if column is None else row.get(column) for row in rows]
    return column, [None if value is None or isinstance(value, (list, dict)) else str(value) for value in found]


def check(
    scorer: Scorer,
    rows: Sequence[Mapping[str, Any]],
    references: Sequence[str | None],
    samples: Sequence[Sequence[str]] = (),
    library: Sequence[str] = (),
) -> Report:
    """Scores texts whose verdict is known, and says what is off.

    Args:
        scorer: of the recipe's rewards.
        rows: N dataset rows.
        references: N reference answers, None where there is none.
        samples: for the first rows, completions of the model.
        library: names of rewards whose best value is 1, whatever they give here.

    Returns:
        The report.
    """
    report = Report(lines=scorer.lines)
    scorer.warm_up(rows[0])
    best = _check_references(scorer, rows, references, library, report)
    _check_nonsense(scorer, rows, references, best, report)
    _check_samples(scorer, rows, samples, report)
    for line in scorer.lines:
        if line.name in scorer.failures:
            report.off.append(f"{line.name} failed: {scorer.failures[line.name]}")
        elif line.none == 1.0:
            report.off.append(f"{line.name} applied to nothing: it was None for every completion")
        elif line.none > 0.5:
            report.off.append(f"{line.name} was None for {line.none:.0%} of the completions")
        for what, count in line.troubles.items():
            report.off.append(f"{line.name}: {count} completions with {what}")
    return report


@dataclass(frozen=True)
class _Best:
    """The best form of one row's reference: its total, and the value of each reward."""

    form: int
    text: str
    total: float
    values: tuple[float, ...]


def _check_references(
    scorer: Scorer,
    rows: Sequence[Mapping[str, Any]],
    references: Sequence[str | None],
    library: Sequence[str],
    report: Report,
) -> list[_Best | None]:
    best: list[_Best | None] = [None] * len(rows)
    places = [i for i, reference in enumerate(references) if reference is not None]
    if not places:
        report.notes.append("no reference answers: name their column with --reference COLUMN to have them checked")
        return best
    chosen, highest = [rows[i] for i in places], [[-math.inf] * len(scorer.lines) for _ in rows]
    for form, (_, template) in enumerate(FORMS):
        texts = [template.format(references[i]) for i in places]
        columns, _ = scorer.score(chosen, texts)
        for k, (i, total) in enumerate(zip(places, scorer.totals(columns), strict=True)):
            each = tuple(column[k] for column in columns)
            highest[i] = [max(a, b) if not math.isnan(b) else a for a, b in zip(highest[i], each, strict=True)]
            if best[i] is None or total > best[i].total:  # type: ignore[union-attr]
                best[i] = _Best(form, texts[k], total, each)
    kept = [one for one in best if one is not None]
    forms = [one.form for one in kept]
    report.form = FORMS[max(set(forms), key=forms.count)][0]
    for r, line in enumerate(scorer.lines):
        values = [one.values[r] for one in kept if not math.isnan(one.values[r])]
        line.reference = sum(values) / len(values) if values else None
        if line.name in UNGRADED or scorer.options[r].group:
            continue
        low = [
            i
            for i in places
            if (own := best[i]) is not None
            and not math.isnan(own.values[r])
            and own.values[r] < max(highest[i][r], 1.0 if line.name in library else -math.inf)
        ]
        if low:
            shown = best[low[0]]
            assert shown is not None
            report.off.append(
                f"{line.name}: the reference answer does not score full marks on {len(low)} of {len(places)} rows, "
                f"e.g. row {low[0]}, {references[low[0]]!r:.80}: {shown.values[r]:g}"
            )
    return best


def _check_nonsense(
    scorer: Scorer,
    rows: Sequence[Mapping[str, Any]],
    references: Sequence[str | None],
    best: Sequence[_Best | None],
    report: Report,
) -> None:
    tops: dict[str, list[int]] = {}
    texts = {name: [text] * len(rows) for name, text in NONSENSE.items()}
    others = list(references[1:]) + list(references[:1])
    if any(each is not None for each in best):
        texts["the answer of another row"] = [
            FORMS[own.form][1].format(other)
            if own is not None and other is not None and other.strip() != str(reference).strip()
            else ""
            for own, other, reference in zip(best, others, references, strict=True)
        ]
    for name, column in texts.items():
        columns, _ = scorer.score(rows, column)
        for line, values in zip(scorer.lines, columns, strict=True):
            applied = [value for value in values if not math.isnan(value)]
            if name in NONSENSE and applied:
                line.nonsense = max([*applied, *([] if line.nonsense is None else [line.nonsense])])
        for i, total in enumerate(scorer.totals(columns)):
            own = best[i]
            if own is not None and total >= own.total:
                tops.setdefault(name, []).append(i)
    for name, places in tops.items():
        said = (
            f"{name!r} scores as much as the reference answer on {len(places)} of {len(rows)} rows, "
            f"e.g. row {places[0]}"
        )
        if name in NONSENSE or _reads_a_column(scorer.functions, rows[0]):
            report.off.append(said)
        else:
            report.notes.append(f"{said}: no reward reads a column of the data, so they judge the form alone")


def _reads_a_column(functions: Sequence[Any], row: Mapping[str, Any]) -> bool:
    """Whether a reward names a column of the data among its arguments, so that it can tell right from wrong."""
    for function in functions:
        try:
            named = set(inspect.signature(function).parameters)
        except (TypeError, ValueError):  # written in C, say
            return True
        if named & (set(row) - {"prompt"}):
            return True
    return False


def _check_samples(
    scorer: Scorer, rows: Sequence[Mapping[str, Any]], samples: Sequence[Sequence[str]], report: Report
) -> None:
    if not samples:
        return
    sizes = [len(texts) for texts in samples]
    asked = [row for row, size in zip(rows, sizes, strict=False) for _ in range(size)]
    columns, _ = scorer.score(asked, [text for texts in samples for text in texts], sizes)
    starts = [sum(sizes[:k]) for k in range(len(sizes))]

    def differing(values: Sequence[float]) -> float:
        groups = [[v for v in values[s : s + n] if not math.isnan(v)] for s, n in zip(starts, sizes, strict=True)]
        return sum(len(set(group)) > 1 for group in groups) / len(groups)

    for line, values in zip(scorer.lines, columns, strict=True):
        applied = [value for value in values if not math.isnan(value)]
        line.sampled = sum(applied) / len(applied) if applied else None
        line.spread = differing(values)
    report.signal = differing(scorer.totals(columns))
    if report.signal == 0.0:
        report.off.append(
            f"no signal: the model's {sizes[0]} completions have the same reward for each of {len(sizes)} prompts. "
            "Give more completions (--samples), easier questions, or a reward with degrees such as tag_counts"
        )


def table_of(report: Report) -> Table:
    """The report as a table.

    Args:
        report: what was found.

    Returns:
        A rich table.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("reward", overflow="fold", min_width=max(len(line.name) for line in report.lines))
    for head in ("weight", "refer.", "nons.", "model", "differ", "None", "ms", "limits"):
        table.add_column(head, justify="right", no_wrap=True)
    for line in report.lines:
        table.add_row(
            line.name,
            f"{line.weight:g}",
            *(_figure(value) for value in (line.reference, line.nonsense, line.sampled)),
            "–" if line.spread is None else f"{line.spread:.0%}",
            f"{line.none:.0%}",
            f"{line.milliseconds:.1f}",
            str(sum(line.troubles.values())),
        )
    return table


def with_columns(row: Mapping[str, Any], log: Any) -> dict[str, Any]:
    """What a reward said beside its value about one completion, column -> text.

    Args:
        row: not changed.
        log: a ``RewardLog`` of that completion, or None.

    Returns:
        The columns and the metrics, as text.
    """
    if log is None:
        return {}
    said = {column: values[0] for column, values in log.extra.items()}
    said.update({name: values[0] for name, values in log.metrics.items()})
    said.update({name: count for name, count in log.troubles.items() if count})
    return {name: value for name, value in said.items() if value is not None}


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
