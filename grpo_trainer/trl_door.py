"""The one door to trl: what it does well outside the objective.

Imported lazily, since trl brings much with it.
"""

from __future__ import annotations

from typing import Any


def is_conversational(prompt: Any) -> bool:
    """Whether a prompt is a list of messages (``role`` and ``content``), as trl tells it."""
    from trl.data_utils import is_conversational as peer

    return bool(peer({"prompt": prompt}))
