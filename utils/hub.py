"""What can be told of names on the Hub without asking for them: whether it can be reached, and what its cache has."""

import os
import socket
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants

from .wording import did_you_mean

_PORTS = {"http": 80, "https": 443}
_PATIENCE = 5.0  # seconds


def check_path(source: str | os.PathLike) -> None:
    """Raises FileNotFoundError: the name of a model is that of no directory, and cannot be an id on the Hub.

    Neither is it where a directory has a model in its folder `model`, as that of a run of `attnres train`.
    """
    path, name = Path(source), str(source)
    if not name:
        raise FileNotFoundError("the name of the model is empty: give a directory or the id of a model on the Hub.")
    on_hub = not (path.exists() or path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2)
    if not path.is_dir() and not on_hub:
        raise FileNotFoundError(f"{source} is not a directory.")
    if not (path / "config.json").exists() and (path / "model" / "config.json").exists():
        raise FileNotFoundError(f"{source} holds no model itself. Its model is {path / 'model'}: name that.")


def check_source(source: str | os.PathLike, named: Collection[str] = ()) -> None:
    """Raises FileNotFoundError: a model is no directory, and the Hub cannot be asked for it, as far as that shows.

    The message has the one of the names `named` that was probably meant.
    """
    check_path(source)
    if not Path(source).is_dir() and not is_cached("models", str(source)) and is_offline():
        raise FileNotFoundError(
            f"{source} is not a directory, and the Hub does not give it: the Hub cannot be reached, and its cache here "
            f"does not have it.{meant(str(source), named)}"
        )


def meant(source: str, named: Collection[str]) -> str:
    """The end of a message on a model that is not there: the one of the names that is all but spelt like it."""
    return did_you_mean(source, named, otherwise_all=False, alike=0.8)


def is_cached(kind: str, name: str) -> bool:
    """Whether the Hub's cache has anything of a repository of this kind, `models` or `datasets`."""
    return (Path(constants.HF_HUB_CACHE) / f"{kind}--{name.replace('/', '--')}").is_dir()


def is_offline() -> bool:
    """Whether the Hub certainly cannot be reached: one that is merely slow may answer yet, and so may a proxy.

    Raises:
        ValueError: the environment variable HF_ENDPOINT is no address.
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
        with socket.create_connection((address.hostname, address.port or _PORTS[address.scheme]), _PATIENCE):
            return False
    except TimeoutError:
        return False
    except OSError:
        return True


__all__ = ["check_path", "check_source", "is_cached", "is_offline", "meant"]
