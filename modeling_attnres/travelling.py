"""Write the code of a model's residual connection beside its weights. This file is only installed.

`transformers` saves the file of a model's class and those that it imports. These do not import any connection: the
registry `connections_attnres` does. So the saved copy gets a registry of its own, which imports what the model uses.
"""

import re
import sys
import warnings
from inspect import getfile
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files

from .attention_change_attnres import AttentionChange
from .configuration_attnres import ResidualConfig
from .connections_attnres import ATTENTION_CHANGES, MTP
from .residual_attnres import FamilyWarning, ResidualConnection

_HERE = Path(__file__).parent
_REGISTRY = "connections_attnres"
# In a saved copy, this import of another package must be of the file beside it: `from .residual_attnres import`.
_IMPORT_OF_FAMILY = re.compile(r"^(\s*from )attnres(?=\.\w+_attnres import )", re.MULTILINE)
# `transformers` finds a file by a single dot with a name, so not by `from . import` nor `from .folder.file import`.
_OTHER_IMPORT = re.compile(r"^\s*(?:from|import) (?:attnres\b|\.\.|\. |\.\w+\.).*", re.MULTILINE)
_RELATIVE_IMPORT = re.compile(r"^\s*from \.(\w+) import ", re.MULTILINE)


def write_used_code(config: ResidualConfig, folder: Path) -> None:
    """Write the files of a model's connection and attention changes into a folder, and the registry that names them.

    The other files of the model's code lie there already. A connection whose code cannot be saved is left out, with a
    warning. The registry names it all the same, so that nothing takes the code for complete.

    Args:
        config: the model's configuration.
        folder: an existing folder.
    """
    # Kimi K3 declares the gate's fields whether it has a gate or not.
    needed = {Path(file).stem for file in get_relative_import_files(getfile(type(config)))}
    changes = [c for c in ATTENTION_CHANGES if c.is_on(config) or c.__module__.rpartition(".")[2] in needed]
    connection = config.connection
    mtp = MTP if MTP is not None and MTP.is_on(config) else None
    for used in filter(None, (connection, *changes, mtp)):
        for name, text in _code_of(used).items():
            (folder / name).write_bytes(text.encode())
    (folder / f"{_REGISTRY}.py").write_bytes(_registry(connection, changes, mtp).encode())


def _registry(connection: type[ResidualConnection], changes: list[type[AttentionChange]], mtp: type | None) -> str:
    """Return the text of the registry of a saved copy."""
    used = filter(None, (connection, *changes, mtp))
    imports = sorted(f"from .{c.__module__.rpartition('.')[2]} import {c.__name__}" for c in used)
    names = ", ".join(change.__name__ for change in changes) + ("," if len(changes) == 1 else "")
    return "\n".join(
        (
            '"""The residual connection of this model, the changes of its attention, and multi-token prediction."""\n',
            *imports,
            f"\nCONNECTIONS = {{{connection.name!r}: {connection.__name__}}}".replace("'", '"'),
            f"ATTENTION_CHANGES = ({names})",
            f"MTP = {mtp and mtp.__name__}\n",
        )
    )


def _code_of(used: type) -> dict[str, str]:
    """Return the files of a class and of what it imports, name -> text; none, with a warning, if they cannot travel."""
    source = getattr(sys.modules[used.__module__], "__file__", None)
    problem = ""
    if source is None or used.__module__ == "__main__":
        problem = "it is defined in a notebook or script"
    texts: dict[str, str] = {}
    waiting = [Path(source)] if source and not problem else []
    while waiting:
        path = waiting.pop()
        # The registry imports a class by its module, which may be a package.
        name = f"{used.__module__.rpartition('.')[2]}.py" if path.name == "__init__.py" else path.name
        text = texts[name] = _IMPORT_OF_FAMILY.sub(r"\1", path.read_text(encoding="utf-8"))
        if path.parent != _HERE and (other := _OTHER_IMPORT.search(text)):
            problem = f"{path.name} has the import `{other[0].strip()}`, which is not of a file that is saved"
        for name in set(_RELATIVE_IMPORT.findall(text)) - {_REGISTRY}:
            beside = path.with_name(f"{name}.py")
            if beside.name not in texts:
                waiting.append(beside if beside.exists() else _HERE / beside.name)
    if not problem:
        return texts
    message = (
        f"the code of {used.__name__} is not saved with the model: {problem}. The model loads only where the class is "
        "registered. Write it in a file of its own that imports only `torch`, `transformers` and files of the family, "
        "such as `from attnres.residual_attnres import ResidualConnection`."
    )
    warnings.warn(message, FamilyWarning, stacklevel=4)
    return {}


__all__ = ["write_used_code"]
