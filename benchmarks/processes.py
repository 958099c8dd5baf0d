"""Measurements in processes of their own, all with the same environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
# glibc hands large blocks back to the kernel after every free, and page faults then dominate: both sides are spared it
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "8589934592",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}


def environment(model: str | None = None) -> dict[str, str]:
    """What both sides run in: allocator, this checkout, no hub, and the same number of threads.

    Args:
        model: the name or folder that ``workloads.MODEL`` is to be; None leaves it.

    Returns:
        The environment of a process.
    """
    import torch

    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads()))}
    return {**os.environ, **MALLOC, **threads, **own, **({"BENCH_MODEL": model} if model else {})}


def run(script: str, arguments: Sequence[Any], folder: Path, model: str | None = None) -> dict[str, Any]:
    """One process.

    Args:
        script: a file beside this one.
        arguments: of it; the folder is added as the last.
        folder: where it writes ``result.json``.
        model: as in ``environment``.

    Returns:
        What it wrote.

    Raises:
        SystemExit: with the end of its output, if it failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(HERE / script), *map(str, arguments), str(folder)]
    done = subprocess.run(command, env=environment(model), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Writes a result file, whole or not at all.

    Args:
        path: of the file.
        value: what JSON can hold.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)
