"""From what a recipe or the command line says to a typed value, or an error that names key, value and type."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import re
import types
import typing
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from yaml.constructor import ConstructorError

from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.registry import suggest

_YAML_1_2 = {
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+(_[0-9]+)*",
    "float": r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|nan)",
}


class RecipeLoader(yaml.SafeLoader):
    """YAML as people mean it: a key stands once, ``no`` is a word, ``1e-6`` is a number.

    PyYAML follows YAML 1.1, where ``save_strategy: no`` is False and ``1e-6`` is a text. Here YAML 1.2's rules hold.
    """

    def construct_document(self, node: Any) -> Any:
        """The value of a document, in whose mappings each key is a plain one and stands once.

        Args:
            node: the document as parsed.

        Returns:
            The value.

        Raises:
            ConstructorError: if a key stands twice or is no plain value, or a value holds itself.
        """
        _check_keys(node, (), set())  # before anchors are merged in, since a merged key may be set once more
        return super().construct_document(node)


def _check_keys(node: Any, above: tuple[int, ...], done: set[int]) -> None:
    """Walks a document; a part that several places refer to is looked at once."""
    if id(node) in above:
        raise ConstructorError(None, None, "a value holds itself, by its anchor", node.start_mark)
    if id(node) in done or isinstance(node, yaml.ScalarNode):
        return
    done.add(id(node))
    above = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item, above, done)
        return
    seen = set()
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConstructorError(None, None, "a key must be a plain word", key_node.start_mark)
        key = (key_node.tag, key_node.value)
        if key in seen:
            raise ConstructorError(None, None, f"the key {key_node.value!r} stands twice", key_node.start_mark)
        seen.add(key)
        _check_keys(value_node, above, done)


def _follow_yaml_1_2() -> None:
    replaced = {*_YAML_1_2, "timestamp", "value"}  # a date and "=" are texts
    kept = {
        first: [(tag, pattern) for tag, pattern in rules if tag.rpartition(":")[2] not in replaced]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    RecipeLoader.yaml_implicit_resolvers = kept
    for name, pattern in _YAML_1_2.items():
        first = "tTfF" if name == "bool" else "-+.0123456789"
        RecipeLoader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"^({pattern})$"), list(first))
    RecipeLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
    RecipeLoader.add_constructor(
        "tag:yaml.org,2002:float", lambda _, node: float(re.sub(r"\.(?=inf|nan)", "", node.value))
    )


def _construct_int(_: Any, node: Any) -> int:
    try:
        return int(node.value)
    except ValueError as error:  # Python reads no more than some thousand digits
        raise ConstructorError(None, None, str(error), node.start_mark) from error


_follow_yaml_1_2()


def parse_yaml(text: str, where: str) -> Any:
    """The content of a YAML text.

    Args:
        text: the text.
        where: its name in an error.

    Returns:
        What it holds.

    Raises:
        RecipeError: if it is not YAML, or a key of a mapping stands twice; with the line.
    """
    try:
        return yaml.load(text, Loader=RecipeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise RecipeError(f"{where}{line}: {getattr(error, 'problem', None) or error}") from error


def typed(key: str, value: Any, annotation: Any, where: str) -> Any:
    """A value as its type says, with the usual liberties: ``"1e-6"`` is a float, 8.0 an int, ``"yes"`` a bool.

    One value stands for a list of one, where only a list would do.

    Args:
        key: name of the setting.
        value: as YAML gave it.
        annotation: the type that it must have.
        where: where the value comes from, for an error.

    Returns:
        The value in that type.

    Raises:
        RecipeError: if it does not fit, naming key, value and type.
    """
    choices = _enum_values(annotation)
    if choices and isinstance(value, str) and value not in choices:
        raise RecipeError(
            f"{where}: {key}: {value!r} is unknown.{suggest(value, choices)} Legal: {', '.join(choices)}."
        )
    # pydantic would take True for the number 1
    bool_for_number = isinstance(value, bool) and _accepts(annotation, int, float) and not _accepts(annotation, bool)
    try:
        if not bool_for_number:
            return TypeAdapter(annotation).validate_python(value)
        problem = ""
    except ValidationError as error:
        if isinstance(value, (str, int, float, dict)) and not isinstance(value, bool) and _accepts_list(annotation):
            with contextlib.suppress(ValidationError):
                return TypeAdapter(annotation).validate_python([value])
        problem = _problem(error, value)
    raise RecipeError(f"{where}: {key}: {value!r} is not {type_name(annotation)}{problem}")


def parse_words(words: list[str]) -> Any:
    """What the words of the command line say, each read as YAML; several make a list, and none means true.

    Args:
        words: what followed a key.

    Returns:
        The value; a word that is no YAML is a text.

    Example:
        >>> parse_words(["1e-6"]), parse_words(["a", "null"]), parse_words([]), parse_words(["[a"])
        (1e-06, ['a', None], True, '[a')
    """
    parsed = [_parse_word(word) for word in words]
    return True if not parsed else parsed[0] if len(parsed) == 1 else parsed


def typed_from_words(key: str, words: list[str], annotation: Any, where: str) -> Any:
    """A value from the words of the command line.

    Each word is read as YAML first (numbers, null, lists and mappings), and as plain text where that does not fit the
    type, so that ``--run_name 7`` is the text "7". No word means true; several words make a list.

    Args:
        key: name of the setting.
        words: what followed the key.
        annotation: the type that it must have.
        where: where the value comes from, for an error.

    Returns:
        The value in that type.

    Raises:
        RecipeError: if it does not fit.
    """
    try:
        return typed(key, parse_words(words), annotation, where)
    except RecipeError as error:
        if not words:
            raise
        try:
            return typed(key, words[0] if len(words) == 1 else words, annotation, where)
        except RecipeError:
            raise error from None


def type_name(annotation: Any) -> str:
    """How a type is called in a message: ``int``, ``float or null``, ``str or a list of str``."""
    names = []
    for member in _members(annotation):
        origin = typing.get_origin(member) or member
        if origin is type(None):
            names.append("null")
        elif origin is list:
            names.append(f"a list of {type_name(typing.get_args(member)[0])}" if typing.get_args(member) else "a list")
        elif origin is dict or dataclasses.is_dataclass(origin):
            names.append("a mapping")
        elif origin is typing.Literal:
            names.extend(repr(choice) for choice in typing.get_args(member))
        elif not (isinstance(origin, type) and issubclass(origin, enum.Enum)):  # an enum is told by its values
            names.append(getattr(origin, "__name__", str(origin)))
    names.sort(key="null".__eq__)
    return " or ".join(dict.fromkeys(names))


def _parse_word(word: str) -> Any:
    try:
        return yaml.load(word, Loader=RecipeLoader)
    except yaml.YAMLError:
        return word


def _members(annotation: Any) -> tuple[Any, ...]:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _accepts(annotation: Any, *kinds: Any) -> bool:
    return any(member in kinds for member in _members(annotation))


def _accepts_list(annotation: Any) -> bool:
    return any((typing.get_origin(member) or member) is list for member in _members(annotation))


def _enum_values(annotation: Any) -> list[str]:
    enums = [m for m in _members(annotation) if isinstance(m, type) and issubclass(m, enum.Enum)]
    return [str(choice.value) for e in enums for choice in e]


def _problem(error: ValidationError, value: Any) -> str:
    """What is wrong inside a list or mapping: the place and pydantic's words. Plain values speak for themselves."""
    if not isinstance(value, (list, dict)):
        return "; put it in quotes if a text is meant" if _wants_quotes(error, value) else ""
    deepest = max(error.errors(include_url=False), key=lambda d: len(d["loc"]))
    # of pydantic's path, the places and keys; the names of the types that it tried say nothing to a user
    place = ".".join(str(part) for part in deepest["loc"] if isinstance(part, int) or _is_key(part, value))
    return f" (at {place}: {deepest['msg'].lower()})" if place else ""


def _is_key(name: str, value: Any) -> bool:
    """Whether a name is a key somewhere in nested lists and mappings."""
    if isinstance(value, dict):
        return name in value or any(_is_key(name, v) for v in value.values())
    return isinstance(value, list) and any(_is_key(name, v) for v in value)


def _wants_quotes(error: ValidationError, value: Any) -> bool:
    return not isinstance(value, str) and any(d["type"] == "string_type" for d in error.errors(include_url=False))
