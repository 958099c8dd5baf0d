"""The one door to trl: what it does well outside the objective.

Imported lazily, since trl brings much with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def is_conversational(prompt: Any) -> bool:
    """Whether a prompt is a list of messages (``role`` and ``content``), as trl tells it."""
    from trl.data_utils import is_conversational as peer

    return bool(peer({"prompt": prompt}))


def write_model_card(path: Path, **fields: Any) -> None:
    """Writes a README.md for a trained model, in trl's format.

    Args:
        path: the file to write.
        **fields: what ``trl.trainer.utils.generate_model_card`` takes.
    """
    from trl.trainer.utils import generate_model_card

    generate_model_card(**fields).save(str(path))
