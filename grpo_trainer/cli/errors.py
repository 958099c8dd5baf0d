"""The errors that the command line reports without a traceback. Apart, so that ``--help`` imports nothing heavy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class RecipeError(ValueError):
    """A recipe, or a setting on the command line, is wrong. The message says which and what to do."""


class StartupError(Exception):
    """Something failed before training began, and no setting is known to be at fault."""


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """While a run is made ready: what fails is a ``StartupError``, unless it is a ``RecipeError`` already.

    Raises:
        StartupError: in place of any other exception, with its kind and its first line.
    """
    try:
        yield
    except (RecipeError, StartupError):
        raise
    except Exception as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
        raise StartupError(f"{type(error).__name__}: {first}") from error
