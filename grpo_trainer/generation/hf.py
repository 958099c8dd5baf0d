"""Completions through ``generate`` of transformers, on the very module that is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import StopStringCriteria

from grpo_trainer.generation.base import Observer
from grpo_trainer.generation.randomness import row_keys
from grpo_trainer.generation.state import inference_state
from grpo_trainer.registry import suggest
from grpo_trainer.types import Completions, SamplingParams


class HFGenerator:
    """Draws completions with the policy itself: no second copy, no weights to synchronise.

    While it draws, the policy is in eval mode (no dropout), without gradient checkpointing and with its cache on, and
    a checkpoint's own generation defaults are out of reach; all of it is put back afterwards, also when generation
    raises.

    Args:
        policy: returns the module that is trained, unwrapped. A function, since a trainer may replace its model.
        autocast: returns the context of mixed precision. One context around the whole call casts the weights once,
            not once per token.
    """

    def __init__(
        self,
        policy: Callable[[], Any],
        autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        self._policy = policy
        self._autocast = autocast

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: Sequence[int],
        sampling: SamplingParams,
        *,
        seed: int,
        row_ids: Sequence[tuple[int, int]] | None = None,
        observer: Observer | None = None,
    ) -> Completions:
        """Draws completions, all in one call; see ``Generator.generate``.

        Args:
            prompts: P prompts as token ids, none of them empty.
            num_samples: for each prompt how many completions to draw.
            sampling: how to draw them.
            seed: fixes every random number that is used.
            row_ids: ``generate`` has one stream of random numbers for all rows; the first row's identity starts it, so
                that processes that share a seed draw different ones.
            observer: is told of nothing: all rows are drawn in one call.

        Returns:
            The completions, group-major.

        Raises:
            ValueError: if a prompt is empty, or ``sampling.extra`` holds what transformers does not know.
        """
        check_prompts(prompts)
        rows = [list(p) for p, n in zip(prompts, num_samples, strict=True) for _ in range(n)]
        if not rows:
            return Completions(ids=(), finished=())
        policy = self._policy()
        device = next(policy.parameters()).device
        ids, mask = pad_left(rows, device)
        if row_ids is not None:
            seed = int(row_keys(seed, row_ids[:1]))
        with torch.no_grad(), inference_state(policy), seeded(seed, device), self._autocast():
            out = policy.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=generation_config(sampling),
                tokenizer=sampling.tokenizer,
            )
        return _cut(out, ids.shape[1], sampling)


_NOT_EXTRA = {
    "num_return_sequences": "num_generations says how many completions a prompt has",
    "return_dict_in_generate": "the ids are what is used",
    "eos_token_id": "set model.generation_config.eos_token_id or tokenizer.eos_token",
    "pad_token_id": "it is the tokenizer's",
    "max_new_tokens": "set max_completion_length",
    "max_length": "set max_completion_length",
    "temperature": "set temperature, which log-probs are divided by too",
    "do_sample": "completions are sampled; a group drawn greedily has no spread",
    "num_beams": "a beam is not a sample of the policy",
}
"""Fields of GenerationConfig that would make what is scored differ from what was sampled, and what to set instead."""


def check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    """Checks that there is something to complete.

    Args:
        prompts: as token ids.

    Raises:
        ValueError: if one is empty.
    """
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i} is empty: an empty prompt cannot be completed, it needs at least one token")


def check_extra(extra: Mapping[str, Any]) -> None:
    """Checks that every further argument is one that ``generate`` of transformers knows.

    Args:
        extra: name -> value.

    Raises:
        ValueError: if one is unknown, or would change what comes back.
    """
    known = vars(GenerationConfig())
    for name in extra:
        if name in _NOT_EXTRA:
            raise ValueError(f"generation_kwargs: {name!r} is not supported: {_NOT_EXTRA[name]}")
        if name not in known or name.startswith("_"):
            raise ValueError(f"generation_kwargs: {name!r} is no field of GenerationConfig.{suggest(name, known)}")


def generation_config(sampling: SamplingParams) -> GenerationConfig:
    """What ``generate`` of transformers calls these parameters; a temperature of 0 is greedy decoding.

    Args:
        sampling: how to draw.

    Returns:
        The configuration.

    Raises:
        ValueError: as ``check_extra``.
    """
    check_extra(sampling.extra)
    draws = {
        "temperature": float(sampling.temperature),
        "top_p": float(sampling.top_p),
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
    }
    settings = {
        "do_sample": sampling.temperature > 0,
        **(draws if sampling.temperature > 0 else {}),  # transformers warns of those that greedy decoding leaves unused
        "max_new_tokens": sampling.max_new_tokens,
        "repetition_penalty": float(sampling.repetition_penalty),
        "eos_token_id": list(sampling.eos_token_ids),
        "pad_token_id": sampling.pad_token_id,
        "disable_compile": True,
        "use_cache": True,
    }
    return GenerationConfig(**{**settings, **sampling.extra})


def pad_left(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Input ids and attention mask of rows of different length.

    A row is filled with its own first token: whoever looks at the ids alone, as the repetition penalty does, then finds
    in a padded row what is in the row by itself.

    Args:
        rows: N prompts, none of them empty.
        device: where the tensors go.

    Returns:
        Both (N, Q).
    """
    width = max(len(row) for row in rows)
    ids = torch.tensor([[row[0]] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def _cut(out: Tensor, prompt_length: int, sampling: SamplingParams) -> Completions:
    """Each row up to and including its first end, an end-of-sequence id or a stop string; what follows is filler."""
    ends = torch.isin(out[:, prompt_length:], torch.tensor(sampling.eos_token_ids, device=out.device))  # (N, T)
    if strings := sampling.extra.get("stop_strings"):
        stops = StopStringCriteria(tokenizer=sampling.tokenizer, stop_strings=strings)
        for t in range(ends.shape[1]):
            ends[:, t] |= stops(out[:, : prompt_length + t + 1], None)
    ids, finished = [], []
    for row, end in zip(out[:, prompt_length:].tolist(), ends.tolist(), strict=True):
        ids.append(tuple(row[: end.index(True) + 1] if True in end else row))
        finished.append(True in end)
    return Completions(ids=tuple(ids), finished=tuple(finished))


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from a seed inside, the generators' own state afterwards.

    Args:
        seed: of torch's generators.
        device: where numbers are drawn.

    Yields:
        Nothing.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
