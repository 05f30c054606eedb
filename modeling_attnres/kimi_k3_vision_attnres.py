"""Kimi K3 that sees: the released tower and projector in front of its language model.

The tower is that of Kimi K2.5 in `transformers`. Differences:

- heads are wider than the width divided by their number;
- norms are RMSNorms, and no projection has a bias;
- the table of positions is resampled bilinearly, not bicubically;
- the projector norms its output, not its input.

An image is a grid of patches. Each of its tokens stands for `merge_kernel_size` patches, and takes the place of one
placeholder token in the prompt. The embeddings with these tokens are the first source of attention residuals. This file
travels with models that see.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast
from transformers.models.kimi_k25 import modeling_kimi_k25 as kimi_k25
from transformers.utils import can_return_tuple

from .kimi_k3_attnres import (
    AttnResKimiK3ForCausalLM,
    AttnResKimiK3ForSequenceClassification,
    AttnResKimiK3ForTokenClassification,
    AttnResKimiK3Model,
)
from .kimi_k3_configuration_attnres import AttnResKimiK3Config
from .kimi_k3_vision_configuration_attnres import AttnResKimiK3VisionConfig
from .residual_attnres import require

# The released norms have no epsilon, so PyTorch takes that of the type it computes in, float32, also for bfloat16.
_NORM_EPS = torch.finfo(torch.float32).eps
_MAX_SIDE = 512  # patches; the released tower has angles for no more


class KimiK3VisionAttention(kimi_k25.Kimi_K25VisionAttention):
    """Attention of the tower, between all patches of an image, or of a clip of frames."""

    def __init__(self, config: AttnResKimiK3VisionConfig):
        nn.Module.__init__(self)
        self.config, self.num_heads, self.head_dim = config, config.num_attention_heads, config.head_dim
        self.num_key_value_groups, self.scaling = 1, config.head_dim**-0.5
        self.attention_dropout, self.is_causal = 0.0, False
        for name in ("q_proj", "k_proj", "v_proj"):
            self.add_module(name, nn.Linear(config.hidden_size, config.qkv_hidden_size, bias=False))
        self.proj = nn.Linear(config.qkv_hidden_size, config.hidden_size, bias=False)


class KimiK3VisionLayer(kimi_k25.Kimi_K25VisionEncoderLayer):
    """A layer of the tower."""

    def __init__(self, config: AttnResKimiK3VisionConfig):
        GradientCheckpointingLayer.__init__(self)
        self.norm1, self.norm2 = (nn.RMSNorm(config.hidden_size, eps=_NORM_EPS) for _ in range(2))
        self.attn = KimiK3VisionAttention(config)
        self.mlp = kimi_k25.Kimi_K25VisionMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        for linear in (self.mlp.fc1, self.mlp.fc2):
            linear.register_parameter("bias", None)


class KimiK3VisionModel(kimi_k25.Kimi_K25VisionModel):
    """The tower: patches of images to the features of their tokens."""

    config: AttnResKimiK3VisionConfig
    _no_split_modules = ["KimiK3VisionLayer"]

    def __init__(self, config: AttnResKimiK3VisionConfig):
        # Not that of Kimi K2.5, which would make its own layers.
        kimi_k25.Kimi_K25PreTrainedModel.__init__(self, config)
        self.merge_kernel_size = config.merge_kernel_size
        self.patch_embed = kimi_k25.Kimi_K25VisionPatchEmbed(config)
        self.patch_embed.proj.register_parameter("bias", None)
        self.patch_embed.pos_emb.interpolation_mode = "bilinear"
        self.rotary_emb = kimi_k25.Kimi_K25VisionRotaryEmbedding(config)
        self.layers = nn.ModuleList(KimiK3VisionLayer(config) for _ in range(config.num_hidden_layers))
        self.add_module("final_layernorm", nn.RMSNorm(config.hidden_size, eps=_NORM_EPS))
        self.post_init()

    def check_grid(self, pixel_values: Tensor, image_grid_thw: Tensor | None) -> Tensor:
        """Check that patches and grids fit each other, and return the grids.

        Args:
            pixel_values: `[patches, 3, patch_size, patch_size]`.
            image_grid_thw: `[images, 3]`; see [`AttnResKimiK3ForConditionalGeneration.get_image_features`].

        Raises:
            ValueError: they do not fit each other, or the tower.
        """
        config, shape = self.config, tuple(pixel_values.shape)
        must = (3, config.patch_size, config.patch_size)
        got = None if image_grid_thw is None else list(image_grid_thw.shape)
        if image_grid_thw is None or got is None or len(got) != 2 or got[0] == 0 or got[1] != 3:
            raise ValueError(f"`image_grid_thw` must have the shape [images, 3], but has {got}.")
        if len(shape) != 4 or shape[1:] != must:
            raise ValueError(
                f"`pixel_values` must have the shape [patches, {', '.join(map(str, must))}], but has {list(shape)}."
            )
        rows, columns = config.merge_kernel_size
        for frames, height, width in image_grid_thw.tolist():
            if height % rows or width % columns or not 0 < min(height, width) <= max(height, width) <= _MAX_SIDE:
                raise ValueError(
                    f"`image_grid_thw` has the grid {[frames, height, width]}, but height and width must be multiples "
                    f"of {rows} and {columns}, and at most {_MAX_SIDE} patches. Pad the image as the processor does."
                )
            if not 0 < frames <= config.pos_emb_time:
                raise ValueError(
                    f"`image_grid_thw` has the grid {[frames, height, width]}, but a clip has 1 to "
                    f"{config.pos_emb_time} frames, and an image 1."
                )
        total = int(image_grid_thw.prod(-1).sum())
        if total != shape[0]:
            raise ValueError(
                f"`image_grid_thw` counts {total} patches, but `pixel_values` has {shape[0]}. Give both as the "
                "processor returns them."
            )
        return image_grid_thw


class KimiK3Projector(nn.Module):
    """Maps the features of tokens to the width of the text model."""

    def __init__(self, config: AttnResKimiK3Config):
        super().__init__()
        vision: Any = config.vision_config
        rows, columns = vision.merge_kernel_size
        width = vision.hidden_size * rows * columns
        self.in_proj = nn.Linear(width, width, bias=False)
        self.act = ACT2FN[vision.projector_hidden_act]
        self.out_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.post_norm = nn.RMSNorm(config.hidden_size, eps=vision.projector_ln_eps)

    def forward(self, features: Tensor) -> Tensor:
        """Compute `[tokens, hidden]` for `[tokens, patches of a token, width of the tower]`."""
        return self.post_norm(self.out_proj(self.act(self.in_proj(features.flatten(1)))))


class AttnResKimiK3MultimodalModel(AttnResKimiK3Model):
    """Decoder of Kimi K3 with tower and projector, without a head."""

    input_modalities = ["image", "text"]
    has_vision = True

    def __init__(self, config: AttnResKimiK3Config):
        vision: Any = config.vision_config
        if vision is None:
            raise ValueError(
                "the configuration has no `vision_config`: this is the text model alone. Load it by "
                "`AutoModelForCausalLM`."
            )
        vision.check_fields()
        placeholder = config.image_token_id
        has_id = isinstance(placeholder, int) and 0 <= placeholder < config.vocab_size
        require(config, "image_token_id", has_id, f"the id of a token, below {config.vocab_size}")
        super().__init__(config)
        self.vision_tower = KimiK3VisionModel(vision)
        self.mm_projector = KimiK3Projector(config)
        self.post_init()

    @can_return_tuple
    def get_image_features(
        self, pixel_values: Tensor, image_grid_thw: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """Compute the tokens of images; see [`AttnResKimiK3ForConditionalGeneration.get_image_features`]."""
        tower: Any = self.vision_tower
        grid = tower.check_grid(pixel_values, image_grid_thw)
        pixel_values = pixel_values.to(tower.patch_embed.proj.weight.dtype)
        # The tower of `transformers` takes several clips at once only if they have equal numbers of frames.
        grids = [grid] if bool((grid[:, 0] == grid[0, 0]).all()) else grid.split(1)
        patches = pixel_values.split([int(part.prod(-1).sum()) for part in grids])
        outputs = [tower(pixels, grid_thw=part) for pixels, part in zip(patches, grids)]
        tokens = self.mm_projector(torch.cat([output.pooler_output for output in outputs]))
        rows, columns = tower.merge_kernel_size
        # The frames of a clip share their tokens.
        counts = (grid[:, 1] * grid[:, 2] // (rows * columns)).tolist()
        return BaseModelOutputWithPooling(
            last_hidden_state=torch.cat([output.last_hidden_state for output in outputs]),
            pooler_output=tokens.split(counts),
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the decoder; see [`AttnResKimiK3ForConditionalGeneration.forward`] for the arguments of images."""
        if kwargs.get("pixel_values_videos") is not None:
            raise ValueError("`pixel_values_videos` are given, but Kimi K3 reads images. Give frames as images.")
        images = (mm_encoder_outputs or {}).get("image")
        if pixel_values is not None:
            images = self.get_image_features(pixel_values, image_grid_thw, return_dict=True)
        elif images is None and not torch.compiler.is_compiling():
            self._check_no_placeholders(input_ids, past_key_values)
        if images is not None:
            tokens = torch.cat([*images.pooler_output])
            inputs_embeds, input_ids = self._with_images(input_ids, inputs_embeds, tokens), None
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    def _check_no_placeholders(self, input_ids: Tensor | None, past_key_values: Any) -> None:
        """Raise `ValueError` if a prompt without images has placeholders.

        Behind a prompt in the cache there may be some: tokens that the model has generated, or a chunk of text.
        """
        is_first = past_key_values is None or past_key_values.get_seq_length() == 0
        placeholder: Any = self.config.image_token_id
        if input_ids is not None and is_first and (count := int(input_ids.eq(placeholder).sum())):
            raise ValueError(f"the prompts hold {count} placeholders (id {placeholder}), but no images are given.")

    def placeholders(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Return where a prompt has placeholders: `[batch, seq]`, boolean.

        Args:
            input_ids: `[batch, seq]`, or `None` where embeddings are given.
            inputs_embeds: `[batch, seq, hidden]`; placeholders have the embedding of their id.
        """
        placeholder: Any = self.config.image_token_id
        if input_ids is not None:
            return input_ids.eq(placeholder)
        embeds: Any = inputs_embeds
        return embeds.eq(self.embed_tokens(torch.tensor(placeholder, device=embeds.device))).all(-1)

    def _with_images(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, tokens: Tensor) -> Tensor:
        """Return the embeddings `[batch, seq, hidden]` of a prompt, with image tokens in place of its placeholders.

        Args:
            input_ids: as in [`placeholders`].
            inputs_embeds: as there; by default those of `input_ids`.
            tokens: `[tokens, hidden]`, of all images in the order of the prompts.

        Raises:
            ValueError: the number of placeholders is another than that of the tokens.
        """
        is_image = self.placeholders(input_ids, inputs_embeds)
        embeds: Any = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        count, placeholder = int(is_image.sum()), self.config.image_token_id
        if count != len(tokens):
            raise ValueError(
                f"the prompts hold {count} placeholders (id {placeholder}), but the images have {len(tokens)} "
                "tokens. Repeat the placeholder of an image once for each of its tokens, as the processor does."
            )
        return embeds.masked_scatter(is_image.unsqueeze(-1), tokens.to(embeds))


class AttnResKimiK3ForConditionalGeneration(AttnResKimiK3ForCausalLM):
    """Kimi K3 that sees: its language model, which takes images beside text.

    ```python
    >>> model = AttnResKimiK3ForConditionalGeneration.from_pretrained(folder)  # a release with its vision part
    >>> model.generate(input_ids, pixel_values=pixel_values, image_grid_thw=image_grid_thw)
    ```
    """

    model_class = AttnResKimiK3MultimodalModel
    input_modalities = ["image", "text"]
    has_vision = True
    auto_classes = AttnResKimiK3ForCausalLM.auto_classes | {
        "AutoModelForImageTextToText": "AttnResKimiK3ForConditionalGeneration"
    }

    def get_image_features(
        self, pixel_values: Tensor, image_grid_thw: Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """Compute the tokens of images.

        Args:
            pixel_values: `[patches, 3, patch_size, patch_size]`, the patches of all images, row by row.
            image_grid_thw: `[images, 3]`, for each image the number of frames (1), of rows and of columns of patches.
            kwargs: `return_dict`, as in `transformers`.

        Returns:
            `pooler_output` holds for each image its tokens `[tokens, hidden]`, and `last_hidden_state` the tower's
            `[patches, width]` of all images.

        Raises:
            ValueError: patches and grids do not fit each other, or the tower.
        """
        return self.model.get_image_features(pixel_values, image_grid_thw, **kwargs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        mm_encoder_outputs: dict[str, Any] | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Run the model on prompts with images.

        Args:
            input_ids: `[batch, seq]`, with a placeholder (`image_token_id`) for each token of an image.
            attention_mask: as in [`AttnResKimiK3ForCausalLM`].
            position_ids: as there.
            past_key_values: as there. Images of earlier calls are in the cache.
            inputs_embeds: `[batch, seq, hidden]` in place of `input_ids`.
            labels: as there. Placeholders are not counted in the loss. If `num_items_in_batch` is given, as by
                `Trainer`, set them to -100 before, or the loss is divided by their number too.
            use_cache: as there.
            pixel_values: `[patches, 3, patch_size, patch_size]` of all images, in the order of the prompts.
            image_grid_thw: `[images, 3]`; see [`get_image_features`].
            mm_encoder_outputs: results of [`get_image_features`] under the name `image`, in place of `pixel_values`.
            logits_to_keep: as there.
            kwargs: as there.

        Raises:
            ValueError: images and placeholders do not fit each other, or patches and grids.
        """
        if labels is not None:
            labels = labels.masked_fill(self.model.placeholders(input_ids, inputs_embeds), -100)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            pixel_values=pixel_values,
            image_grid_thw=image_grid_thw,
            mm_encoder_outputs=mm_encoder_outputs,
            **kwargs,
        )

    def _expand_inputs_for_generation(self, expand_size: int = 1, *args: Any, **kwargs: Any) -> Any:
        """Repeat the inputs for beams, as `transformers` does.

        Raises:
            ValueError: `transformers` is too old to repeat images.
        """
        if expand_size > 1 and kwargs.get("pixel_values") is not None:  # later releases have encoded them by now
            raise ValueError("this `transformers` repeats no images for beams or several sequences: update it.")
        # pyrefly: ignore[bad-argument-type]  # the base class declares a narrower `self`
        return super()._expand_inputs_for_generation(expand_size, *args, **kwargs)

    def _prefill(self, input_ids: Tensor, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any) -> Any:
        """Read the prompt, as `transformers` does.

        Raises:
            ValueError: `transformers` is too old to read images in chunks: it would leave them out.
        """
        if generation_config.prefill_chunk_size is not None and model_kwargs.get("pixel_values") is not None:
            raise ValueError("this `transformers` reads no images in chunks: update it, or omit `prefill_chunk_size`.")
        # pyrefly: ignore[bad-argument-type]  # as above
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)


AttnResKimiK3ForConditionalGeneration.register_for_auto_class("AutoModelForImageTextToText")

# The other Auto classes find their classes in the file of the saved model's class.
__all__ = [
    "AttnResKimiK3ForCausalLM",
    "AttnResKimiK3ForConditionalGeneration",
    "AttnResKimiK3ForSequenceClassification",
    "AttnResKimiK3ForTokenClassification",
    "AttnResKimiK3Model",
    "AttnResKimiK3MultimodalModel",
]
