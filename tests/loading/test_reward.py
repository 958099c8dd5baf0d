from __future__ import annotations

import pytest
import torch
from transformers import LlamaForSequenceClassification

from grpo_trainer.loading import load_reward_model
from tests.helpers import EOS_ID


@pytest.fixture
def classifier(tiny_llama):
    """Builds a tiny Llama with a score head of so many labels, and no padding token in its configuration."""

    def build(num_labels=1):
        torch.manual_seed(0)
        return LlamaForSequenceClassification(tiny_llama(num_labels=num_labels, pad_token_id=None).config)

    return build


def test_a_name_gives_a_frozen_model_and_a_tokenizer_that_pads_right(classifier, tiny_tokenizer, tmp_path):
    original = classifier()
    original.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    model, tokenizer = load_reward_model(str(tmp_path))
    assert torch.equal(model.score.weight, original.score.weight)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert tokenizer.padding_side == "right"


def test_a_text_has_one_score_alone_and_in_a_padded_batch(classifier, tiny_tokenizer):
    tiny_tokenizer.pad_token = None  # pad is then the end-of-sequence token
    model, tokenizer = load_reward_model(classifier(), tiny_tokenizer)
    assert tokenizer.pad_token_id == EOS_ID == model.config.pad_token_id
    assert tiny_tokenizer.pad_token is None
    texts = ["abc", "defghij"]  # 3 and 7 tokens
    together = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    alone = torch.cat([model(**tokenizer(t, return_tensors="pt")).logits[:, 0] for t in texts])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    assert (alone[0] - alone[1]).abs() > 1e-3


def test_a_model_without_a_trained_head_is_refused(tiny_llama, tiny_tokenizer, llama_folder):
    with pytest.raises(ValueError, match=r"has no trained head: score\.weight would be random numbers"):
        load_reward_model(llama_folder)


def test_a_model_with_several_labels_is_refused(classifier, tiny_tokenizer, tiny_llama):
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification has num_labels=3: load it with num_labels=1"):
        load_reward_model(classifier(3), tiny_tokenizer)
    with pytest.raises(ValueError, match="Linear has num_labels=None"):
        load_reward_model(torch.nn.Linear(2, 1), tiny_tokenizer)
