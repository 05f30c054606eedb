"""The folder of a run: which run owns it, and whether a run may begin or resume there.

Three files keep one run's checkpoints from another's: `.lock` while a process trains, `recipe.yaml` with the settings,
and `data.json` with digests of data and model. A run that would continue another run's checkpoints is refused.
"""

import json
import shutil
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from attnres.checkpoints.source import COMMIT
from attnres.utils.files import atomic_write, check_replaceable, check_writable, locked, parents
from attnres.utils.model_files import WRITTEN_ADAPTER, WRITTEN_MODEL
from attnres.utils.yaml_files import parse_yaml

from .recipe import RUN_LENGTHS, Recipe, read_recipe, write_recipe
from .settings import Settings

RECIPE, RESULTS, DATA, LOCK = "recipe.yaml", "results.json", "data.json", ".lock"
MODEL, ADAPTER = "model", "adapter"
PARTIAL = ".partial-"  # the prefix of a folder that a checkpoint is written into
START = ".start"  # the folder of a whole model that is about to be sharded
# Folders that a killed run may leave half-written, the second of them by `atomic_directory`.
HALF_WRITTEN = (f"{PARTIAL}*", ".*.partial", START)
_OTHER_OUT = "Choose another `out`."
# Settings that may change when a run is resumed. `check_length` checks the length.
MAY_CHANGE = ("log_every", "save_every", "keep", "micro_batch_size", *RUN_LENGTHS)


def check_folder(out: Path, recipe: Recipe) -> None:
    """Raise if no run of a recipe can begin or resume in `out`.

    Args:
        out: The folder.
        recipe: The recipe of the run.

    Raises:
        FileExistsError: `out` is a file, or holds a finished run of this length, a run of another recipe or other
            files; or its `model` or `adapter`, which the run replaces at its end, holds other files.
        OSError: `out` cannot be written.
        ValueError: The recipe in `out` is damaged.
    """
    if (out / RESULTS).exists():
        if not any(out.glob("checkpoint-*")):
            raise FileExistsError(f"{out} holds a finished run, without a checkpoint to go on from. {_OTHER_OUT}")
        before = _read_run_recipe(out)
        if all(getattr(recipe, name) == getattr(before, name) for name in RUN_LENGTHS):
            raise FileExistsError(f"{out} holds a finished run. Give more `steps` to go on with it, or another `out`.")
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"{out} is a file. {_OTHER_OUT}")
    if out.exists() and {path.name for path in out.iterdir()} - {LOCK} and not _is_run_folder(out):
        raise FileExistsError(f"{out} holds other files. {_OTHER_OUT}")
    for name, written in ((MODEL, WRITTEN_MODEL), (ADAPTER, WRITTEN_ADAPTER)):
        check_replaceable(out / name, written, overwrite=True)
    if (out / RECIPE).exists() and any(out.glob("checkpoint-*")):
        _check_same_recipe(out, recipe)
    check_writable(out, f"`out` {out} of the recipe")


def _check_same_recipe(out: Path, recipe: Recipe) -> None:
    """Raise FileExistsError if the run in a folder, which has a checkpoint, has another recipe."""
    before = _read_run_recipe(out)
    may_change = MAY_CHANGE
    if None not in (before.pipeline, recipe.pipeline):
        may_change += ("pipeline",)  # a checkpoint of a pipeline can be resumed with another number of stages
    changed = [
        f"{item.name} {_show(old)}, not {_show(new)}"
        for item in fields(recipe)
        if item.name not in may_change and (old := getattr(before, item.name)) != (new := getattr(recipe, item.name))
    ]
    if changed:
        raise FileExistsError(
            f"{out} holds a run with {'; '.join(changed)}. Choose another `out`, or resume with the recipe as it was."
        )


def _show(value: Any) -> str:
    """Return a value of a recipe for a message, `default` for a key that was not given."""
    value = value.given() if isinstance(value, Settings) else value
    return repr(value) if value or value in (0, False) else "default"


def _is_run_folder(out: Path) -> bool:
    """Return whether a run made this folder."""
    if not (out / RECIPE).exists():
        return False
    if any(out.glob("checkpoint-*")):
        return True
    # A run writes every key in a fixed order, as YAML that is written again in the same way. A recipe that a person
    # wrote, beside other files, looks different.
    text = (out / RECIPE).read_text(encoding="utf-8", errors="replace")
    keys = [*parse_yaml(write_recipe(_read_run_recipe(out)), out / RECIPE)]
    content = parse_yaml(text, out / RECIPE)
    # Runs of earlier versions lack this key.
    orders = keys, [key for key in keys if key != "import"]
    return [*content] in orders and yaml.safe_dump(content, sort_keys=False, allow_unicode=True) == text


def _read_run_recipe(out: Path) -> Recipe:
    """Read the recipe that a run has written into its folder. Raise ValueError if the file is not a recipe."""
    try:
        return read_recipe(out / RECIPE)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{out / RECIPE} is not the recipe of a run ({str(error).rstrip('.')}). Restore it to resume that run, "
            "or choose another `out`."
        ) from error


@contextmanager
def hold_folder(out: Path, recipe: Recipe) -> Generator[None]:
    """Lock the folder of a run while the block trains into it, and write the recipe of a new run there.

    Only the first process calls it. The lock belongs to this process: if the launcher is killed and this process
    survives, the folder stays locked.

    Args:
        out: The folder.
        recipe: The recipe of the run.

    Raises:
        FileExistsError: Another process trains into `out`, or `out` is a file or holds another run or other files.
        ValueError: The recipe in `out` is damaged.
        OSError: `out` cannot be made or written.
    """
    check_folder(out, recipe)
    with parents(out / RECIPE), ExitStack() as lock:
        try:
            lock.enter_context(locked(out / LOCK, out))
        except FileExistsError as error:
            raise FileExistsError(
                f"{out} is in use: another process trains into it, perhaps one that has survived its launcher. "
                "Wait for that process or end it, or choose another `out`."
            ) from error
        check_folder(out, recipe)  # again, since another process may have used the folder before this one locked it
        is_new = not (out / RECIPE).exists()
        if not any(out.glob("checkpoint-*")):  # else `record_run` writes it
            atomic_write(out / RECIPE, write_recipe(recipe))
        for pattern in HALF_WRITTEN:
            for path in out.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
        try:
            yield
        except BaseException:
            # A run that is refused before it has begun leaves nothing behind.
            if is_new and not (out / DATA).exists():
                (out / RECIPE).unlink(missing_ok=True)
            raise


def check_length(out: Path, checkpoint: Path, steps: int) -> str:
    """Check the length of a run that resumes.

    Args:
        out: The folder of the run.
        checkpoint: The checkpoint that the run resumes from.
        steps: The number of steps of the run.

    Returns:
        A line that says where the run resumes and, if its length has changed, how long it was and is.

    Raises:
        FileExistsError: The run has made so many steps already.
    """
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    made, before = state["global_step"], state["max_steps"]
    # A shorter run may end at its last checkpoint, but a finished one has ended.
    least = before + 1 if (out / RESULTS).exists() else made
    if steps < least:
        raise FileExistsError(
            f"{out} holds a run of {before} steps that has made {max(made, least - 1)}, but the recipe asks for "
            f"{steps}: give `steps` of at least {least}, or another `out`."
        )
    changed = f" The run has {steps} steps instead of {before}, and its schedule is that of {steps}."
    return f"Resuming from {checkpoint}.{changed if steps != before else ''}"


def check_data(out: Path, digests: Mapping[str, str]) -> None:
    """Compare the data and the model of a run that resumes with the record of [`record_run`].

    Args:
        out: The folder of the run.
        digests: Key of the recipe -> a text that changes with the data (`train`, `held_out`) or the `model`.

    Raises:
        FileExistsError: The data or the model has changed since the run began.
        ValueError: The record is damaged.
    """
    path = out / DATA
    if not path.exists():
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        before = None
    if not isinstance(before, dict):
        raise ValueError(
            f"{path} is damaged, so that changed data would go unnoticed. Restore it, or remove it to resume "
            "without that check."
        )
    # A key that the record lacks cannot be compared.
    if changed := [f"`{name}`" for name in digests if before.get(name, digests[name]) != digests[name]]:
        verb = "have" if len(changed) > 1 else "has"
        commits = [str(record.get("model", "")) for record in (before, digests)]
        detail = ""
        if commits[0] != commits[1] and all(text.startswith(COMMIT) for text in commits):
            detail = f" (`model` was at {commits[0]} on the Hub, and is at {commits[1]} now)"
        raise FileExistsError(
            f"{' and '.join(changed)} {verb} changed since the run in {out} began{detail}: resuming would train "
            "another model. Put it back as it was, or choose another `out`."
        )


def record_run(out: Path, recipe: Recipe, digests: Mapping[str, str], is_resumed: bool) -> None:
    """Record the recipe of a run that nothing refuses any more, and the data and the model of a new one.

    A finished run that goes on counts as stopped from now on.

    Args:
        out: The folder of the run.
        recipe: The recipe of the run.
        digests: As for [`check_data`].
        is_resumed: Whether the run resumes from a checkpoint.
    """
    (out / RESULTS).unlink(missing_ok=True)
    atomic_write(out / RECIPE, write_recipe(recipe))
    if not (is_resumed and (out / DATA).exists()):
        atomic_write(out / DATA, json.dumps(digests, indent=2) + "\n")


__all__ = [
    "ADAPTER",
    "DATA",
    "MODEL",
    "RECIPE",
    "RESULTS",
    "check_data",
    "check_folder",
    "check_length",
    "hold_folder",
    "record_run",
]
