from __future__ import annotations

import enum
from typing import Any

import pytest

from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.values import parse_yaml, type_name, typed, typed_from_words


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1.0e-6", 1e-6),
        ("5E3", 5000.0),
        ("-.5", -0.5),
        ("2.", 2.0),
        ("8", 8),
        ("-8", -8),
        ("1_000", 1000),
        ("no", "no"),
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("12:30", "12:30"),  # YAML 1.1 reads this as a number of base 60
        ("12_", "12_"),
        ("2025-01-31", "2025-01-31"),
        ("2025-99-99", "2025-99-99"),
        ("=", "="),
        ("1e", "1e"),
        ("-", [None]),
        (".inf", float("inf")),
        ("'8'", "8"),
        ("[a, 1]", ["a", 1]),
        ('{"a": 1e-2}', {"a": 0.01}),
    ],
)
def test_yaml_is_read_by_the_rules_of_yaml_1_2(text, value):
    read = parse_yaml(text, "recipe")
    assert read == value and type(read) is type(value)


def test_a_key_that_stands_twice_is_refused_with_its_line():
    with pytest.raises(RecipeError, match=r"^r\.yaml, line 3: the key 'seed' stands twice$"):
        parse_yaml("seed: 1\nbeta: 0\nseed: 2\n", "r.yaml")
    with pytest.raises(RecipeError, match=r"line 2: the key 'b' stands twice"):
        parse_yaml("a:\n  {b: 1, b: 2}\n", "r.yaml")


def test_anchors_and_merge_keys_are_read():
    text = "first: &it {x: 1, y: 2}\nsecond: {<<: *it, y: 3}\nthird: {<<: [*it, {z: 4}]}\nfourth: *it"
    assert parse_yaml(text, "r.yaml") == {
        "first": {"x": 1, "y": 2},
        "second": {"x": 1, "y": 3},
        "third": {"x": 1, "y": 2, "z": 4},
        "fourth": {"x": 1, "y": 2},
    }


def test_a_file_of_anchors_upon_anchors_is_looked_at_once():
    lines = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 64))]
    content = parse_yaml("\n".join(lines), "r.yaml")  # 2 ** 64 places, were they written out
    assert content["a63"][0] is content["a62"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("? [a]\n: b", "line 1: a key must be a plain word"),
        ("a: {{b: 1}: 2}", "line 1: a key must be a plain word"),
        ("a: &a\n  b: *a", "line 1: a value holds itself, by its anchor"),
        ("a: *b", "line 1: found undefined alias 'b'"),
        ("a: {<<: 3}", "line 1: expected a mapping or list of mappings for merging"),
        ("a: " + "1" * 5000, "line 1: Exceeds the limit"),
    ],
)
def test_what_no_setting_can_be_is_refused_with_its_line(text, message):
    with pytest.raises(RecipeError, match=message):
        parse_yaml(text, "r.yaml")


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "!!python/object/apply:os.getcwd []"])
def test_what_is_not_yaml_or_runs_code_is_refused(text):
    with pytest.raises(RecipeError, match=r"^r\.yaml, line 1: "):
        parse_yaml(text, "r.yaml")


@pytest.mark.parametrize(
    ("value", "annotation", "result"),
    [
        ("1e-6", float, 1e-6),
        (3, float, 3.0),
        (8.0, int, 8),
        ("8", int, 8),
        ("yes", bool, True),
        (None, int | None, None),
        ("8", str | None, "8"),
        ("red", Colour | str, "red"),
        (["a"], str | list[str] | None, ["a"]),
        ({"a": 1}, dict[str, Any] | str | None, {"a": 1}),
        (False, str | bool, False),
        (1, list[float] | None, [1.0]),  # one value is a list of one
        ("a", list[str], ["a"]),
        ({"a": 1}, list[dict[str, int]], [{"a": 1}]),
    ],
)
def test_values_take_the_type_that_is_annotated(value, annotation, result):
    got = typed("key", value, annotation, "recipe")
    assert got == result and type(got) is type(result)


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        (8.5, int, r"r: key: 8\.5 is not int$"),
        (8.5, int | None, r"r: key: 8\.5 is not int or null$"),
        ("fast", float, r"r: key: 'fast' is not float$"),
        (None, int, r"r: key: None is not int$"),
        (True, int, r"r: key: True is not int$"),
        (True, float | None, r"r: key: True is not float or null$"),
        (7, str | None, r"r: key: 7 is not str or null; put it in quotes if a text is meant$"),
        ("maybe", bool, r"r: key: 'maybe' is not bool$"),
        ("x", list[float] | None, r"r: key: 'x' is not a list of float or null$"),
        (True, list[float] | None, r"r: key: True is not a list of float or null$"),
        ("reed", Colour | str, r"r: key: 'reed' is unknown\. Did you mean 'red'\? Legal: red, green\.$"),
        ([1, "x"], list[int], r"r: key: \[1, 'x'\] is not a list of int \(at 1: input should be a valid integer"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_key_value_and_type(value, annotation, message):
    with pytest.raises(RecipeError, match=message):
        typed("key", value, annotation, "r")


@pytest.mark.parametrize(
    ("words", "annotation", "result"),
    [
        ([], bool, True),
        (["false"], bool, False),
        (["2e-6"], float, 2e-6),
        (["7"], str | None, "7"),  # a text that looks like a number
        (["true"], str | None, "true"),
        (["null"], int | None, None),
        (["-1"], int, -1),
        (["q", "v"], str | list[str] | None, ["q", "v"]),
        (["1", "0.5"], list[float] | None, [1.0, 0.5]),
        (["1", "2"], list[str], ["1", "2"]),
        (["1"], list[float] | None, [1.0]),
        (["1"], list[str], ["1"]),
        (["[1, 2]"], list[float], [1.0, 2.0]),
        (["{a: 1}"], dict[str, Any] | str | None, {"a": 1}),
        (["{not yaml"], str, "{not yaml"),
        ([""], str, ""),
    ],
)
def test_words_of_the_command_line_are_read_as_their_type(words, annotation, result):
    got = typed_from_words("key", words, annotation, "command line")
    assert got == result and type(got) is type(result)


@pytest.mark.parametrize(("words", "annotation"), [([], float), (["8.5"], int), (["1", "2"], int)])
def test_words_that_do_not_fit_are_refused(words, annotation):
    with pytest.raises(RecipeError, match=r"^command line: key: .* is not (int|float)"):
        typed_from_words("key", words, annotation, "command line")


def test_types_are_named_as_a_person_would():
    assert type_name(int) == "int"
    assert type_name(None | float) == "float or null"
    assert type_name(Colour | str) == "str"
    assert type_name(str | list[str] | dict[str, Any]) == "str or a list of str or a mapping"
