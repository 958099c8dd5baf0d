from __future__ import annotations

import re

import pytest
import torch
from transformers import GenerationConfig

from grpo_trainer.generation.sampling import Shaper
from grpo_trainer.generation.state import inference_state
from grpo_trainer.generation.support import cache_argument, why_not_group, why_not_rules
from tests.generation import families

CONFIG = GenerationConfig(do_sample=True, max_new_tokens=4)
TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize("name", families.DENSE)
def test_every_dense_family_can_be_decoded(name):
    model = families.family(name)
    assert why_not_group(model, CONFIG, 40) is None
    assert cache_argument(model) in ("cache", "past_key_values")


OTHERS = {
    "MambaForCausalLM": (
        {"vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1},
        "keeps a state that is not a list",
    ),
    # in older releases of transformers it also prepares its inputs in a way of its own, which is met first
    "BloomForCausalLM": (
        {"vocab_size": 64, "hidden_size": 16, "n_layer": 1, "n_head": 2},
        "takes no position_ids|has a prepare_inputs_for_generation of its own",
    ),
    "T5ForConditionalGeneration": (
        {"vocab_size": 64, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1},
        "has an encoder",
    ),
    "Lfm2ForCausalLM": (
        {**TINY, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]},
        "has layers with a LinearAttentionLayer",
    ),
    "BertForMaskedLM": (TINY, "is not a model of transformers that generates"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_of_models_are_left_to_generate(kind):
    settings, reason = OTHERS[kind]
    found = why_not_group(families.build(kind, **settings), CONFIG, 40)
    assert kind in found and re.search(reason, found)


def test_a_model_with_a_part_of_generate_of_its_own_is_left_to_generate():
    llama = type(families.family("llama"))

    class Mine(llama):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            return super().prepare_inputs_for_generation(*args, **kwargs)

    class Plain(llama):
        pass

    config = families.family("llama").config
    assert why_not_group(Mine(config), CONFIG, 40) == "Mine has a prepare_inputs_for_generation of its own"
    assert why_not_group(Plain(config), CONFIG, 40) is None
    Plain._auto_class = "AutoModelForCausalLM"  # as if its code had come with the checkpoint
    assert why_not_group(Plain(config), CONFIG, 40) == "the code of Plain came with its checkpoint"


def test_a_model_in_several_places_or_in_shards_is_left_to_generate():
    model = families.family("llama")
    model.hf_device_map = {"model.layers.0": 0, "lm_head": "cpu"}
    assert why_not_group(model, CONFIG, 40) == "LlamaForCausalLM is spread over 2 devices"
    model.hf_device_map = {"": "cpu"}
    assert why_not_group(model, CONFIG, 40) is None
    next(model.parameters()).ds_id = 7  # as ZeRO-3 marks them
    assert why_not_group(model, CONFIG, 40) == "the parameters of LlamaForCausalLM are sharded"


def test_rotary_tables_that_depend_on_the_batch_are_fine_as_long_as_they_do_not_change():
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi = families.family(
        "phi3",
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters={
            **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64},
            **factors,
        },
    )
    assert why_not_group(phi, CONFIG, 64) is None
    reason = why_not_group(phi, CONFIG, 65)
    assert reason == "its longrope positions depend on the longest row of a batch beyond 64 tokens (65 here)"
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    llama = families.family("llama", max_position_embeddings=100, rope_parameters=rope)
    assert why_not_group(llama, CONFIG, 100) is None
    assert "dynamic positions" in why_not_group(llama, CONFIG, 101)


def test_an_adapter_is_looked_at_as_well():
    import peft

    def adapted(config):
        return peft.get_peft_model(families.family("llama"), config)

    assert why_not_group(adapted(peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")), CONFIG, 40) is None
    prompt = adapted(peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    assert why_not_group(prompt, CONFIG, 40) == "adapter 'default' puts learned tokens in front of the prompt"
    settings = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "alora_invocation_tokens": [5]}
    assert "switched on by tokens" in why_not_group(adapted(peft.LoraConfig(**settings)), CONFIG, 40)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"cache_implementation": "static"}, "cache_implementation='static' asks for it"),
        ({"use_cache": False}, "use_cache=False asks for it"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5 asks for it"),
        ({"prefill_chunk_size": 8}, "prefill_chunk_size=8 asks for it"),
        ({"prompt_lookup_num_tokens": 3}, "the arguments ask for assisted generation"),
        ({"num_beams": 2}, "the arguments ask for beam sample"),
        ({"cache_implementation": "dynamic", "guidance_scale": 1.0, "top_k": 3, "bad_words_ids": [[3]]}, None),
    ],
)
def test_what_only_generate_can_do_is_left_to_generate(asked, reason):
    model = families.family("llama")
    assert why_not_group(model, GenerationConfig(do_sample=True, max_new_tokens=4, **asked), 40) == reason


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"encoder_repetition_penalty": 1.5}, "EncoderRepetitionPenaltyLogitsProcessor may remember rows"),
        ({"encoder_no_repeat_ngram_size": 2}, "EncoderNoRepeatNGramLogitsProcessor may remember rows"),
        ({"max_time": 9.0, "no_repeat_ngram_size": 2, "top_k": 4}, None),
    ],
)
def test_processors_that_hold_on_to_a_batch_are_left_to_generate(asked, reason):
    model = families.family("llama")
    config = GenerationConfig(do_sample=True, max_new_tokens=4, eos_token_id=[1], pad_token_id=2, **asked)
    with inference_state(model):
        shaper = Shaper(model, config, 5, torch.device("cpu"))
    found = why_not_rules(shaper.processors, shaper.criteria)
    assert found is None if reason is None else found.startswith(reason)
