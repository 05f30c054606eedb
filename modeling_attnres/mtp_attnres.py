"""Multi-token prediction: a layer after the last one, which predicts the token after the next one.

    h' = block( W [RMSNorm(e(t_{i+1})); RMSNorm(h_i)] ),   logits of t_{i+2} = head( RMSNorm(h') )

`h_i` is the decoder's final state at token i, `e` its embedding and `head` its head. The block is one plain decoder
layer of the backbone, without residual connections (DeepSeek-V3, arXiv 2412.19437, section 2.2; Kimi K3 in vLLM). The
layer lies behind the decoder's last one in `layers`, under the name that released weights have, and a forward pass does
not run it. `generate(use_mtp=True)` lets it draft tokens, and `mtp_loss_weight` adds its loss in training. The file
travels with models that have such a layer.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import make_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask

from .attention_change_attnres import AttentionChange
from .records_attnres import Receiver
from .residual_attnres import field_defaults, is_number, require

try:
    from transformers.cache_utils import MtpCache
    from transformers.generation.candidate_generator import MTPCandidateGenerator
    from transformers.modeling_layers import MtpModel
except ImportError:  # an older `transformers`, whose `generate` has no `use_mtp`
    MtpCache = MtpModel = MTPCandidateGenerator = None

# The backbones whose released weights have such layers, or whose descendants have -> whether the layer reads the output
# of the final norm, and not its input (Kimi K3 in vLLM).
_BACKBONES = {"deepseek_v3": True, "kimi_linear": False}
# The names of the layer's tensors that a plain decoder layer lacks.
_OWN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
# Released weights also hold copies of the model's embedding and head for the layer, which nothing reads.
_COPIES = r"layers\.\d+\.(embed_tokens|shared_head\.head)\.weight$"
_OF_FLASH_ATTENTION = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class MtpFields:
    """Configuration fields of multi-token prediction."""

    mtp_loss_weight: float = 0.0
    """Weight of the loss of the layer for multi-token prediction, which is added to the loss in training mode; 0.3 and
    0.1 in DeepSeek-V3. At 0 the layer is kept, and frozen."""


MTP_FIELDS = field_defaults(MtpFields)


# A backbone's layer follows the mixin.
_AnyLayer = nn.Module if TYPE_CHECKING else object


class MtpLayer(_AnyLayer):
    """Mixin that makes a plain decoder layer of a backbone one for multi-token prediction."""

    predicts_ahead = True  # it is no layer of the depth

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx
        norm: Any = type(self.input_layernorm)
        self.enorm, self.hnorm = (norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = nn.Module()
        self.shared_head.norm = norm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, inputs_embeds: Tensor, previous_hidden_state: Tensor, **kwargs: Any) -> Tensor:
        """Compute the input of the head, `[batch, seq, hidden]`.

        Args:
            inputs_embeds: `[batch, seq, hidden]`, the embeddings of the next tokens.
            previous_hidden_state: `[batch, seq, hidden]`, the decoder's final state at the tokens before them.
            kwargs: arguments of the backbone's layer.
        """
        inputs = torch.cat([self.enorm(inputs_embeds), self.hnorm(previous_hidden_state)], dim=-1)
        # pyrefly: ignore[not-callable]  # of the backbone's layer
        return self.shared_head.norm(super().forward(self.eh_proj(inputs), **kwargs))


@cache
def _layer_on(plain: type[nn.Module]) -> type[MtpLayer]:
    """Return the class of layers for multi-token prediction on a backbone's plain layer."""
    return type(f"{plain.__name__}Ahead", (MtpLayer, plain), {"__module__": __name__})


@cache
def _output_with_loss(base: type) -> type:
    """Return the class of outputs with `mtp_loss`. It is a field, because engines make the outputs anew from these."""
    fields = [("mtp_loss", Tensor | None, None)]
    return make_dataclass(f"{base.__name__}Ahead", fields, bases=(base,), namespace={"__module__": __name__})


class MultiTokenPrediction:
    """The layer for multi-token prediction of a model. The class is never instantiated."""

    fields = MTP_FIELDS

    @staticmethod
    def is_on(config: PreTrainedConfig) -> bool:
        """Return whether a model of a configuration has the layer."""
        number = getattr(config, "num_nextn_predict_layers", None)
        return getattr(config, "backbone", None) in _BACKBONES and bool(number)

    @classmethod
    def check(cls, config: PreTrainedConfig) -> None:
        """Check the fields.

        Raises:
            ValueError: a value is not allowed.
        """
        weight = getattr(config, "mtp_loss_weight", 0.0)
        require(config, "mtp_loss_weight", is_number(weight) and 0 <= weight < 1e6, "a finite number >= 0")
        if config.backbone in _BACKBONES:
            number = getattr(config, "num_nextn_predict_layers", None)
            is_allowed = number is None or (type(number) is int and number in (0, 1))  # `1.0 in (0, 1)` is true
            require(config, "num_nextn_predict_layers", is_allowed, "0 or 1")
        allowed = f"0 without a layer to train: set `num_nextn_predict_layers` to 1, on {' or '.join(_BACKBONES)}"
        require(config, "mtp_loss_weight", not weight or cls.is_on(config), allowed)

    @classmethod
    def config(cls, config: PreTrainedConfig) -> PreTrainedConfig:
        """Return the configuration of the layer's block, as of a model of this layer alone."""
        block = deepcopy(config)
        block.residual_connection, block.num_hidden_layers, block.value_residual = "standard", 1, None
        if hasattr(block, "layer_types"):
            block.layer_types = ["full_attention"]  # a state would have to be kept for each draft
        if hasattr(block, "mlp_layer_types"):
            block.mlp_layer_types = block.mlp_layer_types[-1:]
        if hasattr(block, "first_k_dense_replace"):
            block.first_k_dense_replace = 0
        if not getattr(block, "mla_use_output_gate", False):  # the gate of Kimi K3 belongs to its attention
            block.attention_gate = None
        return block

    @classmethod
    def add_to(cls, decoder: Any, changes: Iterable[type[AttentionChange]]) -> None:
        """Add the layer to a decoder, if its configuration has one; frozen, unless its loss is trained.

        Args:
            decoder: the decoder, with its other layers.
            changes: the changes of attention that its configuration may turn on.
        """
        config = decoder.config
        if not cls.is_on(config):
            return
        mro = decoder.layer_class.__mro__
        plain = next(c for c in mro if issubclass(c, nn.Module) and "connect" not in dir(c))
        block_config = cls.config(config)
        layer = _layer_on(plain)(block_config, 0)
        for change in changes:
            change.add_to(layer, block_config)
        decoder.layers.append(layer)
        cls.freeze(decoder)

    @staticmethod
    def layer(model: nn.Module) -> MtpLayer | None:
        """Return the layer of a model, or `None`."""
        return next((module for module in model.modules() if isinstance(module, MtpLayer)), None)

    @classmethod
    def freeze(cls, model: Any) -> None:
        """Freeze the layer of a model unless its loss is trained: engines refuse parameters without a gradient."""
        layer = cls.layer(model)
        if layer is not None and not model.config.mtp_loss_weight:
            layer.requires_grad_(False)

    @staticmethod
    def names(model: nn.Module) -> set[str]:
        """Return the names that the layer's tensors have in a model's `state_dict`; none without a layer."""
        prefixes = (f"{name}." for name, module in model.named_modules() if isinstance(module, MtpLayer))
        prefix = next(prefixes, None)
        return set() if prefix is None else {name for name in model.state_dict() if name.startswith(prefix)}

    @classmethod
    def fit_config(cls, config: PreTrainedConfig, names: Iterable[str]) -> None:
        """Set the number of layers to 0 if a checkpoint does not hold the layer, unless a new one is to be trained.

        Configurations of DeepSeek-V3 declare a layer by default, and `transformers` saves its models without it.

        Args:
            config: the configuration, which is changed.
            names: names of the checkpoint's tensors.
        """
        ends = tuple(f"layers.{config.num_hidden_layers}.{own}.weight" for own in _OWN)
        if cls.is_on(config) and not config.mtp_loss_weight and not any(name.endswith(ends) for name in names):
            config.num_nextn_predict_layers = 0

    @classmethod
    def fit(cls, model: Any, names: Iterable[str]) -> None:
        """Remove the layer from a model as [`fit_config`] from a configuration, before the weights are loaded."""
        if not cls.is_on(model.config):
            return
        cls.fit_config(model.config, names)
        if cls.is_on(model.config):
            model._keys_to_ignore_on_load_unexpected = {_COPIES}  # the backbone's class names the whole layer
        else:
            decoder = getattr(model, model.base_model_prefix, model)
            del decoder.layers[model.config.num_hidden_layers :]

    @staticmethod
    def final_state(config: PreTrainedConfig, receiver: Receiver) -> Tensor:
        """Return what the layer reads of a forward pass of the decoder, `[batch, seq, hidden]`."""
        return receiver.outputs.last_hidden_state if _BACKBONES[config.backbone] else receiver.unnormed

    @staticmethod
    def has_loss(model: Any, arguments: Mapping[str, Any]) -> bool:
        """Return whether a forward pass of a model with a head computes the loss of the layer.

        Args:
            model: the model, whose `mtp_loss_weight` is not 0.
            arguments: the arguments of the pass by name.
        """
        return model.training and model.can_generate() and arguments.get("labels") is not None

    @classmethod
    def add_loss(cls, model: Any, outputs: Any, arguments: Mapping[str, Any]) -> Any:
        """Return the outputs of a language model with the weighted loss of the layer added to their loss.

        The loss is that of the token after the next one, where both lie in the same document. `mtp_loss` of the result
        is its mean over these tokens, a scalar without a graph.

        Args:
            model: the language model.
            outputs: its outputs, with a loss.
            arguments: the arguments of the language model by name, with a receiver.
        """
        layer: Any = cls.layer(model)
        decoder, receiver = model.base_model, arguments["receiver"]
        passed, state = receiver.arguments, cls.final_state(decoder.config, receiver)
        embeddings = passed.get("inputs_embeds")
        if embeddings is None:
            embeddings = decoder.embed_tokens(passed["input_ids"])
        batch, length = embeddings.shape[:2]
        positions = passed.get("position_ids")
        if positions is None:
            positions = torch.arange(length, device=embeddings.device).unsqueeze(0)
        mask = passed.get("attention_mask")
        if isinstance(mask, Mapping):
            mask = mask["full_attention"]
        else:
            mask = create_causal_mask(
                config=decoder.config,
                inputs_embeds=embeddings,
                attention_mask=mask,
                past_key_values=None,
                position_ids=positions,
            )
        kwargs = {name: passed[name] for name in _OF_FLASH_ATTENTION if name in passed}
        if hasattr(decoder, "rotary_emb"):  # attention sees only differences of positions, so these need no shift
            kwargs["position_embeddings"] = decoder.rotary_emb(embeddings, positions)
        # The embedding that comes round to the last token has no label.
        hidden = layer(embeddings.roll(-1, 1), state, attention_mask=mask, position_ids=positions, **kwargs)
        labels = F.pad(arguments["labels"], (0, 2), value=-100)[:, 2:]  # (batch, seq)
        # Within a document, positions grow by one. Padding has no labels, but may lie before tokens that have some.
        begins = F.pad(positions.diff(dim=-1) != 1, (0, 2), value=True).expand(batch, -1)
        given = arguments.get("attention_mask")
        if isinstance(given, Tensor) and given.ndim == 2:
            begins = begins | F.pad(given == 0, (0, 1)).to(begins.device)
        elif isinstance(given, Tensor):  # over pairs of tokens: a document begins where a token does not see the last
            is_seen = given[:, 0] if given.dtype == torch.bool else given[:, 0] == 0
            begins = begins | F.pad(~is_seen.diagonal(-1, 1, 2), (0, 2), value=True).to(begins.device)
        labels = labels.masked_fill((begins[:, :-1] | begins[:, 1:]).to(labels.device), -100)
        count = labels.ne(-100).sum().clamp(min=1)
        total = arguments.get("num_items_in_batch")
        total = count if total is None else total
        loss = model.loss_function(
            logits=model.get_output_embeddings()(hidden),
            labels=labels,
            shift_labels=labels,
            vocab_size=model.config.vocab_size,
            num_items_in_batch=total,
        )
        outputs["loss"] = outputs.loss + model.config.mtp_loss_weight * loss.to(outputs.loss.device)
        return _output_with_loss(type(outputs))(**outputs, mtp_loss=loss.detach() * total / count)

    @staticmethod
    def candidates(model: Any, generation_config: Any, logits_processor: Any) -> Any:
        """Return the generator of drafts for `generate(use_mtp=True)` of `transformers`.

        Raises:
            ValueError: the model has no layer for multi-token prediction.
        """
        return DraftsOfLayer(model, generation_config, logits_processor)


if MtpModel is not None:

    class LayerAsModel(MtpModel):
        """`MtpModel` of `transformers` on the layer that a model holds, which it would read from a checkpoint."""

        def __init__(self, model: Any, layer: MtpLayer):
            PreTrainedModel.__init__(self, MultiTokenPrediction.config(model.config))
            self.loss_type, self.num_mtp_layers = "ForCausalLM", 1
            self.use_post_norm = self.use_shared_post_norm = self.has_per_layer_rope = False
            self.layers = nn.ModuleList([layer])
            self.tie_with_main_model(model)
            self.train(model.training)  # the layer is the model's own

    class DraftsOfLayer(MTPCandidateGenerator):  # pyrefly: ignore[invalid-inheritance]  # it is not None here
        """The generator of drafts of `transformers`, on the layer and the final state of a model of the family.

        Args:
            model: the language model.
            generation_config: the settings of generation.
            logits_processor: the processors of logits.

        Raises:
            ValueError: the model has no layer for multi-token prediction.
        """

        def __init__(self, model: Any, generation_config: Any, logits_processor: Any):
            layer = MultiTokenPrediction.layer(model)
            if layer is None:
                raise ValueError(
                    "the model has no layer for multi-token prediction: `num_nextn_predict_layers` is 0, or its "
                    "checkpoint did not hold the layer. Generate without `use_mtp`."
                )
            self.num_mtp_layers, self.is_main_model_prefill = 1, True
            self.device = next(layer.parameters()).device
            self.mtp_model = LayerAsModel(model, layer)
            # pyrefly: ignore[not-callable]  # it is not None here
            self.mtp_cache = MtpCache(config=self.mtp_model.config)
            self.mtp_cache.activate_past_recording()
            self.do_sample, self.logits_processor = generation_config.do_sample, logits_processor
            # The base class would record hidden states, which keeps depth attention from its fastest way.
            self._config, self._receiver = model.base_model.config, Receiver()
            self.model_kwargs_overrides = {"receiver": self._receiver}

        def get_candidates(
            self, input_ids: Tensor, model_kwargs: Any, model_outputs: Any, *, n_last_matches: int, **kwargs: Any
        ) -> Any:
            """Return the tokens with their draft; see `transformers`."""
            if model_outputs is not None:
                state = MultiTokenPrediction.final_state(self._config, self._receiver)
                model_outputs["hidden_states"] = (state,)
                if self.is_main_model_prefill:
                    # Where a cache held a part of the prompt, there are no states of it, and the layer reads the rest.
                    self.is_main_model_prefill, n_last_matches = False, state.shape[1] - 1
            kwargs["n_last_matches"] = n_last_matches
            return super().get_candidates(input_ids, model_kwargs, model_outputs, **kwargs)


__all__ = ["MTP_FIELDS", "MtpLayer", "MultiTokenPrediction"]
