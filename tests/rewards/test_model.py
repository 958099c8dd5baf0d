from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2ForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from grpo_trainer.rewards.base import RewardInputs, RewardSet, reward_name
from grpo_trainer.rewards.model import RewardModel
from tests.helpers import EOS, EOS_ID, PAD_ID, VOCAB_SIZE

SMALL = {"gpt2": (GPT2Config, GPT2ForSequenceClassification), "llama": (LlamaConfig, LlamaForSequenceClassification)}
PROMPTS = ["1+", "what is ", "x", "y"]
COMPLETIONS = ["2", "the answer?", "", "zz"]


def classifier(name: str, pad: int):
    sizes = (
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
        if name == "gpt2"
        else {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    )
    config, architecture = SMALL[name]
    torch.manual_seed(0)
    # three labels would be no reward; dropout, where the architecture has it, stays at its default of .1
    return architecture(config(vocab_size=VOCAB_SIZE, num_labels=1, pad_token_id=pad, **sizes)).float()


def last_token_by_hand(model, tokenizer, text: str) -> float:
    """The score at the last token of one unpadded text."""
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(list(text))])
    model.eval()
    with torch.no_grad():
        hidden = model.base_model(ids).last_hidden_state[0, -1]
        return model.score(hidden).item()


@pytest.fixture(params=SMALL)
def model(request):
    return classifier(request.param, PAD_ID)


def plain(prompt: str, completion: str) -> str:
    return prompt + completion


def test_a_score_is_that_of_the_text_alone_at_its_last_token(model, tiny_tokenizer):
    reward = RewardModel(model, tiny_tokenizer, plain, name="rm")
    together = reward(prompts=PROMPTS, completions=COMPLETIONS, answer=[None] * 4)
    assert all(type(score) is float for score in together)
    for prompt, completion, score in zip(PROMPTS, COMPLETIONS, together, strict=True):
        assert reward(prompts=[prompt], completions=[completion]) == pytest.approx([score], abs=1e-5)
        assert last_token_by_hand(model, tiny_tokenizer, prompt + completion) == pytest.approx(score, abs=1e-5)
    assert len(set(together)) == 4


@pytest.mark.parametrize("name", SMALL)
def test_padding_that_is_the_end_of_sequence_id_changes_no_score(name, tiny_tokenizer):
    tiny_tokenizer.pad_token = EOS
    model = classifier(name, EOS_ID)
    reward = RewardModel(model, tiny_tokenizer, plain, name="rm")
    short, long = reward(prompts=["abc", "abcdefg"], completions=["", ""])  # lengths 3 and 7
    assert reward(prompts=["abc"], completions=[""]) == pytest.approx([short], abs=1e-5)
    assert last_token_by_hand(model, tiny_tokenizer, "abc") == pytest.approx(short, abs=1e-5)
    assert last_token_by_hand(model, tiny_tokenizer, "abcdefg") == pytest.approx(long, abs=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_padding_side_of_the_tokenizer_does_not_matter_and_is_kept(model, tiny_tokenizer, side):
    tiny_tokenizer.padding_side = side
    got = RewardModel(model, tiny_tokenizer, plain, name="rm")(PROMPTS, COMPLETIONS)
    assert got[0] == pytest.approx(last_token_by_hand(model, tiny_tokenizer, "1+2"), abs=1e-5)
    assert tiny_tokenizer.padding_side == side


@pytest.mark.parametrize("max_rows", [1, 3, 4, 100])
def test_the_number_of_texts_per_pass_changes_no_score(model, tiny_tokenizer, max_rows):
    passes = []
    model.register_forward_pre_hook(lambda m, args, kwargs: passes.append(len(kwargs["input_ids"])), with_kwargs=True)
    expected = RewardModel(model, tiny_tokenizer, plain, name="rm")(PROMPTS, COMPLETIONS)
    passes.clear()
    got = RewardModel(model, tiny_tokenizer, plain, name="rm", max_rows=max_rows)(PROMPTS, COMPLETIONS)
    assert got == pytest.approx(expected, abs=1e-5)
    assert sum(passes) == 4 and max(passes) <= max_rows


def test_dropout_is_off_and_no_graph_is_kept(tiny_tokenizer):
    model = classifier("gpt2", PAD_ID).train()  # dropout .1
    reward = RewardModel(model, tiny_tokenizer, plain, name="rm")
    assert reward(PROMPTS, COMPLETIONS) == reward(PROMPTS, COMPLETIONS)
    assert all(p.grad is None for p in model.parameters())


def test_the_text_is_what_the_renderer_makes_of_prompt_and_completion_without_further_special_tokens(tiny_tokenizer):
    model = classifier("llama", PAD_ID)
    chat = RewardModel(model, tiny_tokenizer, lambda p, c: f"<|im_start|>{p[0]['content']}{c[0]['content']}", name="rm")
    got = chat([[{"role": "user", "content": "hi"}]], [[{"role": "assistant", "content": "yes"}]])
    ids = [0, *tiny_tokenizer.convert_tokens_to_ids(list("hiyes"))]  # one beginning-of-sequence token, the template's
    with torch.no_grad():
        assert got == pytest.approx([model(torch.tensor([ids])).logits.item()], abs=1e-5)


def test_no_texts_are_no_scores(model, tiny_tokenizer):
    assert RewardModel(model, tiny_tokenizer, plain, name="rm")([], []) == []


def test_it_is_a_reward_function_like_any_other(model, tiny_tokenizer):
    reward = RewardModel(model, tiny_tokenizer, plain, name="helpfulness")
    assert reward_name(reward) == "helpfulness"
    rewards = RewardSet([reward, lambda completions, **kwargs: [1.0] * len(completions)])
    batch = RewardInputs(
        rows=[{"prompt": p, "answer": 1} for p in PROMPTS], completions=COMPLETIONS, completion_ids=[[1]] * 4
    )
    got, _ = rewards.score(batch)
    assert got[:, 0].tolist() == pytest.approx(reward(PROMPTS, COMPLETIONS), abs=1e-6)
    assert got[:, 1].tolist() == [1.0] * 4


def test_texts_of_like_length_are_scored_together_and_keep_their_places(model, tiny_tokenizer):
    texts = ["x" * n for n in (1, 8, 2, 7, 1, 8, 2, 7)]
    alone = [RewardModel(model, tiny_tokenizer, plain, name="rm")([text], [""])[0] for text in texts]
    shapes = []
    model.register_forward_pre_hook(
        lambda m, args, kwargs: shapes.append((tuple(kwargs["input_ids"].shape), int(kwargs["attention_mask"].sum()))),
        with_kwargs=True,
    )
    together = RewardModel(model, tiny_tokenizer, plain, name="rm", max_rows=2)(texts, [""] * 8)
    assert together == pytest.approx(alone, abs=1e-5)
    # 36 tokens in 36 places; two by two as they come, they would take 2 * (8 + 7) * 2 = 60
    assert shapes == [((2, n), 2 * n) for n in (8, 7, 2, 1)]
