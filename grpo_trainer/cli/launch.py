"""Whether as many processes run as were asked for. A run with too few of them trains on smaller batches, unnoticed."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.shipped import recipes_folder


def started_processes(environ: Mapping[str, str]) -> int:
    """How many processes the launcher started, as it tells each of them; 1 without a launcher."""
    value = environ.get("WORLD_SIZE", "1")
    return int(value) if value.isdigit() else 1


def check_processes(wanted: int | None, environ: Mapping[str, str]) -> str | None:
    """Checks the number of processes before anything is loaded.

    Args:
        wanted: ``num_processes`` of the recipe; None for any number.
        environ: the environment of this process.

    Returns:
        A sentence, if the launcher seems to have started fewer processes than it was asked for.

    Raises:
        RecipeError: if the recipe is made for another number.
    """
    started = started_processes(environ)
    if wanted is not None and wanted != started:
        one = (
            "grpo-trainer train …"
            if wanted == 1
            else f"accelerate launch --config_file FILE --num_processes {wanted} …"
        )
        raise RecipeError(
            f"num_processes={wanted}, but {started} {'process runs' if started == 1 else 'processes run'}: start it "
            f"with `{one}`, or set num_processes to {started}, which changes the number of completions in a step"
        )
    if started == 1 and "WORLD_SIZE" not in environ and {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= set(environ):
        # the launcher names a meeting point only if it was asked for several processes
        return (
            "accelerate launch was asked for several processes and started one: with --cpu, or a distributed_type of "
            f"MULTI_CPU, it always does. For several: accelerate launch --config_file "
            f"{recipes_folder() / 'accelerate' / 'cpu.yaml'} --num_processes N -m grpo_trainer train …"
        )
    return None


def check_joined(world_size: int, environ: Mapping[str, str]) -> None:
    """Checks that the processes that were started train together.

    Args:
        world_size: of the run, as the trainer's configuration has it.
        environ: the environment of this process.

    Raises:
        RecipeError: if they do not.
    """
    started = started_processes(environ)
    if world_size != started:
        raise RecipeError(
            f"the launcher started {started} processes (WORLD_SIZE), but {world_size} would train together, and the "
            "others write into the same folder: unset WORLD_SIZE, or launch with accelerate or torchrun"
        )
