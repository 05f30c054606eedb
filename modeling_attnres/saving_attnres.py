"""Save a model over an older save, so that the folder loads as the old model or as the new one.

`save_pretrained` of `transformers` writes into the folder file by file. Interrupted, it leaves shards of both models,
which load without an error. Completed, it leaves an old `model.safetensors`, which is loaded in place of a new index.
Here a save has three steps, and a kill at any file call loses neither model:

1. Write the new model into a stage, a folder that belongs to one process. The old model is untouched.
2. Rename the stage to `.saved-whole`. From now on the new model counts.
3. Exchange: remove the old weights, then move the new files up, the file that makes them loadable last. The next save
   or load completes an exchange that was killed; the folder holds all that this needs.
"""

import json
import os
import re
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_STAGE = ".saving-"
_WHOLE = ".saved-whole"
# Names of the weights in one file and of the index of several, as `from_pretrained` looks for them.
_FORMS = (
    ("model{variant}.safetensors", "model.safetensors.index{variant}.json"),
    ("pytorch_model{variant}.bin", "pytorch_model.bin.index{variant}.json"),
)
# How the name of one of several files ends. Only `attnres convert` writes the second form.
_PART = r"-(\d{5}-of-\d{5}|residual(-\d+)?)"


@contextmanager
def saved_whole(folder: str | os.PathLike, variant: str | None = None) -> Generator[str]:
    """Make a stage to save a model into, and replace the weights in `folder` by it when the block ends.

    If the block fails, `folder` stays as it was. Files that are not weights of this `variant` stay in any case, except
    those that the block writes too. Of several processes that save to one folder, the last one wins.

    Args:
        folder: the folder that the user saves to.
        variant: variant in the file names, as in `save_pretrained`.

    Yields:
        The path of the stage, a new folder in `folder`.

    Raises:
        OSError: the block wrote no weights, or a file could not be moved. The message names the new model's folder.
    """
    folder = Path(folder)
    if folder.is_file():
        yield os.fspath(folder)  # `transformers` refuses it
        return
    with stage_in(folder) as stage:
        yield stage
        if not _entries(Path(stage), variant):
            raise OSError(f"no weights were saved, so the files in {folder} stay as they are.")
        with _locked(folder):
            _exchange(folder)  # complete the exchange of a process that was killed
            if os.path.lexists(folder / _WHOLE):
                raise OSError(f"{folder / _WHOLE} is not a saved model. Move it away and save again.")
            os.replace(stage, folder / _WHOLE)
            _exchange(folder)


@contextmanager
def stage_in(folder: str | os.PathLike) -> Generator[str]:
    """Make a new folder in `folder` that belongs to this call alone, and remove it when the block ends.

    The stages of processes that were killed are removed first.

    Args:
        folder: the folder to make the stage in; a missing one is made.

    Yields:
        The path of the stage.
    """
    stage = Path(folder) / f"{_STAGE}{uuid4().hex}"
    os.makedirs(folder, exist_ok=True)
    with ExitStack() as stack:
        with _locked(Path(folder)):
            for other in Path(folder).glob(f"{_STAGE}*"):
                if other.is_symlink():
                    # Remove the link alone: in a copied repository, it may lead to files of the user.
                    os.remove(other)
                elif other.is_dir():
                    # Its owner may remove it at the same time.
                    with suppress(FileNotFoundError), _locked(other, wait=False) as is_abandoned:
                        if is_abandoned:
                            _clear(other)
            os.makedirs(stage)
            # A kill frees the lock, by which other processes see that the stage is abandoned.
            stack.enter_context(_locked(stage))
        stack.callback(_clear, stage)
        yield str(stage)


def complete_save(folder: str | os.PathLike) -> bool:
    """Complete the exchange of files that a killed save began in `folder`; wait for one that is under way.

    Args:
        folder: a folder that models are saved to.

    Returns:
        Whether files other than weights may have changed, such as `config.json`.

    Raises:
        OSError: the files cannot be moved.
    """
    folder = Path(folder)
    if not _is_whole(folder / _WHOLE):
        return False
    with _locked(folder):
        if not _is_whole(folder / _WHOLE):
            return True  # the process that held the lock has completed it
        names = {path.name for path in (folder / _WHOLE).iterdir()}
        weights = _weight_files(folder / _WHOLE, _variant(folder / _WHOLE))
        _exchange(folder)
        return names != weights


def _exchange(folder: Path) -> None:
    """Replace the weights in `folder` by the files in `.saved-whole`, if it exists.

    Each step may be done already: by a process that was killed, or by one that runs now on a file system without locks.
    """
    whole = folder / _WHOLE
    if whole.is_symlink():
        os.remove(whole)
    if not _is_whole(whole):
        with suppress(OSError):
            os.rmdir(whole)  # a kill came after the last move; a folder with other files stays
        return
    try:
        variant = _variant(whole)
        entries = _entries(whole, variant)
        names = {path.name for path in whole.iterdir()}
        # A part that the new index lists but that is no longer in `.saved-whole` has been moved already: keep it.
        moved = set().union(*(_named(whole / name) for name in entries)) - names
        # Remove the entries last, because they list the parts; and last of all the entry that is looked for first.
        order = [name for form in _forms(variant) for name in form]
        old = sorted(_weight_files(folder, variant) - moved)
        for name in [name for name in old if name not in order] + [name for name in reversed(order) if name in old]:
            _remove(folder / name)
        # Nothing loads without an entry, so the entries come last. Parts come after the configuration and the code:
        # where only weights are left to move, `config.json` is the new one.
        weights = _weight_files(whole, variant)
        for name in sorted(names, key=lambda name: (name in entries, name in weights, name)):
            with suppress(FileNotFoundError):
                os.replace(whole / name, folder / name)
        with suppress(OSError):
            os.rmdir(whole)
    except OSError as error:
        raise OSError(
            f"{error}. A save into {folder} is not complete, but nothing is lost: its files lie in {whole}. Make both "
            "writable; the next save or load there completes it."
        ) from error


def _is_whole(folder: Path) -> bool:
    """Return whether a folder is a finished stage with a whole model in it."""
    return folder.is_dir() and not folder.is_symlink() and _variant(folder) is not None


def _variant(whole: Path) -> str | None:
    """Return the variant of the model in `.saved-whole`, often empty, by its entry's name; `None` without an entry."""
    try:
        names = {path.name for path in whole.iterdir()}
    except FileNotFoundError:  # another process has just completed the exchange
        return None
    # The index first: the parts of a variant look like the single file of another variant.
    for pattern in (
        r"(?:model\.safetensors|pytorch_model\.bin)\.index(?:\.(.+))?\.json",
        r"(?:model(?:\.(.+))?\.safetensors|pytorch_model(?:\.(.+))?\.bin)",
    ):
        for name in sorted(names):
            if match := re.fullmatch(pattern, name):
                return match[match.lastindex] if match.lastindex else ""
    return None


def _entries(folder: Path, variant: str | None) -> set[str]:
    """Return the *entries* in `folder`, by which `from_pretrained` finds weights: a single file, or an index."""
    return {name for form in _forms(variant) for name in form if (folder / name).is_file()}


def _named(index: Path) -> set[str]:
    """Return the names of the files that an entry lists; none if it holds weights itself, or is damaged."""
    if index.suffix != ".json":
        return set()
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (AttributeError, KeyError, TypeError, ValueError):
        return set()


def _weight_files(folder: Path, variant: str | None) -> set[str]:
    """Return the names of the files in `folder` that hold weights of a model, or the index of such files."""
    names = {path.name for path in folder.iterdir() if not path.is_dir()} if folder.is_dir() else set()
    weights = set()
    for single, index in _forms(variant):
        stem, suffix = os.path.splitext(single)
        part = re.compile(re.escape(stem) + _PART + re.escape(suffix))
        weights |= {name for name in names if name in (single, index) or part.fullmatch(name)}
        if index in names:
            weights |= {name for name in names & _named(folder / index) if name.endswith(suffix)}
    return weights


def _forms(variant: str | None) -> list[tuple[str, ...]]:
    """Return the names in `_FORMS` for a variant."""
    return [tuple(name.format(variant=f".{variant}" if variant else "") for name in form) for form in _FORMS]


def _clear(stage: Path) -> None:
    """Remove a folder with all in it; links are removed, and their targets stay."""
    for folder, folders, names in os.walk(stage, topdown=False):
        for name in names + [name for name in folders if os.path.islink(os.path.join(folder, name))]:
            _remove(Path(folder, name))
        with suppress(FileNotFoundError):
            os.rmdir(folder)


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        os.remove(path)


@contextmanager
def _locked(folder: Path, wait: bool = True) -> Generator[bool]:
    """Lock `folder` against other processes and threads; the system frees the lock of a process that is killed.

    The lock is on the folder itself: a lock file could be uploaded with the model.

    Args:
        folder: the folder to lock.
        wait: whether to wait until the lock is free.

    Yields:
        Whether the lock is held. It is not held if another process has it and `wait` is false, nor on systems without
        such locks. There, two exchanges at once may leave a folder that does not load, but no mixture of models.
    """
    if fcntl is None:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            is_held = True
        except OSError:
            is_held = False
        try:
            yield is_held
        finally:
            if is_held:
                fcntl.flock(handle, fcntl.LOCK_UN)  # a forked process may keep the handle open
    finally:
        os.close(handle)
