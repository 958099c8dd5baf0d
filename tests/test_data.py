from __future__ import annotations

import pytest
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from grpo_trainer.data import ContextLimit, PromptRenderer, without_none
from grpo_trainer.types import Prompt
from tests.helpers import BOS, BOS_ID, CHAT_TEMPLATE

USER = [{"role": "user", "content": "hi"}]


def with_bos(tokenizer):
    """As Llama's: plain text gets a beginning-of-sequence token."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    assert tokenizer("a")["input_ids"][0] == BOS_ID
    return tokenizer


def test_a_plain_prompt_is_tokenised_as_it_stands(tiny_tokenizer):
    prompt = PromptRenderer(tiny_tokenizer)({"prompt": "2 + 2", "answer": 4})
    assert prompt.text == "2 + 2" and not prompt.conversational
    assert prompt.ids == tuple(tiny_tokenizer.convert_tokens_to_ids(list("2 + 2")))  # one token per character


def test_messages_go_through_the_chat_template(tiny_tokenizer):
    prompt = PromptRenderer(tiny_tokenizer)({"prompt": USER})
    assert prompt.conversational
    assert prompt.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.ids == tuple(tiny_tokenizer(prompt.text)["input_ids"])
    assert prompt.ids.count(BOS_ID) == 2  # the markers are one token each


def test_a_last_assistant_message_is_continued_and_not_closed(tiny_tokenizer):
    prompt = PromptRenderer(tiny_tokenizer)({"prompt": [*USER, {"role": "assistant", "content": "It is"}]})
    assert prompt.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nIt is"


def test_template_arguments_reach_the_template(tiny_tokenizer):
    tiny_tokenizer.chat_template = CHAT_TEMPLATE + "{% if think %}<think>{% endif %}"
    render = PromptRenderer(tiny_tokenizer, {"think": True})
    assert render({"prompt": USER}).text.endswith("assistant\n<think>")
    assert render.reward_text(USER, [{"role": "assistant", "content": "x"}]).endswith("<think>")


@pytest.mark.parametrize(("adds", "template_writes"), [(True, True), (True, False), (False, True), (False, False)])
def test_there_is_one_beginning_of_sequence_token_if_the_tokenizer_or_the_template_has_one(
    tiny_tokenizer, adds, template_writes
):
    tiny_tokenizer.chat_template = (
        "{{ bos_token }}" if template_writes else ""
    ) + "{% for m in messages %}{{ m.content }}{% endfor %}"
    if adds:
        with_bos(tiny_tokenizer)
    render = PromptRenderer(tiny_tokenizer)
    plain, chat = render({"prompt": "hi"}).ids, render({"prompt": USER}).ids
    assert plain.count(BOS_ID) == int(adds) and plain.index(BOS_ID) == 0 if adds else BOS_ID not in plain
    assert chat.count(BOS_ID) == int(adds or template_writes)
    assert chat[0] == BOS_ID if adds or template_writes else BOS_ID not in chat


def test_a_prompt_is_never_cut(tiny_tokenizer):
    assert len(PromptRenderer(tiny_tokenizer)({"prompt": "x" * 1000}).ids) == 1000


def test_the_tokenizer_is_left_as_it_was(tiny_tokenizer):
    tiny_tokenizer.padding_side = "right"
    PromptRenderer(tiny_tokenizer)({"prompt": USER})
    assert tiny_tokenizer.padding_side == "right"


def test_keys_that_arrow_filled_with_none_do_not_reach_the_template(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{% for m in messages %}{% for k in m %}{{ k }}={{ m[k] }};{% endfor %}{% endfor %}"
    rows = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": "a"}]},
            {"prompt": [{"role": "user", "content": "b", "name": "Ann", "meta": {"x": 1}}]},
            {"prompt": [{"role": "user", "content": "c", "meta": {"y": 2}}]},
        ]
    )
    assert rows[0]["prompt"][0]["name"] is None  # what Arrow made of it
    render = PromptRenderer(tiny_tokenizer)
    texts = [render(row).text for row in rows]
    assert not any("None" in text or "name" in text for text in (texts[0], texts[2]))
    assert "name=Ann;" in texts[1] and "'x': 1" in texts[1] and "'y'" not in texts[1]
    assert "None" not in render.reward_text(rows[0]["prompt"], [{"role": "assistant", "content": "z", "name": None}])


def test_none_is_dropped_at_any_depth_and_the_original_is_kept():
    value = [{"a": None, "b": [{"c": None, "d": 0}, None], "e": {"f": None, "g": ""}}]
    # 0, the empty string and None inside a list are values; only a key that holds None says that it is absent
    assert without_none(value) == [{"b": [{"d": 0}, None], "e": {"g": ""}}]
    assert value[0]["a"] is None


def test_a_reward_model_reads_prompt_and_completion_as_one_text(tiny_tokenizer):
    render = PromptRenderer(tiny_tokenizer)
    assert render.reward_text("2 + 2 = ", "4") == "2 + 2 = 4"
    assert (
        render.reward_text(USER, [{"role": "assistant", "content": "yes"}])
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x", "answer": 1}, r"row 7 of train has no column 'prompt'; its columns: question, answer"),
        ({}, r"row 7 of train has no column 'prompt'; its columns: none"),
        ({"prompt": ""}, "row 7 of train: the prompt is empty"),
        ({"prompt": []}, r"row 7 of train: 'prompt' must be a string or a non-empty list of messages"),
        ({"prompt": None}, r"row 7 of train: 'prompt' must be .*, got NoneType"),
        ({"prompt": 3}, r"row 7 of train: 'prompt' must be .*, got int: '3'"),
        ({"prompt": ["hi"]}, r"row 7 of train: 'prompt' must be .*, got list"),
        ({"prompt": [{"text": "hi"}]}, r"row 7 of train: 'prompt' must be .*, got list"),
    ],
)
def test_a_row_without_a_legal_prompt_is_refused_by_its_place(tiny_tokenizer, row, message):
    with pytest.raises(ValueError, match=message):
        PromptRenderer(tiny_tokenizer)(row, "row 7 of train")


def test_messages_without_a_template_are_refused_with_the_remedy(tiny_tokenizer):
    tiny_tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"row 7: .* has no chat template\. Set tokenizer\.chat_template"):
        PromptRenderer(tiny_tokenizer)({"prompt": USER}, "row 7")
    assert PromptRenderer(tiny_tokenizer)({"prompt": "hi"}).text == "hi"  # plain prompts need none


def test_a_template_that_renders_nothing_is_refused(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(ValueError, match="row 7: the prompt '' has no tokens"):
        PromptRenderer(tiny_tokenizer)({"prompt": USER}, "row 7")


# --- room in the model ------------------------------------------------------------------------------------------------


def of_length(count: int) -> Prompt:
    return Prompt(ids=(5,) * count, text="x" * count, conversational=False)


def test_a_prompt_fits_if_a_whole_completion_fits_behind_it():
    limit = ContextLimit(context=100, max_completion_length=60)
    limit.check(of_length(1), "row 7")
    limit.check(of_length(40), "row 7")  # 40 + 60 = 100
    with pytest.raises(ValueError, match=r"row 7: .* 41 tokens, .*=60 it overruns .* 100 tokens\. Set .* at most 59"):
        limit.check(of_length(41), "row 7")


def test_a_completion_that_leaves_no_room_for_a_prompt_is_refused_at_once():
    ContextLimit(context=100, max_completion_length=99).check(of_length(1), "row 7")
    with pytest.raises(ValueError, match=r"max_completion_length=100 leaves no room .* 100 tokens; .* at most 99"):
        ContextLimit(context=100, max_completion_length=100)


def test_positions_without_bound_hold_any_prompt():
    ContextLimit(context=None, max_completion_length=10**6).check(of_length(1000), "row 7")
