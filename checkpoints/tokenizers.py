"""Load the tokenizer of a model, or raise an error of one line if it has none.

Every command that reads text loads its tokenizer here, so that a directory without one gives the same error everywhere.
`AutoTokenizer` alone fails on some model types with several lines that name no remedy. For others it returns a
tokenizer without a vocabulary, which turns every text into no token or into `<unk>`.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import httpx
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import CONFIG_NAME, TRANSFORMERS_DYNAMIC_MODULE_NAME

from attnres.kimi_tokenizer import read_kimi_tokenizer
from attnres.utils.model_files import TOKENIZER_FILES
from attnres.utils.quiet import quiet_transformers

from .sizes import check_sizes
from .source_files import AUTO_MAP, read_object

SAVE_ONE = "save one there by AutoTokenizer.from_pretrained(SOURCE).save_pretrained(DIR)"


class NoTokenizerError(ValueError):
    """Raised if a source has no tokenizer that loads without more code and packages than there are."""


def load_tokenizer(
    source: str | os.PathLike, *, remedy: str = "", trust_remote_code: bool = False, **options: Any
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a directory or Hub repository.

    Args:
        source: The directory, or the id on the Hub.
        remedy: How to give this command another tokenizer, such as "name one by --tokenizer". The message ends with
            it, after the advice to save one in the directory.
        trust_remote_code: Whether to run code that comes with the tokenizer. Without it, the user is not asked. Code of
            the model and of its configuration is not run in either case.
        options: Other arguments of `AutoTokenizer.from_pretrained`, such as `revision`.

    Returns:
        A tokenizer that has more in its vocabulary than special tokens.

    Raises:
        NoTokenizerError: There is no tokenizer, or it needs code or packages that are not there.
        OSError: `source` is not a directory, and the Hub does not give it; or `tokenizer.json` is damaged.
        ValueError: The table of a Kimi release is damaged, or the `config.json` beside the tokenizer cannot be used.
            The message is one line that names `source` or the file.
    """
    _check_config(source, options.get("revision"))
    return load_beside_config(source, remedy=remedy, trust_remote_code=trust_remote_code, **options)


def load_beside_config(
    source: str | os.PathLike, *, remedy: str = "", trust_remote_code: bool = False, **options: Any
) -> PreTrainedTokenizerBase:
    """Load the tokenizer beside a `config.json` whose sizes were checked; see `load_tokenizer` for all else."""
    hub = {key: options[key] for key in ("revision", "subfolder", "token") if key in options}
    tokenizer_config = get_tokenizer_config(source, **hub)
    if (released := read_kimi_tokenizer(source, tokenizer_config, **hub)) is not None:
        return released
    try:
        if trust_remote_code:
            # `AutoTokenizer` would run the code of the configuration too.
            options["config"] = _read_config(source, **hub)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # `tokenizers` raises nothing more special for a damaged file
        if isinstance(error, OSError) and not Path(source).is_dir():
            raise
        _check_config_loads(source)
        if AUTO_MAP in tokenizer_config and not trust_remote_code:
            raise NoTokenizerError(
                f"The tokenizer of {source} is code that came with it: read that code, then allow it to run by "
                "--trust-remote-code, or in a recipe by trust_remote_code=true."
            ) from error
        if (file := Path(source, "tokenizer.json")).exists() and AUTO_MAP not in tokenizer_config:
            raise OSError(f"{file} is damaged ({error!r}). Copy it again.") from error
        raise NoTokenizerError(_no_tokenizer(source, remedy, error)) from error
    # From a directory without files, `AutoTokenizer` makes some tokenizers of special tokens alone.
    if tokenizer is None or set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise NoTokenizerError(_no_tokenizer(source, remedy))
    return tokenizer


def is_plain_fast(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer is its backend alone: a fast one, without code that came with it."""
    has_code = type(tokenizer).__module__.startswith(f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}.")
    return tokenizer.is_fast and not has_code


def _check_config(source: str | os.PathLike, revision: str | None) -> None:
    """Check the numbers in the `config.json` beside a tokenizer: `AutoTokenizer` makes lists of these lengths."""
    path = Path(source, CONFIG_NAME)
    if not Path(source).is_dir():
        # If the file cannot be downloaded, `AutoTokenizer` fails in the same way with a message.
        with suppress(OSError, HFValidationError, httpx.HTTPError):
            path = Path(hf_hub_download(str(source), CONFIG_NAME, revision=revision))
    if path.is_file():
        check_sizes(path, read_object(path))


def _read_config(source: str | os.PathLike, **hub: Any) -> PreTrainedConfig:
    """Read the `config.json` beside a tokenizer without its code, as `AutoTokenizer` does if no code is trusted."""
    with quiet_transformers():
        try:
            return AutoConfig.from_pretrained(source, trust_remote_code=False, **hub)
        except (OSError, ValueError):
            return PreTrainedConfig.from_pretrained(source, **hub)


def _check_config_loads(source: str | os.PathLike) -> None:
    """Raise ValueError if a tokenizer does not load because the `config.json` beside it does not."""
    path = Path(source, CONFIG_NAME)
    if not path.is_file():
        return
    fields = read_object(path)
    if AUTO_MAP in fields and fields.get("model_type") not in CONFIG_MAPPING:
        return  # its values are for code that is not run
    try:
        AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # a wrong value fails in any way
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} cannot be used ({type(error).__name__}: {reason}). Mend that value there.") from error


def _no_tokenizer(source: str | os.PathLike, remedy: str, error: Exception | None = None) -> str:
    """Return the message that a source has no tokenizer, with remedies and the reason."""
    advice = [SAVE_ONE] if Path(source).is_dir() else []
    advice += [remedy] if remedy else []
    # Without any file of a tokenizer, the message of `transformers` is only a list of all formats.
    has_files = not Path(source).is_dir() or any(Path(source, name).exists() for name in TOKENIZER_FILES)
    reason = f" ({type(error).__name__}: {' '.join(str(error).split())})" if error and has_files else ""
    return f"{source} has no tokenizer that loads{': ' if advice else ''}{', or '.join(advice)}.{reason}"


__all__ = ["NoTokenizerError", "is_plain_fast", "load_tokenizer"]
