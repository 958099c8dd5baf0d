from __future__ import annotations

import pytest

from grpo_trainer.generation.state import inference_state
from tests.generation.doubles import MODELS, state_of, unusual


@pytest.mark.parametrize("name", MODELS)
def test_the_state_is_lent_and_given_back(name):
    model = unusual(name)
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt), inference_state(model):
        inside = state_of(model)
        assert not any(inside["modes"]) and not any(inside["checkpointing"]) and inside["use_cache"] is True
        assert model.generation_config.top_k is None and model.generation_config.do_sample is None
        raise KeyboardInterrupt
    assert state_of(model) == before


def test_under_an_adapter_it_is_the_models_own_state():
    import peft

    adapted = peft.get_peft_model(unusual("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    model = adapted.get_base_model()
    before = state_of(model)
    with inference_state(adapted):
        assert model.config.use_cache is True and model.generation_config.top_k is None
        assert not any(getattr(module, "gradient_checkpointing", False) for module in adapted.modules())
    assert state_of(model) == before
