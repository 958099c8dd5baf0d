"""Imports point down, and each heavy package has one door.

Every module of the package is read with ``ast`` (nothing is imported), so imports inside functions count too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import grpo_trainer

PACKAGE = Path(grpo_trainer.__path__[0])

# The floor of each room (a file or a folder directly under the package). An import may go down or stay on the floor.
FLOORS = {
    **dict.fromkeys(["__init__", "__main__", "cli"], 5),
    **dict.fromkeys(
        ["config", "not_yet", "divergence", "variants", "selection", "assembly", "resumable", "trainer", "reports"], 4
    ),
    **dict.fromkeys(["rollout", "dynamic", "evaluation", "accumulation"], 3),
    **dict.fromkeys(
        ["objective", "loss", "policy", "sampler", "metrics", "data", "loading", "rewards", "generation"], 2
    ),
    **dict.fromkeys(["dataset", "tasks", "gym", "builtin", "runtime", "trl_door"], 2),
    **dict.fromkeys(["stream", "difficulty", "checkpoint", "preemption"], 2),
    **dict.fromkeys(["types", "registry"], 1),
    **dict.fromkeys(["functional"], 0),
}
# Heavy packages, and the only rooms that may import them.
DOORS = {
    "peft": {"loading"},
    "bitsandbytes": {"loading"},
    "trl": {"trl_door"},
    "wandb": {"reports"},
    "matplotlib": {"reports"},
    "trackio": {"reports"},
    "IPython": {"reports"},
    "pydantic": {"cli"},
    "yaml": {"cli"},
    "vllm": set(),
}
# Parts of transformers that only the trainer and its configuration may see; who watches a run may see callbacks too.
CONFIGURES = {"trainer", "resumable", "config", "not_yet", "variants"}
WATCHERS = {"assembly", "trainer", "resumable", "reports", "cli"}
TRAINER_PARTS = {
    **{name: CONFIGURES for name in ["trainer", "Trainer", "trainer_seq2seq", "Seq2SeqTrainer"]},
    **{name: CONFIGURES for name in ["training_args", "TrainingArguments", "Seq2SeqTrainingArguments"]},
    **{name: WATCHERS for name in ["trainer_callback", "TrainerCallback", "TrainerControl"]},
    **{name: WATCHERS for name in ["TrainerState", "ProgressCallback", "PrinterCallback"]},
}
GROUND_FLOOR_PACKAGES = {"torch", *sys.stdlib_module_names}


class Import(NamedTuple):
    """One imported name, e.g. ``transformers.Trainer``, and where it stands."""

    room: str
    place: str
    target: str
    type_checking: bool


def imports(package: Path) -> Iterator[Import]:
    """Every import of every module, relative ones resolved, names of ``from`` imports joined on."""
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        if "recipes" in relative.parts:
            continue
        parents = [package.name, *relative.parent.parts]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        guarded = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for statement in node.body
            for inner in ast.walk(statement)
        }
        for node in ast.walk(tree):
            for target in targets(node, parents):
                yield Import(
                    relative.parts[0].removesuffix(".py"), f"{relative}:{node.lineno}", target, id(node) in guarded
                )


def targets(node: ast.AST, parents: list[str]) -> list[str]:
    """What one syntax node imports, as dotted names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = ([*parents[: len(parents) - node.level + 1]] if node.level else []) + ([node.module] * bool(node.module))
        return [".".join([*base, alias.name]) for alias in node.names]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "transformers":
        return [f"transformers.{node.attr}"]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}:
        return [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return []


def room_of(target: str, package: Path) -> str:
    """The room that ``grpo_trainer.x.y`` lies in; a name of the package itself lies in ``__init__``."""
    room = target.split(".")[1] if "." in target else "__init__"
    known = room in FLOORS or (package / room).is_dir() or (package / f"{room}.py").is_file()
    return room if known else "__init__"


def broken_floors(package: Path) -> list[str]:
    """Imports that point up, and rooms without a floor."""
    faults = []
    for found in imports(package):
        if found.room not in FLOORS:
            faults.append(f"{found.place}: {found.room} has no floor; give it one in FLOORS")
            continue
        if found.target.split(".")[0] != package.name:
            continue
        target = room_of(found.target, package)
        if FLOORS[found.room] < FLOORS.get(target, 0):
            faults.append(
                f"{found.place}: {found.room} (floor {FLOORS[found.room]}) imports {found.target} "
                f"(floor {FLOORS[target]}); imports point down"
            )
    return faults


def circles(package: Path) -> list[str]:
    """Rooms that import each other, directly or through others."""
    below: dict[str, set[str]] = {}
    for found in imports(package):
        if found.target.split(".")[0] == package.name and not found.type_checking:
            below.setdefault(found.room, set()).add(room_of(found.target, package))
    faults = []
    for start in below:
        reached, new = set(), below[start] - {start}
        while new:
            reached |= new
            new = set().union(*(below.get(room, set()) for room in new)) - reached
        if start in reached:
            faults.append(start)
    return [f"these rooms import each other: {', '.join(sorted(faults))}"] if faults else []


def broken_doors(package: Path) -> list[str]:
    """Heavy packages that come in by another door. What only a type checker sees is exempt."""
    faults = []
    for found in imports(package):
        names = found.target.split(".")
        doors = DOORS.get(names[0])
        if names[0] == "transformers":
            doors = next((TRAINER_PARTS[name] for name in names[1:] if name in TRAINER_PARTS), None)
        if doors is not None and found.room not in doors and not found.type_checking:
            allowed = ", ".join(sorted(doors)) or "no room"
            faults.append(f"{found.place}: {found.room} imports {found.target}; {allowed} may")
    return faults


def broken_ground(package: Path) -> list[str]:
    """What functional/ imports besides torch, the standard library and itself."""
    return [
        f"{found.place}: functional imports {found.target}; torch and the standard library are all it knows"
        for found in imports(package)
        if found.room == "functional"
        and found.target.split(".")[0] not in GROUND_FLOOR_PACKAGES
        and not found.target.startswith(f"{package.name}.functional")
    ]


RULES = [broken_floors, circles, broken_doors, broken_ground]


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps_the_rule(rule):
    assert len(list(imports(PACKAGE))) > 10, f"found next to no imports in {PACKAGE}"
    assert rule(PACKAGE) == []


@pytest.mark.parametrize(
    ("rule", "file", "line"),
    [
        (broken_floors, "functional/kl.py", "from fake.registry import resolve"),
        (broken_floors, "rollout.py", "from fake.config import GRPOConfig"),
        (broken_floors, "rollout.py", "from fake import config"),
        (broken_floors, "rollout.py", "import fake.config"),
        (broken_floors, "rollout.py", "from . import config"),
        (broken_floors, "rewards/base.py", "from ..config import GRPOConfig"),
        (broken_floors, "rewards/base.py", "from ..rollout import collect"),
        (broken_floors, "rollout.py", "def f():\n    from fake.config import GRPOConfig"),
        (broken_floors, "rollout.py", "if TYPE_CHECKING:\n    from fake.config import GRPOConfig"),
        (broken_floors, "rollout.py", "import importlib\nimportlib.import_module('fake.config')"),
        (broken_floors, "trainer.py", "from fake import GRPOTrainer"),
        (broken_floors, "attic.py", "import math"),
        (circles, "config.py", "import fake.trainer"),
        (broken_doors, "rollout.py", "import peft"),
        (broken_doors, "trainer.py", "from peft import LoraConfig"),
        (broken_doors, "rewards/base.py", "def f():\n    import peft.tuners.lora"),
        (broken_doors, "data.py", "from trl.data_utils import is_conversational"),
        (broken_doors, "reports/html.py", "import yaml"),
        (broken_doors, "generation/vllm.py", "import vllm"),
        (broken_doors, "loading.py", "from transformers import Trainer"),
        (broken_doors, "loading.py", "import transformers\nx = transformers.TrainingArguments"),
        (broken_doors, "data.py", "from transformers.trainer_callback import TrainerCallback"),
        (broken_ground, "functional/kl.py", "import numpy"),
        (broken_ground, "functional/kl.py", "if TYPE_CHECKING:\n    from transformers import PreTrainedModel"),
        (broken_ground, "functional/kl.py", "from fake.types import RolloutBatch"),
    ],
)
def test_a_breach_is_found(tmp_path, rule, file, line):
    assert rule(fake_package(tmp_path / "sound" / "fake")) == []
    package = fake_package(tmp_path / "fake", file, line)
    assert len(rule(package)) == 1, rule(package)


def fake_package(package: Path, file: str = "types.py", line: str = "") -> Path:
    """A small house in which everything is in its place, with ``line`` added to ``file``."""
    sound = {
        "__init__.py": "def __getattr__(name):\n    from fake.trainer import GRPOTrainer",
        "types.py": "import torch\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import peft",
        "registry.py": "import importlib",
        "functional/kl.py": "import math\nimport torch.nn.functional as F\nfrom .shapes import check_shapes",
        "functional/shapes.py": "from torch import Tensor",
        "loading.py": "def f():\n    import peft, bitsandbytes",
        "rewards/base.py": "from ..types import Row",
        "rollout.py": "from fake.rewards.base import RewardSet\nfrom transformers import set_seed",
        "config.py": "from transformers import TrainingArguments",
        "reports/html.py": "import matplotlib.pyplot\nfrom transformers import TrainerCallback",
        "trainer.py": "from transformers import Trainer\nfrom fake.config import GRPOConfig\nimport fake.reports.html",
        "cli/train.py": "import yaml\nfrom fake import GRPOTrainer",
    }
    for name, text in {**sound, file: f"{sound.get(file, '')}\n{line}\n"}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return package


def test_importing_the_package_is_lazy(tmp_path):
    script = "import sys, grpo_trainer; print(*{'torch', 'transformers', 'trl', 'peft', 'datasets'} & set(sys.modules))"
    path = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); "
    run = subprocess.run([sys.executable, "-c", path + script], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "", f"`import grpo_trainer` already imports {run.stdout.strip()}"
