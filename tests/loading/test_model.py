from __future__ import annotations

import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from grpo_trainer.loading import base_model, disable_dropout, is_peft, max_context
from grpo_trainer.loading.model import config_of


def test_an_adapter_is_seen_and_seen_through(tiny_llama):
    model = tiny_llama()
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert is_peft(adapted) and not is_peft(model) and not is_peft("name") and not is_peft(nn.Linear(1, 1))
    assert base_model(adapted) is base_model(model) is model
    assert config_of(adapted) is model.config
    assert config_of(nn.Linear(1, 1)) is None


def test_context_is_what_the_positions_allow(tiny_llama, tiny_gpt2):
    assert max_context(tiny_llama(max_position_embeddings=77)) == 77
    assert max_context(tiny_gpt2(n_positions=33)) == 33
    assert max_context(get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"]))) == 256
    alibi = BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=32))
    assert max_context(alibi) is None  # it has no table of positions


def falcon():
    config = FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, hidden_dropout=0.5)
    return FalconForCausalLM(config)


def gpt_neo():
    config = GPTNeoConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        attention_types=[[["global"], 1]],
        resid_dropout=0.5,
        embed_dropout=0.5,
        attention_dropout=0.5,
        max_position_embeddings=64,
    )
    return GPTNeoForCausalLM(config)


def opt():
    config = OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        dropout=0.5,
        attention_dropout=0.5,
        layerdrop=0.5,
    )
    return OPTForCausalLM(config)


def llama():
    from tests.helpers import tiny_llama

    return tiny_llama(attention_dropout=0.5)


def gpt2():
    from tests.helpers import tiny_gpt2

    return tiny_gpt2(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)


def llama_lora():
    return get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False))


def llama_loha():
    return get_peft_model(
        llama(), LoHaConfig(target_modules=["q_proj"], rank_dropout=0.5, module_dropout=0.5, init_weights=False)
    )


@pytest.mark.parametrize("build", [llama, gpt2, opt, falcon, gpt_neo, llama_lora, llama_loha])
def test_without_dropout_training_mode_computes_what_eval_mode_does(build):
    model = build()
    ids = torch.arange(5, 37)[None]
    with torch.no_grad():
        expected = model.eval()(ids, use_cache=False).logits
        model.train()
        assert not torch.equal(model(ids, use_cache=False).logits, expected), "there is no dropout to switch off"
        disable_dropout(model)
        for _ in range(3):
            torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=0, atol=1e-6)


def test_the_configuration_is_left_alone_where_the_modules_keep_their_dropout(caplog):
    model = llama()
    disable_dropout(model)
    assert model.config.attention_dropout == 0.5
    assert caplog.text == ""
    model = falcon()
    disable_dropout(model)
    assert model.config.hidden_dropout == 0.0
    assert "disable_dropout set config.hidden_dropout to 0" in caplog.text
