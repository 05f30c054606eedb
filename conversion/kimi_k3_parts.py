"""Rewrite the shards of Kimi K3 before a conversion: pack its experts, and give it the parts of the release again.

No model is loaded: tensors are read, compared and written one by one.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnres import AttnResKimiK3Config
from attnres.checkpoints.checkpoint import Checkpoint
from attnres.checkpoints.complete import check_complete, empty_model
from attnres.checkpoints.kimi_k3 import has_head, is_packed
from attnres.checkpoints.shards import DTYPES, Shard, StoredTensor, check_finite, read_pieces, write_shard
from attnres.kimi_k3_layout_attnres import PREFIX
from attnres.kimi_k3_packed_attnres import MXFP4, check_scales, decode_mxfp4
from attnres.kimi_k3_packing_attnres import GROUP, QUANTIZATION, encode_mxfp4
from attnres.utils.files import check_space
from attnres.utils.wording import counted

_PACKED, _SCALE = "_packed", "_scale"
_EXPERT = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.\d+\.w[123]\.weight")
# Fields that may differ between a model and the release that it was trained from.
_FREE = {
    *("architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range"),
    *("model_type", "num_nextn_predict_layers", "pad_token_id", "quantization_config", "transformers_version"),
    "use_cache",
}
# A tensor to write, and a function that gives its bytes.
_Written = tuple[StoredTensor, Callable[[], Iterable[bytes | memoryview]]]


@dataclass
class Moved:
    """The distance by which packing moved the weights of a layer's experts.

    Attributes:
        tensors: The number of tensors that were packed, and not copied from the release.
        squares: The sum of their squares.
        moved: The sum of the squares of what they moved.
        largest: The largest absolute change of a weight.
    """

    tensors: int = 0
    squares: float = 0.0
    moved: float = 0.0
    largest: float = 0.0

    def __str__(self) -> str:
        relative = math.sqrt(self.moved / self.squares) if self.squares else 0.0
        tensors = counted(self.tensors, "tensor")
        return f"{tensors} packed, weights moved by {relative:.1e} of their norm, the farthest by {self.largest:.1e}"


class _Tensors(NamedTuple):
    """A checkpoint, and the names of its tensors by their names without the prefix of the composite layout."""

    checkpoint: Checkpoint
    names: Mapping[str, str]

    def entry(self, name: str) -> StoredTensor:
        return self.checkpoint.entries[self.names[name]]

    def read(self, name: str) -> Tensor:
        """Return a tensor's values. A library would read the long header of the file for each of them."""
        data, entry = bytearray(), self.entry(name)
        for piece in self.pieces(name):
            data += piece
        return torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(entry.shape)

    def decode(self, weight: str) -> Tensor:
        """Return the values of a packed weight."""
        return decode_mxfp4(self.read(weight + _PACKED), self.read(weight + _SCALE))

    def pieces(self, name: str) -> Iterator[memoryview]:
        """Yield a tensor's bytes."""
        shard = self.checkpoint.where[self.names[name]]
        with shard.path.open("rb") as file:
            yield from read_pieces(file, self.entry(name), shard.source)


def _open(checkpoint: Checkpoint) -> _Tensors:
    return _Tensors(checkpoint, {name.removeprefix(PREFIX): name for name in checkpoint.entries})


@dataclass
class Rewriting:
    """A rewriting that was checked and is ready to be written; see [`prepare_rewriting`].

    Attributes:
        model: The model.
        parts: The release that it was trained from, if that is given.
        is_packed: Whether the result's experts are packed.
        moved: By layer, how far packing moved its experts. It is complete when the shards are written.
        num_bytes: The size of the result's tensors.
    """

    model: Checkpoint
    parts: Checkpoint | None
    is_packed: bool
    moved: dict[int, Moved] = field(default_factory=dict)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Choose the tensors of each shard."""
        self._model = _open(self.model)
        self._parts = None if self.parts is None else _open(self.parts)
        self._encode = lru_cache(maxsize=1)(self._encode)  # the codes and the scale of a weight may lie in two shards
        self._counted: set[str] = set()
        self._shards = [(shard, [*self._tensors_of(shard)]) for shard in self._base.checkpoint.shards]
        self.num_bytes = sum(entry.end for _, tensors in self._shards for entry, _ in tensors)

    @property
    def _base(self) -> _Tensors:
        """The checkpoint whose files, order of tensors and other parts the result has."""
        return self._parts or self._model

    def write(self, scratch: Path, on_bytes: Callable[[int], None] = lambda n: None) -> Checkpoint:
        """Write the shards into a directory.

        Args:
            scratch: The directory, which is made.
            on_bytes: A function that gets the number of bytes of each piece that is written.

        Returns:
            The checkpoint to convert. Its folder, with the files beside the weights, is that of the release or model.

        Raises:
            OSError: There is too little space, which is checked before anything is written; or a shard is damaged.
            ValueError: A weight to pack holds NaN or infinite values.
        """
        check_space(scratch.parent, self.num_bytes)
        scratch.mkdir()
        shards = []
        for shard, tensors in self._shards:
            if tensors:
                shards.append(write_shard(shard, scratch / shard.path.name, tensors, on_bytes))
        result = self._base.checkpoint.with_shards(shards)
        vars(result).pop("config", None)
        result.fields = self._fields()
        return result

    def describe(self) -> list[str]:
        """Return a line on each layer whose experts moved when they were packed, and one on all layers."""
        lines = [f"Layer {layer}: {moved}." for layer, moved in sorted(self.moved.items()) if moved.largest]
        return [*lines, f"All layers: {self._all()}."] if self.moved else []

    @property
    def difference(self) -> str | None:
        """The reason for which the result may compute another function than the model; None if there is none."""
        return f"experts were packed as MXFP4 ({self._all()})" if self.moved and self._all().largest else None

    def _all(self) -> Moved:
        every = self.moved.values()
        tensors, squares, moved = (sum(getattr(m, name) for m in every) for name in ("tensors", "squares", "moved"))
        return Moved(tensors, squares, moved, max(m.largest for m in every))

    def _fields(self) -> dict[str, Any]:
        """Return the fields of the result's `config.json`."""
        fields = deepcopy(self._base.checkpoint.fields)
        text = fields.get("text_config", fields)
        if not self.is_packed:
            for owner in (fields, text):
                owner.pop("quantization_config", None)
        elif not (text.get("quantization_config") or fields.get("quantization_config")):
            text["quantization_config"] = deepcopy(QUANTIZATION)
        if self.parts is not None and self.parts.config.dtype not in (None, self.model.config.dtype):
            for owner in (fields, text):
                for name in {"dtype", "torch_dtype"} & owner.keys():
                    owner[name] = str(self.model.config.dtype).removeprefix("torch.")
        return fields

    def _tensors_of(self, shard: Shard) -> Iterator[_Written]:
        """Yield the tensors to write in place of a shard, in its order."""
        base, model = self._base, self._model
        for entry in shard.entries:
            if base.checkpoint.where.get(entry.name) is not shard:
                continue  # no part of the checkpoint: it lies in the file, but not in its index
            name = entry.name.removeprefix(PREFIX)
            prefix = entry.name.removesuffix(name)
            weight = name.removesuffix(_PACKED).removesuffix(_SCALE)
            if model.names.keys().isdisjoint((weight, weight + _PACKED)):  # of another part
                yield _copy(base, name, entry.name)
            elif (self.is_packed or name != weight) and _EXPERT.fullmatch(weight):
                yield from self._expert(prefix, weight, name)
            else:
                is_equal = model.entry(name).dtype != entry.dtype and torch.equal(*_as_one_dtype(base, model, name))
                yield _copy(base, name, entry.name) if is_equal else self._trained(name, entry.name)

    def _expert(self, prefix: str, weight: str, name: str) -> Iterator[_Written]:
        """Yield the tensors to write in place of a weight of an expert, or of a part of it.

        Args:
            prefix: The prefix of names in the result.
            weight: The name of the weight.
            name: The name of the tensor that is replaced: the same, or that of the codes or of the scale.
        """
        if not self.is_packed:  # the weight takes the place of the codes
            if name.endswith(_PACKED):
                yield self._trained(weight, prefix + weight)
            return
        rows, columns = self._shape(weight)
        for part, width in ((_PACKED, columns // 2), (_SCALE, columns // GROUP)):
            if name not in (weight, weight + part):
                continue
            if weight not in self._model.names:
                yield _copy(self._model, weight + part, prefix + weight + part)
            else:
                size = rows * width
                entry = StoredTensor(prefix + weight + part, "U8", (rows, width), 0, size)
                yield entry, partial(self._pieces, weight, part)

    def _trained(self, name: str, new_name: str) -> _Written:
        """Return a tensor of the model under its name in the result, which is checked while it is read."""
        entry, _ = _copy(self._model, name, new_name)
        return entry, partial(self._finite, name)

    def _finite(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor of the model, and name its file if a value is not finite.

        Later checks know the file of the release alone, in whose place the result is written.
        """
        for piece in self._model.pieces(name):
            check_finite(piece, self._model.entry(name), self.model.where[self._model.names[name]].source)
            yield piece

    def _shape(self, weight: str) -> tuple[int, ...]:
        if weight in self._model.names:
            return self._model.entry(weight).shape
        rows, half = self._model.entry(weight + _PACKED).shape
        return rows, 2 * half

    def _pieces(self, weight: str, part: str) -> Iterable[bytes | memoryview]:
        """Return the bytes of an expert's codes or scale: those of the release if the weight has not changed."""
        if self._is_untouched(weight):
            return self._base.pieces(weight + part)
        packed, scale = self._encode(weight)
        return [(packed if part == _PACKED else scale).numpy().tobytes()]

    def _is_untouched(self, weight: str) -> bool:
        """Return whether the model's weight has the values of the release's packed one."""
        return self._parts is not None and is_untouched(self._model, self._parts, weight)

    def _encode(self, weight: str) -> tuple[Tensor, Tensor]:
        """Pack a weight of the model, and note how far that moves it."""
        values = self._model.read(weight)
        try:
            packed, scale = encode_mxfp4(values)
        except ValueError as error:
            path = self.model.where[self._model.names[weight]].source
            raise ValueError(f"{path}: `{self._model.names[weight]}` cannot be packed: {error}") from error
        if weight not in self._counted:
            self._counted.add(weight)
            match = _EXPERT.fullmatch(weight)
            moved = self.moved.setdefault(int(match[1]) if match else 0, Moved())
            values = values.float()
            change = decode_mxfp4(packed, scale).float().sub_(values)
            moved.tensors += 1
            moved.squares += values.double().square().sum().item()
            moved.moved += change.double().square().sum().item()
            moved.largest = max(moved.largest, change.abs().max().item())
        return packed, scale


def is_untouched(model: _Tensors, parts: _Tensors, weight: str) -> bool:
    """Return whether a model's unpacked weight has the values of the release's packed one."""
    if weight + _PACKED not in parts.names:
        return False
    values = model.read(weight)
    return torch.equal(parts.decode(weight).to(values.dtype), values)


def _copy(source: _Tensors, name: str, new_name: str) -> _Written:
    """Return a tensor of a checkpoint under its name in the result."""
    entry = source.entry(name)
    size = entry.end - entry.start
    return StoredTensor(new_name, entry.dtype, entry.shape, 0, size), partial(source.pieces, name)


def _as_one_dtype(one: _Tensors, other: _Tensors, name: str) -> tuple[Tensor, Tensor]:
    a, b = one.read(name), other.read(name)
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def prepare_rewriting(model: Checkpoint, parts: Checkpoint | None, pack: bool) -> Rewriting:
    """Prepare to pack a model's experts, to give it the parts of a release, or both.

    With a release, the result has the release's files: the tensors of the text model are replaced by those of the
    model, and all others stay. A tensor whose values are those of the release keeps the release's bytes. If the
    release's experts are packed, so are the result's, unless one has changed and `pack` is false.

    Args:
        model: The model.
        parts: The release that it was trained from.
        pack: Whether to pack experts that have changed.

    Returns:
        The rewriting; [`Rewriting.write`] writes the shards.

    Raises:
        OSError: A file is damaged.
        ValueError: One of them is not a whole language model of Kimi K3; the model was not trained from the release; or
            its experts cannot be packed.
    """
    option = "--pack-experts" if parts is None else "--with-parts"
    for checkpoint in (model,) if parts is None else (model, parts):
        config: Any = deepcopy(checkpoint.config)
        if not isinstance(config, AttnResKimiK3Config):
            raise ValueError(
                f"{option} belongs to Kimi K3, but {checkpoint.name} is of model type {config.model_type!r}."
            )
        if parts is not None and not has_head(checkpoint, config):
            raise ValueError(f"{checkpoint.name} has no `lm_head`, but --with-parts takes whole language models.")
        check_complete(checkpoint, empty_model(config, checkpoint), config)
        if is_packed(checkpoint) and config.packing != MXFP4:
            raise ValueError(
                f"the experts of {checkpoint.name} are packed as {config.packing.title}, but {option} takes "
                f"{MXFP4.title} alone."
            )
        _check_scales(checkpoint)
    if pack:
        _check_can_pack(model)
    if parts is not None:
        _check_is_of(model, parts)
        _check_keeps_all(model, parts)
    has_packed = is_packed(model)
    if not (pack or has_packed) and parts is not None and is_packed(parts):
        trained, released = _open(model), _open(parts)
        weights = (name for name in trained.names if _EXPERT.fullmatch(name))
        has_packed = all(is_untouched(trained, released, weight) for weight in weights)
    return Rewriting(model, parts, pack or has_packed)


def _check_scales(checkpoint: Checkpoint) -> None:
    """Raise `ValueError` if a scale of packed experts cannot be decoded: it is read before long work begins."""
    tensors = _open(checkpoint)
    for name in tensors.names:
        if _EXPERT.fullmatch(name.removesuffix(_SCALE)) and name.endswith(_SCALE):
            path = checkpoint.where[tensors.names[name]].source
            check_scales(f"{path}: `{tensors.names[name]}`", tensors.read(name))


def _check_can_pack(model: Checkpoint) -> None:
    """Raise `ValueError` if a model has no routed experts, or some whose width is no multiple of the group's."""
    config: Any = model.config
    if config.num_local_experts is None:
        raise ValueError(f"{model.name} has no routed experts. Leave out --pack-experts.")
    latent = "hidden_size" if config.routed_expert_hidden_size is None else "routed_expert_hidden_size"
    for name in ("moe_intermediate_size", latent):
        if (width := getattr(config, name)) % GROUP:
            raise ValueError(
                f"{model.config_path}: `{name}` is {width}, but must be a multiple of {GROUP} to pack experts: "
                f"{GROUP} weights share a scale."
            )


def _check_is_of(model: Checkpoint, parts: Checkpoint) -> None:
    """Raise `ValueError` unless a model can have been trained from a release."""
    fields, released = (_text_fields(checkpoint) for checkpoint in (model, parts))
    for name in sorted(fields.keys() | released.keys()):
        if fields.get(name) != released.get(name):
            raise ValueError(
                f"{model.name} was not trained from {parts.name}: `{name}` is {fields.get(name)!r} there, and "
                f"{released.get(name)!r} in {parts.name}. Give the release that it was trained from."
            )
    # Both are read in any case: a damaged one would be noticed only when the shards have been written.
    tokenizer, released_tokenizer = model.tokenizer, parts.tokenizer
    if tokenizer is None:
        return
    if released_tokenizer is None:
        raise ValueError(
            f"{parts.name} has no tokenizer that loads here, but {model.name} has one. Copy the tokenizer files of the "
            f"release into {parts.name}."
        )
    if tokenizer.get_vocab() != released_tokenizer.get_vocab():
        raise ValueError(
            f"{model.name} was not trained from {parts.name}: their tokenizers have other tokens. Give the release "
            "that it was trained from."
        )


def _check_keeps_all(model: Checkpoint, parts: Checkpoint) -> None:
    """Raise `ValueError` if a model holds tensors that have no place in a release, such as a layer that was added."""
    weights, released = (
        {name.removesuffix(_PACKED).removesuffix(_SCALE) for name in _open(checkpoint).names}
        for checkpoint in (model, parts)
    )
    if lost := sorted(weights - released):
        raise ValueError(
            f"{model.name} holds {counted(len(lost), 'weight')} that {parts.name} does not hold, such as `{lost[0]}`. "
            "The result would lack them. Give a release that holds them, or leave out --with-parts."
        )


def _text_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the fields of a text model that training does not change."""
    config: Any = checkpoint.config
    fields = config.to_dict()
    return {name: value for name, value in fields.get("text_config", fields).items() if name not in _FREE}


__all__ = ["Moved", "Rewriting", "prepare_rewriting"]
