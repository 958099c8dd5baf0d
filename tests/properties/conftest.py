"""Runs of a tiny training in processes of their own, a second each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("resume_worker.py")
ROOT = WORKER.parents[2]


class Runs:
    """Jobs for the worker, and what they leave."""

    def __init__(self, process: subprocess.Popen, answers) -> None:
        self._process, self._answers = process, answers

    def __call__(self, out: Path, **job) -> list[int]:
        out.mkdir(exist_ok=True)
        job = {"kill": None, "resume": False, "world_size": 1, "out": str(out), "settings": {}, **job}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return json.loads(self._answers.readline())


@pytest.fixture(scope="session")
def runs():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    reads, writes = os.pipe()
    process = subprocess.Popen(
        [sys.executable, str(WORKER), str(writes)], stdin=subprocess.PIPE, pass_fds=[writes], text=True, env=environment
    )
    os.close(writes)
    with os.fdopen(reads) as answers:
        yield Runs(process, answers)
        process.stdin.close()
        process.wait(timeout=60)
