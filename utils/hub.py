"""Check the name of a model before PyTorch is imported and before a request to the Hub.

So a wrong name is reported at once, and not after a request has timed out.
"""

import os
import re
import socket
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .wording import did_you_mean

# The file that makes a directory an adapter of PEFT.
ADAPTER_CONFIG = "adapter_config.json"
# What to do with an adapter where a model is needed.
_MERGE_FIRST = "Merge it first: by `merge=true` of the recipe, or by `merge_and_unload` of PEFT."

_REVISION = re.compile(r"(?!.*\.\.)[\w][\w./-]*")
_PORTS = {"http": 80, "https": 443}
_TIMEOUT = 5.0  # seconds


def is_adapter(folder: str | os.PathLike) -> bool:
    """Return whether a directory holds an adapter of PEFT without a model."""
    return Path(folder, ADAPTER_CONFIG).is_file() and not Path(folder, "config.json").exists()


def describe_adapter(source: str | os.PathLike) -> str:
    """Return the message that a directory or Hub id is an adapter where a model is needed."""
    return f"{source} is an adapter, not a model (it has {ADAPTER_CONFIG}). {_MERGE_FIRST}"


def check_path(source: str | os.PathLike, *, is_tokenizer: bool = False) -> None:
    """Raise if the name of a model is neither the directory of a model nor a possible id on the Hub.

    Args:
        source: The name.
        is_tokenizer: Whether only the tokenizer is read, which the directory of an adapter may have too.

    Raises:
        FileNotFoundError: It is neither; or it is a directory without a model, such as that of a training run, which
            holds the model in a folder `model`, or an adapter in a folder `adapter`.
        ValueError: It is the directory of an adapter.
    """
    path, name = Path(source), str(source)
    if not name:
        raise FileNotFoundError("the name of the model is empty: give a directory or the id of a model on the Hub.")
    can_be_id = not (path.exists() or path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2)
    if not path.is_dir() and not can_be_id:
        raise FileNotFoundError(f"{source} is not a directory.")
    has_config = (path / "config.json").exists()
    if not has_config and (path / "model" / "config.json").exists():
        raise FileNotFoundError(f"{source} holds no model itself. Its model is {path / 'model'}: name that.")
    if not has_config and is_adapter(path / "adapter"):
        remedy = "Name that." if is_tokenizer else _MERGE_FIRST
        raise FileNotFoundError(f"{source} holds no model, only the adapter {path / 'adapter'}. {remedy}")
    if not is_tokenizer:
        check_no_lone_adapter(path, source)
        if path.is_dir() and not has_config:
            raise FileNotFoundError(f"{source} has no config.json: give the directory of a model.")


def check_no_lone_adapter(folder: Path, source: str | os.PathLike) -> None:
    """Raise ValueError if a directory holds an adapter of PEFT without a model.

    Args:
        folder: The directory.
        source: The directory or Hub id, for the message.
    """
    if is_adapter(folder):
        raise ValueError(describe_adapter(source))


def check_source(source: str | os.PathLike, known: Collection[str] = (), *, is_tokenizer: bool = False) -> None:
    """Raise if a model is neither a directory nor in the Hub's cache, and the Hub cannot be reached.

    If it is in the cache and the Hub cannot be reached, this process sends no further requests to the Hub.

    Args:
        source: The directory or Hub id.
        known: Other names that the caller accepts. The message proposes a similar one.
        is_tokenizer: Whether only the tokenizer is read.

    Raises:
        FileNotFoundError: The model cannot be found.
        ValueError: It is the directory of an adapter.
    """
    check_path(source, is_tokenizer=is_tokenizer)
    if Path(source).is_dir() or not is_offline():
        return
    if not is_cached("models", str(source)):
        raise FileNotFoundError(
            f"{source} is not a directory, and the Hub does not give it: the Hub cannot be reached, and its cache here "
            f"does not have it.{meant(str(source), known)}"
        )
    use_cache_alone()


def check_dataset(source: str, name: str) -> None:
    """Raise FileNotFoundError if a data set is not in a cache, and the Hub cannot be reached.

    If it is in a cache and the Hub cannot be reached, this process sends no further requests to the Hub.

    Args:
        source: The data set as the user wrote it. There must be no file or folder of this name.
        name: Its id on the Hub.
    """
    if not is_offline():
        return
    if is_dataset_cached(name):
        use_cache_alone()
        return
    folder = Path(source).parent
    files = [str(path) for path in folder.iterdir()] if folder.is_dir() else []
    raise FileNotFoundError(
        f"{source} is not a file or folder here, and the Hub does not give it: the Hub cannot be reached, and its "
        f"cache here does not have it.{meant(source, files)}"
    )


def use_cache_alone() -> None:
    """Make this process send no requests to the Hub, of which each would be repeated for half a minute."""
    # Libraries that are imported later read the variable. `huggingface_hub` has read it.
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True


def is_hub_id(name: str) -> bool:
    """Return whether a name can be the id of a repository on the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def check_repo(repo: str, revision: str | None = None) -> None:
    """Check the form of the names of the repository and branch of an upload.

    Args:
        repo: The id of the repository.
        revision: The name of the branch.

    Raises:
        ValueError: A name has characters that the Hub does not allow.
    """
    if not is_hub_id(repo):
        raise ValueError(
            f"{repo!r} is not a repository id: it must be NAME or ORG/NAME, of letters, digits, `-`, `_` and `.`."
        )
    if revision is not None and not _REVISION.fullmatch(revision):
        raise ValueError(f"{revision!r} is not a branch name: it must have letters, digits, `-`, `_`, `/` and `.`.")


def meant(source: str, known: Collection[str]) -> str:
    """Return the end of a message on an unknown model.

    Args:
        source: The name of the model.
        known: The known names.

    Returns:
        A proposal of the most similar known name, or an empty string.
    """
    return did_you_mean(source, known, otherwise_all=False, alike=0.8)


def is_cached(kind: str, name: str) -> bool:
    """Return whether the Hub's local cache has a folder for a repository.

    Args:
        kind: `models` or `datasets`.
        name: The id of the repository.
    """
    return (Path(constants.HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}").is_dir()


def is_dataset_cached(name: str) -> bool:
    """Return whether the cache of the Hub or of `datasets` holds at least a part of a data set."""
    prepared = Path(os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets"))
    # `datasets` writes `TIGER-Lab/MMLU-Pro` as `TIGER-Lab___mmlu-pro`.
    folder = name.replace("/", "___").lower()
    return is_cached("datasets", name) or any(path.name.lower() == folder for path in prepared.glob("*"))


def is_offline() -> bool:
    """Return whether the Hub certainly cannot be reached. A slow Hub, or a Hub behind a proxy, may still answer.

    Raises:
        ValueError: The environment variable HF_ENDPOINT is not an address.
    """
    if constants.HF_HUB_OFFLINE:
        return True
    address = urlsplit(constants.ENDPOINT)
    if address.scheme not in _PORTS or not address.hostname:
        raise ValueError(f"HF_ENDPOINT is {constants.ENDPOINT!r}, but must begin with https:// or http://.")
    proxies = getproxies()
    if proxies.get(address.scheme) or proxies.get("all"):
        return False
    try:
        with socket.create_connection((address.hostname, address.port or _PORTS[address.scheme]), _TIMEOUT):
            return False
    except TimeoutError:
        return False
    except OSError:
        return True


__all__ = [
    "ADAPTER_CONFIG",
    "check_dataset",
    "check_no_lone_adapter",
    "check_path",
    "check_repo",
    "check_source",
    "describe_adapter",
    "is_adapter",
    "is_cached",
    "is_dataset_cached",
    "is_hub_id",
    "is_offline",
    "meant",
    "use_cache_alone",
]
