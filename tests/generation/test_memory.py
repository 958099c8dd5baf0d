from __future__ import annotations

import pytest
import torch

from grpo_trainer.generation import memory
from grpo_trainer.generation.memory import bytes_per_token, default_cache_tokens, stored_dtype
from tests import helpers
from tests.generation import families

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", families.DENSE)
def test_the_bytes_of_a_token_are_those_that_a_cache_takes(name):
    model = families.family(name)
    with torch.no_grad():
        cache = model(torch.tensor([[5, 6, 7, 8]]), use_cache=True)
    layers = (cache.get("cache") or cache.get("past_key_values")).layers
    held = sum(x.numel() * x.element_size() for layer in layers for x in (layer.keys, layer.values))
    assert bytes_per_token(model, CPU) == held // 4
    with torch.autocast("cpu", torch.bfloat16):  # attention that is several calls keeps float32 keys
        assert bytes_per_token(model, CPU) == held // (4 if model.config._attn_implementation == "eager" else 8)


def test_keys_are_stored_lower_only_where_attention_is_one_call_under_autocast():
    model = families.family("llama")
    assert stored_dtype(model, CPU) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert stored_dtype(model, CPU) == torch.bfloat16
        model.set_attn_implementation("eager")
        assert stored_dtype(model, CPU) is None


@pytest.mark.parametrize(
    ("at_least", "free", "bytes_allowed"),
    [
        (0, None, "weights"),  # as much as the weights
        (1 << 20, None, 1 << 20),  # a small model's cache may be larger
        (1 << 20, 1 << 19, 1 << 18),  # but half of what is free is the most
        (1 << 20, 0, 0),
    ],
)
def test_the_cache_may_take_what_the_weights_take(monkeypatch, at_least, free, bytes_allowed):
    monkeypatch.setattr(memory, "_AT_LEAST", at_least)
    monkeypatch.setattr(memory, "_free_bytes", lambda device: free)
    model = helpers.tiny_llama()
    weights = sum(p.numel() * 4 for p in model.parameters())
    per_token = 2 * 2 * 2 * 16 * 4  # keys and values, 2 layers, 2 heads of 16, float32
    allowed = weights if bytes_allowed == "weights" else bytes_allowed
    assert default_cache_tokens(model, CPU) == max(1, allowed // per_token)


def test_the_system_is_asked_what_is_free(monkeypatch, tmp_path):
    table = tmp_path / "meminfo"
    table.write_text("MemTotal:  100 kB\nMemFree:  5 kB\nMemAvailable:    70 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", table)
    assert memory._free_bytes(CPU) == 70 * 1024
    table.unlink()
    assert memory._free_bytes(CPU) is None
