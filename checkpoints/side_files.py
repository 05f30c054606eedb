"""Copy the files beside a model's weights: tokenizer, chat template, generation configuration, licences, code.

Data is copied by a list of names and from within the model's directory. Files such as `tokenizer_config.json` refer to
classes in a field `auto_map`: as `module.Class`, or as `repository--module.Class` for code in another repository.
`transformers` runs this code when a user trusts the *result*, where the user expects only the code of this package. So
code of a source is copied only if the person who converts it trusts it, and so that it cannot replace this package's
files.
"""

import json
import re
import shutil
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_imports
from transformers.utils import GENERATION_CONFIG_NAME

from attnres.utils.model_files import OTHER_PATTERNS, SOURCE_CODE, TOKENIZER_PATTERNS

from .checkpoint import TOKENIZER_CONFIG, Checkpoint
from .source_files import AUTO_MAP, CODE_FIELDS, check_file, read_json, read_object, write_json


def copy_side_files(
    checkpoint: Checkpoint,
    target: Path,
    trust_remote_code: bool = False,
    has_legacy_settings: bool = True,
    code_folder: str = SOURCE_CODE,
) -> list[str]:
    """Copy the side files of a model, so that `AutoTokenizer` loads the same tokenizer from the copies.

    Args:
        checkpoint: The source.
        target: The result's directory.
        trust_remote_code: Whether to copy the code that the files refer to. Otherwise the copies refer to no code, and
            a tokenizer that needs its code is not copied: `AutoTokenizer` might take another class for it, which gives
            other tokens.
        has_legacy_settings: Whether settings of generation in `config.json` move to `generation_config.json`.
        code_folder: The subfolder of the result for that code; empty for the top level.

    Returns:
        Notes for the user on code, one line each.

    Raises:
        OSError: A file is damaged, or code that the tokenizer needs does not exist.
        ValueError: A file is a link to a file outside `folder`, or refers to code outside it; or `transformers` refuses
            the settings of generation.
    """
    folder, notes = checkpoint.folder, []
    paths = _side_files(folder)
    generation = checkpoint.generation_config  # the result gets these settings, so they must be valid
    loaded = checkpoint.tokenizer
    kimi = checkpoint.kimi_tokenizer  # saved as a fast tokenizer, in place of its table and code
    needs_code = bool(references(checkpoint.tokenizer_config, folder / TOKENIZER_CONFIG)) and loaded is None
    if needs_code and not trust_remote_code:
        notes.append(
            "Left out: the tokenizer, which does not load without code that came with the source. "
            "--trust-remote-code copies both."
        )
    for path, is_of_tokenizer in paths.items():
        if is_of_tokenizer and (kimi is not None or (needs_code and not trust_remote_code)):
            continue
        copy = target / path.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
        if path.suffix == ".json":
            content = deepcopy(checkpoint.tokenizer_config) if path.name == TOKENIZER_CONFIG else read_json(path)
            notes += _settle_code(content, path, copy, target, trust_remote_code, code_folder)
    if has_legacy_settings and checkpoint.generation_path == checkpoint.config_path:
        # `transformers` reads the settings of older models from `config.json`, but does not write them there.
        path = target / GENERATION_CONFIG_NAME
        generation.to_json_file(path)
        notes += _settle_code(read_json(path), folder / path.name, path, target, trust_remote_code, code_folder)
    if kimi is not None:
        kimi.save_pretrained(target)
    elif loaded is not None:
        _name_tokenizer_class(type(loaded).__name__, target)
        backend = getattr(loaded, "backend_tokenizer", None)
        if backend is not None and getattr(backend, "fix_mistral_regex", False):
            # `transformers` corrects this tokenizer as it loads, but only beside the `config.json` of a Mistral.
            backend.save(str(target / "tokenizer.json"))
    return notes


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, target: Path) -> None:
    """Save a tokenizer beside a model. If its code was run, save the code in the subfolder that conversions use.

    `save_pretrained` would write the code beside the model's, where it could take the place of a file.

    Args:
        tokenizer: The tokenizer.
        target: The model's directory.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokenizer.save_pretrained(folder)
        config = read_object(folder / TOKENIZER_CONFIG)
        if AUTO_MAP in config:
            config[AUTO_MAP], _ = copy_code(config[AUTO_MAP], folder, target)
            write_json(folder / TOKENIZER_CONFIG, config)
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.py"), dirs_exist_ok=True)


def _side_files(folder: Path) -> dict[Path, bool]:
    """Check the side files, and return path -> whether only a tokenizer needs the file."""
    paths = {path: True for pattern in TOKENIZER_PATTERNS for path in sorted(folder.glob(pattern))}
    paths |= {path: False for pattern in OTHER_PATTERNS for path in sorted(folder.glob(pattern))}
    paths = {path: is_of_tokenizer for path, is_of_tokenizer in paths.items() if path.exists() and not path.is_dir()}
    for path in paths:
        check_file(folder, path)
    return paths


def _settle_code(
    content: Any, path: Path, copy: Path, target: Path, trust_remote_code: bool, code_folder: str
) -> list[str]:
    """Copy the code that a JSON file refers to, or remove the references from its copy. Return notes for the user.

    Args:
        content: The content of the file, which is changed.
        path: The file of the source.
        copy: Its copy.
        target: The result's directory.
        trust_remote_code: As in [`copy_side_files`].
        code_folder: As in [`copy_side_files`].
    """
    name = show_reference(path.name)
    holders = code_fields(content)
    referred, files = [], []
    for fields, key in holders:
        if key == AUTO_MAP:
            referred += references(fields, path)
        if key == AUTO_MAP and trust_remote_code:
            fields[key], copied = copy_code(fields[key], path.parent, target, code_folder)
            files += copied
        else:
            del fields[key]
    if holders:
        write_json(copy, content)
    notes = []
    if referred and not trust_remote_code:
        code = ", ".join(map(show_reference, referred))
        notes.append(f"Left out: code that {name} refers to ({code}). --trust-remote-code copies it.")
    elsewhere = [show_reference(reference) for reference in referred if "--" in reference]
    if files:
        notes.append(f"Code that came with the source, for {name}: {', '.join(sorted(set(files)))}.")
    if elsewhere and trust_remote_code:
        notes.append(f"{name} refers to code in another repository: {', '.join(elsewhere)}.")
    others = dict.fromkeys(key for _, key in holders if key != AUTO_MAP)
    notes += [f"Left out: `{key}` of {name}." for key in others]
    return notes


def _name_tokenizer_class(name: str, target: Path) -> None:
    """Name the tokenizer's class in its configuration: otherwise `AutoTokenizer` chooses it by the model type.

    The result's model type differs from the source's.
    """
    path = target / TOKENIZER_CONFIG
    tokenizer = read_object(path) if path.exists() else {}
    if AUTO_MAP not in tokenizer and tokenizer.get("tokenizer_class") != name:
        write_json(path, tokenizer | {"tokenizer_class": name})


def code_fields(value: Any) -> list[tuple[dict, str]]:
    """Return the fields of a JSON value that name code, at any depth: the object that has the field, and its name."""
    found, pending = [], [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            # A vocabulary may have the token "auto_map", whose value is a number.
            found += [(item, key) for key in CODE_FIELDS if not isinstance(item.get(key, 0), int)]
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    return found


def show_reference(reference: str) -> str:
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
                raise ValueError(f"{path} imports {show_reference(module)}, which does not lie beside it.")
            imported = code.with_name(f"{module}.py")
            if imported not in files:
                files.append(imported)
    return files


__all__ = ["code_fields", "copy_side_files", "module_of", "references", "save_tokenizer", "with_imports"]
