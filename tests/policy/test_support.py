from __future__ import annotations

import copy
from types import SimpleNamespace

import peft
import pytest
import torch
from torch import nn

from grpo_trainer.loading.head import cast_head_to_float32
from grpo_trainer.policy.head import Transform
from grpo_trainer.policy.support import forward_parameters, innermost, needs_last_token, plain_head, why_padded
from tests import helpers
from tests.policy.families import FAMILIES, tiny


class Wrapper(nn.Module):
    """As data-parallel wrappers are."""

    def __init__(self, module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


# --- whether ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_that_are_served_are_packed(family):
    assert why_padded(tiny(family)) is None


def test_wrappers_are_looked_through():
    model = helpers.tiny_llama()
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["q_proj"]))
    for wrapped in (model, Wrapper(model), adapted, Wrapper(adapted), Wrapper(Wrapper(model))):
        assert why_padded(wrapped) is None
        assert type(innermost(wrapped)) is type(model)
        assert "logits_to_keep" in forward_parameters(wrapped)


def prompt_tuned():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return peft.get_peft_model(helpers.tiny_llama(), config)


def with_conv():
    model = helpers.tiny_llama()
    model.model.layers[0].conv = nn.Conv1d(1, 1, 1)
    return model


def changed(**attributes):
    model = helpers.tiny_llama()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def configured(**fields):
    model = helpers.tiny_llama()
    for name, value in fields.items():
        setattr(model.config, name, value)
    return model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: nn.Linear(1, 1), "Linear is not a model of the transformers library"),
        (lambda: torch.compile(helpers.tiny_llama()), "it is compiled"),
        (lambda: nn.DataParallel(helpers.tiny_llama()), "cuts a batch along its rows"),
        (lambda: helpers.tiny_llama(attention_dropout=0.1), "LlamaAttention has dropout: disable_dropout=True"),
        (lambda: helpers.tiny_gpt2(attn_pdrop=0.1), "GPT2Attention has dropout"),
        (prompt_tuned, "adapter 'default' adds learned tokens"),
        (with_conv, "Conv1d carries something from token to token"),
        (lambda: changed(never_pack=True), "never_pack"),
        (lambda: changed(_supports_flash_attn=False), "computes its attention in a way of its own"),
        (lambda: configured(_attn_implementation="mine"), "nothing is known of its attention 'mine'"),
        (lambda: configured(attn_logit_softcapping=0.5), "has a softcap, which sdpa leaves out"),
        (lambda: configured(is_causal=False), "lets tokens see those after them"),
        (lambda: configured(layer_types=["full_attention", "chunked_attention"]), "chunked_attention"),
        (lambda: configured(is_encoder_decoder=True), "has an encoder"),
    ],
)
def test_what_cannot_be_packed_says_why(build, reason):
    assert reason in why_padded(build())


def test_layers_that_carry_a_state_are_not_packed():
    from transformers import Mamba2Config, Mamba2ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

    settings = dict(vocab_size=32, hidden_size=32, num_hidden_layers=1)
    assert why_padded(Mamba2ForCausalLM(Mamba2Config(**settings, num_heads=4, head_dim=16, state_size=4, n_groups=1)))
    assert why_padded(
        Qwen3NextForCausalLM(
            Qwen3NextConfig(
                **{**settings, "num_hidden_layers": 2},
                **dict(layer_types=["linear_attention", "full_attention"], num_experts=2, moe_intermediate_size=8),
                **dict(shared_expert_intermediate_size=8, intermediate_size=8, num_attention_heads=2, head_dim=16),
                **dict(
                    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8
                ),
                **dict(num_key_value_heads=2),
            )
        )
    )


def test_a_model_that_makes_masks_of_its_own_is_not_packed():
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    config.attention_probs_dropout_prob = 0.0
    assert "BertSelfAttention lets tokens see those after them" in (why_padded(BertLMHeadModel(config)) or "")


def test_positions_that_depend_on_the_longest_row_keep_the_last_token():
    assert not needs_last_token(helpers.tiny_llama())
    assert not needs_last_token(helpers.tiny_gpt2())
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert needs_last_token(helpers.tiny_llama(rope_parameters=rope))
    longrope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi = tiny("phi3", rope_parameters=longrope, original_max_position_embeddings=16)
    assert needs_last_token(phi)


# --- the vocabulary head ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "transform"),
    [
        ("llama", Transform()),
        ("gpt2", Transform()),
        ("gemma2", Transform(softcap=0.3)),
        ("gemma3_text", Transform()),
        ("granite", Transform(scale=1 / 0.4)),
    ],
)
def test_what_a_model_does_with_its_logits_is_found_out(family, transform):
    model = tiny(family)
    head = plain_head(model)
    assert head.layer is model.get_output_embeddings()
    assert head.transform == transform
    # asked once, and nothing has changed
    assert plain_head(model) is head
    assert "forward" not in vars(head.layer)
    assert model.config.to_dict() == tiny(family).config.to_dict()


def test_asking_draws_no_random_number_and_changes_no_mode():
    model = helpers.tiny_gpt2(resid_pdrop=0.5, embd_pdrop=0.5).train()
    state = torch.get_rng_state()
    assert plain_head(model) is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())


def test_a_head_that_the_model_scales_in_an_unknown_way_is_left_to_it():
    class Odd(type(helpers.tiny_llama())):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            return SimpleNamespace(logits=out.logits.sinh())

    model = helpers.tiny_llama()
    model.__class__ = Odd
    assert plain_head(model) is None


def hooked():
    model = helpers.tiny_llama()
    model.lm_head.register_forward_hook(lambda module, args, out: out + 1)
    return model


def adapted_head():
    adapter = peft.LoraConfig(target_modules=["lm_head"])
    return peft.get_peft_model(helpers.tiny_llama(), adapter)


@pytest.mark.parametrize("build", [hooked, adapted_head])
def test_a_head_that_is_more_than_a_product_is_left_to_the_model(build):
    assert plain_head(build()) is None


def test_a_head_in_float32_is_a_product():
    model = helpers.tiny_llama().bfloat16()
    cast_head_to_float32(model)
    assert plain_head(model).layer.weight.dtype == torch.float32


def test_a_head_that_is_exchanged_is_looked_at_again():
    model = helpers.tiny_llama()
    first = plain_head(model)
    model.set_output_embeddings(nn.Linear(64, 300, bias=True))
    assert plain_head(model).layer is not first.layer
