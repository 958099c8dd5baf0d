"""``python -m grpo_trainer`` and ``accelerate launch -m grpo_trainer``: the command line."""

from __future__ import annotations

import sys

from grpo_trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
