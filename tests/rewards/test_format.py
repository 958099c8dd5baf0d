from __future__ import annotations

import time

import pytest

from grpo_trainer.rewards import REWARDS
from grpo_trainer.rewards.format import json_schema, matches, tag_counts, think_answer_format, xml
from grpo_trainer.rewards.options import options_of

GOOD = "<think>3 + 4</think> <answer>7</answer>"


@pytest.mark.parametrize(
    ("text", "form", "quarters"),
    [
        (GOOD, 1, 4),
        (f"\n{GOOD}\n", 1, 4),
        ("<think>\n3 + 4\n</think>\n<answer>\n7\n</answer>", 1, 4),
        ("<think>3 + 4</think>\n\n<answer>7</answer>", 1, 4),
        ("<think>a < b </ think></think><answer>7</answer>", 1, 4),  # what only looks like a tag is text
        (f"Sure. {GOOD}", 0, 4),  # text before
        (f"{GOOD} Done.", 0, 4),  # text after
        ("<think>3 + 4</think> so <answer>7</answer>", 0, 4),  # text between
        ("<think></think><answer>7</answer>", 0, 4),  # no thought
        ("<think>3</think><answer> </answer>", 0, 4),  # no answer
        ("<answer>7</answer><think>3 + 4</think>", 0, 4),  # the wrong order
        ("</think>3<think><answer>7</answer>", 0, 4),  # closed before it is opened
        ("<think>3<answer>7</answer></think>", 0, 4),  # one in the other
        ("<think>3</think><answer>7", 0, 3),  # cut off
        ("3 + 4</think><answer>7</answer>", 0, 3),  # the prompt had not opened it
        (f"{GOOD}{GOOD}", 0, 0),  # each tag twice
        ("<think>3</think><think>4</think><answer>7</answer>", 0, 2),
        ("<THINK>3</THINK><ANSWER>7</ANSWER>", 0, 0),  # tags are as they are asked for
        ("<think>3 + 4", 0, 1),
        ("7", 0, 0),
        ("", 0, 0),
    ],
)
def test_r1s_form_and_its_tags(text, form, quarters):
    assert think_answer_format([text]) == [form]
    assert tag_counts([text]) == [quarters / 4]
    message = [[{"role": "assistant", "content": text}]]
    assert (think_answer_format(message), tag_counts(message)) == ([form], [quarters / 4])


@pytest.mark.parametrize(
    ("text", "form", "quarters"),
    [
        ("3 + 4</think> <answer>7</answer>", 1, 4),
        ("3 + 4 <answer>7</answer>", 0, 3),  # never closed
        (GOOD, 0, 3),  # opened twice
        ("</think><answer>7</answer>", 0, 4),  # no thought
    ],
)
@pytest.mark.parametrize(
    "how",
    [
        {"prompts": ["What is 3 + 4?\n<think>\n"]},
        {"prompts": [[{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "<think>"}]]},
        {"opened": True},
    ],
)
def test_a_prompt_that_has_opened_the_tag(text, form, quarters, how):
    assert think_answer_format([text], **how) == [form]
    assert tag_counts([text], **how) == [quarters / 4]


def test_a_prompt_that_only_speaks_of_the_tag_has_not_opened_it():
    prompts = [[{"role": "user", "content": "Put your thoughts in <think> and </think>."}]]
    assert think_answer_format(["3</think><answer>7</answer>"], prompts) == [0.0]
    assert think_answer_format([GOOD], ["a <think>"], opened=False) == [1.0]


def test_a_pattern_is_looked_for_or_must_cover_all():
    texts = ["Answer: 7", "So the Answer: 7", "seven"]
    assert matches(texts, pattern="Answer: [0-9]") == [1.0, 1.0, 0.0]
    assert matches(texts, pattern="Answer: [0-9]", full=True) == [1.0, 0.0, 0.0]
    assert matches(["a\nb"], pattern=r"(?s)a.b", full=True) == [1.0]
    with pytest.raises(ValueError, match=r"matches: pattern '\(' is no regular expression"):
        matches(texts, pattern="(")


def test_a_pattern_that_blows_up_matches_nothing_and_is_counted():
    metrics: dict[str, float] = {}
    start = time.monotonic()
    rewards = matches(["a" * 60 + "!", "aaa"], pattern=r"^(a|a)*$", log_metric=metrics.__setitem__)
    assert rewards == [0.0, 1.0]
    assert metrics == {"matches/timeouts": 0.5} and time.monotonic() - start < 60


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"name": "Ada", "age": 36}', 1),
        ('{"name": "Ada"}', 1),
        ('```json\n{"name": "Ada"}\n```', 1),
        ('<think>{"age": 1}</think>{"name": "Ada"}', 1),
        ('<think>x</think><answer>\n{"name": "Ada"}\n</answer>', 1),
        ('{"age": 36}', 0),  # no name
        ('{"name": "Ada", "age": -1}', 0),
        ('{"name": "Ada", "age": 36.5}', 0),
        ('{"name": "Ada", "x": 1}', 0),
        ('Here it is: {"name": "Ada"}', 0),
        ("{'name': 'Ada'}", 0),  # Python, not JSON
        ('{"name": "Ada",}', 0),
        ('{"name": "Ada", "age": NaN}', 0),
        ("[" * 100_000, 0),
        ('{"name": "Ada", "age": ' + "9" * 10_000 + "}", 0),  # more digits than Python reads
        ("", 0),
        ('{"name": "\x00"}', 0),
    ],
)
def test_json_fits_a_schema(text, fits):
    import json

    assert json_schema([text], schema=SCHEMA) == [fits]
    assert json_schema([text], schema=json.dumps(SCHEMA)) == [fits]


def test_what_python_reads_beyond_json_is_refused():
    assert json_schema(["NaN", "[Infinity]", "-Infinity", "[1.5, null]"], schema={}) == [0.0, 0.0, 0.0, 1.0]


def test_a_schema_that_is_none_is_refused_and_no_other_document_is_fetched():
    with pytest.raises(ValueError, match="json_schema: schema is no JSON schema"):
        json_schema(["1"], schema={"type": "whole number"})
    with pytest.raises(Exception, match=r"(?i)unresolvable|unretrievable|ref"):
        json_schema(["1"], schema={"$ref": "http://127.0.0.1:9/schema.json"})


BOMB = '<!DOCTYPE a [<!ENTITY x "ha"><!ENTITY y "&x;&x;&x;&x;&x;"><!ENTITY z "&y;&y;&y;&y;&y;">]><a>&z;</a>'


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("<a><b x='1'/>text</a>", 1),
        ("```xml\n<a/>\n```", 1),
        ("<think>no <b></think><a/>", 1),
        ("<?xml version='1.0'?><a/>", 1),
        ("<b/>", 0),  # another root
        ("<a><b></a></b>", 0),
        ("<a/><a/>", 0),  # two documents
        ("<a", 0),
        ("text", 0),
        ("", 0),
        (BOMB, 0),
        ('<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><a>&x;</a>', 0),
        ("<a>\x00</a>", 0),
        ("<a>\ud800</a>", 0),
    ],
)
def test_xml_is_well_formed(text, fits):
    assert xml([text], root="a") == [fits]


def test_any_root_will_do_if_none_is_asked_for():
    assert xml(["<b/>", "<a>"]) == [1.0, 0.0]


def test_those_that_parse_run_in_a_worker_and_all_go_by_their_names():
    for name in ("matches", "json_schema", "xml"):
        options = options_of(REWARDS[name])
        assert options.isolation == "process" and options.time_limit
    assert options_of(REWARDS["think_answer_format"]).isolation == "inline"
    assert REWARDS["tag_counts"] is tag_counts
