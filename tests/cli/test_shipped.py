from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from grpo_trainer.cli import shipped as module
from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.recipe import load_recipe
from grpo_trainer.cli.shipped import find_recipe, first_comment, launcher_files, recipe_names

ROOT = Path(__file__).parents[2]
SUMS = "quickstart/smollm2-135m-sums"


@pytest.mark.parametrize("name", [SUMS, f"{SUMS}.yaml", "smollm2-135m-sums", f"recipes/{SUMS}.yaml"])
def test_packaged_recipes_are_found_by_name_from_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe(name) == ROOT / "recipes" / f"{SUMS}.yaml"


def test_a_file_comes_before_a_packaged_recipe_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("smollm2-135m-sums").write_text("seed: 1")
    assert find_recipe("smollm2-135m-sums") == Path("smollm2-135m-sums")


def test_a_recipe_that_is_not_there_is_refused_with_the_nearest():
    with pytest.raises(RecipeError, match=r"no file 'smollm2-135m-sum'.*Did you mean 'smollm2-135m-sums'\?"):
        find_recipe("smollm2-135m-sum")


def test_a_name_that_stands_for_several_is_refused(tmp_path, monkeypatch):
    for folder in ("a", "b", "accelerate"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.yaml").write_text("seed: 1")
    monkeypatch.setattr(module, "recipes_folder", lambda: tmp_path)
    assert recipe_names() == ["a/x", "b/x"]  # accelerate's own files are no recipes
    assert find_recipe("a/x") == tmp_path / "a" / "x.yaml"
    with pytest.raises(RecipeError, match="'x' stands for several: a/x, b/x"):
        find_recipe("x")


@pytest.mark.parametrize("name", recipe_names())
def test_every_packaged_recipe_is_read_and_makes_a_configuration(name):
    recipe = load_recipe(name)
    recipe.config()
    assert recipe.arguments.model_name_or_path and recipe.arguments.dataset_name and recipe.arguments.rewards()
    assert f"[{name}]({name}.yaml)" in (ROOT / "recipes" / "README.md").read_text()


def test_a_folder_is_told_from_a_recipe(tmp_path):
    with pytest.raises(RecipeError, match=r"is a folder; give a recipe in it, e\.g\. the run\.yaml that a run leaves"):
        find_recipe(str(tmp_path))


def test_files_for_the_launcher_start_several_processes():
    assert [path.name for path in launcher_files()] == ["cpu.yaml", "ddp.yaml"]
    for path in launcher_files():
        config = load_config_from_file(str(path))
        # MULTI_CPU would start a single one
        assert (config.distributed_type.value, config.num_processes, config.num_machines) == ("MULTI_GPU", 2, 1)
        assert config.use_cpu == (path.name == "cpu.yaml")
        assert config.mixed_precision == "no"  # the recipe's bf16 decides
        assert "num_processes" in first_comment(path)
        assert f"[accelerate/{path.name}](accelerate/{path.name})" in (ROOT / "recipes" / "README.md").read_text()


def test_a_file_without_a_comment_has_no_line_about_it(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("seed: 1\n# later")
    assert first_comment(path) == ""
