"""How a function gets into a worker: by the name of its module where a worker can import that, else as a whole."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def carry(name: str, function: Callable[..., Any], readable: Sequence[Path] | None = None) -> bytes:
    """A pickle of a function that a worker can load: also of a lambda, a closure, or a function of a notebook.

    Args:
        name: of the function, for messages.
        function: a function, a partial of one, or a callable object.
        readable: folders that the worker can read; None: all that this process can. A function of a module that lies
            elsewhere is carried as a whole.

    Returns:
        The pickle.

    Raises:
        ValueError: if it cannot be pickled.
    """
    import cloudpickle

    try:
        with _as_a_whole([m for m in _modules(function) if not _importable(m, readable)]):
            return cloudpickle.dumps(function)
    except Exception as error:
        raise ValueError(
            f"reward function {name!r} cannot be carried to a worker process: {type(error).__name__}: {error}. Let it "
            "make what cannot be pickled (models, locks, open files) when it is called, or set isolation='inline'"
        ) from error


def pack(value: Any) -> bytes:
    """A pickle of arguments, which may hold what only a notebook knows.

    Args:
        value: anything that can be pickled.

    Returns:
        The pickle.
    """
    import cloudpickle

    return cloudpickle.dumps(value)


@contextlib.contextmanager
def _as_a_whole(modules: Sequence[ModuleType]) -> Iterator[None]:
    import cloudpickle

    registered = []
    try:
        for module in modules:
            if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                registered.append(module)
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _modules(function: Any) -> list[ModuleType]:
    """The modules in which a function, what it wraps, and the class of an object are written; not ``__main__``."""
    names = []
    while function is not None:
        names += [getattr(function, "__module__", None), type(function).__module__]
        if isinstance(function, functools.partial):
            function = function.func
        else:
            function = getattr(function, "__wrapped__", None) or getattr(function, "__self__", None)
    found = [sys.modules[n] for n in dict.fromkeys(names) if isinstance(n, str) and n in sys.modules]
    return [m for m in found if m.__name__ not in ("__main__", "builtins")]


def _importable(module: ModuleType, readable: Sequence[Path] | None) -> bool:
    """Whether another process that searches the same folders finds the module."""
    parts = module.__name__.split(".")
    path: Any = None
    spec: Any = None
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        finders = [finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")]
        try:
            spec = next((found for find in finders if (found := find(name, path)) is not None), None)
        except (ImportError, AttributeError, ValueError):
            return False
        if spec is None:
            return False
        path = spec.submodule_search_locations
    file = getattr(module, "__file__", None)
    if file is None:
        return True  # built in
    if spec.origin is None or Path(spec.origin).resolve() != Path(file).resolve():
        return False
    return readable is None or any(Path(file).resolve().is_relative_to(folder.resolve()) for folder in readable)
