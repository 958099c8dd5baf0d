"""Collects rollouts: from dataset rows to the constants of the objective.

::

    rows --render--> prompts --generate--> completions --score--> rewards (N, R)
         --combine--> totals (P, G) --less the price of KL--> (P, G) --advantage--> (P, G) --> RolloutBatch
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from grpo_trainer.data import OneFormat, PromptLimit, PromptRenderer
from grpo_trainer.functional.advantages import is_constant
from grpo_trainer.functional.kl import kl_penalty
from grpo_trainer.generation.base import Generator, Observer
from grpo_trainer.metrics import MetricStore
from grpo_trainer.policy.kl_coefficient import KLCoefficient
from grpo_trainer.policy.modes import eval_mode
from grpo_trainer.policy.parts import fitting, split
from grpo_trainer.policy.scoring import completion_logprobs
from grpo_trainer.rewards.base import RewardLog, RewardSet
from grpo_trainer.rewards.overlap import ScoredWhileDrawn
from grpo_trainer.types import (
    AdvantageFn,
    Completions,
    JointAdvantageFn,
    KLFn,
    Prompt,
    RolloutBatch,
    Row,
    SamplingParams,
)

Gather = Callable[[Tensor], Tensor]
"""``(n, ...) on this process -> (W * n, ...) of all, by rank``; every process gives the same shape."""

Parts = Callable[[RolloutBatch, Sequence[int]], Sequence[Sequence[int]]]
"""``(batch, some of its rows) -> those rows, part by part``."""


OWN_FIGURES = frozenset(
    [
        "loss",
        "grad_norm",
        "learning_rate",
        "epoch",
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "kl",
        "kl_coef",
        "kl_penalty",
        "entropy",
        "num_tokens",
        "step_time",
        "tokens_per_second",
    ]
)
OWN_PREFIXES = (
    *("rewards/", "completions/", "clip_ratio/", "sampling/", "time/", "dynamic_sampling/", "prompts/"),
    *("train_", "eval_"),
)
"""Names that a reward function's ``log_metric`` cannot take."""


class Reference(Protocol):
    """A policy that stays behind: inside the context, the module that speaks for it."""

    def activate(self) -> contextlib.AbstractContextManager[nn.Module]:
        """The context."""
        ...

    def sync(self, model: nn.Module, alpha: float) -> None:
        """Moves it towards the policy, by the share alpha of the way."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Its weights by name, if it has moved."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes up what ``state_dict`` gave."""
        ...


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Completions and what they earned, on this process.

    Attributes:
        rows: for each completion its dataset row.
        prompts: for each completion its prompt.
        completions: ids.
        texts: the completions as text, special tokens left out.
        rewards: (n, R) float64, NaN = does not apply.
        log: what the reward functions logged.
    """

    rows: list[Row]
    prompts: list[Prompt]
    completions: Completions
    texts: list[str]
    rewards: Tensor
    log: RewardLog


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What every process knows of a rollout.

    Attributes:
        rewards: (N, R) float64, group-major, NaN = does not apply.
        silent: (P,) True where a group carries no signal.
        num_tokens: prompt and completion tokens of all processes; a prompt counts once per completion.
    """

    rewards: Tensor
    silent: Tensor
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """This process's share of one rollout, ready for the optimizer.

    Attributes:
        batch: n rows, group-major.
        num_tokens: prompt and completion tokens of all processes; a prompt counts once per completion.
        table: column -> one entry per completion of this process, for people to read.
    """

    batch: RolloutBatch
    num_tokens: int
    table: dict[str, list[Any]]


@dataclass(kw_only=True)
class RolloutCollector:
    """Collects rollouts.

    Attributes:
        renderer: row -> prompt.
        generator: draws completions.
        sampling: how they are drawn in training.
        rewards: the reward functions.
        advantage: totals (P, G) -> advantages (P, G).
        joint_advantage: rewards (P, G, R) and their weights -> advantages (P, G), in place of ``advantage``; or None.
        num_generations: G.
        policy: returns the module that is trained, unwrapped.
        limit: how long a prompt may be.
        reference: the frozen policy of the KL term; None leaves the term's log-probs out.
        keep_old_logprobs: whether a rollout is trained on after the policy has moved.
        keep_sampling_logprobs: whether the objective asks for the sampler's own log-probs.
        kl_in_reward: estimator of the KL that each completion pays for in its reward; None: it pays nothing.
        kl_coefficient: its price; what is measured is counted there.
        mask_truncated: whether completions cut at the length limit are left out of the loss.
        parts: how rows are shared out over forward passes of the old and the reference policy.
        live: the rows whose old and reference log-probs are needed, once their advantages are known.
        metrics: where figures go.
        gather: collects tensors of all processes.
        rank: of this process.
        layout: for each process the rows of a rollout that it holds; None: this process holds them all.
        autocast: context of mixed precision.
        trainer_state: returns what reward functions get as ``trainer_state``.
        progress: is shown to people while so many completions are drawn.
        observe: is told the totals (P, G) of each rollout that is drawn, on every process.
    """

    renderer: PromptRenderer
    generator: Generator
    sampling: SamplingParams
    rewards: RewardSet
    advantage: AdvantageFn
    num_generations: int
    policy: Callable[[], nn.Module]
    limit: PromptLimit = field(default_factory=PromptLimit)
    joint_advantage: JointAdvantageFn | None = None
    reference: Reference | None = None
    keep_old_logprobs: bool = False
    keep_sampling_logprobs: bool = False
    kl_in_reward: KLFn | None = None
    kl_coefficient: KLCoefficient = field(default_factory=KLCoefficient)
    mask_truncated: bool = False
    parts: Parts = lambda batch, rows: [list(rows[i : i + 8]) for i in range(0, len(rows), 8)]
    live: Callable[[RolloutBatch], Sequence[int]] = lambda batch: range(len(batch))
    metrics: MetricStore = field(default_factory=MetricStore)
    gather: Gather = lambda t: t
    rank: int = 0
    layout: Sequence[Sequence[int]] | None = None
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    trainer_state: Callable[[], Any] = lambda: None
    progress: Callable[[int], contextlib.AbstractContextManager[Observer]] = lambda total: contextlib.nullcontext(
        Observer()
    )
    observe: Callable[[Tensor], None] = lambda totals: None
    _format: OneFormat = field(default_factory=OneFormat, init=False, repr=False)  # a copy of the collector starts anew

    def collect(
        self, rows: Iterable[Row], num_samples: Sequence[int], *, seed: int, names: Sequence[str] | None = None
    ) -> Rollout:
        """One rollout.

        Args:
            rows: the dataset rows that this process completes; read here, so that a failure to is told to all.
            num_samples: for each how many completions; the groups of all processes together are whole.
            seed: of the rollout's random numbers, the same on all processes.
            names: of the rows, for messages; None numbers them.

        Returns:
            The constants of the objective for this process's completions.

        Raises:
            ValueError: if a prompt or a reward is not legal, on whichever process it happened.
        """
        drawn, facts = self.draw_together(rows, num_samples, seed=seed, names=names)
        return self.credit(drawn, num_samples, facts)

    def draw_together(
        self, rows: Iterable[Row], num_samples: Sequence[int], *, seed: int, names: Sequence[str] | None = None
    ) -> tuple[Drawn, Facts]:
        """This process's completions of a rollout, and what is known of those of all processes.

        Args:
            rows: as for ``collect``.
            num_samples: as for ``collect``.
            seed: as for ``collect``.
            names: as for ``collect``.

        Returns:
            The completions, and the figures that every process holds.

        Raises:
            ValueError: if a prompt or a reward is not legal, on whichever process it happened.
        """
        count, group = sum(num_samples), self.num_generations
        mine = range(count) if self.layout is None else self.layout[self.rank]
        drawn, failure = self._try_draw(rows, num_samples, seed, names, [divmod(row, group) for row in mine])
        shared = self._share(drawn, count, failure)  # (N, R + 3), all processes
        assert drawn is not None
        rewards = shared[:, : len(self.rewards.names)]
        totals = self.rewards.combine(rewards).view(-1, group)  # (P, G)
        silent = self.silent(rewards, totals)
        self.observe(totals)
        if self.rank == 0:  # every process holds the same figures: one counts them
            count_rollout(self.metrics, self.rewards.names, rewards, totals, shared[:, -3:], silent)
        for name, values in drawn.log.metrics.items():
            self.metrics.add(name, sum(values), len(values))
        for name, count in drawn.log.troubles.items():  # completions of a rollout, over all processes
            self.metrics.add(name, count, float(self.rank == 0))
        return drawn, Facts(rewards=rewards, silent=silent, num_tokens=int(shared[:, -3:-1].sum().item()))

    def credit(
        self,
        drawn: Drawn,
        num_samples: Sequence[int],
        facts: Facts,
        *,
        old_logprobs: Sequence[Tensor | None] | None = None,
    ) -> Rollout:
        """Turns rewards into advantages, and takes the log-probs that the loss needs.

        Args:
            drawn: this process's completions.
            num_samples: of each of its prompts how many completions.
            facts: of all processes.
            old_logprobs: for each of its completions the log-probs of the policy that drew it, (T,), or None where that
                is the policy of now; None as a whole: all were drawn by the policy of now.

        Returns:
            The constants of the objective for this process's completions.
        """
        totals = self.rewards.combine(facts.rewards).view(-1, self.num_generations)  # (P, G)
        batch = self.freeze(drawn, num_samples)
        if self.kl_in_reward is None:
            batch = self._with_advantages(batch, facts.rewards, totals)
            with self.timed("time/logprobs"):
                batch, _ = self._with_old_and_reference(batch, old_logprobs, self.live(batch))
        else:
            with self.timed("time/logprobs"):
                batch, penalties = self._with_old_and_reference(batch, old_logprobs, range(len(batch)))
            assert penalties is not None
            batch = self._with_advantages(batch, facts.rewards, totals - penalties.view_as(totals))
        return Rollout(batch=batch, num_tokens=facts.num_tokens, table=self._table(drawn, batch.advantages.tolist()))

    def _with_advantages(self, batch: RolloutBatch, rewards: Tensor, totals: Tensor) -> RolloutBatch:
        """The batch with its share of the advantages of the rollout, (P * G,)."""
        if self.joint_advantage is None:
            advantages = self.advantage(totals)  # (P, G)
        else:
            advantages = self.joint_advantage(rewards.view(*totals.shape, -1), weights=self.rewards.weights)  # (P, G)
        local = advantages.flatten().float()
        if self.layout is not None:
            local = local[torch.tensor(self.layout[self.rank])]
        return replace(batch, advantages=local.to(batch.device))

    def draw(
        self,
        rows: Iterable[Row],
        num_samples: Sequence[int],
        *,
        seed: int,
        sampling: SamplingParams | None = None,
        names: Sequence[str] | None = None,
        row_ids: Sequence[tuple[int, int]] | None = None,
    ) -> Drawn:
        """Completions and their rewards, without credit: what an evaluation needs.

        Args:
            rows: dataset rows.
            num_samples: for each how many completions.
            seed: of the random numbers.
            sampling: how to draw; None as in training.
            names: of the rows, for messages; None numbers them.
            row_ids: for each completion the pair (prompt, completion) that tells it from all others of this seed.

        Returns:
            The completions, group-major.

        Raises:
            ValueError: if a prompt or a reward is not legal.
        """
        rows = list(rows)
        names = names or [f"row {i} of the rollout" for i in range(len(rows))]
        prompts = [self.limit.fit(self.renderer(row, name), name) for row, name in zip(rows, names, strict=True)]
        for prompt, name in zip(prompts, names, strict=True):
            self._format.check(prompt, name)
        each_row = [row for row, n in zip(rows, num_samples, strict=True) for _ in range(n)]
        each_prompt = [p for p, n in zip(prompts, num_samples, strict=True) for _ in range(n)]
        scored = ScoredWhileDrawn(
            self.rewards, self.renderer.tokenizer, each_row, each_prompt, num_samples, self.trainer_state()
        )
        with scored:
            with self.timed("time/generation"), self.progress(sum(num_samples)) as observer:
                completions = self.generator.generate(
                    [p.ids for p in prompts],
                    num_samples,
                    sampling or self.sampling,
                    seed=seed,
                    row_ids=row_ids,
                    observer=scored.observer(observer),
                )
            if len(completions) != len(each_row):
                raise ValueError(
                    f"the generator returned {len(completions)} completions, {len(each_row)} were asked for"
                )
            with self.timed("time/rewards"):
                texts, (rewards, log) = scored.finish(completions.ids)
        if scored.hidden is not None:
            self.metrics.add("time/rewards_hidden", scored.hidden, 0.0)
        for name in log.metrics:
            if name in OWN_FIGURES or name.startswith(OWN_PREFIXES):
                raise ValueError(f"log_metric({name!r}, ...) would be mixed with the trainer's own figure of that name")
        return Drawn(rows=each_row, prompts=each_prompt, completions=completions, texts=texts, rewards=rewards, log=log)

    def silent(self, rewards: Tensor, totals: Tensor) -> Tensor:
        """Which groups carry no signal.

        Args:
            rewards: (P * G, R), NaN = does not apply.
            totals: (P, G) weighted totals, NaN = unscorable.

        Returns:
            (P,) True where all totals are equal; with a ``joint_advantage``, where the rewards of each function are.
        """
        if self.joint_advantage is None:
            return is_constant(totals)
        return torch.stack([is_constant(each.view(totals.shape)) for each in rewards.unbind(dim=-1)]).all(dim=0)

    def keeps(self, row: Row, name: str) -> bool:
        """Whether a row is used at all: a policy may leave out prompts that are too long.

        Args:
            row: a dataset row; its prompt is also compared with those before it, whichever process completes it.
            name: of the row, for messages.

        Returns:
            True if it is.

        Raises:
            ValueError: if its prompt is not legal, or of another format than an earlier one.
        """
        if isinstance(row.get("prompt"), (str, list)):
            self._format.check_kind(isinstance(row["prompt"], list), name)
        return not self.limit.filters or self.limit.keeps(self.renderer(row, name))

    # The processes of a run must all reach the same collective calls, so a failure on one is carried to the others
    # in the very tensor that they exchange anyway.
    def _try_draw(
        self,
        rows: Iterable[Row],
        num_samples: Sequence[int],
        seed: int,
        names: Sequence[str] | None,
        row_ids: Sequence[tuple[int, int]],
    ) -> tuple[Drawn | None, Exception | None]:
        try:
            drawn = self.draw(rows, num_samples, seed=seed, names=names, row_ids=row_ids)
            if self.keep_sampling_logprobs and drawn.completions.sampling_logprobs is None:
                raise ValueError(
                    f"sampler_correction=True needs the log-probs of the sampler, and {type(self.generator).__name__} "
                    "gave none. Set generation_engine='group', which says if the model cannot be drawn from that way"
                )
            return drawn, None
        except Exception as error:
            return None, error

    def _share(self, drawn: Drawn | None, count: int, failure: Exception | None) -> Tensor:
        """Rewards, prompt length, completion length and finished flag of all N completions, group-major."""
        width = len(self.rewards.names) + 4
        local = torch.zeros(count, width, dtype=torch.float64)  # last column: 1 = this process failed
        if drawn is None:
            local[:, -1] = 1
        else:
            local[:, : drawn.rewards.shape[1]] = drawn.rewards
            local[:, -4] = torch.tensor([len(p.ids) for p in drawn.prompts])
            local[:, -3] = torch.tensor([len(ids) for ids in drawn.completions.ids])
            local[:, -2] = torch.tensor(drawn.completions.finished)
        shared = self.gather(local)
        failed = shared[:, -1].view(-1, count)[:, 0].nonzero().flatten().tolist()
        if failed:
            words = self._words_of(failed[0], failure)
            if failure is not None:
                raise failure
            raise RuntimeError(f"process {failed[0]} failed while collecting a rollout: {words}")
        return self._group_major(shared)[:, :-1]

    def _words_of(self, process: int, failure: Exception | None) -> str:
        """What the failure of a process says, on every process, each of which comes here; 1000 bytes of it."""
        said = b"" if failure is None else f"{type(failure).__name__}: {failure}".encode(errors="replace")[:1000]
        everyone = self.gather(torch.tensor(list(said.ljust(1000)), dtype=torch.uint8)).view(-1, 1000)
        return bytes(everyone[process].tolist()).decode(errors="replace").strip()

    def _group_major(self, gathered: Tensor) -> Tensor:
        """(N, ...) by rank -> by row of the rollout."""
        if self.layout is None:
            return gathered
        order = torch.tensor([row for rows in self.layout for row in rows])
        return torch.empty_like(gathered).index_copy(0, order, gathered)

    def freeze(self, drawn: Drawn, num_samples: Sequence[int]) -> RolloutBatch:
        """The constants of the objective, but for log-probs and advantages.

        Args:
            drawn: completions, group-major.
            num_samples: of each prompt how many.

        Returns:
            The batch; its advantages are 0.
        """
        device = next(self.policy().parameters()).device
        lengths = tuple(len(ids) for ids in drawn.completions.ids)
        width = max(lengths, default=0)
        ids = torch.zeros(len(lengths), width, dtype=torch.long)
        for row, tokens in enumerate(drawn.completions.ids):
            ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        credited = torch.arange(width) < torch.tensor(lengths)[:, None]
        if self.mask_truncated:
            credited &= torch.tensor(drawn.completions.finished)[:, None]
        sampled = None
        if self.keep_sampling_logprobs:
            sampled = torch.full(ids.shape, torch.nan)
            for row, each in enumerate(drawn.completions.sampling_logprobs or ()):
                sampled[row, : len(each)] = torch.tensor(each)
        firsts = [sum(num_samples[:i]) for i in range(len(num_samples))]
        return RolloutBatch(
            prompt_ids=tuple(torch.tensor(drawn.prompts[i].ids) for i in firsts),
            prompt_of_row=tuple(p for p, n in enumerate(num_samples) for _ in range(n)),
            lengths=lengths,
            completion_ids=ids,
            mask=credited,
            advantages=torch.zeros(len(lengths)),
            sampling_logprobs=sampled,
        ).to(device)

    def _with_old_and_reference(
        self, batch: RolloutBatch, known: Sequence[Tensor | None] | None, rows: Sequence[int]
    ) -> tuple[RolloutBatch, Tensor | None]:
        """The batch with the log-probs that the loss needs of some rows, and what each of the rollout pays, (N,)."""
        old = ref = None
        keep = self.keep_old_logprobs or known is not None
        if keep or self.kl_in_reward is not None:
            old = self.policy_logprobs(batch, rows)
            for row, each in enumerate(known or ()):
                if each is not None:
                    old[row, : len(each)] = each.to(old.device)
        if self.reference is not None:
            with self.reference.activate() as model:
                device = batch.device
                if next(model.parameters()).device != device:  # placed later than the reference was made
                    model.to(device)
                ref = self._logprobs(model, batch, rows)
        if self.kl_in_reward is None:
            return replace(batch, old_logprobs=old, ref_logprobs=ref), None
        assert old is not None and ref is not None
        penalties = self._penalties(self.kl_in_reward(old, ref), batch)
        return replace(batch, old_logprobs=old if keep else None), penalties

    def _penalties(self, kl: Tensor, batch: RolloutBatch) -> Tensor:
        """(N,) float64, units of reward: what every completion of the rollout pays for its KL to the reference.

        It pays for all its tokens, whatever of them is credited, since it is rewarded for all of them.
        """
        columns = torch.arange(kl.shape[1], device=kl.device)
        drawn = columns < torch.tensor(batch.lengths, device=kl.device)[:, None]
        total, count = torch.where(drawn, kl, 0.0).sum(dtype=torch.float64), drawn.sum()
        self.metrics.add("kl", total, count)
        self.kl_coefficient.count(total, count)
        paid = kl_penalty(kl.double(), drawn, beta=self.kl_coefficient.beta)
        self.metrics.add("kl_penalty", paid.sum(), len(paid))
        return self._group_major(self.gather(paid.cpu()))

    def policy_logprobs(self, batch: RolloutBatch, rows: Sequence[int] | None = None) -> Tensor:
        """Log-probs under the policy of now.

        Args:
            batch: n rows.
            rows: of which it is asked; None for all.

        Returns:
            (n, T) float32 without gradient, 0 beyond a row's length and in rows that were not asked for.
        """
        policy = self.policy()
        with eval_mode(policy):
            return self._logprobs(policy, batch, range(len(batch)) if rows is None else rows)

    def _logprobs(self, model: nn.Module, batch: RolloutBatch, rows: Sequence[int]) -> Tensor:
        """(n, T) log-probs of some rows without gradient, part by part."""
        out = torch.zeros(batch.completion_ids.shape, dtype=torch.float32, device=batch.device)
        with torch.no_grad(), self.autocast():
            waiting = [list(part) for part in self.parts(batch, rows)]
            while waiting:
                part = waiting.pop()
                selected = batch.select(part)
                score = functools.partial(completion_logprobs, model, selected, temperature=self.sampling.temperature)
                scores = fitting(score)
                if scores is None:
                    waiting += [[part[i] for i in half] for half in split(selected)]
                    continue
                for i, row in enumerate(part):
                    out[row, : scores.logprobs.shape[1]] = scores.logprobs[i]
        return out

    def _table(self, drawn: Drawn, advantages: list[float]) -> dict[str, list[Any]]:
        fixed = ("step", "prompt", "completion", "advantage", "finished", "length")
        rewards = {
            (f"rewards/{name}" if name in fixed else name): [None if v != v else v for v in column]
            for name, column in zip(self.rewards.names, drawn.rewards.T.tolist(), strict=True)
        }
        own: dict[str, list[Any]] = {
            "prompt": [p.text for p in drawn.prompts],
            "completion": drawn.texts,
            **rewards,
            "advantage": advantages,
            "finished": list(drawn.completions.finished),
            "length": [len(ids) for ids in drawn.completions.ids],
        }
        extra = {(f"extra/{name}" if name in own or name == "step" else name): v for name, v in drawn.log.extra.items()}
        return {**own, **extra}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the seconds that are spent inside to a figure.

        Args:
            name: of the figure.

        Yields:
            Nothing.
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            self.metrics.add(name, time.perf_counter() - start, 0.0)


def count_rollout(
    metrics: MetricStore, names: Sequence[str], rewards: Tensor, totals: Tensor, facts: Tensor, silent: Tensor
) -> None:
    """Figures about all completions of a rollout.

    Args:
        metrics: where they go.
        names: of the R reward functions.
        rewards: (N, R), NaN = does not apply.
        totals: (P, G) weighted totals, NaN = unscorable.
        facts: (N, 3) prompt length, completion length, finished flag.
        silent: (P,) True where a group carries no signal.
    """
    labels = [("reward", "reward_std"), *((f"rewards/{name}/mean", f"rewards/{name}/std") for name in names)]
    for (mean, std), values in zip(labels, [totals.flatten(), *rewards.T], strict=True):
        known = values[~values.isnan()]
        if len(known):
            metrics.add(mean, known.sum().item(), len(known))
            metrics.add(std, known.std().item() if len(known) > 1 else 0.0)
    metrics.add("frac_reward_zero_std", silent.sum().item(), len(silent))
    lengths, finished = facts[:, 1], facts[:, 2] > 0
    metrics.add("completions/clipped_ratio", (~finished).sum().item(), len(finished))
    for label, some in [("", lengths), ("terminated_", lengths[finished])]:
        if len(some):
            metrics.add(f"completions/mean_{label}length", some.sum().item(), len(some))
            metrics.extreme(f"completions/min_{label}length", some.min().item(), "min")
            metrics.extreme(f"completions/max_{label}length", some.max().item(), "max")
