"""One value for a model that is given by its name: a named configuration, a folder, or an id on the Hub.

The command line makes this value before it imports PyTorch, so heavy packages are imported by the methods.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnres.utils.hub import check_source, meant
from attnres.utils.packaged import configuration_names

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from .checkpoint import Checkpoint


COMMIT = "commit "  # the beginning of the identity of a model on the Hub
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # fields of a configuration


@dataclass(frozen=True)
class ModelSource:
    """A model by its name.

    A named configuration comes first: `./attnres-tiny` is a folder of that name.

    Attributes:
        name: The name of a configuration, a folder, or an id on the Hub.
        revision: The branch, tag or commit on the Hub.
    """

    name: str
    revision: str | None = None

    @cached_property
    def is_named(self) -> bool:
        """Return whether the model is a named configuration, which has no weights."""
        return self.name in configuration_names()

    @cached_property
    def is_folder(self) -> bool:
        """Return whether the model is a folder on this machine."""
        return not self.is_named and Path(self.name).is_dir()

    @property
    def hub_id(self) -> str | None:
        """The id on the Hub; `None` for a named configuration or a folder."""
        return None if self.is_named or self.is_folder else self.name

    @cached_property
    def checkpoint(self) -> "Checkpoint":
        """The opened checkpoint, of which the files on the Hub are downloaded.

        Raises:
            FileNotFoundError: The model is a named configuration, or cannot be found.
            OSError, ValueError: As [`attnres.checkpoints.checkpoint.Checkpoint.open`].
        """
        from .checkpoint import Checkpoint

        if self.is_named:
            raise self._without_weights()
        return Checkpoint.open(self.name, self.revision)

    def check(self, *, needs_weights: bool = False, is_tokenizer: bool = False) -> None:
        """Check offline, without PyTorch, that there may be a model of this name.

        Args:
            needs_weights: Whether a named configuration will not do.
            is_tokenizer: Whether only the tokenizer is read, which the folder of an adapter may have too.

        Raises:
            FileNotFoundError: The model cannot be found.
            ValueError: It is the folder of an adapter.
        """
        if needs_weights and self.is_named:
            raise self._without_weights()
        if needs_weights or is_tokenizer:
            check_source(self.name, is_tokenizer=is_tokenizer)
        elif not self.is_named:
            check_source(self.name, configuration_names())

    def config(self, trust_remote_code: bool = False, **fields: Any) -> "PreTrainedConfig":
        """Read the configuration, and compare its numbers with the headers of the weights.

        Args:
            trust_remote_code: Whether to run Python code that comes with the model.
            fields: Fields of the configuration to replace.

        Returns:
            The configuration.

        Raises:
            FileNotFoundError: The model cannot be found or read.
            OSError: A file of the model is truncated or damaged.
            ValueError: The configuration or one of the fields cannot be used.
        """
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig

        from attnres.configuration import load

        if not self.is_named:
            self.check_files()
        try:
            if self.is_named:
                return load(self.name, **fields)
            options = {"revision": self.revision, "trust_remote_code": trust_remote_code}
            return AutoConfig.from_pretrained(self.name, **options, **fields)
        except OSError as error:
            raise self._missing("model", error) from error
        except (ArithmeticError, AttributeError, LookupError, StrictDataclassError, TypeError, ValueError) as error:
            subject = f"`config` does not fit {self.name}" if fields else f"the configuration of {self.name} is wrong"
            raise ValueError(f"{subject} ({type(error).__name__}): {' '.join(str(error).split())}") from error

    def check_files(self) -> None:
        """Check the configuration and the headers of the weights, as [`attnres.checkpoints.whole.check_loadable`] does.

        Raises:
            OSError, ValueError: A file is missing or damaged, or a number does not fit the weights.
        """
        from .whole import check_loadable

        try:
            checkpoint = self.checkpoint
        except FileNotFoundError:
            if self.is_folder:
                raise
            return  # the Hub may give only single files of a repository; loading the model says what is missing
        check_loadable(checkpoint)

    @property
    def as_packed(self) -> dict[str, Any]:
        """The option of [`build`] that keeps experts packed; empty for a model whose files have no packed experts."""
        if self.is_named:
            return {}
        from .kimi_k3 import is_packed

        with suppress(FileNotFoundError):  # a repository of which the Hub gives no snapshot, only single files
            if self.checkpoint.is_kimi_k3 and is_packed(self.checkpoint):
                return {"packed_experts": True}
        return {}

    def tokenizer(self, remedy: str = "", trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
        """Load the tokenizer that is with the model.

        Args:
            remedy: As for [`attnres.checkpoints.tokenizers.load_tokenizer`].
            trust_remote_code: Whether to run Python code that comes with the tokenizer.

        Raises:
            FileNotFoundError: The model cannot be found or read.
            ValueError: There is no tokenizer, or it does not load.
        """
        from .tokenizers import load_tokenizer

        options = {"revision": self.revision, "trust_remote_code": trust_remote_code}
        try:
            return load_tokenizer(self.name, remedy=remedy, **options)
        except OSError as error:
            raise self._missing("tokenizer", error) from error

    def build(self, load: "Callable[..., PreTrainedModel] | None" = None, **options: Any) -> "PreTrainedModel":
        """Make the causal language model: with random weights from a named configuration, else with its own weights.

        Special tokens among the fields of the configuration also hold for generation. If code that came with the model
        is not run, the model does not refer to it, so it can be saved.

        Args:
            load: A function of the folder or Hub id and of `options`, which loads the model. By default
                [`attnres.checkpoints.whole.load_whole`] by `AutoModelForCausalLM`.
            options: Fields of the configuration. Where the model has weights, also arguments of `from_pretrained`.

        Returns:
            The model.

        Raises:
            OSError, RuntimeError, ValueError: The model cannot be loaded, or an option does not fit it.
        """
        from transformers import AutoModelForCausalLM

        from .source_files import CODE_FIELDS
        from .whole import load_whole

        if self.is_named:
            return AutoModelForCausalLM.from_config(self.config(**options))
        # An absolute path, since the file of an adapter names its base by it.
        name = str(Path(self.name).absolute()) if self.is_folder else self.name
        if self.revision is not None:
            options["revision"] = self.revision
        try:
            model = load_whole(AutoModelForCausalLM, name, **options) if load is None else load(name, **options)
        except TypeError as error:  # the model's constructor gets each key that is not a field of its configuration
            raise ValueError(f"`config` does not fit {self.name}: {error}") from error
        # The file of settings of generation has its own special tokens, by which `generate` ends a text.
        if model.generation_config is not None:
            special = {field: options[field] for field in SPECIAL_TOKENS if field in options}
            vars(model.generation_config).update(special)
        for field in () if options.get("trust_remote_code") else CODE_FIELDS:
            vars(model.config).pop(field, None)
        return model

    def identity(self) -> str | None:
        """Return a text that changes with the files of the model: by the commit on the Hub, or by sizes and times.

        It is `None` for a named configuration, and where the Hub gives only single files and no snapshot.
        """
        if self.is_folder:
            folder = Path(self.name)
            names = {path.name for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".bin")}
            states = [(name, (folder / name).stat()) for name in sorted(names.union(self.checkpoint.weight_files))]
            return repr([(name, state.st_size, state.st_mtime_ns) for name, state in states])
        if not self.is_named:
            with suppress(FileNotFoundError):
                return f"{COMMIT}{self.checkpoint.folder.name}"  # the folder of a snapshot has this name
        return None

    def _without_weights(self) -> FileNotFoundError:
        """Return the error that a named configuration is given for a model with weights."""
        return FileNotFoundError(
            f"{self.name} is a named configuration, which has no weights. For a folder of that name, write "
            f"./{self.name}."
        )

    def _missing(self, part: str, error: OSError) -> OSError:
        """Return the error that a part of the model, `model` or `tokenizer`, cannot be read."""
        reason = " ".join(str(error).split()).rstrip(".")
        if self.is_folder:
            return FileNotFoundError(f"the {part} in {self.name} cannot be read: {reason}.")
        known = configuration_names() if part == "model" else ()
        absent = f"folder or named configuration ({', '.join(known)})" if known else "folder"
        return FileNotFoundError(
            f"the {part} {self.name} cannot be read: there is no such {absent}, and loading it from the Hub failed: "
            f"{reason}.{meant(self.name, known)}"
        )


__all__ = ["COMMIT", "SPECIAL_TOKENS", "ModelSource"]
