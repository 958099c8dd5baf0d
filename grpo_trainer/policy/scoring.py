"""Log-probs of completions under a model: the same arithmetic for the policy, the old policy and the reference.

Two layouts give the same values. Packed (see ``packing.py``), what rows begin with alike is computed once, nothing is
padded, and the vocabulary head sees only the positions that predict a completion token. A model that cannot take that
is given a rectangle: prompts padded on the left, completions on the right, so that every completion starts in the same
column. In both, positions count from the first real token of a row.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import logging

from grpo_trainer.functional.logprobs import token_entropy, token_logprobs
from grpo_trainer.loading.head import Float32Linear
from grpo_trainer.policy.attention import packed_attention
from grpo_trainer.policy.flex import BLOCK
from grpo_trainer.policy.head import head_logprobs
from grpo_trainer.policy.modes import eval_mode, set_for_now
from grpo_trainer.policy.packing import Packed, pack
from grpo_trainer.policy.support import Head, forward_parameters, innermost, needs_last_token, plain_head, why_padded
from grpo_trainer.types import RolloutBatch

logger = logging.get_logger(__name__)


class Scores(NamedTuple):
    """What a scoring pass gives.

    Attributes:
        logprobs: (B, T) float32 in nats; 0 beyond a row's length.
        entropy: (B, T) float32 in nats, without gradient unless that was asked for; None if it was not.
        balance: () the load-balancing loss of a mixture of experts over all tokens of all rows, with its gradient; None
            if it was not asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None
    balance: Tensor | None = None


def completion_logprobs(
    model: nn.Module,
    batch: RolloutBatch,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
    with_balance: bool = False,
) -> Scores:
    """Log-probs of the completion tokens of a micro-batch, one forward pass.

    Token t of a completion after a prompt of Q tokens is predicted at position Q + t - 1.

    Args:
        model: a causal language model, possibly wrapped (adapter, data parallel).
        batch: B rows.
        temperature: the sampling temperature, > 0; the logits are divided by it.
        with_entropy: also the entropy of each predicted distribution.
        entropy_gradient: the entropy, too, carries a gradient; the logits of all completion tokens are then held in
            float32 at once, which the fused head spares.
        with_balance: also the load-balancing loss that a mixture of experts computes of its routers. A token that
            stands in the stream once for several rows counts for each of them.

    Returns:
        The scores. The log-probs carry a gradient if gradients are enabled.
    """
    reason = why_padded(model)
    if reason is None:
        return _packed_pass(model, batch, temperature, with_entropy, entropy_gradient, with_balance=with_balance)
    _say_once(f"{type(innermost(model)).__name__} computes each prompt once per completion, padded, because {reason}.")
    return _padded_pass(model, batch, temperature, with_entropy, entropy_gradient, with_balance=with_balance)


def check_packing(model: nn.Module, batch: RolloutBatch, *, temperature: float = 1.0) -> None:
    """Checks on a model and data at hand that packed rows have the log-probs of padded ones.

    Args:
        model: as for ``completion_logprobs``; one that is never packed passes.
        batch: B rows, of which the first two and the last two are compared.
        temperature: as for ``completion_logprobs``.

    Raises:
        RuntimeError: if they differ by more than rounding.
    """
    if why_padded(model) is not None or not len(batch):
        return
    some = batch.select(sorted({0, min(1, len(batch) - 1), max(len(batch) - 2, 0), len(batch) - 1}))
    model = innermost(model)
    run = functools.partial(type(model).forward, model)  # past hooks, which are for real passes, and past autocast,
    device = batch.device.type  # without which float32 rounds so little that any difference shows
    with torch.no_grad(), eval_mode(model), torch.autocast(device, enabled=False):
        padded = _padded_pass(model, some, temperature, False, run=run).logprobs
        error, allowed = _distance(_packed_pass(model, some, temperature, False, run=run).logprobs, padded, some), 1e-3
        if any(p.dtype not in (torch.float32, torch.float64) for p in model.parameters()):
            # a row alone and in company differ by rounding only: the measure of what is none
            rows = [
                _padded_pass(model, some.select([i]), temperature, False, run=run).logprobs for i in range(len(some))
            ]
            alone = torch.cat([nn.functional.pad(row, (0, padded.shape[1] - row.shape[1])) for row in rows])
            allowed = 0.05 + 4 * _distance(alone, padded, some)
    if not error <= allowed:
        raise RuntimeError(
            f"verify_packing: the log-probs of {type(model).__name__} differ by {error:.2g} nats (root mean square "
            f"over {sum(some.lengths)} tokens, {allowed:.2g} allowed) between packed and padded rows: a token sees "
            "what it should not, or does not see what it should. To go on with padded rows, set `model.never_pack = "
            "True` before the model is handed over; and please report the model"
        )


def _distance(a: Tensor, b: Tensor, batch: RolloutBatch) -> float:
    """Root mean square over the tokens of a batch."""
    return ((a - b).double().square().sum() / max(sum(batch.lengths), 1)).sqrt().item()


# --- packed -----------------------------------------------------------------------------------------------------------


def _packed_pass(
    model: Any,
    batch: RolloutBatch,
    temperature: float,
    with_entropy: bool,
    entropy_gradient: bool = False,
    run: Callable | None = None,
    with_balance: bool = False,
) -> Scores:
    keep_last = needs_last_token(model) or with_balance
    stream = pack(batch, keep_last=keep_last, multiple=1 if batch.device.type == "cpu" else BLOCK)
    head = None if entropy_gradient else plain_head(model)
    entropy: list[Tensor] = []
    with packed_attention(model, stream.segments), _scoring(head, stream, temperature, with_entropy, entropy):
        out = (run or model)(
            input_ids=stream.input_ids,
            # the packed attention does not read it; a load-balancing loss weights the tokens by it
            attention_mask=stream.rows[None] if with_balance else torch.ones_like(stream.input_ids),
            position_ids=stream.position_ids,
            logits_to_keep=stream.predictors,
            use_cache=False,
            **({"output_router_logits": True} if with_balance else {}),
        )
    logits = out.logits  # (1, M, V), or (1, N, 1) log-probs from a head that scores
    if head is not None:
        logprobs = logits[0, :, 0]
    else:
        logits = logits[:, stream.places]  # (1, N, V)
        logprobs = token_logprobs(logits, stream.targets[None], temperature=temperature)[0]
        if with_entropy:
            seen = logits if entropy_gradient else logits.detach()
            entropy.append(token_entropy(seen, temperature=temperature)[0])
    shape = batch.completion_ids.shape
    return Scores(
        stream.unpack(logprobs, shape),
        stream.unpack(entropy[0], shape) if with_entropy else None,
        out.aux_loss if with_balance else None,
    )


@contextlib.contextmanager
def _scoring(
    head: Head | None, stream: Packed, temperature: float, with_entropy: bool, entropy: list[Tensor]
) -> Iterator[None]:
    """Inside, the model's head gives log-probs in place of logits, and the model hands them on as they are.

    It is still the model that calls its head, so that whatever is wrapped around either (data parallel, sharding) sees
    the forward pass that it knows.
    """
    if head is None:
        yield
        return
    layer, config = head.layer, head.config

    def score(hidden: Tensor) -> Tensor:
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device) and not isinstance(layer, Float32Linear)
        logprobs, found = head_logprobs(
            hidden.flatten(0, -2),
            layer.weight,
            layer.bias,
            stream.places,
            stream.targets,
            transform=head.transform._replace(temperature=temperature),
            dtype=torch.get_autocast_dtype(device) if autocast else layer.weight.dtype,
            with_entropy=with_entropy,
        )
        if found is not None:
            entropy.append(found)
        return logprobs[None, :, None]

    with set_for_now(layer, {"forward": score}), set_for_now(config, head.neutral):
        yield


# --- padded -----------------------------------------------------------------------------------------------------------


def _padded_pass(
    model: Any,
    batch: RolloutBatch,
    temperature: float,
    with_entropy: bool,
    entropy_gradient: bool = False,
    run: Callable | None = None,
    with_balance: bool = False,
) -> Scores:
    inputs = _rectangle(batch)
    width = batch.completion_ids.shape[1]
    parameters = forward_parameters(model)
    kwargs: dict[str, Any] = {k: v for k, v in inputs.items() if k != "position_ids" or k in parameters}
    if "logits_to_keep" in parameters:
        kwargs["logits_to_keep"] = width + 1
    if "use_cache" in parameters:
        kwargs["use_cache"] = False
    if with_balance:
        kwargs["output_router_logits"] = True
    out = (run or model)(**kwargs)
    logits = out.logits  # (B, T + 1, V), or (B, Q + T, V) from a model that keeps all
    logits = logits[:, logits.shape[1] - width - 1 : -1]  # (B, T, V): the last position predicts nothing of ours
    real = _within(batch)
    logprobs = token_logprobs(logits, batch.completion_ids.to(batch.device), temperature=temperature)
    entropy = None
    if with_entropy:
        seen = logits if entropy_gradient else logits.detach()
        entropy = token_entropy(seen, temperature=temperature).masked_fill(~real, 0.0)
    return Scores(logprobs.masked_fill(~real, 0.0), entropy, out.aux_loss if with_balance else None)


def _rectangle(batch: RolloutBatch) -> dict[str, Tensor]:
    """Input ids, attention mask and position ids, each (B, Q + T)."""
    rows, width = batch.completion_ids.shape
    prompts = [batch.prompt_ids[p] for p in batch.prompt_of_row]
    longest = max((len(p) for p in prompts), default=0)
    ids = batch.completion_ids.new_zeros(rows, longest + width)
    mask = torch.zeros_like(ids)
    for row, (prompt, length) in enumerate(zip(prompts, batch.lengths, strict=True)):
        ids[row, longest - len(prompt) : longest] = prompt
        mask[row, longest - len(prompt) : longest + length] = 1
    ids[:, longest:] = batch.completion_ids
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return {
        k: v.to(batch.device) for k, v in (("input_ids", ids), ("attention_mask", mask), ("position_ids", positions))
    }


def _within(batch: RolloutBatch) -> Tensor:
    """(B, T) bool: True on a row's own tokens, whether credited or not."""
    device = batch.device
    columns = torch.arange(batch.completion_ids.shape[1], device=device)
    return columns < torch.tensor(batch.lengths, device=device)[:, None]


# --- words ------------------------------------------------------------------------------------------------------------

_said: set[str] = set()


def _say_once(message: str) -> None:
    """Warns, the first time only, and on the first process only."""
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if first and message not in _said:
        logger.warning(message)
    _said.add(message)
