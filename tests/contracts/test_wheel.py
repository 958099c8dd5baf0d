"""The wheel works where there is no checkout: it holds the package, the recipes and the command."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.relative_to(ROOT) for path in (ROOT / "recipes").rglob("*.yaml"))

pytestmark = pytest.mark.slow


def run(command: list[str | Path], cwd: Path) -> str:
    """The standard output of a command that must succeed, run without the caller's import paths."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The interpreter of a new environment that has the wheel, and sees this environment's other packages.

    A .pth file lends it those packages' folder; the .pth files in that folder, through which an editable install
    leads to the checkout, are not read again.
    """
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT], cwd=folder)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", symlinks=True)
    interpreter = folder / "venv" / "bin" / "python"
    purelib = Path(run([interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    (purelib / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "--disable-pip-version-check"]
    run([*pip, "install", "--no-deps", "--no-index", "--force-reinstall", wheel], cwd=folder)
    return interpreter


def test_the_package_is_imported_from_the_wheel(python, tmp_path):
    code = "import grpo_trainer as g; t = g.GRPOTrainer; print(g.__file__); print(t.__module__)"
    *_, file, module = run([python, "-c", code], cwd=tmp_path).splitlines()  # libraries print lines of their own first
    assert Path(file).is_relative_to(python.parents[1])
    assert module == "grpo_trainer.trainer"


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_each_recipe_is_in_the_wheel_as_it_is_here(python, tmp_path, recipe):
    code = (
        f"import importlib.resources as r; print(r.files('grpo_trainer').joinpath({str(recipe)!r}).read_text(), end='')"
    )
    assert run([python, "-c", code], cwd=tmp_path) == (ROOT / recipe).read_text()


def test_type_checkers_find_the_marker(python, tmp_path):
    code = "import importlib.resources as r; print(r.files('grpo_trainer').joinpath('py.typed').is_file())"
    assert run([python, "-c", code], cwd=tmp_path).strip() == "True"


def test_the_module_and_the_command_answer(python, tmp_path):
    assert "quickstart" in run([python, "-m", "grpo_trainer", "--help"], cwd=tmp_path)
    assert "quickstart" in run([python.parent / "grpo-trainer", "--help"], cwd=tmp_path)
