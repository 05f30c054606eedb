"""AttnRes on a Kimi Linear backbone.

Differences from Kimi Linear in `transformers`:

- sublayers and the final norm read from the depth state, as on any backbone;
- delta attention keeps the documents of one row apart and ignores padding;
- an installed `attnres` brings a faster delta attention for devices without GPU kernels;
- Kimi Linear checkpoints load and save in their published layout.
"""

import inspect
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, conversion_mapping
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_layers import GenericForTokenClassification
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

from .configuration_attnres import Sublayers
from .decoder_attnres import ResidualDecoderLayer, ResidualModel
from .delta_attention_attnres import DeltaAttention
from .functional_attnres import accelerated
from .heads_attnres import PooledByMask, ResidualHead, ResidualLanguageModel
from .kimi_linear_configuration_attnres import AttnResConfig
from .padding_attnres import Rows, read_rows
from .pretrained_attnres import ResidualPreTrainedModel
from .recording_attnres import record_states
from .rows_attnres import cache_of


class AttnResDecoderLayer(ResidualDecoderLayer, kimi_linear.KimiLinearDecoderLayer):
    """Decoder layer of Kimi Linear with residual connections and the family's delta attention."""

    delta_attention_class = DeltaAttention

    def connect(self, config: AttnResConfig, sublayers: Sublayers, layer_idx: int) -> None:
        """Add the residual connections, and replace the delta attention by the family's; see the base class."""
        super().connect(config, sublayers, layer_idx)
        if self.block_type != "full_attention":
            # Kimi Linear's layer makes its delta attention of a fixed class. The family's class adds methods but no
            # tensors, so only the class changes: a new module would draw its start a second time. (Kimi K3's layer has
            # made the right class already.)
            attention: Any = self.self_attn
            attention.__class__ = self.delta_attention_class
            if accelerated is not None:
                accelerated.accelerate_delta_attention(attention)

    def attend(
        self, attention: nn.Module, hidden_states: Tensor, rows: Rows | None = None, **kwargs
    ) -> tuple[Any, ...]:
        """Call full attention or delta attention with the arguments that it takes; see the base class."""
        if self.block_type == "full_attention":
            return super().attend(attention, hidden_states, **kwargs)
        # Delta attention takes no positions and no mask, and returns only the output.
        return (attention(hidden_states, cache_of(kwargs), rows),)


class AttnResPreTrainedModel(ResidualPreTrainedModel, kimi_linear.KimiLinearPreTrainedModel):
    """Base of the models on Kimi Linear."""

    config: AttnResConfig
    _no_split_modules = ["AttnResDecoderLayer"]
    # `generate` asks this to learn whether a cache can go back by some tokens. Those of the family can.
    _is_stateful = False
    # The list of Kimi Linear since transformers 5.24, and `A_log`. In bfloat16, different routing biases become equal,
    # so tokens go to other experts. Decays, which multiply up over a sequence, are off by a percent.
    _keep_in_fp32_modules_strict = ["e_score_correction_bias", "gate.weight", "dt_bias", "A_log"]
    auto_classes = {
        "AutoModel": "AttnResModel",
        "AutoModelForCausalLM": "AttnResForCausalLM",
        "AutoModelForSequenceClassification": "AttnResForSequenceClassification",
        "AutoModelForTokenClassification": "AttnResForTokenClassification",
    }


class AttnResModel(ResidualModel, AttnResPreTrainedModel, kimi_linear.KimiLinearModel):
    """[`KimiLinearModel`] with attention residuals or another of `CONNECTIONS`: the decoder without a head."""

    layer_class = AttnResDecoderLayer

    @property
    def carries_state(self) -> bool:
        """Return whether a layer has linear attention; the class of `transformers` says so of every model."""
        return "linear_attention" in self.config.layer_types

    def prepare_rows(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Prepare padding and documents for full attention and delta attention; see the base class."""
        kinds = self.config.layer_types
        if "linear_attention" not in kinds:
            return super().prepare_rows(arguments)
        dtype, makes_cache = self.embed_tokens.weight.dtype, self.makes_cache(arguments)
        record_states(cache_of(arguments))
        arguments, rows = read_rows(arguments, self.config, dtype, makes_cache, kinds.index("linear_attention"))
        return arguments | {"rows": rows}


class AttnResForCausalLM(ResidualLanguageModel, AttnResPreTrainedModel, kimi_linear.KimiLinearForCausalLM):
    """[`KimiLinearForCausalLM`] with attention residuals or another of `CONNECTIONS`: the language model."""

    model_class = AttnResModel
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Start continuous batching as `transformers` does; `generate_batch` calls this.

        Raises:
            ValueError: a layer has linear attention.
        """
        if "linear_attention" in self.config.layer_types:
            raise ValueError(
                "continuous batching keeps pages of keys and values, but linear attention keeps a state: call "
                "`generate` in place of `generate_batch`."
            )
        return super().init_continuous_batching(*args, **kwargs)

    @wraps(GenerationMixin.prepare_inputs_for_generation)  # `transformers` reads the names of the arguments
    def prepare_inputs_for_generation(
        self, input_ids: Tensor, next_sequence_length: int | None = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Prepare the arguments of a pass as `transformers` does; leave out the tokens of a prompt that a cache holds.

        The loop for drafted tokens passes the whole prompt. If the caller had read a part of it before, the model would
        read that part twice.

        Args:
            input_ids: `[batch, tokens]`, the prompt with a draft, or all tokens so far.
            next_sequence_length: number of tokens of the pass, if `transformers` knows it.
            args: other arguments of `transformers`' function of this name.
            kwargs: other arguments of `transformers`' function of this name.
        """
        cache, mask = cache_of(kwargs), kwargs.get("attention_mask")
        # Where a caller passes only new tokens, the mask is longer.
        is_whole = cache is not None and isinstance(mask, Tensor) and mask.shape[1] == input_ids.shape[1]
        if next_sequence_length is None and is_whole and 0 < cache.get_seq_length() < input_ids.shape[1]:
            next_sequence_length = input_ids.shape[1] - cache.get_seq_length()
        # pyrefly: ignore[bad-argument-type]  # `transformers` types the model by a protocol
        return super().prepare_inputs_for_generation(input_ids, next_sequence_length, *args, **kwargs)

    def _assisted_decoding(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Decode with drafts as `transformers` does, also where the caller's cache holds a part of the prompt.

        Args:
            input_ids: `[1, tokens]`, the prompt.
            args: other arguments of `transformers`' function of this name.
            kwargs: other arguments of `transformers`' function of this name.

        Raises:
            ValueError: as in the base class, or the cache alone holds tokens of a prompt with padding.
        """
        mask, length = kwargs.get("attention_mask"), input_ids.shape[1]
        # `generate` drops a mask of ones, but `prepare_inputs_for_generation` needs its length.
        if mask is None and getattr(kwargs.get("generation_config"), "_mask_length", None) == length:
            kwargs["attention_mask"] = torch.ones_like(input_ids)
        elif mask is not None and mask.shape[1] > length > 0:  # `transformers` would cut it to the length of the tokens
            raise ValueError("`attention_mask` has padding: pass all tokens of the prompt, those in the cache too.")
        return super()._assisted_decoding(input_ids, *args, **kwargs)

    @staticmethod
    def create_masks_for_generate(
        config: AttnResConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        is_first_iteration: bool = True,
        **kwargs: Any,
    ) -> dict[str, Tensor | None]:
        """Make the masks with which `generate` fills a static cache, one for each kind of layer.

        `transformers` leaves out the padding of a single token, because a token that is generated is real. But a prompt
        that is read in chunks may have a chunk of one token, which is padding in some rows.

        Args:
            config: the model's configuration.
            inputs_embeds: `[batch, seq, ...]`, for its shape, dtype and device.
            attention_mask: `[batch, tokens]`, 0 for padding, for the tokens in the cache and these.
            args: other arguments of `transformers`' function of this name.
            is_first_iteration: whether the tokens are of the prompt.
            kwargs: other arguments of `transformers`' function of this name.
        """
        masks = create_masks_for_generate(config, inputs_embeds, attention_mask, *args, **kwargs)
        is_token_of_prompt = is_first_iteration and inputs_embeds.shape[1] == 1 and attention_mask is not None
        if is_token_of_prompt and "linear_attention" in masks and not bool(attention_mask[:, -1].all()):
            masks["linear_attention"] = attention_mask[:, -1:]
        return masks


class AttnResForSequenceClassification(ResidualHead, PooledByMask, AttnResPreTrainedModel):
    """A sequence classifier on [`AttnResModel`], with attention residuals or another of `CONNECTIONS`."""

    model_class: type[AttnResModel] = AttnResModel  # `AutoModel` has no entry for remote code

    def __init__(self, config: AttnResConfig):
        AttnResPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = self.model_class(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()


class AttnResForTokenClassification(ResidualHead, GenericForTokenClassification, AttnResPreTrainedModel):
    """A token classifier on [`AttnResModel`], with attention residuals or another of `CONNECTIONS`."""

    model_class: type[AttnResModel] = AttnResModel

    def __init__(self, config: AttnResConfig):
        AttnResPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = self.model_class(config)
        self.dropout = nn.Dropout(0.1)  # as in `transformers`' own token classifiers
        self.score = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()


# `save_pretrained` writes the code of these classes beside the weights.
AttnResConfig.register_for_auto_class()
for _auto, _name in AttnResPreTrainedModel.auto_classes.items():
    globals()[_name].register_for_auto_class(_auto)


if accelerated is None and not torch.accelerator.is_available() and any(map(find_spec, ("fla", "causal_conv1d"))):
    # `transformers` would choose the kernels of these packages, which fail without a GPU. It offers no switch.
    _delta = "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"
    for _name in (*_delta, "causal_conv1d_fn", "causal_conv1d_update"):
        setattr(kimi_linear, _name, inspect.unwrap(getattr(kimi_linear, _name)))

# `transformers` reads the published layout of Kimi Linear, but writes a dense MLP as `block_sparse_moe`. On saving,
# renamings are applied in reverse, so these come last and restore the published name. On loading, both names load.
_LAYOUT: list[Any] = [
    conversion_mapping.WeightRenaming(rf"\.mlp\.{part}\.", rf"\.block_sparse_moe\.{part}\.")
    for part in ("gate_proj", "up_proj", "down_proj")
]
_LAYOUT += conversion_mapping.get_checkpoint_conversion_mapping("kimi_linear") or []
# `overwrite`: beside an installed `attnres`, remote code registers the same mapping a second time.
conversion_mapping.register_checkpoint_conversion_mapping(AttnResConfig.model_type, _LAYOUT, overwrite=True)
