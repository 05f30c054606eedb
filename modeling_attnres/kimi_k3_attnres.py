"""Kimi K3: the released language model with attention residuals, on Kimi Linear's classes.

Differences from AttnRes on Kimi Linear (`modeling_attnres`):

- `attn_res_block_size` counts decoder layers, of two sublayers each;
- the decay of delta attention has a lower bound, and the gate of its output has full rank;
- full attention has a gate before its output projection;
- all MLPs use SiTU, which bounds both factors of the product of gate and up projection;
- routed experts work in a smaller, latent space between two projections of their own;
- a checkpoint holds the text model alone, or in a composite model beside a vision part; it may pack experts as MXFP4.

The configuration is in `kimi_k3_configuration_attnres`, the layout of a released checkpoint in
`kimi_k3_layout_attnres`. Packed experts are decoded in `kimi_k3_packed_attnres`, and packed in
`kimi_k3_packing_attnres`. The model that sees is in `kimi_k3_vision_attnres`. The files `kimi_k3_*` travel with models
of Kimi K3 only. The experts' decorator
`@use_experts_implementation` is named here because `transformers` searches this file's text for it.
"""

from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel, conversion_mapping
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.integrations import use_experts_implementation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import load_state_dict
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

from .connections_attnres import MTP
from .delta_attention_attnres import DeltaAttention
from .functional_attnres import accelerated
from .kimi_k3_configuration_attnres import COMPOSITE, AttnResKimiK3Config
from .kimi_k3_layout_attnres import check_own_names, in_form_of_model, layout_rules, read_release
from .kimi_k3_packed_attnres import MXFP4, packed_linear
from .kimi_k3_packing_attnres import QUANTIZATION, pack_experts
from .loading_attnres import check_files
from .modeling_attnres import (
    AttnResDecoderLayer,
    AttnResForCausalLM,
    AttnResForSequenceClassification,
    AttnResForTokenClassification,
    AttnResModel,
    AttnResPreTrainedModel,
)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """Compute SiTU, `b tanh(gate / b) sigmoid(gate) * l tanh(up / l)`, in float32 or wider.

    Args:
        gate: `[..., width]`.
        up: `[..., width]`.
        beta: `b`.
        linear_beta: `l`; `None` leaves `up` unchanged.

    Returns:
        `[..., width]` in the dtype of `gate`.
    """
    if torch.compiler.is_compiling():  # a compiler fuses plain operations by itself
        return _plain_situ(gate, up, beta, linear_beta)
    if not torch.is_grad_enabled():
        return _situ_without_grad(gate, up, beta, linear_beta)
    # Transforms and tracers need plain operations. (The compiled loops look for these themselves.)
    is_transformed = torch.autograd.forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    compute = _plain_situ if is_transformed or torch.jit.is_tracing() else _SiTU.apply
    return compute(gate, up, beta, linear_beta)


def _plain_situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """Compute SiTU as the formula says it."""
    dtype = gate.dtype
    wide = torch.promote_types(dtype, torch.float32)
    gate, up = gate.to(wide), up.to(wide)
    gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return (gate * up).to(dtype)


def _situ_without_grad(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """Compute SiTU by the compiled loops of an installed `attnres` if they run here, or by the formula."""
    result = None if accelerated is None else accelerated.situ(gate, up, beta, linear_beta)
    return _plain_situ(gate, up, beta, linear_beta) if result is None else result


class _SiTU(torch.autograd.Function):
    """SiTU that keeps gate and up for its backward pass, and nothing in between."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.betas = beta, linear_beta
        return _situ_without_grad(gate, up, beta, linear_beta)

    @staticmethod
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        grads = None
        # For second derivatives (`create_graph=True`), autograd differentiates the formula.
        if accelerated is not None and not torch.is_grad_enabled():
            grads = accelerated.situ_grads(gate, up, grad, *ctx.betas)
        if grads is None:
            # pyrefly: ignore[bad-unpacking]  # three results only with `has_aux`
            _, derivative = torch.func.vjp(lambda gate, up: _plain_situ(gate, up, *ctx.betas), gate, up)
            grads = derivative(grad)
        return *grads, None, None


class KimiK3Activation(nn.Module):
    """The activation of all MLPs of a model: SiTU, or a function of the gate times the up projection."""

    def __init__(self, config: AttnResKimiK3Config):
        super().__init__()
        self.beta, self.linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
        self.of_gate = None if config.hidden_act == "situ" else ACT2FN[config.hidden_act]

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute `[..., width]` for gate and up projection of that shape."""
        if self.of_gate is not None:
            return self.of_gate(gate) * up
        return situ(gate, up, self.beta, self.linear_beta)  # pyrefly: ignore[bad-argument-type]  # SiTU has a bound


def _for_kimi_linear(config: AttnResKimiK3Config) -> AttnResKimiK3Config:
    """Return the configuration for the modules of Kimi Linear, whose activation is a function of one tensor."""
    config = copy(config)
    config.hidden_act = "silu"
    return config


class KimiK3ForgetGate(kimi_linear.KimiLinearForgetGate):
    """Logarithm of the decay: `L sigmoid(exp(A) (f + b))` with the lower bound L, or Kimi Linear's without one."""

    def __init__(self, config: AttnResKimiK3Config):
        super().__init__(config)
        self.lower_bound = config.gate_lower_bound

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute the logarithms `[batch, seq, heads, d_k]` in float32, for `[batch, seq, hidden]`."""
        if self.lower_bound is None:
            return super().forward(hidden_states)
        rate = self.f_b_proj(self.f_a_proj(hidden_states)).float() + self.dt_bias.float()
        rate = rate.unflatten(-1, (-1, self.head_dim)) * self.A_log.float().exp()
        return self.lower_bound * torch.sigmoid(rate)


class _CalledConvolution(nn.Conv1d):
    """A convolution that its owner computes in a call of this module.

    The weight stays in float32. So FSDP2 in 16 bits shards it apart from the other weights of delta attention, and
    gathers it when this module is called.
    """

    def forward(self, compute: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return what `compute` returns for the other arguments."""
        return compute(*args, **kwargs)


class KimiK3DeltaAttention(DeltaAttention):
    """Delta attention with a bounded decay, and a gate of its output of full rank."""

    def __init__(self, config: AttnResKimiK3Config, layer_idx: int):
        super().__init__(_for_kimi_linear(config), layer_idx)
        self.forget_gate = KimiK3ForgetGate(config)
        self.conv1d.__class__ = _CalledConvolution  # a new module would draw its start a second time
        if config.use_full_rank_gate:
            del self.g_a_proj, self.g_b_proj
            self.g_proj = nn.Linear(config.hidden_size, self.qkv_dim, bias=False)

    def run_convolution(self, function: Callable[..., Tensor], *args: Tensor, **kwargs: Any) -> Tensor:
        """Compute the convolution in a call of its module; see the base class."""
        return self.conv1d(super().run_convolution, function, *args, **kwargs)

    def write_rate(self, hidden_states: Tensor) -> Tensor:
        """Compute `beta` in float32; see the base class."""
        return self.b_proj(hidden_states).float().sigmoid()

    def output_gate(self, hidden_states: Tensor) -> Tensor:
        """Compute the logits of the output's gate; see the base class."""
        return self.g_proj(hidden_states) if hasattr(self, "g_proj") else super().output_gate(hidden_states)


class KimiK3MLP(kimi_linear.KimiLinearMLP):
    """MLP whose activation takes gate and up projection."""

    def __init__(self, config: AttnResKimiK3Config, intermediate_size: int | None = None):
        super().__init__(_for_kimi_linear(config), intermediate_size)
        self.config, self.act_fn = config, KimiK3Activation(config)

    def forward(self, x: Tensor) -> Tensor:
        """Compute `[..., hidden]` for an input of that shape."""
        return self.down_proj(self.act_fn(self.gate_proj(x), self.up_proj(x)))


class _Experts(kimi_linear.KimiLinearExperts):
    """Routed experts in the latent space, whose activation takes gate and up projection."""

    def __init__(self, config: AttnResKimiK3Config):
        latent = _for_kimi_linear(config)
        latent.hidden_size = config.routed_expert_hidden_size or config.hidden_size
        super().__init__(latent)
        self.act_fn = KimiK3Activation(config)

    def project(self, name: str, expert: int, x: Tensor) -> Tensor:
        """Compute `[tokens, out]` for `[tokens, in]` by an expert's `gate_up_proj` or `down_proj`."""
        return F.linear(x, getattr(self, name)[expert])

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """Compute the activation `[tokens, width]` for `[tokens, 2 width]`; the implementations of experts call it."""
        return self.act_fn(*gate_up.chunk(2, dim=-1))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the weighted sum of the chosen experts, one expert after another.

        Args:
            hidden_states: `[tokens, hidden]`.
            top_k_index: `[tokens, top_k]`; `num_experts` stands for an expert on another device.
            top_k_weights: `[tokens, top_k]`.

        Returns:
            `[tokens, hidden]`.
        """
        result = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert == self.num_experts:
                continue
            tokens, choices = torch.where(top_k_index == expert)
            output = self._apply_gate(self.project("gate_up_proj", expert, hidden_states[tokens]))
            output = self.project("down_proj", expert, output) * top_k_weights[tokens, choices, None]
            result.index_add_(0, tokens, output.to(result.dtype))
        return result


@use_experts_implementation
class KimiK3Experts(_Experts):
    """Routed experts that may be computed by any implementation of experts of `transformers`."""


class KimiK3PackedExperts(_Experts):
    """Routed experts that stay packed, and are decoded one by one. They are frozen; gradients reach their input.

    The implementations of experts of `transformers` need whole weights, so the loop of this class always runs.
    """

    def __init__(self, config: AttnResKimiK3Config):
        with torch.device("meta"):
            super().__init__(config)
        self.packing = config.packing
        for name, weights in (("gate_up_proj", 2), ("down_proj", 1)):
            experts, rows, columns = getattr(self, name).shape
            delattr(self, name)
            # Parameters, not buffers: FSDP2 and expert parallelism shard parameters alone.
            for part, shape in self.packing.byte_shapes(rows, columns, weights).items():
                codes = torch.empty((experts, *shape), dtype=torch.uint8)
                self.register_parameter(f"{name}_{part}", nn.Parameter(codes, requires_grad=False))

    def project(self, name: str, expert: int, x: Tensor) -> Tensor:
        """Compute `[tokens, out]` for `[tokens, in]` by an expert's packed projection; see the base class."""
        return packed_linear(x, self.packing, [getattr(self, f"{name}_{part}")[expert] for part in self.packing.parts])


class KimiK3MoE(kimi_linear.KimiLinearMoE):
    """Routed experts in a latent space, beside shared experts in the model's own."""

    def __init__(self, config: AttnResKimiK3Config):
        nn.Module.__init__(self)
        self.config = config
        self.gate = kimi_linear.KimiLinearTopkRouter(config)
        # `transformers` 5.24 makes and saves the weight in float32. In the release it has the dtype of the model.
        self.gate.weight = nn.Parameter(self.gate.weight.to(torch.get_default_dtype()))
        # The released code leaves the weight of a single expert as it is.
        self.gate.norm_topk_prob = config.norm_topk_prob and config.num_experts_per_tok > 1
        self.experts = (KimiK3PackedExperts if config.packed_experts else KimiK3Experts)(config)
        width, latent = config.hidden_size, config.routed_expert_hidden_size
        self.is_latent = latent is not None
        if latent is not None:
            self.routed_expert_down_proj = nn.Linear(width, latent, bias=False)
            self.routed_expert_norm = None
            if config.latent_moe_use_norm:
                self.routed_expert_norm = kimi_linear.KimiLinearRMSNorm(latent, config.rms_norm_eps)
            self.routed_expert_up_proj = nn.Linear(latent, width, bias=False)
        self.shared_experts = None  # pyrefly: ignore[bad-assignment]  # Kimi Linear always has some
        if config.n_shared_experts:
            self.shared_experts = KimiK3MLP(config, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute `[batch, seq, hidden]` for an input of that shape."""
        _, weights, experts = self.gate(hidden_states)  # the router sees the model's own space
        routed = self.routed_expert_down_proj(hidden_states) if self.is_latent else hidden_states
        routed = self.experts(routed.flatten(0, -2), experts, weights).view(routed.shape)
        if self.is_latent:
            routed = routed if self.routed_expert_norm is None else self.routed_expert_norm(routed)
            routed = self.routed_expert_up_proj(routed)
        return routed if self.shared_experts is None else routed + self.shared_experts(hidden_states)


class KimiK3DecoderLayer(kimi_linear.KimiLinearDecoderLayer):
    """Decoder layer of Kimi K3 without residual connections, as for multi-token prediction."""

    def __init__(self, config: AttnResKimiK3Config, layer_idx: int):
        # Not Kimi Linear's `__init__`: it would allocate experts of another size.
        GradientCheckpointingLayer.__init__(self)
        self.hidden_size, self.block_type = config.hidden_size, config.layer_types[layer_idx]
        is_full = self.block_type == "full_attention"
        attention_class = kimi_linear.KimiLinearAttention if is_full else KimiK3DeltaAttention
        self.self_attn = attention_class(config, layer_idx)
        self.mlp = KimiK3MoE(config) if config.mlp_layer_types[layer_idx] == "sparse" else KimiK3MLP(config)
        self.input_layernorm = kimi_linear.KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = kimi_linear.KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps)


class AttnResKimiK3DecoderLayer(AttnResDecoderLayer, KimiK3DecoderLayer):
    """Decoder layer of Kimi K3."""

    delta_attention_class = KimiK3DeltaAttention


class AttnResKimiK3PreTrainedModel(AttnResPreTrainedModel):
    """Base of the models of Kimi K3: start of its tensors, and the released layout."""

    config: AttnResKimiK3Config
    config_class = AttnResKimiK3Config
    _no_split_modules = ["AttnResKimiK3DecoderLayer"]
    # The tensors that the release stores in float32.
    _keep_in_fp32_modules_strict = ["e_score_correction_bias", "dt_bias", "A_log", "conv1d", "o_norm"]
    has_vision = False  # whether the model reads the vision part of a release
    auto_classes = {
        "AutoModel": "AttnResKimiK3Model",
        "AutoModelForCausalLM": "AttnResKimiK3ForCausalLM",
        "AutoModelForSequenceClassification": "AttnResKimiK3ForSequenceClassification",
        "AutoModelForTokenClassification": "AttnResKimiK3ForTokenClassification",
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, KimiK3PackedExperts):
            for part in module.parameters(recurse=False):
                init.zeros_(part)
            return
        super()._init_weights(module)
        if isinstance(module, KimiK3ForgetGate) and module.lower_bound is not None:
            # As in flash-linear-attention: the sigmoid takes the place of a rate per head.
            init.zeros_(module.A_log)

    @property
    def _weight_conversions(self) -> list[WeightConverter | WeightRenaming]:
        """Rules that `save_pretrained` of `transformers` applies in reverse.

        The name is private, but the only place where a model can say in which layout it is to be saved.
        """
        return layout_rules(self.config, is_decoder=isinstance(self, AttnResKimiK3Model))

    @_weight_conversions.setter
    def _weight_conversions(self, rules: list[WeightConverter | WeightRenaming]) -> None:
        """Ignore the rules by which `transformers` has loaded: they lack those for names that were right already."""

    def save_pretrained(self, save_directory: str | Path, *args, packed_experts: bool = False, **kwargs):
        """Save in the released layout; see the base class.

        Args:
            save_directory: the folder.
            args: as in the base class.
            packed_experts: whether to pack routed experts as MXFP4. Experts that are packed already are saved as they
                lie. A group of weights that was decoded from a packed one, and not changed, keeps its values. It also
                keeps its bytes if its largest weight is 4 or 6 times the scale.
            kwargs: as in the base class.

        Raises:
            ValueError: the model has no routed experts, or they cannot be packed.
        """
        config = self.config
        if not packed_experts or config.packed_experts:
            return super().save_pretrained(save_directory, *args, **kwargs)
        if config.num_local_experts is None:
            raise ValueError("the model has no routed experts. Save it without `packed_experts`.")
        kwargs["state_dict"] = pack_experts(kwargs.get("state_dict") or self.state_dict())
        stored, owner = config.stored_quantization, "text_config" if config.checkpoint_layout == COMPOSITE else ""
        if stored is None or config.packing != MXFP4:
            config.stored_quantization = {owner: QUANTIZATION}
        # The configuration decides the names of tensors, and whether `config.json` says that experts are packed.
        config.packed_experts = True
        try:
            return super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            config.packed_experts, config.stored_quantization = False, stored

    @staticmethod
    def _load_pretrained_model(
        model: "AttnResKimiK3PreTrainedModel",
        state_dict: dict[str, Any] | None,
        checkpoint_files: list[str] | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Check a checkpoint's tensors and decode packed ones, then load as `transformers` does.

        The name is private, but only there can the files be checked before they are loaded.
        """
        if getattr(model, "_hf_peft_config_loaded", False):  # these are the tensors of an adapter
            return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs)
        with ExitStack() as stack:
            if state_dict is None and checkpoint_files:
                state_dict, held = {}, {}
                for file in checkpoint_files:
                    if file.endswith(".safetensors"):
                        handle = stack.enter_context(safe_open(file, framework="pt"))
                        tensors = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (it is no dictionary)
                    else:
                        tensors = load_state_dict(file)
                    state_dict |= tensors
                    held[file] = tensors.keys()
                check_files(held)
            if state_dict is not None:
                if MTP is not None:
                    MTP.fit(model, state_dict)
                names = [name for name in model.state_dict() if name not in (model.all_tied_weights_keys or ())]
                check_own_names(names, state_dict)
                has_head = isinstance(model, AttnResKimiK3ForCausalLM)
                state_dict = read_release(model.config, state_dict, has_head, model.has_vision)
                state_dict = in_form_of_model(model.config, state_dict)
            return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs)


class AttnResKimiK3Model(AttnResKimiK3PreTrainedModel, AttnResModel):
    """Decoder of Kimi K3 without a head."""

    layer_class = AttnResKimiK3DecoderLayer

    def __init__(self, config: AttnResKimiK3Config):
        config.check_fields()
        # Not Kimi Linear's `__init__`, which makes its own layers.
        PreTrainedModel.__init__(self, config)
        padding = config.pad_token_id
        has_padding = padding is not None and 0 <= padding < config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding if has_padding else None)
        layers = (AttnResKimiK3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = kimi_linear.KimiLinearRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.connect()

    def prepare_rows(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Prepare padding and documents; see the base class.

        Raises:
            ValueError: also if images are given, which this model would not see.
        """
        if arguments.get("pixel_values") is not None:
            raise ValueError(
                "`pixel_values` are given, but this is the text model alone, which sees no images. Load a release with "
                "a vision part by `AutoModelForImageTextToText`."
            )
        return super().prepare_rows(arguments)


class AttnResKimiK3ForCausalLM(AttnResKimiK3PreTrainedModel, AttnResForCausalLM):
    """Language model of Kimi K3.

    ```python
    >>> model = AttnResKimiK3ForCausalLM.from_pretrained(folder)  # a release: composite, or of the text model alone
    >>> model.save_pretrained(out)  # in the same layout
    ```
    """

    model_class = AttnResKimiK3Model

    def __init__(self, config: AttnResKimiK3Config):
        PreTrainedModel.__init__(self, config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class AttnResKimiK3ForSequenceClassification(AttnResKimiK3PreTrainedModel, AttnResForSequenceClassification):
    """A sequence classifier on [`AttnResKimiK3Model`], such as a reward model."""

    model_class = AttnResKimiK3Model


class AttnResKimiK3ForTokenClassification(AttnResKimiK3PreTrainedModel, AttnResForTokenClassification):
    """A token classifier on [`AttnResKimiK3Model`]."""

    model_class = AttnResKimiK3Model


for _auto, _name in AttnResKimiK3PreTrainedModel.auto_classes.items():
    globals()[_name].register_for_auto_class(_auto)

# A later `transformers` may know the model type, and have rules of its own for it.
IS_KNOWN = AttnResKimiK3Config.model_type in CONFIG_MAPPING_NAMES
for _key in AttnResKimiK3PreTrainedModel.auto_classes.values() if IS_KNOWN else (AttnResKimiK3Config.model_type,):
    # `overwrite`: beside an installed `attnres`, remote code registers the same mapping a second time.
    conversion_mapping.register_checkpoint_conversion_mapping(_key, layout_rules(), overwrite=True)
