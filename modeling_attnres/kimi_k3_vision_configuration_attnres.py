"""Configuration and released layout of Kimi K3's vision part: a tower for images, and a projector to the text model.

This file travels with every model of Kimi K3, since its `config.json` may describe a vision part. The modules are in
`kimi_k3_vision_attnres`, which travels with models that see.
"""

import re
from collections.abc import Mapping
from typing import Any

from transformers.activations import ACT2FN
from transformers.core_model_loading import Chunk, ConversionOps, PermuteForRope, WeightConverter, WeightRenaming
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25VisionConfig

from .residual_attnres import is_count, is_number, one_of, require

# Names in a released `config.json` -> names in the configuration. All other fields have one name.
_NAMES = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
    "activation_func": "hidden_act",
}
_SAME = ("patch_size", "merge_kernel_size", "qkv_hidden_size", "projector_hidden_act", "projector_ln_eps")
# Fields of which the modules know one value alone.
_FIXED = {
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
}
_PROJECTIONS = [f"{name}_proj" for name in "qkv"]
TOWER, PROJECTOR = "vision_tower.", "mm_projector."  # beginnings of the names of the vision part's tensors


class AttnResKimiK3VisionConfig(Kimi_K25VisionConfig):
    """Configuration of Kimi K3's vision part. Defaults are those of the released model.

    It takes the fields of a released `vision_config`, under their released names or those of [`Kimi_K25VisionConfig`].
    """

    model_type = "kimi_k3_vision"
    base_config_key = "vision_config"
    attribute_map = _NAMES

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_attention_heads: int = 12

    qkv_hidden_size: int = 1536
    """Width of the queries of all heads, which is not `hidden_size`; keys and values have the same."""

    projector_hidden_act: str = "gelu"
    """Activation of the projector."""

    projector_ln_eps: float = 1e-5
    """Epsilon of the norm at the projector's end. The norms of the tower have a fixed one."""

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.qkv_hidden_size // self.num_attention_heads

    @classmethod
    def from_release(cls, fields: Mapping[str, Any]) -> "AttnResKimiK3VisionConfig":
        """Return the configuration for the fields of a released `vision_config`."""
        # The release asks for FlashAttention, which is left to the user here as for any model.
        derived = ("_attn_implementation", "model_type", "mm_hidden_size", "text_hidden_size")
        return cls(**{name: value for name, value in fields.items() if name not in derived})

    def to_release(self, text_hidden_size: int) -> dict[str, Any]:
        """Return the fields as a released `vision_config` has them.

        Args:
            text_hidden_size: width of the text model.
        """
        fields = {name: getattr(self, name) for name in (*_NAMES, *_SAME)}
        fields |= {"merge_kernel_size": list(self.merge_kernel_size)}
        fields |= {name: getattr(self, name, value) for name, value in _FIXED.items()}
        fields |= {"mm_hidden_size": self.hidden_size, "text_hidden_size": text_hidden_size}
        return dict(sorted(fields.items()))

    def check_fields(self) -> None:
        """Check all fields of a vision part that is to run.

        Raises:
            ValueError: a value is not allowed; the message names field, value and allowed values.
        """
        for name, value in _FIXED.items():
            require(self, name, getattr(self, name, value) == value, repr(value))
        counts = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "patch_size")
        for name in (*counts, "pos_emb_height", "pos_emb_time"):
            require(self, name, is_count(getattr(self, name)), "an integer >= 1")
        for name in ("hidden_act", "projector_hidden_act"):
            require(self, name, getattr(self, name) in ACT2FN, one_of(ACT2FN))
        epsilon = self.projector_ln_eps  # a negative one gives wrong values or NaN
        require(self, "projector_ln_eps", is_number(epsilon) and 0 <= epsilon < float("inf"), "a finite number >= 0")
        unit = 4 * self.num_attention_heads  # a head has pairs for columns and for rows
        width = self.qkv_hidden_size
        require(self, "qkv_hidden_size", is_count(width) and width % unit == 0, f"a multiple of {unit}")
        require(self, "hidden_size", self.hidden_size % 2 == 0, "an even number")
        require(self, "pos_emb_width", self.pos_emb_width == self.pos_emb_height, "`pos_emb_height`")
        merge = self.merge_kernel_size
        is_pair = isinstance(merge, list | tuple) and len(merge) == 2 and all(map(is_count, merge))
        require(self, "merge_kernel_size", is_pair, "two integers >= 1")


def is_of_vision(name: str) -> bool:
    """Return whether the name of a tensor in a released checkpoint is that of a vision part."""
    return name.startswith((TOWER, PROJECTOR))


def vision_shapes(config: AttnResKimiK3VisionConfig, text_hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a vision part by their released names, and their shapes.

    Args:
        config: configuration of the vision part.
        text_hidden_size: width of the text model.
    """
    width, inner, mlp = config.hidden_size, config.qkv_hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        f"{TOWER}patch_embed.proj.weight": (width, 3, config.patch_size, config.patch_size),
        f"{TOWER}patch_embed.pos_emb.weight": (config.pos_emb_height, config.pos_emb_width, width),
    }
    for i in range(config.num_hidden_layers):
        block = f"{TOWER}encoder.blocks.{i}."
        shapes |= {f"{block}norm0.weight": (width,), f"{block}norm1.weight": (width,)}
        shapes |= {f"{block}wqkv.weight": (3 * inner, width), f"{block}wo.weight": (width, inner)}
        shapes |= {f"{block}mlp.fc0.weight": (mlp, width), f"{block}mlp.fc1.weight": (width, mlp)}
    shapes[f"{TOWER}encoder.final_layernorm.weight"] = (width,)
    merged = width * config.merge_kernel_size[0] * config.merge_kernel_size[1]
    shapes |= {f"{PROJECTOR}proj.0.weight": (merged, merged), f"{PROJECTOR}proj.2.weight": (text_hidden_size, merged)}
    return shapes | {f"{PROJECTOR}post_norm.weight": (text_hidden_size,)}


def _split_projections() -> list[ConversionOps]:
    """Return the operations that make queries, keys and values of the release's one projection.

    The release turns neighbouring pairs of a head by their position, and the modules of `transformers` the halves.
    """
    return [Chunk(dim=0), PermuteForRope(subconfig_key="vision_config", permute_layer_names=["q_proj", "k_proj"])]


def split_projections(tensors: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the tensors of a release with queries, keys and values of the tower apart, under the model's names.

    The rules of `transformers` would do so only after it has sharded the tensors among processes.

    Args:
        tensors: tensors, or slices of safetensors files, by name.
        config: configuration of the model.
    """
    result = dict(tensors)
    for name in tensors:
        match = re.fullmatch(r"vision_tower\.encoder\.blocks\.(\d+)\.wqkv\.weight", name)
        if match is None:
            continue
        parts: dict[str, Any] = {"wqkv": result.pop(name)[...]}
        for operation in _split_projections():
            parts = operation.convert(parts, source_patterns=["wqkv"], target_patterns=_PROJECTIONS, config=config)
        result |= {f"model.vision_tower.layers.{match[1]}.attn.{part}.weight": value for part, value in parts.items()}
    return result


def vision_rules() -> list[WeightConverter | WeightRenaming]:
    """Return the rules from released names of a vision part to the model's.

    The rules of the text model must follow them. So a save, which applies all in reverse, has given these names the
    text model's prefix and its name of an MLP before these rules restore the released ones.
    """
    block = r"^vision_tower\.encoder\.blocks\.(\d+)\."
    # Numbers rise from the last on, so that loading renames no tensor twice, and saving neither.
    renamings = {
        rf"{block}norm1\.": r"^vision_tower\.encoder\.blocks\.\1\.norm2\.",
        rf"{block}norm0\.": r"^vision_tower\.encoder\.blocks\.\1\.norm1\.",
        rf"{block}mlp\.fc1\.": r"^vision_tower\.encoder\.blocks\.\1\.block_sparse_moe\.fc2\.",
        rf"{block}mlp\.fc0\.": r"^vision_tower\.encoder\.blocks\.\1\.block_sparse_moe\.fc1\.",
        rf"{block}wo\.": r"^vision_tower\.encoder\.blocks\.\1\.attn\.proj\.",
        r"^vision_tower\.encoder\.blocks\.": r"^vision_tower\.layers\.",
        r"^vision_tower\.encoder\.final_layernorm\.": r"^vision_tower\.final_layernorm\.",
        r"^vision_tower\.patch_embed\.pos_emb\.weight": r"^vision_tower\.patch_embed\.pos_emb\.position_embeddings",
        r"^mm_projector\.proj\.0\.": r"^mm_projector\.in_proj\.",
        r"^mm_projector\.proj\.2\.": r"^mm_projector\.out_proj\.",
        r"^vision_tower\.": r"^language_model\.model\.vision_tower\.",
        r"^mm_projector\.": r"^language_model\.model\.mm_projector\.",
    }
    rules: list[WeightConverter | WeightRenaming] = [WeightRenaming(*pair) for pair in renamings.items()]
    return [
        *rules,
        WeightConverter([r"\.wqkv\."], [rf"\.attn\.{name}\." for name in _PROJECTIONS], _split_projections()),
    ]
