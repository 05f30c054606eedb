"""Copy the files beside a model's weights: tokenizer, chat template, generation configuration, licences.

Only data is copied, by a list of names and from within the model's directory. Code that came with the source is copied
by `source_code.py`, if the user trusts it.
"""

import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers.utils import GENERATION_CONFIG_NAME

from attnres.utils.model_files import OTHER_PATTERNS, SOURCE_CODE, TOKENIZER_PATTERNS

from .checkpoint import TOKENIZER_CONFIG, Checkpoint
from .source_code import AUTO_MAP, code_fields, copy_code, references, shown
from .source_files import check_file, read_json, read_object, write_json


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
        ValueError: A file is a link to a file outside `folder`, or refers to code outside it.
    """
    folder, notes = checkpoint.folder, []
    paths = _side_files(folder)
    loaded = checkpoint.tokenizer
    needs_code = bool(references(checkpoint.tokenizer_config, folder / TOKENIZER_CONFIG)) and loaded is None
    if needs_code and not trust_remote_code:
        notes.append(
            "Left out: the tokenizer, which does not load without code that came with the source. "
            "--trust-remote-code copies both."
        )
    for path, is_of_tokenizer in paths.items():
        if is_of_tokenizer and needs_code and not trust_remote_code:
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
        checkpoint.generation_config.to_json_file(path)
        notes += _settle_code(read_json(path), folder / path.name, path, target, trust_remote_code, code_folder)
    if loaded is not None:
        _name_tokenizer_class(type(loaded).__name__, target)
        backend = getattr(loaded, "backend_tokenizer", None)
        if backend is not None and getattr(backend, "fix_mistral_regex", False):
            # `transformers` corrects this tokenizer as it loads, but only beside the `config.json` of a Mistral.
            backend.save(str(target / "tokenizer.json"))
    return notes


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
    name = shown(path.name)
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
        code = ", ".join(map(shown, referred))
        notes.append(f"Left out: code that {name} refers to ({code}). --trust-remote-code copies it.")
    elsewhere = [shown(reference) for reference in referred if "--" in reference]
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


__all__ = ["copy_side_files"]
