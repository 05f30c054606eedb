"""Convert released checkpoints of Kimi K3 to directories that the Auto classes load, and back.

Such a conversion keeps the bytes of every tensor, those of the vision part and packed experts included. It changes
`config.json`, and adds the model's code. The text model alone names Kimi Linear's model type in its `config.json`; its
result is in the composite layout, whose tensors have a prefix.
"""

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import CONFIG_NAME, IMAGE_PROCESSOR_NAME

from attnres import (
    AttnResKimiK3Config,
    AttnResKimiK3ForCausalLM,
    AttnResKimiK3ForConditionalGeneration,
    AttnResKimiK3ImageProcessor,
    AttnResKimiK3Processor,
)
from attnres.checkpoints.checkpoint import Checkpoint
from attnres.checkpoints.complete import check_complete, empty_model
from attnres.checkpoints.kimi_k3 import check_vision, is_packed
from attnres.checkpoints.shards import StoredTensor
from attnres.checkpoints.side_files import code_fields, references
from attnres.checkpoints.source_files import AUTO_MAP, check_file, json_text, read_object
from attnres.kimi_k3_fields_attnres import fields_without_experts
from attnres.kimi_k3_layout_attnres import PREFIX, prefix_of
from attnres.kimi_k3_packed_attnres import check_scales
from attnres.pretrained_attnres import auto_map
from attnres.travelling import write_used_code
from attnres.utils.model_files import RECORD

from .convert import Conversion
from .kimi_k3_parts import Rewriting

# Fields of the text model that a composite `config.json` repeats.
_REPEATED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")


@dataclass
class KimiK3Conversion(Conversion):
    """A conversion of Kimi K3: its files keep their names and their order of tensors, so that it can be undone.

    Attributes:
        texts: The texts of `config.json` and of other files to write beside the weights, by name.
        adds_prefix: Whether the tensors of the text model get the prefix of the composite layout.
        removes_prefix: Whether they lose that prefix.
        processor_text: The text of the released `preprocessor_config.json`, which a conversion back restores.
    """

    config: AttnResKimiK3Config
    texts: Mapping[str, str] = field(default_factory=dict)
    adds_prefix: bool = False
    removes_prefix: bool = False
    processor_text: str | None = None

    has_legacy_settings: ClassVar[bool] = False

    def new_name(self, name: str) -> str:
        """Return a tensor's name in the result; see the base class."""
        if self.adds_prefix and name.startswith(("model.", "lm_head.")):
            return PREFIX + name
        return name.removeprefix(PREFIX) if self.removes_prefix else name

    def check_integers(self, values: Tensor, entry: StoredTensor, path: Path) -> None:
        """Raise ValueError if scales of packed experts cannot be decoded; see the base class."""
        if entry.name.endswith("_scale"):
            check_scales(f"{path}: `{entry.name}`", values)

    def file_names(self, sources: Sequence[str]) -> list[str]:
        """Return the names of the source's shards; see the base class."""
        return [*sources]

    def write_configuration(self, target: Path) -> None:
        """Write `config.json`, the record for a conversion back, and the code; see the base class."""
        for name, text in self.texts.items():
            (target / name).write_bytes(text.encode())  # with the line ends of the release
        if self.has_code:
            custom_object_save(_whole_class(self.config.vision_config), target)
            write_used_code(self.config, target)

    def write(self, target: Path, *arguments: Any, **options: Any) -> list[str]:
        """Write the result, its image processor with code of this package; see the base class."""
        notes = super().write(target, *arguments, **options)
        path, source = (folder / IMAGE_PROCESSOR_NAME for folder in (target, self.checkpoint.folder))
        if not path.is_file() or path.read_bytes() == source.read_bytes():
            return notes
        fields = read_object(path)
        if self.processor_text is not None and _without_code(json.loads(self.processor_text)) == _without_code(fields):
            path.write_bytes(self.processor_text.encode())
        elif self.has_code and self.config.vision_config is not None and AUTO_MAP not in fields:
            # Code of the release was left out, unless the user trusts it.
            classes = (AttnResKimiK3ImageProcessor, AttnResKimiK3Processor)
            for processor_class in classes:
                custom_object_save(processor_class, target)
            names = {c._auto_class: f"{c.__module__.rpartition('.')[2]}.{c.__name__}" for c in classes}
            path.write_text(json_text(fields | {AUTO_MAP: names}), encoding="utf-8")
        return notes

    def write_index(self, target: Path, names: Sequence[str], weight_map: dict[str, str]) -> None:
        """Write the source's index if it has one, with the names of the result's tensors; see the base class."""
        checkpoint = self.checkpoint
        index, path = checkpoint.index, checkpoint.weights_path
        is_whole = index is not None and not checkpoint.lacks_metadata
        if is_whole and checkpoint.is_temporary:  # the index may be that of other tensors
            size = sum(entry.end - entry.start for entry in checkpoint.entries.values())
            is_whole = index["weight_map"] == weight_map and index["metadata"].get("total_size") == size
        if not is_whole or index is None or path is None:
            super().write_index(target, names, weight_map)
        elif not (self.adds_prefix or self.removes_prefix):
            shutil.copyfile(path, target / path.name)
        else:
            # The order of its tensors and its metadata stay.
            renamed = {self.new_name(name): file for name, file in index["weight_map"].items()}
            (target / path.name).write_text(json.dumps(index | {"weight_map": renamed}, indent=2) + "\n")


def prepare_kimi_k3(
    source: Checkpoint, flags: Collection[str] = (), back: str | None = None, rewriting: Rewriting | None = None
) -> KimiK3Conversion | None:
    """Prepare the conversion of Kimi K3; return None for any other model, which is converted in another way.

    Args:
        source: The model.
        flags: The options of a retrofit and of a change of connections that the user gave, as `--block-size`.
        back: The value of `--to`, which undoes a conversion.
        rewriting: The rewriting that has made the source, which packed experts or put back parts of the release.

    Raises:
        OSError: A file is damaged.
        ValueError: The options do not fit the model; or a tensor is missing, misshapen, or packed where it may not be.
    """
    _check_options(source, flags, back)
    if not isinstance(source.config, AttnResKimiK3Config):
        return None
    return _prepare_loadable(source, rewriting) if back is None else _prepare_release(source)


def _check_options(source: Checkpoint, flags: Collection[str], back: str | None) -> None:
    """Raise ValueError if options of a conversion do not fit its source."""
    folder, config = source.folder, source.config
    if not isinstance(config, AttnResKimiK3Config):
        if back == "released":
            raise ValueError(
                f"{folder} is of model type {config.model_type!r}, but --to released gives back a release of Kimi K3. "
                "--to standard undoes a retrofit."
            )
        return
    if flags:
        raise ValueError(
            f"{folder} is Kimi K3, which is converted as it is and takes no retrofit. Leave out {' and '.join(flags)}."
        )
    if back == "standard":
        raise ValueError(
            f"{folder} is Kimi K3, and no standard decoder of transformers computes the same function. --to released "
            "undoes a conversion."
        )


def _prepare_loadable(source: Checkpoint, rewriting: Rewriting | None) -> KimiK3Conversion:
    """Prepare to make a directory that the Auto classes load, with every tensor as it is.

    A `config.json` of the text model alone becomes that of the composite model, whose tensors have a prefix.
    """
    config, checked = _check(source)
    adds_prefix = not prefix_of(source.entries)
    released = source.fields
    fields = _loadable_config(released)
    texts = {CONFIG_NAME: json_text(fields)}
    parts = None if rewriting is None else rewriting.parts
    if parts is not None and parts.fields == released and _read_record(parts) is not None:
        texts[RECORD] = (parts.folder / RECORD).read_bytes().decode()  # the parts were converted before
    elif parts is not None or not source.is_temporary:  # otherwise the result has other tensors than the source
        texts[RECORD] = _make_record(source, adds_prefix)
    config.auto_map = fields["auto_map"]
    left = _names_of_code(released) if released.get(AUTO_MAP) != fields[AUTO_MAP] else []
    note = f"Left out: {' and '.join(left)} of {CONFIG_NAME}. The result loads by the code of this package alone."
    conversion = KimiK3Conversion(source, config, **checked, texts=texts, adds_prefix=adds_prefix)
    conversion.notes = (note,) if left else ()
    if rewriting is not None:
        done = ["experts packed as MXFP4"] if rewriting.is_packed else []
        done += [] if parts is None else [f"with the other parts of {parts.name}"]
        conversion.title = f"Kimi K3 for the Auto classes ({' and '.join(done)})"
        conversion.original, conversion.difference = rewriting.model, rewriting.difference
        conversion.notes += tuple(rewriting.describe())
    return conversion


def _prepare_release(source: Checkpoint) -> KimiK3Conversion:
    """Prepare to undo [`_prepare_loadable`]: the released `config.json` and tensors, without the code of this package.

    Where `config.json` was changed since, or there is no record of the released one, its present fields stay.
    """
    config, checked = _check(source)
    path, record = source.config_path, _read_record(source)
    if record is None:
        fields = source.fields
        reason = "No record of the release"
        if (source.folder / RECORD).exists():
            reason = f"{path} was changed since the conversion"
        removed = f" and removed {' and '.join(names)}" if (names := _names_of_code(fields)) else ""
        text, prefix, processor_text = json_text(_without_code(fields)), "", None
        notes = [f"{reason}: kept {CONFIG_NAME}{removed}."]
    else:
        text, prefix, processor_text = record
        files = _files_of_code(json.loads(text), source.folder / RECORD)
        notes = [f"Copy these files from the release: {', '.join(files)}."] if files else []
    return KimiK3Conversion(
        source,
        config,
        **checked,
        texts={CONFIG_NAME: text},
        removes_prefix=bool(prefix),
        processor_text=processor_text,
        has_code=False,
        code_folder="",  # a release has its code beside `config.json`
        notes=tuple(notes),
    )


def _check(source: Checkpoint) -> tuple[AttnResKimiK3Config, dict[str, Any]]:
    """Check that a source is whole; return a copy of its configuration, and what a conversion tells of the model."""
    config: Any = deepcopy(source.config)  # a conversion changes its fields
    model = empty_model(config, source)
    unused = check_complete(source, model, config) - check_vision(source, config)
    packed = f", experts packed as {config.packing.title}" if is_packed(source) else ""
    return config, {
        "model": model,
        "title": f"Kimi K3 for the Auto classes (every tensor byte for byte{packed})",
        "unused": unused,
        "model_class": type(model),  # the Auto classes cannot load every source
    }


def _whole_class(vision: Any) -> type[AttnResKimiK3ForCausalLM]:
    """Return the class whose code loads the whole of a release, for the value of its `vision_config`."""
    return AttnResKimiK3ForCausalLM if vision is None else AttnResKimiK3ForConditionalGeneration


def _names_of_code(fields: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields of a `config.json` that name code, as in a message."""
    return [f"`{name}`" for name in sorted({key for _, key in code_fields(dict(fields))})]


def _files_of_code(fields: Mapping[str, Any], path: Path) -> list[str]:
    """Return the names of the Python files beside a `config.json` to which its fields refer.

    Raises:
        OSError: A field is damaged. The message names `path`.
    """
    referred = [r for owner, key in code_fields(dict(fields)) if key == AUTO_MAP for r in references(owner, path)]
    return sorted({f"{reference.rpartition('.')[0]}.py" for reference in referred if "--" not in reference})


def _without_code(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `config.json` without those that name code, at any depth."""
    result = deepcopy(dict(fields))
    for owner, name in code_fields(result):
        del owner[name]
    return result


def _loadable_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `config.json` by which the Auto classes load Kimi K3.

    Args:
        fields: Those of the source: of the composite model, or of its text model alone.

    Returns:
        The fields of the composite model with the `auto_map` of the code that a result has.
    """
    whole_class = _whole_class(fields.get("vision_config"))
    added = {AUTO_MAP: auto_map(whole_class), "model_type": AttnResKimiK3Config.model_type}
    # Code of the source would run where a user trusts this package's code in the result.
    result = _without_code(fields)
    known = AttnResKimiK3Config.fields_of_file(fields)
    if known.get("num_experts", known.get("num_local_experts")) is None:
        text = result.get("text_config", result)
        text.pop("num_experts_per_tok", None)  # another name of a field that is set
        text |= fields_without_experts(known.get("num_hidden_layers", AttnResKimiK3Config.num_hidden_layers))
    if "text_config" in result:
        return {name: result.get(name) for name in fields if name in result or name in added} | added
    text = {name: value for name, value in result.items() if name != "transformers_version"}
    text["model_type"] = AttnResKimiK3Config.backbone
    outer = {name: text[name] for name in _REPEATED if name in text}
    return {"architectures": ["KimiK3ForConditionalGeneration"], **added, **outer, "text_config": text}


def _make_record(source: Checkpoint, has_new_prefix: bool) -> str:
    """Return the content of the file `RECORD`, by which a conversion back restores `config.json` and names.

    Args:
        source: The checkpoint.
        has_new_prefix: Whether the result's tensors have a prefix that those of the source do not have.
    """
    text = source.config_path.read_bytes().decode()  # `read_text` would change line ends
    if json.loads(text) != source.fields:
        text = json_text(source.fields)  # those of a source with other weights
    record = {"text_of_config.json": text, "prefix_added": PREFIX if has_new_prefix else ""}
    if (path := source.folder / IMAGE_PROCESSOR_NAME).is_file():
        check_file(source.folder, path)
        read_object(path)  # a damaged one is refused here
        record["text_of_preprocessor_config.json"] = path.read_bytes().decode()
    return json_text(record)


def _read_record(source: Checkpoint) -> tuple[str, str, str | None] | None:
    """Return the text of the released `config.json`, the prefix added to names of tensors, and the processor's text.

    It is None if the directory has no record, or if its `config.json` was changed since: by a run that trained the
    model, for example.

    Args:
        source: The checkpoint.

    Raises:
        OSError: The record is damaged.
    """
    path = source.folder / RECORD
    if not path.exists() and not path.is_symlink():
        return None
    check_file(source.folder, path)
    record = read_object(path)
    text, prefix = record.get("text_of_config.json"), record.get("prefix_added")
    try:
        fields = json.loads(text) if isinstance(text, str) else None
        processor_text = record.get("text_of_preprocessor_config.json")
        is_whole = processor_text is None or isinstance(json.loads(processor_text), dict)
    except (TypeError, ValueError):
        raise OSError(f"{path} is damaged. Copy it again, or remove it.") from None
    if not isinstance(text, str) or not isinstance(fields, dict) or prefix not in ("", PREFIX) or not is_whole:
        raise OSError(f"{path} is damaged. Copy it again, or remove it.")
    return (text, prefix, processor_text) if _loadable_config(fields) == source.fields else None


__all__ = ["KimiK3Conversion", "prepare_kimi_k3"]
