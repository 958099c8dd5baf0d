"""The one error that the command line reports without a traceback. Apart, so that ``--help`` imports nothing heavy."""

from __future__ import annotations


class RecipeError(ValueError):
    """A recipe, or a setting on the command line, is wrong. The message says which and what to do."""
