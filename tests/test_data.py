from __future__ import annotations

import pytest
from datasets import Dataset
from tokenizers.processors import TemplateProcessing

from grpo_trainer.data import OVERLONG_PROMPTS, OneFormat, PromptLimit, PromptRenderer, without_none
from grpo_trainer.types import Prompt
from tests.helpers import BOS, BOS_ID, CHAT_TEMPLATE, EOS

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


def test_a_template_that_ends_in_an_opened_tag_is_left_as_it_is(tiny_tokenizer):
    tiny_tokenizer.chat_template = CHAT_TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"
    prompt = PromptRenderer(tiny_tokenizer)({"prompt": USER})
    assert prompt.text.endswith("<|im_start|>assistant\n<think>\n")
    assert tiny_tokenizer.decode(prompt.ids[-8:]) == "<think>\n"


def test_a_renderer_cuts_no_prompt(tiny_tokenizer):
    tiny_tokenizer.model_max_length = 10
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


def test_calls_of_tools_come_out_of_arrow_as_they_went_in(tiny_tokenizer):
    def called(name, **arguments):
        calls = [{"function": {"name": name, "arguments": arguments}}]
        return {"prompt": [{"role": "assistant", "content": None, "tool_calls": calls}, *USER]}

    rows = [called("weather", city="Rome"), called("clock", zone="CET", exact=False)]
    tiny_tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    )
    through_arrow = Dataset.from_list(rows)
    assert through_arrow[0]["prompt"][0]["tool_calls"][0]["function"]["arguments"]["zone"] is None
    render = PromptRenderer(tiny_tokenizer)
    assert render(through_arrow[0]).text == '[{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]hi'
    assert "null" not in render(through_arrow[1]).text and '"exact": false' in render(through_arrow[1]).text


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
        ("hi", r"row 7 of train is a str, not a mapping of columns"),
        ({"prompt": [{"role": "user"}]}, r"row 7 of train: message 0 of the prompt \(role 'user'\) has no 'content'"),
        ({"prompt": [{"role": "user", "content": None}]}, r"row 7 of train: message 0 .* has no 'content'"),
        ({"prompt": [{"role": "user", "content": 3}]}, r"row 7 of train: message 0 .* has a int for its 'content'"),
        ({"prompt": [{"role": None, "content": "hi"}]}, r"row 7 of train: message 0 of the prompt has no 'role'"),
        ({"prompt": [{"role": 3, "content": "hi"}]}, r"row 7 of train: message 0 of the prompt has the role 3"),
        (
            {"prompt": [*USER, {"content": "hi"}]},
            r"row 7 of train: message 1 of the prompt has no 'role'; a message is",
        ),
        ({"prompt": [*USER, "hi"]}, r"row 7 of train: message 1 of the prompt is a str"),
        ({"prompt": [*USER, None]}, r"row 7 of train: message 1 of the prompt is a NoneType"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image"}]}]},
            r"row 7 of train: message 0 .* holds a part that is not text, which is not supported yet",
        ),
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


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}",
            "begin with the",
        ),
        ("{{ messages[0].content + messages[0].name }}", "has no attribute 'name'"),  # jinja's own
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),  # python's
        ("{{ messages | nofilter }}", "No filter named"),
    ],
)
def test_a_template_that_does_not_take_the_messages_names_the_row(tiny_tokenizer, template, why):
    tiny_tokenizer.chat_template = template
    prompt = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ValueError, match=rf"(?s)row 7: the chat template .*\(roles: system, user\): .*{why}.*Bring"):
        PromptRenderer(tiny_tokenizer)({"prompt": prompt}, "row 7")


def test_a_template_that_renders_nothing_is_refused(tiny_tokenizer):
    tiny_tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(ValueError, match="row 7: the prompt '' has no tokens"):
        PromptRenderer(tiny_tokenizer)({"prompt": USER}, "row 7")


# --- length -----------------------------------------------------------------------------------------------------------


def of_length(count: int) -> Prompt:
    return Prompt(ids=tuple(range(count)), text="x" * count, conversational=False)


def test_a_prompt_fits_if_a_whole_completion_fits_behind_it():
    limit = PromptLimit(context=100, max_completion_length=60)
    for count in (1, 40):  # 40 + 60 = 100
        assert limit.fit(of_length(count), "row 7") == of_length(count)
    with pytest.raises(
        ValueError,
        match=r"row 7: .* 41 tokens, .*=60 it overruns .* 100 tokens\. Set max_completion_length to at most 59, or "
        "max_prompt_length to at most 40",
    ):
        limit.fit(of_length(41), "row 7")
    with pytest.raises(
        ValueError, match=r"100 tokens, .* context of 100 tokens\. Set max_prompt_length to at most 40$"
    ):
        limit.fit(of_length(100), "row 7")


def test_a_completion_that_leaves_no_room_for_a_prompt_is_refused_at_once():
    PromptLimit(context=100, max_completion_length=99).fit(of_length(1), "row 7")
    with pytest.raises(ValueError, match=r"max_completion_length=100 leaves no room .* 100 tokens; .* at most 99"):
        PromptLimit(context=100, max_completion_length=100)


def test_positions_without_bound_hold_any_prompt():
    assert PromptLimit(max_completion_length=10**6).fit(of_length(1000), "row 7") == of_length(1000)


def test_a_cut_prompt_is_the_last_ids_and_its_text_shows_every_marker(tiny_tokenizer):
    limit = PromptLimit(max_prompt_length=6, overlong="truncate_left", tokenizer=tiny_tokenizer)
    # ten ids, of which five are markers, which a decoder may leave out
    full = PromptRenderer(tiny_tokenizer)({"prompt": f"ab{BOS}cd{EOS}{BOS}e{BOS}{EOS}"})
    assert len(full.ids) == 10
    cut = limit.fit(full, "row 7")
    assert cut.ids == full.ids[-6:] == (*tiny_tokenizer.convert_tokens_to_ids(["d", EOS, BOS, "e", BOS, EOS]),)
    assert cut.text == f"d{EOS}{BOS}e{BOS}{EOS}"


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("prompt", ["x" * 50, [{"role": "user", "content": "x" * 50}]])
def test_a_limit_holds_for_either_format_with_all_special_tokens_counted(tiny_tokenizer, prompt, adds):
    tokenizer = with_bos(tiny_tokenizer) if adds else tiny_tokenizer
    full = PromptRenderer(tokenizer)({"prompt": prompt})
    length = len(full.ids)
    assert length >= 50 + adds
    for policy in OVERLONG_PROMPTS:
        fits = PromptLimit(max_prompt_length=length, overlong=policy, tokenizer=tokenizer)
        assert fits.keeps(full) and fits.fit(full, "row 7") is full
        tight = PromptLimit(max_prompt_length=length - 1, overlong=policy, tokenizer=tokenizer)
        assert tight.keeps(full) == (policy != "filter")
        if policy == "truncate_left":
            assert tight.fit(full, "row 7").ids == full.ids[1:]
            assert tight.fit(full, "row 7").conversational == full.conversational
        else:
            with pytest.raises(
                ValueError, match=f"row 7: .* {length} tokens, more than max_prompt_length={length - 1}"
            ):
                tight.fit(full, "row 7")


def test_without_a_limit_no_policy_does_anything():
    for policy in OVERLONG_PROMPTS:
        limit = PromptLimit(overlong=policy)
        assert limit.keeps(of_length(1000)) and limit.fit(of_length(1000), "row 7") == of_length(1000)
        assert not limit.filters and not limit.needs_every_prompt


def test_the_context_is_checked_after_the_cut(tiny_tokenizer):
    def limit(most):
        return PromptLimit(context=100, max_completion_length=60, max_prompt_length=most, tokenizer=tiny_tokenizer)

    assert limit(40).fit(of_length(41), "row 7").ids == tuple(range(1, 41))
    with pytest.raises(ValueError, match=r"row 7: the prompt has 41 tokens.*max_prompt_length to at most 40"):
        limit(41).fit(of_length(50), "row 7")


def test_a_filter_leaves_out_what_has_no_room_in_the_context_if_there_is_a_limit():
    limit = PromptLimit(context=100, max_completion_length=60, max_prompt_length=50, overlong="filter")
    assert [limit.keeps(of_length(n)) for n in (40, 41, 50, 51)] == [True, False, False, False]
    assert PromptLimit(context=100, max_completion_length=60, overlong="filter").keeps(of_length(41))


def test_prompts_of_one_format_pass_and_the_first_of_another_is_named_with_its_counterpart():
    talk = Prompt(ids=(1,), text="x", conversational=True)
    one = OneFormat()
    one.check(of_length(1), "row 0")
    one.check(of_length(2), "row 1")
    with pytest.raises(ValueError, match=r"strings \(row 0\) and lists of messages \(row 2\)"):
        one.check(talk, "row 2")
    other = OneFormat()
    other.check(talk, "row 4")
    with pytest.raises(ValueError, match=r"strings \(row 5\) and lists of messages \(row 4\)"):
        other.check(of_length(1), "row 5")
