"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): groups without a signal give way to others.

A group whose completions all earn the same has no advantage and teaches nothing. Here such groups are replaced: prompts
are drawn, in rounds of one rollout, until the rollout is full of groups that carry a signal. What a round brings beyond
that waits for the next rollout; it was drawn by the policy of its time, so the log-probs under that policy are kept::

    waiting   ██ ──┐   ┌── full: trained on now
    round 1   ▒█▒█ ├──>│██████
    round 2   █▒██ ┘   └── surplus ██ ──> waiting        ▒ silent   █ with a signal

Every process holds the same groups in the same order, whichever process drew them, so the rollout does not depend on
how many there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_trainer.rewards.base import RewardLog
from grpo_trainer.rollout import Drawn, Facts, Rollout, RolloutCollector
from grpo_trainer.types import Completions, Prompt, Row

AT_CAP = {
    "fill": "silent groups fill the step up and count in its normaliser, as without dynamic sampling",
    "partial": "silent groups fill it up and do not count",
    "error": "the run ends",
}
"""What happens when the rounds are used up and the rollout is not full, by name."""

GatherObject = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt, its completions, and what they earned.

    Attributes:
        prompt: as the model sees it.
        completions: G of them.
        texts: G texts.
        rewards: (G, R) float64, NaN = does not apply.
        extra: column -> G values that reward functions logged.
        step: optimizer step, counted from 0, in which it was drawn.
        old_logprobs: (G, T) float32 under the policy that drew it, 0 beyond a completion's length; None: that is the
            policy of now.
    """

    prompt: Prompt
    completions: Completions
    texts: list[str]
    rewards: Tensor
    extra: dict[str, list[Any]]
    step: int
    old_logprobs: Tensor | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens; the prompt counts once per completion."""
        return len(self) * len(self.prompt.ids) + sum(map(len, self.completions.ids))

    def plain(self) -> dict[str, Any]:
        """The group in values that a checkpoint can hold."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("prompt", "completions"):
            values[name] = {f.name: getattr(values[name], f.name) for f in dataclasses.fields(values[name])}
        values["extra"] = {name: [_plain(v) for v in column] for name, column in self.extra.items()}
        return values

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Group:
        """The group that ``plain`` was made of."""
        parts = {"prompt": Prompt(**plain["prompt"]), "completions": Completions(**plain["completions"])}
        return cls(**{**plain, **parts})


class Source(NamedTuple):
    """Where prompts come from, round after round of a whole run.

    Attributes:
        rows: number of the round in the run, from 0 -> the dataset rows of this process's prompts, and their names for
            messages.
        seed: number of the round within its rollout, from 0 -> seed of its random numbers, the same on all processes.
    """

    rows: Callable[[int], tuple[Iterable[Row], Sequence[str]]]
    seed: Callable[[int], int]


@dataclass(kw_only=True)
class DynamicSampling:
    """Fills rollouts with groups that carry a signal.

    Attributes:
        max_rounds: most rounds for one rollout, at least 1.
        at_cap: one of ``AT_CAP``.
        max_age: most optimizer steps that a group waits.
        gather_object: collects one object per process; None for a single process.
        waiting: groups with a signal that were not needed yet, the oldest first.
        rounds: how many rounds the run has drawn.
    """

    max_rounds: int
    at_cap: str
    max_age: int
    gather_object: GatherObject | None = None
    waiting: list[Group] = field(default_factory=list)
    rounds: int = 0

    def collect(
        self, collector: RolloutCollector, groups: Sequence[tuple[int, int]], source: Source, *, step: int
    ) -> Rollout:
        """One rollout; every process calls it at the same point.

        Args:
            collector: draws and scores.
            groups: of the rollout, those that this process holds: (index of the prompt, completions), whole groups.
            source: of the prompts.
            step: the optimizer step, counted from 0.

        Returns:
            The rollout.

        Raises:
            RuntimeError: if the rounds are used up, the rollout is not full, and ``at_cap`` is "error".
        """
        wanted = _total_prompts(collector, groups)
        carried = [group for group in self.waiting if step - group.step <= self.max_age]
        counts = {"groups_aged_out": len(self.waiting) - len(carried)}
        found, silent, tokens, asked = list(carried), [], 0, 0
        while len(found) < wanted and asked < self.max_rounds:
            drawn, flags, number = self._round(collector, groups, source, asked, step)
            found += [group for group, mute in zip(drawn, flags, strict=True) if not mute]
            silent += [group for group, mute in zip(drawn, flags, strict=True) if mute]
            tokens += number
            asked += 1
        counts["groups_asked"] = asked * wanted
        counts["groups_kept"] = len(found) - len(carried)
        missing = wanted - len(found)
        if missing > 0 and self.at_cap == "error":
            raise RuntimeError(
                f"dynamic sampling drew {asked} rounds of {wanted} prompts (dynamic_sampling_max_rounds="
                f"{self.max_rounds}) and found {len(found)} groups with a signal. Use prompts of another difficulty, a "
                "larger num_generations or more rounds, or set dynamic_sampling_at_cap to 'fill' or 'partial'"
            )
        chosen = [*found[:wanted], *silent[: max(missing, 0)]]
        self.waiting = self._with_old_logprobs(collector, found[wanted:])
        counts["groups_carried"] = min(len(carried), wanted)
        counts["groups_waiting"] = len(self.waiting)
        if collector.rank == 0:
            for name, value in counts.items():
                collector.metrics.add(f"dynamic_sampling/{name}", float(value), 1.0)
            collector.metrics.add("dynamic_sampling/rounds", float(asked), 1.0)
            collector.metrics.add("dynamic_sampling/frac_silent", float(len(silent)), float(max(asked, 0) * wanted))
        return self._credit(collector, groups, chosen, muted=max(missing, 0), tokens=tokens)

    def _round(
        self,
        collector: RolloutCollector,
        groups: Sequence[tuple[int, int]],
        source: Source,
        number: int,
        step: int,
    ) -> tuple[list[Group], list[bool], int]:
        """The groups of all processes in one round, whether each is silent, and the tokens of the round."""
        rows, names = source.rows(self.rounds)
        self.rounds += 1
        own, facts = collector.draw_together(rows, [n for _, n in groups], seed=source.seed(number), names=names)
        mine = {p: group for (p, _), group in zip(groups, _groups(own, [n for _, n in groups], step), strict=True)}
        everyone = self.gather_object([mine]) if self.gather_object else [mine]
        by_prompt = {p: group for part in everyone for p, group in part.items()}
        return [by_prompt[p] for p in sorted(by_prompt)], facts.silent.tolist(), facts.num_tokens

    def _with_old_logprobs(self, collector: RolloutCollector, groups: list[Group]) -> list[Group]:
        """Groups that have to wait, with their log-probs under the policy of now, shared out over the processes."""
        new = [i for i, group in enumerate(groups) if group.old_logprobs is None]
        world = 1 if collector.layout is None else len(collector.layout)
        mine = {}
        with collector.timed("time/logprobs"):
            for i in new[collector.rank :: world]:
                batch = collector.freeze(_drawn([groups[i]]), [len(groups[i])])
                mine[i] = collector.policy_logprobs(batch).cpu()
        everyone = self.gather_object([mine]) if self.gather_object and new else [mine]
        known = {i: values for part in everyone for i, values in part.items()}
        return [replace(g, old_logprobs=known[i]) if i in known else g for i, g in enumerate(groups)]

    def _credit(
        self,
        collector: RolloutCollector,
        groups: Sequence[tuple[int, int]],
        chosen: list[Group],
        *,
        muted: int,
        tokens: int,
    ) -> Rollout:
        """The rollout of the groups that were chosen, of which the last ``muted`` are silent."""
        local = [chosen[p] for p, _ in groups]
        old = [None if g.old_logprobs is None else g.old_logprobs[i] for g in local for i in range(len(g))]
        facts = Facts(
            rewards=torch.cat([group.rewards for group in chosen]),
            silent=torch.tensor([False] * (len(chosen) - muted) + [True] * muted),
            num_tokens=tokens,
        )
        stale = any(group.old_logprobs is not None for group in chosen)  # on whichever process: all must agree
        rollout = collector.credit(
            _drawn(local), [len(group) for group in local], facts, old_logprobs=old if stale else None
        )
        if self.at_cap == "partial" and muted:
            counted = [p < len(chosen) - muted for p, n in groups for _ in range(n)]
            mask = rollout.batch.mask & torch.tensor(counted, device=rollout.batch.device)[:, None]
            rollout = replace(rollout, batch=replace(rollout.batch, mask=mask))
        return rollout

    def state_dict(self) -> dict[str, Any]:
        """What the rest of a run depends on, in values that a checkpoint can hold."""
        return {"rounds": self.rounds, "waiting": [group.plain() for group in self.waiting]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what ``state_dict`` gave; an empty state is that of a new run.

        Args:
            state: the values.
        """
        self.rounds = state.get("rounds", 0)
        self.waiting = [Group.of(plain) for plain in state.get("waiting", ())]


def _total_prompts(collector: RolloutCollector, groups: Sequence[tuple[int, int]]) -> int:
    """P, over all processes."""
    rows = sum(n for _, n in groups) if collector.layout is None else sum(map(len, collector.layout))
    return rows // collector.num_generations


def _groups(drawn: Drawn, num_samples: Sequence[int], step: int) -> list[Group]:
    """Completions, group by group."""
    out, first = [], 0
    for n in num_samples:
        part = slice(first, first + n)
        sampled = drawn.completions.sampling_logprobs
        out.append(
            Group(
                prompt=drawn.prompts[first],
                completions=Completions(
                    ids=drawn.completions.ids[part],
                    finished=drawn.completions.finished[part],
                    sampling_logprobs=None if sampled is None else sampled[part],
                ),
                texts=drawn.texts[part],
                rewards=drawn.rewards[part],
                extra={name: list(column[part]) for name, column in drawn.log.extra.items()},
                step=step,
            )
        )
        first += n
    return out


def _drawn(groups: Sequence[Group]) -> Drawn:
    """The reverse of ``_groups``."""
    sampled = [group.completions.sampling_logprobs for group in groups]
    columns = dict.fromkeys(name for group in groups for name in group.extra)
    return Drawn(
        rows=[],
        prompts=[group.prompt for group in groups for _ in range(len(group))],
        completions=Completions(
            ids=tuple(ids for group in groups for ids in group.completions.ids),
            finished=tuple(flag for group in groups for flag in group.completions.finished),
            sampling_logprobs=None
            if any(each is None for each in sampled)
            else tuple(row for each in sampled for row in each or ()),
        ),
        texts=[text for group in groups for text in group.texts],
        rewards=torch.cat([group.rewards for group in groups]),
        log=RewardLog(
            extra={c: [v for group in groups for v in group.extra.get(c, [None] * len(group))] for c in columns}
        ),
    )


def _plain(value: Any) -> Any:
    """A value that a checkpoint can hold: numbers and texts as they are, anything else as text."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
