"""Code that came with a source: what its files refer to, and copies of it that cannot take the place of ours.

A field `auto_map`, as of `tokenizer_config.json`, refers to classes as `module.Class`, or `repository--module.Class`
for code that stays in another repository. `transformers` runs them where the user trusts the *result*, whose own code
is what this package put there: so that other code must be trusted when the result is made.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_imports

from .source_files import check_text

AUTO_MAP = "auto_map"
PIPELINES = "custom_pipelines"
# In a result, what came with the source lies here, and all that this package puts there lies above.
FOLDER = "source_code"


def objects(value: Any) -> Iterator[dict]:
    """The JSON objects in a JSON value, itself among them, however they are nested."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            yield item
            left += item.values()
        elif isinstance(item, list):
            left += item


def shown(reference: str) -> str:
    """A reference as messages give it: only what names a module and a class is itself, and all else in quotes."""
    return reference if re.fullmatch(r"[\w./-]+", reference) else repr(reference)


def references(fields: dict, path: Path) -> list[str]:
    """What the `auto_map` in the JSON object of the file `path` refers to, if there is one.

    Raises:
        OSError: it is not an `auto_map`.
    """
    found = []
    auto_map = fields.get(AUTO_MAP, {})
    for value in auto_map.values() if isinstance(auto_map, dict) else [auto_map]:
        for reference in value if isinstance(value, list) else [value]:
            if reference is not None and not isinstance(reference, str):
                raise OSError(f"{path} is damaged (`{AUTO_MAP}` is {json.dumps(auto_map)}). Copy it again.")
            found += [reference] if reference else []
    return found


def module_of(reference: str, folder: Path) -> list[str]:
    """The folders and the module that a reference `folder/module.Class` to code in `folder` names.

    Raises:
        ValueError: it does not lead to a file there.
    """
    module, _, name = reference.rpartition(".")
    parts = module.split("/")
    if not all(part.isidentifier() for part in (*parts, name)):
        raise ValueError(f"{folder} refers to code as {reference!r}, which is not the name of a class in a file there.")
    return parts


def copy_code(auto_map: dict | list | str, folder: Path, target: Path) -> tuple[Any, list[str]]:
    """Copy the Python files that an `auto_map` refers to, and those they import, from one directory to another's.

    Returns:
        The `auto_map` that refers to the copies, and the names of these.

    Raises:
        OSError: one is not there, or is no file.
        ValueError: one has a name that leads out of `folder`, or that another has there already.
    """
    files = []

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(item) for key, item in value.items()}
        if isinstance(value, list):
            return [moved(item) for item in value]
        if not value or "--" in value:
            return value
        parts = module_of(value, folder)
        # As an earlier conversion left it. The file `source_code.py` of a source is one like any other.
        is_there = len(parts) > 1 and parts[0] == FOLDER
        parents = parts[:-1] if is_there else [FOLDER, *parts[:-1]]
        for path in with_imports(folder.joinpath(*parts[:-1], f"{parts[-1]}.py"), folder):
            copy = target.joinpath(*parents, path.name)
            if copy.exists() and copy.read_bytes() != path.read_bytes():
                raise ValueError(f"{path} would take the place of another {copy.relative_to(target)}. Rename it.")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            files.append(copy.relative_to(target).as_posix())
        return f"{'/'.join((*parents, parts[-1]))}.{value.rpartition('.')[2]}"

    return moved(auto_map), sorted(set(files))


def with_imports(code: Path, folder: Path) -> list[Path]:
    """A file of code and those that it and they import from beside it."""
    files = [code]
    for path in files:  # which grows
        check_text(folder, path)
        for module in sorted(get_relative_imports(path)):
            # What is taken for a relative import may be any text of the file.
            if not module.isidentifier():
                raise ValueError(f"{path} imports {shown(module)}, which does not lie beside it.")
            imported = code.with_name(f"{module}.py")
            if imported not in files:
                files.append(imported)
    return files


__all__ = [
    "AUTO_MAP",
    "FOLDER",
    "PIPELINES",
    "copy_code",
    "module_of",
    "objects",
    "references",
    "shown",
    "with_imports",
]
