"""What a report does when it fails: it says so once, and training goes on."""

from __future__ import annotations

import logging
from types import TracebackType

logger = logging.getLogger(__name__)


class Guard:
    """A context that a report may fail in. The first failure is said, with its reason; later ones are silent.

    Ctrl-C and the like pass through.

    Args:
        what: what then does not happen, as the start of a sentence.

    Example:
        >>> guard = Guard("the completions are not written to out/completions")
        >>> with guard:
        ...     raise OSError("No space left on device")
        >>> guard.failed
        True
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.failed = False

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if not self.failed:
            logger.warning("%s (%s: %s); training goes on without", self.what, type(error).__name__, error)
        self.failed = True
        return True
