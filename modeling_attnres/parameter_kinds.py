"""Sort a model's parameters by the rule of their update, for optimizers and for a plan of their memory."""

from torch import nn

from .residual_attnres import ResidualConnection, residual_tensors


def parameters_by_kind(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Sort the trainable parameters of a model by the rule of their update. Tied ones count once.

    Args:
        model: any model, also with adapters.

    Returns:
        The parameters of each kind: `matrices` in the decoder, which Muon trains, stacked ones of experts included;
        `others`, which AdamW trains with weight decay (embedding, head, kernels of convolutions); `vectors`, which do
        not decay; and the tensors of residual connections, `residual`, which do not decay either.
    """
    kinds = {"matrices": [], "others": [], "vectors": [], "residual": []}
    residual = {id(parameter) for parameter in residual_tensors(model).values()}
    # pyrefly: ignore[not-callable]  # PEFT's wrapper has the method
    unwrapped = model.get_base_model() if hasattr(model, "get_base_model") else model  # without PEFT's wrapper
    decoder = {id(parameter) for parameter in getattr(unwrapped, "base_model", unwrapped).parameters()}
    seen = set()  # tied parameters appear in several modules
    for module in model.modules():
        # `MixtralExperts`, `KimiLinearExperts`, ...: every tensor is stacked along a first axis of experts.
        experts = type(module).__name__.endswith("Experts")
        for parameter in module.parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            shape = getattr(parameter, "ds_shape", parameter.shape)  # DeepSpeed ZeRO-3 keeps the whole shape there
            if id(parameter) in residual:
                kind = "residual"
            elif shape.numel() == max(shape, default=1) or (experts and len(shape) == 2):
                kind = "vectors"
            elif len(shape) != 2 + experts or isinstance(module, nn.Embedding) or id(parameter) not in decoder:
                kind = "others"
            else:
                kind = "matrices"
            kinds[kind].append(parameter)
    return kinds


def rows_of_heads(model: nn.Module) -> dict[nn.Parameter, tuple[int, ...]]:
    """Return the rows that one head has in each weight of queries, keys and values.

    Args:
        model: any model. Attention is recognised by the names of its projections and sizes in `transformers`.

    Returns:
        Weight `[heads x rows, in]` -> the rows of a head. They are two numbers if a head's keys and values lie in one
        weight, as behind MLA's latents. Latent projections, which all heads share, are not among them.
    """
    rows = {}
    for module in model.modules():
        if hasattr(module, "kv_b_proj"):
            query, nope = (module.qk_head_dim,), module.qk_nope_head_dim
            parts = {"q_proj": query, "q_b_proj": query, "kv_b_proj": (nope, module.v_head_dim)}
        elif hasattr(module, "q_proj") and hasattr(module, "head_dim"):
            parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), (module.head_dim,))
        else:
            continue
        projections = {name: getattr(module, name, None) for name in parts}  # MLA has one of two for its queries
        rows |= {layer.weight: parts[name] for name, layer in projections.items() if layer is not None}
    return rows


def residual_rate_factors(model: nn.Module) -> dict[nn.Parameter, float]:
    """Return factors of the learning rate for the tensors that need another rate (`rate_factors`)."""
    return {
        parameter: module.rate_factors[name]
        for module in model.modules()
        if isinstance(module, ResidualConnection)
        for name, parameter in module.named_parameters(recurse=False)
        if name in module.rate_factors
    }


__all__ = ["parameters_by_kind", "residual_rate_factors", "rows_of_heads"]
