"""Which member of the AttnRes family a standard decoder becomes, and back, and what tensors it begins with."""

import math

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig

from attnres import BACKBONES, AttnResConfig, ResidualConfig

DEFAULT_NUM_BLOCKS = 8  # "about 8 blocks recover most of the gain" (AttnRes, section 3)
# Fields that say which class a configuration is of, not what the model computes.
_IDENTITY = ("model_type", "architectures", "auto_map", "transformers_version")


def member_type(backbone: str) -> str:
    """The model type of the family on a backbone: `attnres_llama` for `llama`, and `attnres` for `kimi_linear`."""
    return AttnResConfig.model_type if backbone == AttnResConfig.backbone else f"attnres_{backbone}"


def member_config(config: PreTrainedConfig) -> ResidualConfig:
    """The family's configuration of a standard decoder, with `residual_connection="standard"`: the same function.

    Raises:
        ValueError: no member of the family has this backbone; or the decoder has attention residuals already.
    """
    if isinstance(config, ResidualConfig):
        if config.residual_connection != "standard":
            raise ValueError(
                f"the model has residual_connection={config.residual_connection!r} already; "
                "a retrofit takes a 'standard' one."
            )
        return config.from_dict(config.to_dict())
    if config.model_type not in BACKBONES:
        raise ValueError(
            f"cannot retrofit the model type {config.model_type!r}. Supported are {', '.join(map(repr, BACKBONES))}, "
            "and `attnres.add_backbone` brings the family to others."
        )
    fields = {key: value for key, value in config.to_dict().items() if key not in _IDENTITY}
    return CONFIG_MAPPING[member_type(config.model_type)].from_dict(fields | {"residual_connection": "standard"})


def backbone_config(config: ResidualConfig) -> PreTrainedConfig:
    """The configuration of the standard decoder that a member of the family has as its backbone."""
    own = {*_IDENTITY, *ResidualConfig.__annotations__}
    fields = {key: value for key, value in config.to_dict().items() if key not in own}
    return CONFIG_MAPPING[config.backbone].from_dict(fields)


def retrofit_config(
    config: PreTrainedConfig, *, block_size: int | None, num_blocks: int | None, full: bool, scale: str
) -> ResidualConfig:
    """The configuration that a retrofit gives a standard decoder; the arguments as in [`attnres.conversion.retrofit`].

    Raises:
        ValueError: the decoder cannot be retrofitted, or one of the arguments is not valid.
    """
    config = member_config(config)
    config.residual_connection, config.attn_res_scale = "attn_res", scale
    config.attn_res_block_size = _pick_block_size(config, block_size, num_blocks, full)
    config.check_fields()
    return config


def _pick_block_size(config: ResidualConfig, block_size: int | None, num_blocks: int | None, full: bool) -> int:
    """The block size S in sublayers that is asked for: as such, by the number of blocks, or as Full AttnRes (1).

    With none of the three there are about 8 blocks.
    """
    given = {"block_size": block_size, "num_blocks": num_blocks, "full": full or None}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"give one of block_size, num_blocks and full, not {' and '.join(given)}.")
    if full:
        return 1
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"`{name}` is {value}, but must be an integer >= 1.")
    return block_size or math.ceil(config.num_sublayers / (num_blocks or DEFAULT_NUM_BLOCKS))


def initial_tensor(name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """The AttnRes tensor `name` as a retrofit begins with it: a zero pseudo-query, or a key norm of ones."""
    start = torch.ones if name.endswith("_norm.weight") else torch.zeros
    return start(shape, dtype=dtype, device=device)


__all__ = ["backbone_config", "initial_tensor", "member_config", "member_type", "retrofit_config"]
