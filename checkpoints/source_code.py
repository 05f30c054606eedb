"""Copy Python code that came with a source, such as a tokenizer's, so that it cannot replace this package's files.

Files such as `tokenizer_config.json` refer to classes in a field `auto_map`: as `module.Class`, or as
`repository--module.Class` for code in another repository. `transformers` runs this code when a user trusts the
*result*, where the user expects only the code of this package. So code of a source is copied only if the person who
converts it trusts it.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_imports

from attnres.utils.model_files import SOURCE_CODE

from .source_files import check_file

AUTO_MAP = "auto_map"
PIPELINES = "custom_pipelines"
# Fields that name code, in any JSON file of a model.
CODE_FIELDS = (AUTO_MAP, PIPELINES, "custom_generate")


def objects(value: Any) -> Iterator[dict]:
    """Yield all JSON objects in a JSON value, at any depth, the value itself included."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            yield item
            pending += item.values()
        elif isinstance(item, list):
            pending += item


def code_fields(value: Any) -> list[tuple[dict, str]]:
    """Return the fields of a JSON value that name code, at any depth: the object that has the field, and its name."""
    # A vocabulary may have the token "auto_map", whose value is a number.
    return [
        (fields, key) for fields in objects(value) for key in CODE_FIELDS if not isinstance(fields.get(key, 0), int)
    ]


def shown(reference: str) -> str:
    """Return a reference for a message: unchanged if it looks like a path or class, otherwise quoted and escaped."""
    return reference if re.fullmatch(r"[\w./-]+", reference) else repr(reference)


def references(fields: dict, path: Path) -> list[str]:
    """Return the references in the `auto_map` of a JSON object; none if it has no `auto_map`.

    Args:
        fields: The JSON object.
        path: The file it was read from, for the message.

    Returns:
        References such as `module.Class`.

    Raises:
        OSError: The `auto_map` holds a value that is not a reference.
    """
    result = []
    auto_map = fields.get(AUTO_MAP, {})
    for value in auto_map.values() if isinstance(auto_map, dict) else [auto_map]:
        for reference in value if isinstance(value, list) else [value]:
            if reference is not None and not isinstance(reference, str):
                raise OSError(f"{path} is damaged (`{AUTO_MAP}` is {json.dumps(auto_map)}). Copy it again.")
            result += [reference] if reference else []
    return result


def module_of(reference: str, folder: Path) -> list[str]:
    """Split a reference `subfolder/module.Class` into the names of its folders and its module.

    Args:
        reference: The reference.
        folder: The model's directory, for the message.

    Returns:
        The names, such as `["subfolder", "module"]`.

    Raises:
        ValueError: A name is not a Python identifier, so the path might lead out of the directory.
    """
    module, _, name = reference.rpartition(".")
    parts = module.split("/")
    if not all(part.isidentifier() for part in (*parts, name)):
        raise ValueError(f"{folder} refers to code as {reference!r}, which is not the name of a class in a file there.")
    return parts


def copy_code(
    auto_map: dict | list | str, folder: Path, target: Path, subfolder: str = SOURCE_CODE
) -> tuple[Any, list[str]]:
    """Copy the Python files that an `auto_map` refers to, and the files that they import.

    Args:
        auto_map: The value of the field `auto_map`.
        folder: The source's directory.
        target: The result's directory.
        subfolder: The subfolder of `target` for the copies; empty for its top level.

    Returns:
        The value with references to the copies, and the sorted paths of the copies relative to `target`.

    Raises:
        OSError: A file does not exist.
        ValueError: A path leads out of `folder`, or another file has the same name in `target`.
    """
    files = []

    def moved(value: Any) -> Any:
        """Copy the files of all references in a value, and return the value with the new references."""
        if isinstance(value, dict):
            return {key: moved(item) for key, item in value.items()}
        if isinstance(value, list):
            return [moved(item) for item in value]
        if not value or "--" in value:  # none, or code in another repository
            return value
        parts = module_of(value, folder)
        # An earlier conversion may have put it into its subfolder. A file `source_code.py` is not that subfolder.
        is_moved = len(parts) > 1 and parts[0] == SOURCE_CODE
        parents = [*filter(None, [subfolder]), *parts[is_moved:-1]]
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
    """Return a Python file and all files beside it that it imports, directly or through others.

    Args:
        code: The file.
        folder: The model's directory, which all files must lie in.

    Returns:
        The paths.

    Raises:
        OSError: A file does not exist.
        ValueError: A file leads out of the directory.
    """
    files = [code]
    for path in files:  # the loop also visits the files that it appends
        check_file(folder, path)
        for module in sorted(get_relative_imports(path)):
            # `get_relative_imports` searches the file by a pattern, so it may return any text of the file.
            if not module.isidentifier():
                raise ValueError(f"{path} imports {shown(module)}, which does not lie beside it.")
            imported = code.with_name(f"{module}.py")
            if imported not in files:
                files.append(imported)
    return files


__all__ = [
    "AUTO_MAP",
    "CODE_FIELDS",
    "PIPELINES",
    "code_fields",
    "copy_code",
    "module_of",
    "objects",
    "references",
    "shown",
    "with_imports",
]
