"""From a name to what ``from_pretrained`` makes of it, with one clear sentence if nothing is there."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch

from grpo_trainer.builtin import is_builtin, resolve_builtin
from grpo_trainer.registry import suggest

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What of model_init_kwargs says where files are; the rest is about the model.
_WHERE = ("revision", "token", "cache_dir", "subfolder", "local_files_only", "force_download", "proxies")


def load_causal_lm(name: str, kwargs: dict[str, Any] | None, trust_remote_code: bool, quantization_config: Any) -> Any:
    """A causal language model by name, as TRL loads it: the class that its configuration names.

    Args:
        name: a hub name, a folder, or ``builtin:…``.
        kwargs: of ``from_pretrained``, not changed; ``dtype`` may be a string, and is float32 if there is none.
        trust_remote_code: run code that the repository brings, unless ``kwargs`` says.
        quantization_config: loads it in few bits.

    Returns:
        The model, in eval mode.
    """
    settings = {"dtype": "float32", "trust_remote_code": trust_remote_code, **copy.deepcopy(kwargs or {})}
    if "torch_dtype" in settings:
        settings["dtype"] = settings.pop("torch_dtype")
    if isinstance(settings["dtype"], str) and settings["dtype"] != "auto":
        settings["dtype"] = _dtype(settings["dtype"])
    if quantization_config is not None:
        settings["quantization_config"] = quantization_config
    return fetch(_architecture_of(name, settings), name, "model", **settings)


def fetch(loader: Any, name: str, what: str, **options: Any) -> Any:
    """What ``loader.from_pretrained`` makes of a name.

    Args:
        loader: an auto class of transformers.
        name: a hub name, a folder, or ``builtin:…``.
        what: what is loaded, for error messages.
        **options: of ``from_pretrained``.

    Returns:
        What it returns.

    Raises:
        OSError: if the folder does not hold it, or the hub does not or cannot be reached.
        ValueError: if the folder holds something else.
    """
    place = folder_of(name, what)
    try:
        return loader.from_pretrained(place, **options)
    except OSError as error:
        if Path(place).is_dir():
            raise OSError(f"{what} {name!r} cannot be loaded from that folder: {_first_line(error)}") from error
        raise OSError(
            f"{what} {name!r} is neither a folder here nor could it be fetched from the model hub: "
            f"{_first_line(error)} Give a folder, a hub name (owner/name) or builtin:…"
        ) from error
    except ValueError as error:
        if Path(place).is_dir() and not (Path(place) / "config.json").is_file():
            raise ValueError(f"{what} {name!r}: that folder holds no config.json") from error
        raise


def _architecture_of(name: str, settings: dict[str, Any]) -> Any:
    """The class that a repository's configuration names; the auto class if transformers does not have it."""
    import transformers

    where = {key: settings[key] for key in (*_WHERE, "trust_remote_code") if key in settings}
    config = settings.get("config") or fetch(transformers.AutoConfig, name, "model", **where)
    named = (getattr(config, "architectures", None) or [""])[0]
    check_architecture(named or type(config).__name__, config)
    found = getattr(transformers, named, None) if named else None
    if found is None:
        return transformers.AutoModelForCausalLM
    if not found.can_generate():
        raise ValueError(
            f"model {name!r} is a {named}, which has no language-model head: name a causal language model (its "
            "config.json would name an architecture such as LlamaForCausalLM)"
        )
    return found


def check_architecture(name: str, config: Any) -> None:
    """Refuses an encoder-decoder.

    Args:
        name: of its class.
        config: its configuration.

    Raises:
        ValueError: if it is one.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder; GRPO here trains decoder-only language models")


def folder_of(name: str, what: str) -> str:
    """Where the files of a name are.

    Args:
        name: a hub name, a folder, or ``builtin:…``.
        what: what is to be loaded, for error messages.

    Returns:
        A folder, or the hub's name as it is.

    Raises:
        ValueError: if it reads like a folder that does not exist, is a file, or is an adapter and no model.
    """
    if is_builtin(name):
        return resolve_builtin(name)
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file() and what == "model":
            raise ValueError(
                f"{what} {name!r} is the folder of an adapter: give peft.AutoPeftModelForCausalLM.from_pretrained("
                f"{name!r}, is_trainable=True) as the model"
            )
        return str(path)
    if path.is_file():
        raise ValueError(f"{what} {name!r} is a file; give the folder that holds config.json")
    if name.startswith((".", "~")) or path.is_absolute() or name.count("/") > 1 or "\\" in name:
        raise ValueError(
            f"{what} {name!r}: there is no such folder (looked at {os.path.abspath(path)}). Give a folder, a hub name "
            "(owner/name) or builtin:…"
        )
    return name


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        known = ["auto", *_DTYPES]
        raise ValueError(f"dtype={name!r} is unknown.{suggest(name, known)} Known: {', '.join(known)}")
    return _DTYPES[name]


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
