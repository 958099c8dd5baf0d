"""The load-balancing loss of a mixture of experts is that of padded rows, and has its weight over the whole step."""

from __future__ import annotations

import pytest
import torch
import trl
from transformers import TrainerCallback

from grpo_trainer import GRPOConfig
from grpo_trainer.policy import scoring
from grpo_trainer.policy.scoring import completion_logprobs
from tests.helpers import tiny_tokenizer
from tests.policy.families import random_batch, tiny
from tests.properties.test_peer_gradients import COMMON, our_gradients, trl_gradients
from tests.test_trainer import by_place, logs, make

EXPERTS = ["qwen3_moe", "gpt_oss"]


def by_hand(model, batch):
    """Switch Transformer, equations 4 to 6: over all tokens of all rows and layers, each row by itself."""
    config = model.config
    count = getattr(config, "num_experts", None) or config.num_local_experts
    chosen, probability, tokens = torch.zeros(count).double(), torch.zeros(count).double(), 0
    for row, length in enumerate(batch.lengths):
        ids = torch.cat([batch.prompt_ids[batch.prompt_of_row[row]], batch.completion_ids[row, :length]])
        with torch.no_grad():
            gates = model(ids[None], output_router_logits=True).router_logits
        for gate in gates:
            for place in gate.view(-1, count).double().softmax(-1):
                probability += place
                for expert in place.topk(config.num_experts_per_tok).indices.tolist():
                    chosen[expert] += 1
                tokens += 1
    return count * (chosen / tokens * probability / tokens).sum().item()


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("how", ["packed", "padded"])
def test_a_token_counts_for_every_row_that_it_stands_for(family, how):
    model, batch = tiny(family), random_batch()
    model.never_pack = how == "padded"
    assert (scoring.why_padded(model) is None) == (how == "packed")
    scores = completion_logprobs(model, batch, with_balance=True)
    assert scores.balance.item() == pytest.approx(by_hand(model, batch), rel=1e-5)


@pytest.mark.parametrize("family", EXPERTS)
def test_its_gradient_is_that_of_padded_rows(family):
    gradients = []
    for packed in (True, False):
        model = tiny(family)
        model.never_pack = not packed
        completion_logprobs(model, random_batch(), with_balance=True).balance.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert gradients[0].norm() > 1e-4
    assert (gradients[0] - gradients[1]).norm() <= 2e-5 * gradients[1].norm()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    tiny("qwen3_moe", vocab_size=256).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("coefficient", [None, 0.0, 0.7])
def test_the_step_is_that_of_trl(coefficient, checkpoint, tmp_path):
    """None takes the model's own weight, 0.001 here, too small to see; so it is made larger."""
    settings = {**COMMON, "per_device_train_batch_size": 8, "max_steps": 2, "router_aux_loss_coef": coefficient}
    rewards = lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids]  # noqa: E731
    theirs = trl_gradients(checkpoint, trl.GRPOConfig(str(tmp_path / "trl"), **settings), rewards)
    ours = our_gradients(checkpoint, GRPOConfig(str(tmp_path / "ours"), **settings), rewards)
    for a, b in zip(ours, theirs, strict=True):
        assert b.norm() > 0
        assert (a - b).norm() <= 1e-5 * b.norm()


class Gradients(TrainerCallback):
    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.found.append(gradient(model))


def gradient(model):
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def test_it_is_averaged_over_the_step_by_tokens(tmp_path):
    """With rewards that are all equal there is nothing but this loss: the mean of the micro-batches' own."""

    def step(accumulation):
        watch = Gradients()
        trainer = make(
            tmp_path,
            lambda completions, **_: [1.0] * len(completions),
            model=tiny("qwen3_moe", vocab_size=256),
            per_device_train_batch_size=8 // accumulation,
            gradient_accumulation_steps=accumulation,
            router_aux_loss_coef=0.5,
            max_steps=1,
            max_grad_norm=0.0,
            gradient_checkpointing=False,
            callbacks=[watch],
        )
        seen = []
        inner = trainer.get_batch_samples

        def note(*args):
            out = inner(*args)
            seen.extend(part for micro in out[0] for part in micro["parts"])
            return out

        trainer.get_batch_samples = note
        trainer.train()
        return trainer, watch.found[0], seen

    trainer, got, parts = step(2)
    assert len(parts) == 2  # as configured, though all rows are silent
    model = tiny("qwen3_moe", vocab_size=256)
    tokens = [part.num_tokens for part in parts]
    balances = [completion_logprobs(model, part, with_balance=True).balance for part in parts]
    mean = sum(n * b for n, b in zip(tokens, balances, strict=True)) / sum(tokens)
    (0.5 * mean).backward()
    expected = gradient(model)
    assert expected.norm() > 1e-4 and (got - expected).norm() <= 2e-5 * expected.norm()
    assert logs(trainer, "aux_loss")[0] == pytest.approx(mean.item(), rel=1e-5)


def test_a_model_without_experts_has_none(tmp_path):
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0.1 .* LlamaForCausalLM computes none"):
        make(tmp_path, router_aux_loss_coef=0.1)
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=-1 must be a number, 0 or more"):
        make(tmp_path, model=tiny("qwen3_moe", vocab_size=256), router_aux_loss_coef=-1)
    trainer = make(tmp_path, by_place, router_aux_loss_coef=0.0)
    trainer.train()
    assert not logs(trainer, "aux_loss")
