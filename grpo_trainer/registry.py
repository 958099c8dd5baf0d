"""From a name to a function: a literal table, or ``pkg.mod:fn`` for one's own."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def resolve(name: str | Callable, table: Mapping[str, Callable], what: str, **kwargs: Any) -> Callable:
    """The function that ``name`` stands for, with its keyword arguments bound.

    Args:
        name: a key of ``table``, an import path ``pkg.mod:fn``, or a callable (taken as it is).
        table: the known names.
        what: what the name stands for, for error messages, e.g. ``"loss_type"``.
        **kwargs: bound to the function; each must be one of its parameters.

    Returns:
        The function itself, or a ``functools.partial`` of it if keyword arguments are given.

    Raises:
        ValueError: if the name is unknown (with the nearest legal one), cannot be imported, or does not take one
            of the keyword arguments.

    Example:
        >>> resolve("upper", {"upper": str.upper}, "case")("a")
        'A'
        >>> resolve("uper", {"upper": str.upper}, "case")
        Traceback (most recent call last):
        ...
        ValueError: unknown case 'uper'. Did you mean 'upper'? Known: upper; or give your own as 'pkg.mod:fn'.
    """
    function = name if callable(name) else _lookup(name, table, what)
    if not kwargs:
        return function
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in kwargs:
        if key not in parameters and not takes_any:
            legal = ", ".join(p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY) or "none"
            raise ValueError(f"{what} {name!r} takes no argument {key!r}. Its keyword arguments: {legal}.")
    return functools.partial(function, **kwargs)


def only_accepted(function: Callable, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some keyword arguments that a function takes.

    Args:
        function: whose signature decides.
        kwargs: name -> value.

    Returns:
        The arguments that it takes; all of them if it takes any.

    Example:
        >>> only_accepted(sorted, {"reverse": True, "epsilon": 0.2})
        {'reverse': True}
    """
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(kwargs)
    return {name: value for name, value in kwargs.items() if name in parameters}


def suggest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """``" Did you mean 'x'?"`` for the nearest known name, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _lookup(name: str, table: Mapping[str, Callable], what: str) -> Callable:
    if name in table:
        return table[name]
    if ":" not in name:
        raise ValueError(
            f"unknown {what} {name!r}.{suggest(name, table)} Known: {', '.join(table)}; "
            "or give your own as 'pkg.mod:fn'."
        )
    module_name, _, attribute = name.partition(":")
    try:
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module_name))
    except (ImportError, AttributeError, ValueError, TypeError) as error:  # the last two: "", ".relative"
        raise ValueError(f"{what} {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"{what} {name!r} is a {type(found).__name__}, not a function.")
    return found
