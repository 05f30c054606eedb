"""List the small files beside a model's weights that `attnres push` may upload, by their names.

A model's directory may hold anything, and an upload may be public. So a file is uploaded only if its name comes from
`transformers` or a tokenizer's code, or is the name of a licence. `attnres convert` uses the wider patterns of
`utils/model_files.py`, because its copies stay on the same machine.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from attnres.utils.model_files import RECORD

_TOKENIZER = {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    # The `vocab_files_names` of the tokenizer classes of `transformers` that language models use.
    "merges.txt",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spiece.model",
    "spm.model",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
}
_SETTINGS = {"generation_config.json", "preprocessor_config.json", "processor_config.json", RECORD}
_LICENCES = {
    f"{name}{suffix}" for name in ("LICENSE", "LICENCE", "COPYING", "NOTICE") for suffix in ("", ".txt", ".md", ".rst")
}
_NAMES = _TOKENIZER | _SETTINGS | _LICENCES
# Versions of Mistral's tokenizer, and the folder where `transformers` writes chat templates other than the default.
_FORMS = re.compile(r"tokenizer\.model\.v\d{1,2}|additional_chat_templates/[\w.-]+\.jinja")
# Suffixes of vocabularies under other names. They are uploaded if the uploaded code names them.
_VOCABULARIES = (".json", ".model", ".tiktoken", ".txt")
# A literal in Python code that may be the name of a file.
_LITERAL = re.compile(r"""["']([\w.-]+)["']""")


def side_files(folder: Path) -> list[str]:
    """Return the paths of files with known names, relative to a model's directory and sorted."""
    paths = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
    names = [path.relative_to(folder).as_posix() for path in paths if not path.is_dir()]
    return sorted(name for name in names if name in _NAMES or _FORMS.fullmatch(name))


def is_read_on_loading(name: str) -> bool:
    """Return whether a path in a repository is a known file that `from_pretrained` may read: any but a licence."""
    return name in _TOKENIZER | _SETTINGS - {RECORD} or _FORMS.fullmatch(name) is not None


def vocabularies(folder: Path, code: Iterable[str]) -> list[str]:
    """Return the names of vocabularies that Python files of a model contain as literals, such as `qwen.tiktoken`.

    Args:
        folder: The model's directory.
        code: The paths of the Python files, relative to `folder`. They are searched, not run.

    Returns:
        The names, sorted.
    """
    texts = ((folder / path).read_text("utf-8", errors="replace") for path in code)
    literals = {name for text in texts for name in _LITERAL.findall(text)}
    return sorted(name for name in literals if name.endswith(_VOCABULARIES) and (folder / name).is_file())


__all__ = ["is_read_on_loading", "side_files", "vocabularies"]
