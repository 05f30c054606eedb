"""Adapters of Kimi K3's routed experts, computed for the chosen experts alone.

    y = W_e x + (alpha / rank) B_e (A_e x)        for each token that the router sends to expert e

PEFT adds `B A` to the stacked weights of all experts in every forward pass, which takes the memory of one more copy of
them, and needs weights that are not packed. The classes here leave the weights alone. Their tensors have PEFT's names
and shapes in a state dict, so PEFT by itself reads the same files.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from attnres.kimi_k3_attnres import KimiK3Experts, KimiK3PackedExperts
from attnres.kimi_k3_packed_attnres import MXFP4, decode_mxfp4
from attnres.kimi_k3_packing_attnres import encode_mxfp4
from attnres.utils.extras import require_extra

with require_extra("train"):
    from peft import LoraConfig, PeftModel
    from peft.tuners import lora
    from peft.tuners.tuners_utils import check_adapters_to_merge

EXPERTS = (KimiK3Experts, KimiK3PackedExperts)
STACKS = ("gate_up_proj", "down_proj")  # the stacked weights of experts; PEFT nests their wrappers in this order


class ParamWrapper(lora.ParamWrapper):
    """The adapter of one stacked weight of the experts.

    The class has the name of PEFT's, because PEFT recognises wrappers of parameters by the name of their class.

    Attributes:
        first_expert: The index of the first expert that this process holds. Without expert parallelism it is 0.
        moved: Sums of squares over packed experts that [`merge`] has changed: of the merged weights, of what the
            adapters changed in them, and of what packing them again changed.
    """

    # PEFT's attributes, whose types its code does not say.
    lora_A: Any
    lora_B: Any
    scaling: Any
    num_experts: int
    moved: Sequence[float] = (0.0, 0.0, 0.0)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Make the tensors of an adapter, as PEFT calls it."""
        experts: Any = self.get_base_layer()
        # The stack has the experts of all processes.
        is_split = experts.num_experts < self.num_experts
        stored: Any = _stored(experts)
        self.first_expert = stored.device_mesh["ep"].get_local_rank() * experts.num_experts if is_split else 0
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move an adapter to the device of the experts, as PEFT calls it."""
        for part in (self.lora_A, self.lora_B):
            part[adapter_name].to(_stored(self.get_base_layer()).device)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters into the stacked weight, as PEFT calls it. Packed experts are packed again.

        An expert whose adapter is zero keeps its bytes.

        Raises:
            ValueError: The experts are packed in another format than MXFP4.
        """
        experts = self.get_base_layer()
        if not isinstance(experts, KimiK3PackedExperts):
            return super().merge(safe_merge, adapter_names)
        if experts.packing is not MXFP4:
            raise ValueError(
                f"adapters cannot be merged into experts that are packed as {experts.packing.title}: load the base "
                "without `packed_experts`."
            )
        for adapter in check_adapters_to_merge(self, adapter_names):
            if adapter in self.lora_A:
                self._merge_into_packed(experts, *self._factors(adapter))
                self.merged_adapters.append(adapter)

    def unmerge(self) -> None:
        """Take merged adapters out of the stacked weight again, as PEFT calls it.

        Raises:
            ValueError: The experts are packed, which has rounded the merged weights.
        """
        if self.merged and isinstance(self.get_base_layer(), KimiK3PackedExperts):
            raise ValueError(
                "merged adapters cannot be taken out of packed experts, which are rounded: load the base again."
            )
        super().unmerge()

    @torch.no_grad()
    def _merge_into_packed(
        self, experts: KimiK3PackedExperts, a: Sequence[Tensor], b: Sequence[Tensor], scaling: float
    ) -> None:
        """Add `scaling * b @ a` to the packed weight of each expert."""
        stored = [getattr(experts, f"{self.parameter_name}_{part}") for part in experts.packing.parts]
        whole = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach() for tensor in stored]
        for expert, factors in enumerate(zip(a, b, strict=True)):
            inner, outer = (factor.float() for factor in factors)
            if not (change := scaling * outer @ inner).any():
                continue
            parts = [tensor[expert] for tensor in whole]
            change = change.to(parts[0].device)
            merged = decode_mxfp4(*parts, dtype=torch.float32) + change
            for part, packed in zip(parts, encode_mxfp4(merged), strict=True):
                part.copy_(packed)
            lost = decode_mxfp4(*parts, dtype=torch.float32) - merged
            self.moved = [
                total + tensor.square().sum().item() for total, tensor in zip(self.moved, (merged, change, lost))
            ]
        for tensor, changed in zip(stored, whole, strict=True):
            if isinstance(tensor, DTensor):
                shared = DTensor.from_local(changed, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim)
                tensor.copy_(shared.redistribute(placements=tensor.placements))

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Generator[None]:
        """Add the adapters to the products of the experts while the block runs."""
        experts: Any = self.get_base_layer()
        # The other implementations multiply the stacked weights without asking for a product of one expert, so the
        # adapter would have no effect. Packed experts have no other implementation, and no configuration, which for
        # others is a copy of their own.
        config = getattr(experts, "config", None)
        implementation = config and config._experts_implementation
        if config is not None:
            config._experts_implementation = "eager"
        factors = [self._factors(adapter) for adapter in active_adapters if adapter in self.lora_A]
        project, is_outermost = experts.project, "project" not in vars(experts)

        def project_with_adapters(name: str, expert: int, x: Tensor) -> Tensor:
            result = project(name, expert, x)
            for a, b, scaling in factors if name == self.parameter_name else ():
                inner = F.linear(x.to(a[0].dtype), a[self.first_expert + expert])
                result = result + (scaling * F.linear(inner, b[self.first_expert + expert])).to(result.dtype)
            return result

        experts.project = project_with_adapters
        try:
            yield
        finally:
            if config is not None:
                config._experts_implementation = implementation
            if is_outermost:
                del experts.project  # the method of the class is left
            else:
                experts.project = project

    def _factors(self, adapter: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], float]:
        """Return the matrices A `[rank, in]` and B `[out, rank]` of all experts, and the factor of their product.

        One operation splits the tensor for all experts: if each expert's part were indexed, each of these operations
        would make a gradient of the size of the whole tensor.
        """
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        a = a.view(self.num_experts, -1, a.shape[1]).unbind(0)
        return a, b.view(b.shape[0], -1, self.num_experts).unbind(-1), self.scaling[adapter]


class SharedOuterWrapper(ParamWrapper):
    """The adapter of one stacked weight, whose outer factor all experts share.

    The outer factors are A of the first projection, which reads the latent space, and B of the second one, which writes
    to it. A state dict has a copy of the factor for each expert, as PEFT expects.
    """

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Make the tensors of an adapter, as PEFT calls it: A by Xavier's rule, and B zero."""
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)
        a, b = self.lora_A[adapter_name], self.lora_B[adapter_name]
        shared = a if self._shares_a else b
        part = a.weight[:r] if self._shares_a else b.weight[:, :r]
        shared.weight = nn.Parameter(part.detach().clone(), requires_grad=shared.weight.requires_grad)
        # On the CPU also for a layer of another process, so that all processes draw the same numbers.
        start = torch.empty(a.weight.shape, device="cpu")
        for matrix in start.split(r):
            nn.init.xavier_uniform_(matrix)
        a.weight.detach().copy_(start)
        if not getattr(self, "_expands", False):
            self._expands = True
            self.register_state_dict_post_hook(_expand)
            self.register_load_state_dict_pre_hook(_contract)

    @property
    def _shares_a(self) -> bool:
        return self.parameter_name == STACKS[0]

    def _factors(self, adapter: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], float]:
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        if self._shares_a:
            b = b.view(b.shape[0], -1, self.num_experts).unbind(-1)
            return (a,) * self.num_experts, b, self.scaling[adapter]
        a = a.view(self.num_experts, -1, a.shape[1]).unbind(0)
        return a, (b,) * self.num_experts, self.scaling[adapter]

    def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> Tensor:
        """Return what merging adds to the stacked weight, as PEFT calls it."""
        a, b, scaling = self._factors(adapter_name)
        param = self.get_param()
        return (scaling * torch.stack(b) @ torch.stack(a)).to(param.device, param.dtype)

    def shared_names(self, prefix: str) -> Generator[str]:
        """Yield the names of the shared factors in a state dict.

        Args:
            prefix: The name of this module there, with a dot at its end.
        """
        part = "lora_A" if self._shares_a else "lora_B"
        for adapter in getattr(self, part):
            yield f"{prefix}{part}.{adapter}.weight"


def _stored(experts: nn.Module) -> nn.Parameter:
    """Return a parameter of the experts that is stored. The place-holders of packed weights are not: skip them."""
    parameters = [*experts.parameters()]
    return next((parameter for parameter in parameters if not parameter.is_meta), parameters[0])


def _expand(module: SharedOuterWrapper, tensors: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    """Repeat the shared factors in a state dict for each expert."""
    for name in module.shared_names(prefix):
        if name in tensors:
            tensors[name] = _copies(module, tensors[name])


def _copies(module: SharedOuterWrapper, factor: Tensor) -> Tensor:
    """Return a shared factor once for each expert."""
    # A has the experts outside `[experts, rank, in]`, and B inside `[out, rank, experts]`.
    times = module.num_experts
    return factor.repeat(times, 1) if module._shares_a else factor.repeat_interleave(times, 1)


def _contract(module: SharedOuterWrapper, tensors: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """Take the shared factors of a state dict from their first copy. Raise ValueError if the copies differ."""
    for name in module.shared_names(prefix):
        if name in tensors:
            tensor, times = tensors[name], module.num_experts
            shared = tensor[: len(tensor) // times] if module._shares_a else tensor[:, ::times]
            copies = _copies(module, shared)
            if copies.shape == tensor.shape and not torch.equal(copies, tensor):
                raise ValueError(
                    f"`{name}` has a factor for each expert, but experts share theirs in this model, which has "
                    "adapters with `shared_outer`. Load the adapter onto a base model without adapters."
                )
            tensors[name] = shared


# PEFT finds a wrapper among several by the name of its class.
SharedOuterWrapper.__name__ = ParamWrapper.__name__


@contextmanager
def packed_stacks(model: nn.Module) -> Generator[None]:
    """Give packed experts a place-holder for each stacked weight while PEFT looks for the weights to adapt.

    Args:
        model: The base model.
    """
    packed = [module for module in model.modules() if isinstance(module, KimiK3PackedExperts)]
    for experts in packed:
        count, hidden, width = len(_stored(experts)), experts.hidden_dim, experts.intermediate_dim
        for name, shape in zip(STACKS, ((count, 2 * width, hidden), (count, hidden, width)), strict=True):
            stack = nn.Parameter(torch.empty(shape, device="meta", dtype=torch.bfloat16), requires_grad=False)
            experts.register_parameter(name, stack)
    try:
        yield
    finally:
        for experts in packed:
            for name in STACKS:
                delattr(experts, name)


class PackedLoraModel(lora.LoraModel):
    """PEFT's model of adapters, in which experts that stay packed take further adapters too."""

    def inject_adapter(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Add an adapter, as `add_adapter` and `load_adapter` of PEFT call it."""
        with packed_stacks(model):
            super().inject_adapter(model, *args, **kwargs)


# PEFT, TRL and others may compare the name of the class.
PackedLoraModel.__name__ = lora.LoraModel.__name__


def take_more_adapters(adapted: PeftModel) -> None:
    """Let the packed experts of a PEFT model take further adapters by PEFT's own methods.

    Args:
        adapted: The model, which is changed in place.
    """
    if any(isinstance(module, KimiK3PackedExperts) for module in adapted.modules()):
        adapted.base_model.__class__ = PackedLoraModel


def use_wrappers(config: LoraConfig, shared_outer: bool = False) -> None:
    """Make PEFT use the wrappers of this file for Kimi K3's experts.

    Args:
        config: The configuration of the adapter.
        shared_outer: Whether experts share the outer factors.
    """
    wrapper = SharedOuterWrapper if shared_outer else ParamWrapper
    config._register_custom_module(dict.fromkeys(EXPERTS, wrapper))
