"""What goes along with the weights of a model: tokenizer, chat template, generation configuration, licences."""

import json
import shutil
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

# All but the weights, their index, the model's configuration, and code.
SIDE_FILES = (
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.jinja",
    "chat_template*",
    "additional_chat_templates/*",
    "LICENSE*",
    "NOTICE*",
)
_TOKENIZER_CONFIG = "tokenizer_config.json"
# A tokenizer has one of them.
TOKENIZER_FILES = (_TOKENIZER_CONFIG, "tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def copy_side_files(folder: Path, target: Path) -> None:
    """Copy them from the directory of one model to that of another, of which `AutoTokenizer` makes the same.

    Raises:
        OSError: one is damaged, or code that the tokenizer needs is not there.
    """
    for pattern in SIDE_FILES:
        for path in folder.glob(pattern):
            if path.is_file():
                copy = target / path.relative_to(folder)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
    if not (folder / GENERATION_CONFIG_NAME).exists():
        _copy_legacy_generation_config(folder, target)
    tokenizer = _read_tokenizer_config(folder)
    if "auto_map" in tokenizer:
        _copy_tokenizer_code(tokenizer["auto_map"], folder, target)
    elif any((folder / name).exists() for name in TOKENIZER_FILES):
        _name_tokenizer_class(tokenizer, folder, target)


def _read_tokenizer_config(folder: Path) -> dict:
    path = folder / _TOKENIZER_CONFIG
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OSError(f"{path} is damaged ({error}). Copy it again.") from error
    if not isinstance(config, dict):
        raise OSError(f"{path} is damaged (it holds no object). Copy it again.")
    return config


def _copy_legacy_generation_config(folder: Path, target: Path) -> None:
    """Older models keep it in `config.json`, where `transformers` reads it, but does not write it."""
    config = GenerationConfig.from_pretrained(folder, config_file_name=CONFIG_NAME, _from_model_config=True)
    config.to_json_file(target / GENERATION_CONFIG_NAME)


def _copy_tokenizer_code(auto_map: dict | list, folder: Path, target: Path) -> None:
    references = auto_map["AutoTokenizer"] if isinstance(auto_map, dict) else auto_map
    for reference in [references] if isinstance(references, str) else references:
        if reference and "--" not in reference:  # otherwise the code is in another repository
            code = folder / f"{reference.partition('.')[0]}.py"
            for path in (code, *map(Path, get_relative_import_files(code))):
                shutil.copyfile(path, target / path.name)


def _name_tokenizer_class(tokenizer: dict, folder: Path, target: Path) -> None:
    """Name the class that `AutoTokenizer` takes for the source: it also goes by the model type, which changes."""
    try:
        name = type(AutoTokenizer.from_pretrained(folder, trust_remote_code=False)).__name__
    except Exception as error:  # `tokenizers` raises nothing more special for a damaged file
        path = folder / "tokenizer.json"
        if path.exists():
            raise OSError(f"{path} is damaged ({error!r}). Copy it again.") from error
        return  # other formats need packages that may not be here
    if tokenizer.get("tokenizer_class") != name:
        text = json.dumps(tokenizer | {"tokenizer_class": name}, indent=2, ensure_ascii=False)
        (target / _TOKENIZER_CONFIG).write_text(text + "\n", encoding="utf-8")


__all__ = ["SIDE_FILES", "TOKENIZER_FILES", "copy_side_files"]
