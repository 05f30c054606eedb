"""Sequence parallelism beside tensor parallelism (AttnRes, section 4): each rank keeps the depth state of its tokens.

With n ranks and T tokens, between the sharded matrices

    rank r holds       tokens r S .. (r + 1) S - 1 of sources, partial sums and norms, with S = ceil(T / n)
    before a matrix    all-gather along the sequence        [batch, S, hidden] -> [batch, T, hidden]
    after a matrix     reduce-scatter along the sequence    [batch, T, hidden] -> [batch, S, hidden]

Together the two move the same bytes as the all-reduce of plain tensor parallelism, and block states take 1/n of the
memory. The model's files know nothing of this: [`shard_sequence`] replaces the `forward` of the modules at
these borders, as `transformers` does for tensor parallelism. Norms and residual connections work on one token at a
time, so they run on a rank's tokens unchanged. Their gradients are sums over tokens, and so are summed over the ranks.

The collectives with their gradients are in `sequence_split.py`. How the modules of a sublayer change is in
`sequence_styles.py`.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, ColwiseParallel, EmbeddingParallel

from attnres.decoder_attnres import DepthReader, ResidualDecoderLayer, ResidualModel
from attnres.records_attnres import SUMS
from attnres.residual_attnres import DepthState
from attnres.rows_attnres import shape_of

from .sequence_split import SequenceSplit, gather, scatter
from .sequence_styles import SequenceSharding, install_at_embedding, install_at_head, leave_in_parts
from .tensor_parallel import parameter_names, rule_name, sum_gradients_of_norms, tensor_parallel_mesh

# The keyword by which a decoder passes the split of its tokens to its layers.
_SPLIT = "sequence_split"


def shard_sequence(model: PreTrainedModel) -> PreTrainedModel:
    """Shard the depth state of a model along the sequence, among the ranks that shard its matrices.

    ```python
    >>> model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=4))
    >>> shard_sequence(model).generate(prompt, prefill_chunk_size=16384)
    ```

    Inputs and outputs stay the same. All passes with gradients are sharded. A pass without them is sharded if it has at
    least as many tokens as there are ranks, as a prefill has. Sublayers of which every rank has the whole, such as Kimi
    Linear's attention, compute all tokens on every rank; their inputs are gathered, and their outputs cut.

    Args:
        model: A model of the family that `transformers` has loaded with tensor parallelism, with or without a head. It
            is changed in place.

    Returns:
        The model.

    Raises:
        ValueError: The model is not of the family or has value residuals, its matrices are not sharded, its sequence is
            sharded already, its experts are sharded by expert parallelism, or its plan shards a module that computes
            single tokens.
    """
    decoder, mesh = _check_model(model)
    prefix = "" if decoder is model else f"{model.base_model_prefix}."
    plan = {name: ALL_PARALLEL_STYLES[style] for name, style in model.tp_plan.items()}
    sum_gradients_of_norms(model)
    sharding = SequenceSharding(mesh.get_group())

    embedding = decoder.get_input_embeddings()
    (name,) = (name for name, module in decoder.named_modules() if module is embedding)
    style = plan.get(f"{prefix}{name}")
    if isinstance(style, EmbeddingParallel):
        install_at_embedding(embedding, style, sharding, mesh)
    # Modules that need all tokens of a row, or work on matrices. All other modules compute single tokens.
    mixing = {embedding}
    for i, layer in enumerate(cast(Iterable[ResidualDecoderLayer], decoder.layers)):
        for name in _mixing_modules(layer):
            module = getattr(layer, name)
            mixing.add(module)
            rules = {part: plan.get(f"{prefix}layers.*.{name}.{rule_name(part)}") for part in _owners(module)}
            _gather_around(module, sharding, is_partial=leave_in_parts(module, rules, sharding, mesh))
        layer.forward = _in_split_of_pass(layer.forward, sharding, is_first=i == 0)
    inside = {part for module in mixing for part in module.modules()}
    single = {
        module: names for module in decoder.modules() if module not in inside and (names := parameter_names(module))
    }
    _check_whole(decoder, single)
    if (getattr(model.config.distributed_config, "dp_size", None) or 1) > 1:
        # FSDP2 puts the whole parameters of a module in place when the module, or one around it, is called.
        for module, names in single.items():
            sharding.gradients.watch_calls(module, names)
        single = {}
    decoder.forward = _split_pass(decoder, sharding, single)

    head, style = getattr(model, "lm_head", None), plan.get("lm_head")
    if head is not None and decoder is not model and type(style) is ColwiseParallel:
        install_at_head(head, style, sharding, mesh)
        model.forward = _feed_head(model.forward, sharding)
    return model


def _check_model(model: PreTrainedModel) -> tuple[ResidualModel, DeviceMesh]:
    """Return the decoder and the ranks that shard its matrices. Raise ValueError if it cannot be sequence parallel."""
    decoder = model.base_model if isinstance(model, PreTrainedModel) else None
    if not isinstance(decoder, ResidualModel):
        raise ValueError(
            f"sequence parallelism needs a model of this family, not a {type(model).__name__}: convert it by "
            "`attnres convert` first."
        )
    mesh = tensor_parallel_mesh(decoder)
    if mesh is None:
        raise ValueError(
            "sequence parallelism needs sharded matrices, but this model has its matrices whole: load it with "
            "`distributed_config=DistributedConfig(tp_size=N)`, and with a `tp_plan` if its class has none."
        )
    if (getattr(model.config.distributed_config, "ep_size", None) or 1) > 1:
        raise ValueError("sequence parallelism does not work beside expert parallelism: leave out `ep_size`.")
    if decoder.config.value_residual is not None:
        raise ValueError("sequence parallelism does not work with value residuals: use tensor parallelism alone.")
    if getattr(decoder, "has_vision", False):
        raise ValueError(
            "sequence parallelism does not divide the tokens of images: train the text model alone, or leave it out."
        )
    if len(decoder.depth_layers) < len(decoder.layers):
        raise ValueError(
            "sequence parallelism does not shard the layer for multi-token prediction: leave it out by "
            "`num_nextn_predict_layers=0` in the model's configuration."
        )
    if "forward" in vars(decoder):
        raise ValueError("this model is sequence parallel already, or another tool has replaced its `forward`.")
    return decoder, mesh


def _check_whole(decoder: ResidualModel, single: Mapping[nn.Module, Iterable[str]]) -> None:
    """Raise ValueError if a parameter of a module that computes single tokens is sharded among the ranks."""
    places = {module: name for name, module in decoder.named_modules()}
    for module, names in single.items():
        for name in names:
            parameter = module._parameters[name]
            if isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ()):
                raise ValueError(
                    f"the tensor-parallel plan shards `{places[module]}.{name}`, whose module computes single tokens: "
                    "leave it out of `tp_plan`, or leave out sequence parallelism."
                )


def _mixing_modules(layer: ResidualDecoderLayer) -> list[str]:
    """Return the names of a layer's attention and MLP: the modules of its sublayers that have matrices.

    Norms and dropouts, which compute single tokens, have none.
    """
    names = dict.fromkeys(name for sublayer in layer.sublayers for branch in sublayer.branches for name in branch)
    return [name for name in names if any(tensor.ndim > 1 for tensor in getattr(layer, name).parameters())]


def _owners(module: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a module that hold parameters, by name."""
    return {name: part for name, part in module.named_modules() if parameter_names(part)}


def _gather_around(module: nn.Module, sharding: SequenceSharding, is_partial: bool) -> None:
    """Gather the input of an attention or MLP, and keep a rank's tokens of its output.

    Args:
        module: The module; its `forward` is replaced.
        sharding: The sequence parallelism.
        is_partial: Whether the ranks' outputs, and their gradients of the input, are parts of a sum.
    """
    forward = module.forward

    @wraps(forward)
    def forward_on_all_tokens(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        split = sharding.split
        if split is None:
            return forward(hidden_states, *args, **kwargs)
        result = forward(gather(hidden_states, split, 1, is_partial), *args, **kwargs)
        output, *rest = result if isinstance(result, tuple) else (result,)
        output = scatter(output, split, 1, is_partial)
        return (output, *rest) if isinstance(result, tuple) else output

    module.forward = forward_on_all_tokens


def _in_split_of_pass(forward: Callable, sharding: SequenceSharding, is_first: bool) -> Callable:
    """Return a layer's `forward` on a rank's tokens; the first layer gets all tokens, and keeps those of the rank."""

    @wraps(forward)
    def forward_in_split(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        split = kwargs.pop(_SPLIT, None)
        if split is not None and is_first:
            if isinstance(hidden_states, DTensor):  # of a sharded embedding
                hidden_states = split.pad(hidden_states.to_local(), 1)
            else:
                hidden_states = scatter(hidden_states, split, 1, False)
        if split is not None:
            kwargs["reader"] = _SplitReader(kwargs["reader"], sharding, split)
        with sharding.splitting(split):
            return forward(hidden_states, *args, **kwargs)

    return forward_in_split


class _SplitReader(DepthReader):
    """A reader that sets the split of its pass before each read.

    With activation checkpointing, the backward pass computes a layer a second time, when the pass has ended. It calls
    the method of the layer's class then, with the arguments of the first time.
    """

    def __init__(self, reader: DepthReader, sharding: SequenceSharding, split: SequenceSplit):
        super().__init__(reader.model, reader.plan, reader.last)
        self.sharding, self.split = sharding, split

    def read(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self.sharding.split = self.split
        return super().read(*args, **kwargs)

    def after(self, layer_idx: int, state: DepthState) -> DepthState:
        state = super().after(layer_idx, state)
        self.sharding.split = None
        return state


def _split_pass(
    decoder: ResidualModel, sharding: SequenceSharding, single: Mapping[nn.Module, Iterable[str]]
) -> Callable:
    """Return a decoder's `forward` that begins the split of a pass, and gathers its outputs.

    Args:
        decoder: The decoder.
        sharding: The sequence parallelism.
        single: Modules that compute single tokens, with the names of parameters whose gradients are to be summed.
    """
    forward: Callable[..., Any] = decoder.forward
    names = decoder.argument_names

    @wraps(forward)
    def forward_split(*args: Any, **kwargs: Any) -> Any:
        for module, parameters in single.items():
            sharding.gradients.watch(module, parameters)
        shape = shape_of(dict(zip(names, args)) | kwargs)
        split = None if shape is None else sharding.split_of(shape[1])
        if split is None:
            with sharding.splitting(None):
                return forward(*args, **kwargs)
        is_dict = kwargs.pop("return_dict", None)
        is_dict = decoder.config.return_dict if is_dict is None else is_dict
        with sharding.splitting(split):
            outputs = forward(*args, **kwargs, return_dict=True, **{_SPLIT: split})
        outputs["last_hidden_state"] = gather(outputs.last_hidden_state, split, 1, sharding.feeds_head)
        # Name -> dimension of the tokens.
        records = {"hidden_states": 1, "depth_attentions": 2} | dict.fromkeys(SUMS, 1)
        for name, dim in records.items():
            if outputs.get(name) is not None:
                # In place, because the head takes our records from this object. `None` was not selected.
                outputs[name] = tuple(r if r is None else gather(r, split, dim, False) for r in outputs[name])
        return outputs if is_dict else outputs.to_tuple()

    return forward_split


def _feed_head(forward: Callable, sharding: SequenceSharding) -> Callable:
    """Return the `forward` of a language model whose sharded head takes the decoder's output.

    The ranks then sum the gradient of that output once, by tokens. Without the head, all ranks compute all of it.
    """

    @wraps(forward)
    def forward_to_head(*args: Any, **kwargs: Any) -> Any:
        before, sharding.feeds_head = sharding.feeds_head, True
        try:
            return forward(*args, **kwargs)
        finally:
            sharding.feeds_head = before

    return forward_to_head


__all__ = ["shard_sequence"]
