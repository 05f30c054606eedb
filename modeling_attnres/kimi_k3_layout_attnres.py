"""The released layout of Kimi K3's checkpoints: names of its tensors, packed experts, and padded heads.

[`read_release`] checks the tensors of a checkpoint before they are loaded, and decodes packed experts one by one,
unless they are to stay packed.
[`layout_rules`] are the rules by which `transformers` renames and merges them, and writes them again.
"""

import math
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    SplitModulelist,
    WeightConverter,
    WeightRenaming,
)

from .kimi_k3_configuration_attnres import COMPOSITE, AttnResKimiK3Config
from .kimi_k3_packed_attnres import NVFP4, Packing, check_scales
from .kimi_k3_shapes_attnres import released_shapes
from .kimi_k3_vision_configuration_attnres import is_of_vision, split_projections, vision_rules, vision_shapes
from .residual_attnres import FamilyWarning

_CLASSIFIER = "score."  # the head of a sequence or token classifier
PREFIX = "language_model."  # of the text model's tensors in the composite layout
# Endings of the names of tensors that belong to a quantised weight, of any method.
_OF_QUANTIZED = ("weight_packed", "weight_scale", "weight_shape", "weight_global_scale", "weight_zero_point")
_OF_QUANTIZED += ("weight_scale_inv", "input_global_scale", "input_scale")
# The names of dtypes in safetensors files. Weights that are not packed have one of `_FLOATS`.
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES |= {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3"}
_FLOATS = ("F64", "F32", "F16", "BF16")
_ITEMSIZE = {name: dtype.itemsize for dtype, name in _DTYPES.items()}
# Parts of the names of tensors that a model has or lacks -> the fields that decide it.
_BY_FIELD = {
    (".self_attn.g_proj.weight",): "`mla_use_output_gate` and `use_full_rank_gate`",
    (".self_attn.g_a_proj.weight", ".self_attn.g_b_proj.weight"): "`use_full_rank_gate`",
    tuple(f".self_attn.{name}.weight" for name in ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj")): "`q_lora_rank`",
    (".routed_expert_down_proj.weight", ".routed_expert_up_proj.weight"): "`routed_expert_hidden_size`",
    (".routed_expert_norm.weight",): "`latent_moe_use_norm`",
    tuple(f".shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")): "`num_shared_experts`",
    ("_res_proj.", "_res_norm."): "`attn_res_block_size`",
}
# A tensor under the name that it has in the model, and not in a release.
_OWN_NAME = re.compile(r"(model\.)?layers\.\d+\.(self_attn\.forget_gate\.|mlp\.experts\.gate_up_proj(_packed)?$)")


class _Packed:
    """A packed weight that is decoded when it is read, so that no more than the loaded model is in memory.

    It stands in place of a slice of a safetensors file.
    """

    def __init__(self, packing: Packing, parts: Sequence[Any]):
        self.packing, self.parts = packing, parts

    def __getitem__(self, index: Any) -> Tensor:
        return self.packing.decode(*(part[...] for part in self.parts))[index]

    def get_shape(self) -> list[int]:
        """Return the shape of the decoded weight."""
        rows, columns = shape_of(self.parts[0])
        return [rows, 2 * columns]

    def get_dtype(self) -> str:
        """Return the dtype of the decoded weight, as a safetensors file names it."""
        return "BF16"


class _Part:
    """The bytes of a part of a packed weight, which are checked when they are read; in place of a slice of a file."""

    def __init__(self, name: str, tensor: Any):
        self.name, self.tensor = name, tensor

    def __getitem__(self, index: Any) -> Tensor:
        values = self.tensor[...]
        if self.name.endswith("_scale"):
            check_scales(f"`{self.name}`", values)
        return values.view(torch.uint8)[index]

    def get_shape(self) -> list[int]:
        """Return the shape of the bytes."""
        *shape, last = shape_of(self.tensor)
        return [*shape, last * _ITEMSIZE[_dtype_of(self.tensor)]]

    def get_dtype(self) -> str:
        """Return the dtype of the bytes, as a safetensors file names it."""
        return _DTYPES[torch.uint8]


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, or of a slice of a safetensors file."""
    return tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)


def _dtype_of(tensor: Any) -> str:
    """Return the dtype of a tensor, or of a slice of a safetensors file, by the name that such a file has for it."""
    return tensor.get_dtype() if hasattr(tensor, "get_dtype") else _DTYPES.get(tensor.dtype, str(tensor.dtype))


def _in_words(names: Iterable[str], limit: int = 3) -> str:
    """Return the first of some names and the number of the others: "`a`, `b` and 5 more"."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"`{name}`" for name in names[:limit]) + more


def _lacks(missing: Collection[str]) -> str:
    """Return the message on tensors that a checkpoint lacks."""
    remedy = "Copy all of its files"
    if all(name.endswith("lm_head.weight") for name in missing):
        remedy += ", or, if it holds a decoder without a head, load it by `AutoModel`"
    return f"the checkpoint lacks {_in_words(missing)}. {remedy}."


def prefix_of(names: Iterable[str]) -> str:
    """Return the prefix of the text model's tensors among these names: `PREFIX`, or "" for a text model alone."""
    return PREFIX if any(name.startswith(PREFIX) for name in names) else ""


def _text_part(tensors: Mapping[str, Any], layers: int) -> tuple[dict[str, Any], str]:
    """Return the tensors of the text model's layers without their prefix, and the prefix. Name the others once."""
    prefix = prefix_of(tensors)
    text, left_out = {}, Counter()
    for name, tensor in tensors.items():
        inner = name.removeprefix(prefix)
        layer = inner.split(".")[2] if inner.startswith("model.layers.") else ""
        if name.startswith(_CLASSIFIER):  # no release has one, so it is saved without the prefix
            text[name] = tensor
        elif not name.startswith(prefix):
            left_out[f"{name.partition('.')[0]}.*"] += 1
        elif layer.isdecimal() and int(layer) >= layers:
            left_out[f"{prefix}model.layers.{layer}.* (beyond the last layer)"] += 1
        else:
            text[inner] = tensor
    if left_out:
        counts = (f"{part}: {n} {'tensor' if n == 1 else 'tensors'}" for part, n in sorted(left_out.items()))
        message = f"Left out of the checkpoint, because the text model has no such part: {', '.join(counts)}."
        if any(map(is_of_vision, left_out)):
            message += " `AutoModelForImageTextToText` loads a vision part, too."
        warnings.warn(message, FamilyWarning, stacklevel=3)
    return text, prefix


def read_release(
    config: AttnResKimiK3Config, tensors: Mapping[str, Any], has_head: bool = True, has_vision: bool = False
) -> dict[str, Any]:
    """Return a model's tensors of a released checkpoint, checked. Packed experts are decoded, or stay packed.

    Tensors of a vision part that the model does not have, and of layers beyond the last one, are left out and named
    once. Tensors under the model's own names, as `Trainer` saves them in its checkpoints, are returned as they are; see
    [`check_own_names`].

    Args:
        config: the model's configuration. Its `packed_experts` says whether experts stay packed. The shape of the
            checkpoint's `A_log` is noted there, for saving.
        tensors: tensors, or slices of safetensors files, by name.
        has_head: whether `lm_head` is needed, too.
        has_vision: whether the vision part is needed, too.

    Raises:
        ValueError: a tensor is missing, has another shape or dtype than it must have, is packed where no rule
            covers it, or is not packed where it must be; padding of `A_log` is not zero.
    """
    if any(map(_OWN_NAME.match, tensors)):
        return dict(tensors)
    vision = read_vision(config, tensors) if has_vision else {}
    others = {name: tensor for name, tensor in tensors.items() if name not in vision}
    text, prefix = _text_part(others, config.num_hidden_layers + (config.num_nextn_predict_layers or 0))
    ahead = f"model.layers.{config.num_hidden_layers}."  # the layer for multi-token prediction
    for copy in ("embed_tokens.weight", "shared_head.head.weight"):  # its copies of the model's own tensors
        text.pop(f"{ahead}{copy}", None)
    starts_ahead = not any(name.startswith(ahead) for name in text)
    experts = config.num_local_experts or 0
    if experts > len(text):  # before each is looked for: the number in a file may be huge
        raise ValueError(
            f"the checkpoint holds {len(text)} tensors, too few for the {experts:,} experts in `num_experts` of its "
            "config.json. Use the checkpoint's own config.json, and copy all of its files."
        )
    shapes = released_shapes(config)
    if not has_head:
        shapes.pop("lm_head.weight", None)
    missing, result = [], {}
    for name, shape in shapes.items():
        if ".experts." in name and f"{name}_packed" in text:
            if name in text:
                raise ValueError(
                    f"the checkpoint holds both `{prefix}{name}` and `{prefix}{name}_packed`. Remove one of them."
                )
            parts = _take_parts(config.packing, name, shape, text, prefix)
            if config.packed_experts:
                result |= parts
            else:
                result[name] = _Packed(config.packing, [*parts.values()])
        elif ".experts." in name and name in text and config.packed_experts:
            raise ValueError(
                f"`packed_experts` is true, but the checkpoint holds `{prefix}{name}`, which is not packed. Load it "
                "without `packed_experts`."
            )
        elif name in text:
            tensor = result[name] = text.pop(name)
            _check_float(prefix + name, tensor)
            if name.endswith(".A_log"):
                first = next((name for name in result if name.endswith(".A_log")), name)
                _check_heads(prefix + name, tensor, shape[0])
                if shape_of(tensor) != shape_of(result[first]):
                    raise ValueError(
                        f"`{prefix}{name}` has the shape {list(shape_of(tensor))}, but `{prefix}{first}` has "
                        f"{list(shape_of(result[first]))}. All must have one shape. Copy the files again."
                    )
                config.stored_A_log_shape = list(shape_of(tensor))
            else:
                _check_shape(prefix + name, tensor, shape)
        elif name.startswith("model.layers.0.self_attention_res_"):
            # The first layer reads the embedding alone, and some programs omit its pair.
            result[name] = torch.zeros(shape) if "_proj" in name else torch.ones(shape)
        elif not (starts_ahead and name.startswith(ahead)):
            missing.append(prefix + name)
        elif config.packed_experts and ".experts." in name:  # a new layer starts at random, but packed weights at zero
            raise ValueError(
                "the checkpoint holds no layer for multi-token prediction, and a new one could not train its packed "
                "experts. Load it without `packed_experts`, or with `mtp_loss_weight=0`."
            )
    packed = [prefix + name for name in text if name.endswith(_OF_QUANTIZED)]
    if packed:
        raise ValueError(
            f"the checkpoint holds quantised tensors that no rule covers: {_in_words(packed)}. Only the weights of "
            "routed experts may be packed, each with its scale."
        )
    if missing:
        raise ValueError(_lacks(missing))
    experts = [prefix + name for name in text if ".experts." in name]
    if experts:
        raise ValueError(
            f"the checkpoint holds {_in_words(experts)}, but `num_experts` of its config.json is "
            f"{config.num_local_experts}. Use the checkpoint's own config.json."
        )
    named = _warn_of_unread(text, config, prefix)
    # `transformers` names the others in its report.
    return result | {name: tensor for name, tensor in text.items() if name not in named} | vision


def read_vision(config: AttnResKimiK3Config, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of the vision part of a released checkpoint, checked; see [`read_release`].

    Raises:
        ValueError: a tensor is missing, or has another shape or dtype than it must have.
    """
    vision: Any = config.vision_config
    shapes = vision_shapes(vision, config.hidden_size)
    if missing := shapes.keys() - tensors.keys():
        raise ValueError(f"{_lacks(missing)} `AutoModelForCausalLM` loads the text model alone.")
    for name, shape in shapes.items():
        _check_float(name, tensors[name])
        _check_shape(name, tensors[name], shape)
    return {name: tensor for name, tensor in tensors.items() if is_of_vision(name)}


def check_own_names(names: Iterable[str], tensors: Iterable[str]) -> None:
    """Check that a checkpoint under the model's own names is whole.

    The tensors of connections are not checked here, because they are new where a model gets another connection.

    Args:
        names: names of the model's tensors.
        tensors: names of the checkpoint's tensors. A release's names are not checked.

    Raises:
        ValueError: a tensor is missing.
    """
    tensors = [*tensors]
    if not any(map(_OWN_NAME.match, tensors)):
        return
    held = {name.removeprefix("model.") for name in tensors}
    missing = [name for name in names if name.removeprefix("model.") not in held]
    if missing := [name for name in missing if "_res_proj." not in name and "_res_norm." not in name]:
        raise ValueError(_lacks(missing))


def _warn_of_unread(names: Iterable[str], config: AttnResKimiK3Config, prefix: str) -> set[str]:
    """Warn of tensors that the model would read if a field of its configuration had another value. Return their names.

    Args:
        names: names of tensors that the model does not read, without the prefix.
        config: the model's configuration.
        prefix: prefix of the names in the checkpoint.
    """
    named: set[str] = set()
    for ends, fields in _BY_FIELD.items():
        unread = [name for name in names if any(end in name for end in ends)]
        # Tensors of another connection have such names too; and whoever sets `residual_connection` knows the result.
        is_meant = config.residual_connection != "standard" or config.attn_res_block_size is not None
        if unread and not ("attn_res_block_size" in fields and is_meant):
            named.update(unread)
            held = _in_words(prefix + name for name in unread)
            message = (
                f"the checkpoint holds {held}. Because of {fields}, the model does not read them. If you "
                "did not intend that, use the checkpoint's own config.json."
            )
            warnings.warn(message, FamilyWarning, stacklevel=3)
    return named


def in_form_of_model(config: AttnResKimiK3Config, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a release with the convolutions of each layer joined, and `A_log` without its padding.

    Queries, keys and values of a vision part are apart. The rules of `transformers` do so too late: it shards tensors
    among processes before a rule sees them, so that each process would join or unpad the parts that it has, which are
    not its part of the result.
    """
    result, heads = split_projections(tensors, config), config.linear_num_heads
    for name in tensors:
        owner, _, end = name.rpartition("self_attn.")
        owner += "self_attn."
        if end == "A_log":
            result[f"{owner}forget_gate.A_log"] = result.pop(name)[...].flatten()[:heads].view(1, 1, heads, 1)
        elif end == "q_conv1d.weight":
            parts = [result.pop(f"{owner}{x}_conv1d.weight")[...] for x in "qkv"]
            result[f"{owner}conv1d.weight"] = torch.cat(parts)
    return result


def _take_parts(
    packing: Packing, name: str, shape: tuple[int, ...], text: dict[str, Any], prefix: str
) -> dict[str, Any]:
    """Take the parts of the packed weight `name` from `text`, and return them by their names, checked."""
    parts: dict[str, Any] = {}
    # The scale of a layer's input, where activations are quantised too. Here they are not.
    text.pop(f"{name.removesuffix('weight')}input_global_scale", None)
    for part, must in packing.shapes(*shape).items():
        key, dtype_must = f"{name}_{part}", _DTYPES[packing.parts[part]]
        if key not in text:
            raise ValueError(f"the checkpoint lacks `{prefix}{key}`, a part of a packed weight. Copy all files.")
        tensor = text.pop(key)
        has, dtype = list(shape_of(tensor)), _dtype_of(tensor)
        if dtype != dtype_must or has != list(must) or shape[1] % packing.group:
            raise ValueError(
                f"`{prefix}{key}` has the shape {has} and the dtype {dtype}, but must have {list(must)} and "
                f"{dtype_must}, that is {str(packing.parts[part]).removeprefix('torch.')}: {packing.title} has two "
                f"weights in a byte, and {packing.group} share a scale."
            )
        parts[key] = _Part(prefix + key, tensor)
    return parts


def _check_float(name: str, tensor: Any) -> None:
    """Raise `ValueError` unless a tensor has a dtype of weights that are not packed."""
    if _dtype_of(tensor) not in _FLOATS:
        raise ValueError(
            f"`{name}` has the dtype {_dtype_of(tensor)}, but must have one of {', '.join(_FLOATS)}. Only the weights "
            "of routed experts may be packed."
        )


def _check_shape(name: str, tensor: Any, shape: tuple[int, ...]) -> None:
    """Raise `ValueError` unless a tensor has the shape that the configuration gives it."""
    if shape_of(tensor) != shape:
        raise ValueError(
            f"`{name}` has the shape {list(shape_of(tensor))}, but must have {list(shape)}. Use the checkpoint's own "
            "config.json."
        )


def _check_heads(name: str, tensor: Any, heads: int) -> None:
    """Raise `ValueError` unless an `A_log` holds an entry for each head, and zeros after them."""
    shape = list(shape_of(tensor))
    if math.prod(shape) < heads:
        raise ValueError(f"`{name}` has {math.prod(shape)} entries, but must have at least {heads}, one for each head.")
    padding = tensor[...].flatten()[heads:]
    if padding.count_nonzero():
        raise ValueError(
            f"`{name}` must be zero after its first {heads} entries (one a head). `num_heads` may be wrong."
        )


class _LiveHeads(ConversionOps):
    """Take the heads of `A_log` from its padded form; in reverse, pad them."""

    def convert(self, input_dict: dict[str, Any], target_patterns: list[str], config: Any, **kwargs: Any) -> dict:
        """Return the only tensor as `[1, 1, heads, 1]`."""
        (tensor,) = (value[0] if isinstance(value, list) else value for value in input_dict.values())
        heads = config.linear_num_heads
        return {target_patterns[0]: tensor.flatten()[:heads].view(1, 1, heads, 1)}

    @property
    def reverse_op(self) -> ConversionOps:
        """The operation that pads."""
        return _PaddedHeads()


class _PaddedHeads(ConversionOps):
    """Pad the heads of `A_log` with zeros to the shape that the checkpoint had, by default to a multiple of 128."""

    def convert(self, input_dict: dict[str, Any], target_patterns: list[str], config: Any, **kwargs: Any) -> dict:
        """Return the only tensor in its stored shape."""
        (tensor,) = (value[0] if isinstance(value, list) else value for value in input_dict.values())
        tensor = tensor.flatten()
        shape = config.stored_A_log_shape or [128 * math.ceil(len(tensor) / 128)]
        return {target_patterns[0]: F.pad(tensor, (0, math.prod(shape) - len(tensor))).view(shape)}

    @property
    def reverse_op(self) -> ConversionOps:
        """The operation that removes the padding."""
        return _LiveHeads()


class _AsBytes(ConversionOps):
    """Leave parts of packed weights as they are, which [`read_release`] gives as bytes; in reverse, restore a dtype."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict:
        """Return the tensors."""
        return input_dict

    @property
    def reverse_op(self) -> ConversionOps:
        """The operation that restores the dtype."""
        return _FromBytes(self.dtype)


class _FromBytes(_AsBytes):
    """Give bytes the dtype that the part has in a checkpoint."""

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict:
        """Return the tensors in their dtype."""
        if self.dtype is torch.uint8:
            return input_dict
        # A copy, because the bytes of a number in a stack may begin anywhere.
        return {name: tensor.clone().view(self.dtype) for name, tensor in input_dict.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        """The operation that takes bytes."""
        return _AsBytes(self.dtype)


class _StackExperts(MergeModulelist):
    """Stack the tensors of all experts."""

    @property
    def reverse_op(self) -> ConversionOps:
        """The operation that gives each expert its tensor."""
        return _UnstackExperts(self.dim)


class _UnstackExperts(SplitModulelist):
    """Give each expert its tensor, in its whole shape: `transformers` 5.17 leaves out every axis of length 1."""

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the tensors of all experts by name; the stacks of one rule have equal shapes."""
        stack = next(iter(input_dict.values()))
        shape = (stack[0] if isinstance(stack, list) else stack).shape[1:]
        return {name: tensor.view(shape) for name, tensor in super().convert(input_dict, *args, **kwargs).items()}


def layout_rules(
    config: AttnResKimiK3Config | None = None, is_decoder: bool = False
) -> list[WeightConverter | WeightRenaming]:
    """Return the rules from released names to the model's.

    Args:
        config: the configuration of a model to save; `None` for the rules of loading, which take every layout.
        is_decoder: whether the model to save is the decoder without a head.
    """
    rules: list[WeightConverter | WeightRenaming] = vision_rules()
    is_composite = config is None or config.checkpoint_layout == COMPOSITE
    if is_decoder:
        rules.append(WeightRenaming(r"^language_model\.model\." if is_composite else r"^model\.", "^"))
    elif is_composite:
        # `transformers` applies the rules in reverse when it saves, so the prefix is the last to be added.
        rules += [WeightRenaming(rf"^language_model\.{part}\.", rf"^{part}\.") for part in ("model", "lm_head")]
    # On saving, `.mlp.` becomes `.block_sparse_moe.` everywhere; these restore the name of a dense MLP.
    rules += [
        WeightRenaming(rf"\.mlp\.{part}\.", rf"\.block_sparse_moe\.{part}\.")
        for part in ("gate_proj", "up_proj", "down_proj")
    ]
    rules.append(WeightRenaming(r"\.block_sparse_moe\.", r"\.mlp\."))
    rules += [
        WeightRenaming(rf"self_attn\.{part}", rf"self_attn\.forget_gate\.{part}")
        for part in (r"f_a_proj\.", r"f_b_proj\.", "dt_bias")
    ]
    convolutions = [f"self_attn.{name}_conv1d.weight" for name in "qkv"]
    rules += [
        WeightConverter("self_attn.A_log", "self_attn.forget_gate.A_log", [_LiveHeads()]),
        WeightConverter(convolutions, "self_attn.conv1d.weight", [Concatenate(dim=0)]),
    ]
    # A model to save has experts in one form, plain or packed. The names of packed ones come first, because they begin
    # as the plain ones do.
    packing = NVFP4 if config is None else config.packing  # NVFP4 has all parts, and their dtypes matter in saving only
    is_packed, is_plain = config is None or config.packed_experts, config is None or not config.packed_experts
    forms: dict[str, list[ConversionOps]] = {}
    if is_packed:
        forms = {f"_{part}": [_AsBytes(dtype)] for part, dtype in packing.parts.items()}
    if is_plain:
        forms[""] = []
    for form, first in forms.items():
        rules += [
            WeightConverter(
                [rf"\.experts.*.w1.weight{form}", rf"\.experts.*.w3.weight{form}"],
                rf"\.experts.gate_up_proj{form}",
                [*first, _StackExperts(dim=0), Concatenate(dim=1)],
            ),
            WeightConverter(
                rf"\.experts.*.w2.weight{form}", rf"\.experts.down_proj{form}", [*first, _StackExperts(dim=0)]
            ),
        ]
    return rules
