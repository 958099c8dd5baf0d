from __future__ import annotations

import functools

import pytest

from grpo_trainer.registry import only_accepted, resolve, suggest


def power(base, *, exponent=2, scale=1):
    return scale * base**exponent


def takes_anything(base, **knobs):
    return base, knobs


TABLE = {"power": power, "anything": takes_anything}


def test_a_name_stands_for_its_line_in_the_table():
    assert resolve("power", TABLE, "function") is power


def test_keyword_arguments_are_bound():
    assert resolve("power", TABLE, "function", exponent=3)(2) == 8
    assert resolve("power", TABLE, "function", exponent=3, scale=10)(2) == 80
    assert resolve("anything", TABLE, "function", whatever=1)(2) == (2, {"whatever": 1})


def test_a_path_stands_for_what_can_be_imported_there():
    assert resolve("math:sqrt", TABLE, "function")(9) == 3
    assert resolve("os.path:basename", TABLE, "function")("a/b") == "b"
    assert resolve("fractions:Fraction.from_float", TABLE, "function")(0.5) == 0.5


def test_a_callable_is_taken_as_it_is():
    assert resolve(power, TABLE, "function") is power
    assert resolve(functools.partial(power, scale=3), TABLE, "function", exponent=1)(2) == 6
    assert resolve(lambda x: x + 1, TABLE, "function")(1) == 2


def test_an_unknown_name_is_refused_with_the_nearest_and_all_legal_ones():
    with pytest.raises(ValueError, match=r"unknown loss 'powr'\. Did you mean 'power'\? Known: power, anything; or "):
        resolve("powr", TABLE, "loss")
    with pytest.raises(ValueError, match=r"unknown loss 'zzz'\. Known: power, anything"):
        resolve("zzz", TABLE, "loss")


def test_an_unknown_keyword_argument_is_refused_with_the_legal_ones():
    with pytest.raises(ValueError, match=r"loss 'power' takes no argument 'exponnt'.*: exponent, scale\."):
        resolve("power", TABLE, "loss", exponnt=3)
    with pytest.raises(ValueError, match=r"takes no argument 'x'.*: none"):
        resolve("plain", {"plain": lambda a: a}, "loss", x=1)


@pytest.mark.parametrize("name", ["no.such.module:f", "math:no_such_function", "math:", ":f", ".math:sqrt"])
def test_a_path_that_cannot_be_imported_is_refused_by_name(name):
    with pytest.raises(ValueError, match="loss " + repr(name)):
        resolve(name, TABLE, "loss")


def test_a_path_to_something_that_cannot_be_called_is_refused():
    with pytest.raises(ValueError, match="loss 'math:pi' is a float, not a function"):
        resolve("math:pi", TABLE, "loss")


def test_a_function_is_offered_much_and_takes_what_it_has():
    offered = {"exponent": 3, "temperature": 1}
    assert only_accepted(power, offered) == {"exponent": 3}
    assert only_accepted(takes_anything, offered) == offered
    assert only_accepted(lambda base: base, offered) == {}


def test_a_suggestion_is_made_only_where_one_is_near():
    assert suggest("dr_grop", ["grpo", "dr_grpo"]) == " Did you mean 'dr_grpo'?"
    assert suggest("xyz", {"grpo": 1}) == ""
