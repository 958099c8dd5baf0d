"""The words of the house: symbols, and the frozen types that the stations of a step hand to each other.

Symbols, used in every docstring and shape comment:

====== =========================================================================================
P      prompts of a rollout
G      completions of one prompt (the group)
N      completions of a rollout, N = P * G, group-major: row i belongs to prompt i // G
B      rows of one micro-batch
Q, T   prompt tokens, completion tokens (longest of the tensor at hand)
V      vocabulary entries
R      reward functions
W      processes (ranks)
====== =========================================================================================

A step passes through these types, one per station::

    dataset row -> Prompt -> Completions -> rewards (N, R) -> RolloutBatch -> TokenLoss
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo_trainer.functional.losses import TokenLoss

Row = Mapping[str, Any]
"""One dataset row: column name -> value. The column ``prompt`` is required."""

AdvantageFn = Callable[[Tensor], Tensor]
"""``(rewards (P, G), NaN = unscorable) -> advantages (P, G)``, finite, 0 where unscorable."""

CorrectionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(logprobs (B, T), sampling_logprobs (B, T), mask (B, T)) -> weights (B, T) or (B, 1)``, without gradient."""

JointAdvantageFn = Callable[..., Tensor]
"""``(rewards (P, G, R), weights=(R,)) -> advantages (P, G)``, for rewards that are not summed first."""

KLFn = Callable[[Tensor, Tensor], Tensor]
"""``(logprobs (B, T), ref_logprobs (B, T)) -> KL estimate (B, T)``, in nats."""

AggregationFn = Callable[[Tensor], tuple[Tensor, Tensor]]
"""``(mask (B, T)) -> (weights (B, T), items ())``: the objective is ``sum(weights * loss) / sum(items)``."""


PolicyLossFn = Callable[[Tensor, "Tensor | None", Tensor, Tensor], TokenLoss]
"""``(logprobs (B, T), old_logprobs (B, T) | None, advantages (B,), mask (B, T)) -> TokenLoss``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as the model sees it.

    Attributes:
        ids: token ids, exactly those that are fed to the model; never empty.
        text: the rendered text that ``ids`` came from, or that they say if the prompt was cut; special tokens included.
        conversational: whether the dataset row held a list of messages.
    """

    ids: tuple[int, ...]
    text: str
    conversational: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How completions are drawn. Everything a generator may use; nothing comes from a checkpoint's defaults.

    Attributes:
        max_new_tokens: most tokens of a completion, its end-of-sequence token included.
        eos_token_ids: ids that end a completion (the first one drawn is kept as its last token).
        pad_token_id: filler for rectangular tensors inside a generator; may be an end-of-sequence id.
        temperature: divisor of the logits, > 0.
        top_p: nucleus mass in (0, 1]; 1 keeps the whole vocabulary.
        top_k: number of likeliest tokens kept; 0 keeps all.
        min_p: smallest probability kept, as a share of the likeliest token's; None keeps all.
        repetition_penalty: 1 leaves repeated tokens alone.
        extra: further keyword arguments of ``transformers.GenerationConfig``.
        tokenizer: needed where ``extra`` has ``stop_strings``.
    """

    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """What a generator returns: N completions, group-major, as the ids that were sampled.

    Attributes:
        ids: N tuples of token ids; the first end-of-sequence id, if any, is the last of its tuple. May be empty.
        finished: N flags, True if the completion ended by itself (an end-of-sequence id, a stop string), False if it
            was cut at ``max_new_tokens``.
        sampling_logprobs: N tuples, the log-probability of each token under the distribution it was drawn from;
            None if the generator does not capture them.
    """

    ids: tuple[tuple[int, ...], ...]
    finished: tuple[bool, ...]
    sampling_logprobs: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        if len(self.finished) != len(self.ids):
            raise ValueError(f"{len(self.ids)} completions but {len(self.finished)} finished flags")

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """Constants of the objective for B completions: everything needed to compute their loss, nothing else.

    A prompt is stored once, however many of the rows are its completions; rows are ragged at rest and padded only
    where a model needs a rectangle. Lengths and token ids live on the host, so that no reader has to ask the device for
    them: what a model is to read is laid out there, and moved in one piece.

    Attributes:
        prompt_ids: the distinct prompts, each (Q_p,) int64, on the host.
        prompt_of_row: for each of the B rows the index of its prompt in ``prompt_ids``.
        lengths: for each row its number of completion tokens T_i; 0 is legal.
        completion_ids: (B, T) int64, right-padded, T = max(lengths), on the host.
        mask: (B, T) bool, True on tokens that are credited (trained on); always False beyond a row's length.
        advantages: (B,) float32.
        old_logprobs: (B, T) float32 under the sampling policy, 0 beyond a row's length; None: the sampling policy
            is the current policy, so that the importance ratio is exactly 1.
        sampling_logprobs: (B, T) float32 that the sampler itself gave, NaN where unknown; None: they are the trainer's.
        ref_logprobs: (B, T) float32 under the reference policy; None: the objective has no KL term.
        token_weights: (B, T) float32, what each token's loss is multiplied by before it is summed; None: what the
            aggregation makes of ``mask``. Set where rows have been left out that the weights depend on.
    """

    prompt_ids: tuple[Tensor, ...]
    prompt_of_row: tuple[int, ...]
    lengths: tuple[int, ...]
    completion_ids: Tensor
    mask: Tensor
    advantages: Tensor
    old_logprobs: Tensor | None = None
    sampling_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    token_weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        """Where everything but the ids is."""
        return self.mask.device

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens of all rows, each prompt counted once per row."""
        prompts = sum(len(self.prompt_ids[p]) for p in self.prompt_of_row)
        return prompts + sum(self.lengths)

    def select(self, rows: Sequence[int]) -> RolloutBatch:
        """The batch of some rows, in the order given, trimmed to their longest completion.

        Args:
            rows: indices into this batch's rows.

        Returns:
            A batch that holds those rows and only the prompts that they use.
        """
        rows = list(rows)
        lengths = tuple(self.lengths[i] for i in rows)
        width = max(lengths, default=0)
        used = list(dict.fromkeys(self.prompt_of_row[i] for i in rows))
        index = torch.tensor(rows, dtype=torch.long)
        there = index.to(self.device)

        def cut(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, there)[:, :width]

        return dataclasses.replace(
            self,
            prompt_ids=tuple(self.prompt_ids[p] for p in used),
            prompt_of_row=tuple(used.index(self.prompt_of_row[i]) for i in rows),
            lengths=lengths,
            completion_ids=self.completion_ids.index_select(0, index)[:, :width],
            mask=cut(self.mask),
            advantages=self.advantages.index_select(0, there),
            old_logprobs=None if self.old_logprobs is None else cut(self.old_logprobs),
            sampling_logprobs=None if self.sampling_logprobs is None else cut(self.sampling_logprobs),
            ref_logprobs=None if self.ref_logprobs is None else cut(self.ref_logprobs),
            token_weights=None if self.token_weights is None else cut(self.token_weights),
        )

    @classmethod
    def join(cls, batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """The rows of several batches, in their order.

        Args:
            batches: at least one, of one objective: what is None in one is None in all.

        Returns:
            The batch; a prompt that several hold stands once for each of them.
        """
        if len(batches) == 1:
            return batches[0]
        width = max(batch.completion_ids.shape[1] for batch in batches)
        firsts = itertools.accumulate((len(batch.prompt_ids) for batch in batches[:-1]), initial=0)

        def joined(name: str) -> Any:
            values = [getattr(batch, name) for batch in batches]
            if values[0] is None:
                return None
            return torch.cat([torch.nn.functional.pad(v, (0, width - v.shape[1])) for v in values])

        return cls(
            prompt_ids=tuple(ids for batch in batches for ids in batch.prompt_ids),
            prompt_of_row=tuple(
                first + p for first, batch in zip(firsts, batches, strict=True) for p in batch.prompt_of_row
            ),
            lengths=tuple(n for batch in batches for n in batch.lengths),
            completion_ids=joined("completion_ids"),
            mask=joined("mask"),
            advantages=torch.cat([batch.advantages for batch in batches]),
            old_logprobs=joined("old_logprobs"),
            sampling_logprobs=joined("sampling_logprobs"),
            ref_logprobs=joined("ref_logprobs"),
            token_weights=joined("token_weights"),
        )

    def to(self, device: torch.device | str) -> RolloutBatch:
        """The same batch with its tensors, but for the ids, on ``device``."""
        tensors = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "completion_ids"}
        moved: dict[str, Any] = {name: value.to(device) for name, value in tensors.items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **moved)
