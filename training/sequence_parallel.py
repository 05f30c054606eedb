"""Sequence parallelism beside tensor parallelism (AttnRes, section 4): each rank keeps the depth state of its tokens.

With n ranks and T tokens, between the divided matrices

    rank r holds       tokens r S .. (r + 1) S - 1 of sources, partial sums and norms, with S = ceil(T / n)
    before a matrix    all-gather along the sequence        [batch, S, hidden] -> [batch, T, hidden]
    after a matrix     reduce-scatter along the sequence    [batch, T, hidden] -> [batch, S, hidden]

Together the two move the same bytes as the all-reduce of plain tensor parallelism, and the memory of the block states
is divided by n. The model's files know nothing of this: [`shard_sequence`] replaces the `forward` of the modules at
these borders, as `transformers` does for tensor parallelism. Norms and residual connections work on one token at a
time, so they run on a rank's tokens unchanged. Their gradients are sums over tokens, and so are summed over the ranks.

Every rank has S rows, because collectives want equal parts. The rows after the last token are zeros, and no result
depends on them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    ColwiseParallel,
    EmbeddingParallel,
    MoeExpertsParallel,
    ReplicatedWithGradAllReduce,
    RowwiseParallel,
    TensorParallelLayer,
)

from attnres.decoder_attnres import DepthReader, ResidualModel
from attnres.documents_attnres import shape_of
from attnres.residual_attnres import DepthState

from .tensor_parallel import GradientSum, own_names, rule_name, sum_gradients_of_norms, tensor_parallel_mesh

# torch 2.13 has renamed these two functions, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# The name of a rule in a plan of tensor parallelism: its style.
Styles = Mapping[str, TensorParallelLayer | None]
# The keyword by which a decoder passes the split of its tokens to its layers.
_SPLIT = "sequence_split"


@dataclass(frozen=True)
class SequenceSplit:
    """The split of the tokens of one forward pass among the ranks of a group.

    Args:
        length: Number T of tokens in each row of the batch.
        size: Number n of ranks.
        rank: The rank of this process in the group.
        group: The process group; `None` for the default group.
    """

    length: int
    size: int
    rank: int
    group: dist.ProcessGroup | None = None

    @property
    def rows(self) -> int:
        """Number S of rows that each rank holds."""
        return -(-self.length // self.size)

    def own(self, full: Tensor, dim: int) -> Tensor:
        """Copy this rank's part `[.., S, ..]` of a tensor `[.., T, ..]`, with zeros after the last token."""
        start = min(self.rank * self.rows, self.length)
        part = full.narrow(dim, start, min(self.rows, self.length - start))
        # A copy, since a view would keep the tensor of all tokens in memory.
        return part.clone() if part.shape[dim] == self.rows else self.pad(part, dim)

    def pad(self, part: Tensor, dim: int) -> Tensor:
        """Return a part of at most S rows as a tensor `[.., S, ..]`, with zeros after the last row."""
        missing = list(part.shape)
        missing[dim] = self.rows - missing[dim]
        return torch.cat((part, part.new_zeros(missing)), dim) if missing[dim] else part

    def all_gather(self, part: Tensor, dim: int) -> Tensor:
        """Gather the parts `[.., S, ..]` of all ranks to a tensor `[.., T, ..]` on every rank."""
        part = part.movedim(dim, 0).contiguous()
        full = part.new_empty(self.size * self.rows, *part.shape[1:])
        _all_gather(full, part, group=self.group)
        return full[: self.length].movedim(0, dim).contiguous()

    def reduce_scatter(self, full: Tensor, dim: int) -> Tensor:
        """Sum the tensors `[.., T, ..]` of all ranks, and return this rank's part `[.., S, ..]` of the sum."""
        full = full.movedim(dim, 0)
        if len(full) < self.size * self.rows:
            full = torch.cat((full, full.new_zeros(self.size * self.rows - len(full), *full.shape[1:])))
        part = full.new_empty(self.rows, *full.shape[1:])
        _reduce_scatter(part, full.contiguous(), group=self.group)
        return part.movedim(0, dim)


class _Gather(torch.autograd.Function):
    """All-gather forward. `is_partial` says that each rank computes a part of the result's gradient, and not all."""

    @staticmethod
    def forward(ctx, part: Tensor, split: SequenceSplit, dim: int, is_partial: bool) -> Tensor:
        ctx.arguments = split, dim, is_partial
        return split.all_gather(part, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        split, dim, is_partial = ctx.arguments
        return (split.reduce_scatter if is_partial else split.own)(grad, dim), None, None, None


class _Scatter(torch.autograd.Function):
    """Keep a rank's tokens: of the sum of all ranks' tensors if each is a part (`is_partial`), else of its copy."""

    @staticmethod
    def forward(ctx, full: Tensor, split: SequenceSplit, dim: int, is_partial: bool) -> Tensor:
        ctx.arguments = split, dim
        return (split.reduce_scatter if is_partial else split.own)(full, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        split, dim = ctx.arguments
        return split.all_gather(grad, dim), None, None, None


class _CountOnce(torch.autograd.Function):
    """Identity whose gradient, which all ranks compute alike, is divided by their number, because it will be summed."""

    @staticmethod
    def forward(ctx, full: Tensor, size: int) -> Tensor:
        ctx.size = size
        return full.view_as(full)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.size, None


class _SumGradient(torch.autograd.Function):
    """Identity whose gradient is summed over the ranks, of which each has computed a part."""

    @staticmethod
    def forward(ctx, full: Tensor, gradients: GradientSum) -> Tensor:
        ctx.gradients = gradients
        return full.view_as(full)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.gradients.sum(grad), None


class SequenceSharding:
    """The sequence parallelism of one model: its group of ranks, and the split of the pass that is running.

    Args:
        group: The ranks that divide the model's matrices.

    Attributes:
        gradients: Sums the gradients of modules that compute single tokens.
        split: The split of the running pass; `None` outside of a pass, and in one that is not split.
        feeds_head: Whether the running pass is that of a language model whose head is divided.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.gradients = GradientSum(group)
        self.split: SequenceSplit | None = None
        self.feeds_head = False

    @contextmanager
    def splitting(self, split: SequenceSplit | None) -> Iterator[None]:
        """Set the split of the running pass for a while."""
        before, self.split = self.split, split
        try:
            yield
        finally:
            self.split = before

    def split_of(self, length: int) -> SequenceSplit | None:
        """Return the split of a pass over rows of `length` tokens; `None` if it is not worth splitting.

        A step of decoding has fewer tokens than there are ranks. A pass with gradients is always split, so that the
        gradients of the vectors are always parts.
        """
        if length < self.size and not torch.is_grad_enabled():
            return None
        return SequenceSplit(length, self.size, self.rank, self.group)


# Styles of `transformers` with another communication while a pass is split. Then the input of a sublayer is gathered
# once for all its matrices, whose gradients are summed together, and its outputs are summed once by a reduce-scatter.


class _EmbeddingToShards(EmbeddingParallel):
    """A divided embedding whose result is divided by tokens. It is a DTensor, so it has the shape of all tokens."""

    def __init__(self, style: EmbeddingParallel, sharding: SequenceSharding):
        super().__init__(shard_dim=style.shard_dim)
        self.sharding = sharding

    def transform_output_post_forward(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
        if self.sharding.split is None or not isinstance(output, DTensor):
            return super().transform_output_post_forward(module, output, mesh)
        return output.redistribute(placements=[Shard(1)])


class _ColwiseOfGathered(ColwiseParallel):
    """Columns of a matrix, on gathered tokens. Each rank computes a part of the gradient of its input."""

    def __init__(self, style: ColwiseParallel, sharding: SequenceSharding, is_head: bool = False):
        super().__init__(output_layouts=style.output_layouts, use_local_output=style.use_local_output)
        self.sharding, self.is_head = sharding, is_head

    def _is_split(self) -> bool:
        return self.sharding.feeds_head if self.is_head else self.sharding.split is not None

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return self._is_split() or super().should_use_local_tensors(module)

    def transform_inputs_pre_forward(self, module: nn.Module, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple:
        # The base class would sum the gradient of the input here, once for each matrix.
        return (args, kwargs) if self._is_split() else super().transform_inputs_pre_forward(module, args, kwargs, mesh)


class _RowwiseInParts(RowwiseParallel):
    """Rows of a matrix. The result is this rank's part of the sum, which is left to the border of the sublayer."""

    def __init__(self, style: RowwiseParallel, sharding: SequenceSharding):
        super().__init__(output_layouts=style.output_layouts, use_local_output=style.use_local_output)
        self.sharding = sharding

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return self.sharding.split is not None or super().should_use_local_tensors(module)

    def transform_output_post_forward(self, module: nn.Module, output: Tensor, mesh: DeviceMesh) -> Tensor:
        return (
            output if self.sharding.split is not None else super().transform_output_post_forward(module, output, mesh)
        )


class _ExpertsInParts(MoeExpertsParallel):
    """Experts of which each rank has a part of every matrix, on gathered tokens; their results are not summed here."""

    def __init__(self, sharding: SequenceSharding):
        self.sharding = sharding

    def transform_inputs_pre_forward(self, module: nn.Module, args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple:
        if self.sharding.split is None:
            return super().transform_inputs_pre_forward(module, args, kwargs, mesh)
        hidden_states, indices, weights, *rest = args
        # The router is whole on every rank, so it needs the whole gradient of its weights `[tokens, top_k]`.
        return (hidden_states, indices, _SumGradient.apply(weights, self.sharding.gradients), *rest), kwargs

    def transform_output_post_forward(self, module: nn.Module, output: Tensor, mesh: DeviceMesh) -> Tensor:
        return (
            output if self.sharding.split is not None else super().transform_output_post_forward(module, output, mesh)
        )


def shard_sequence(model: PreTrainedModel) -> PreTrainedModel:
    """Divide the depth state of a model along the sequence, among the ranks that divide its matrices.

    ```python
    >>> model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=4))
    >>> shard_sequence(model).generate(prompt, prefill_chunk_size=16384)
    ```

    Inputs and outputs stay the same. Passes with gradients are divided, and passes without of at least as many tokens
    as there are ranks, such as a prefill. Sublayers of which every rank has the whole, such as Kimi Linear's attention,
    compute all tokens on every rank; their inputs are gathered, and their outputs cut.

    Args:
        model: A model of the family that `transformers` has loaded with tensor parallelism, with or without a head. It
            is changed in place.

    Returns:
        The model.

    Raises:
        ValueError: The model is not of the family, its matrices are not divided, its sequence is divided already, its
            experts are divided by expert parallelism, or its plan divides a module that computes single tokens.
    """
    decoder = _check_model(model)
    prefix = "" if decoder is model else f"{model.base_model_prefix}."
    plan = {name: ALL_PARALLEL_STYLES[style] for name, style in model.tp_plan.items()}
    mesh = tensor_parallel_mesh(decoder)
    if mesh is None:
        raise ValueError("no matrix of this model is divided: give a `tp_plan` that divides some.")
    sum_gradients_of_norms(model)
    sharding = SequenceSharding(mesh.get_group())

    embedding = decoder.get_input_embeddings()
    (name,) = (name for name, module in decoder.named_modules() if module is embedding)
    style = plan.get(f"{prefix}{name}")
    if isinstance(style, EmbeddingParallel):
        _install(_EmbeddingToShards(style, sharding), embedding, mesh)
    # Modules that need all tokens of a row, or work on matrices. All other modules compute single tokens.
    mixing = {embedding}
    for i, layer in enumerate(decoder.layers):
        for name in _mixing_modules(layer):
            module = getattr(layer, name)
            mixing.add(module)
            rules = {part: plan.get(f"{prefix}layers.*.{name}.{rule_name(part)}") for part in _owners(module)}
            _gather_around(module, sharding, is_partial=_leave_in_parts(module, rules, sharding, mesh))
        layer.forward = _in_split_of_pass(layer.forward, sharding, is_first=i == 0)
    inside = {part for module in mixing for part in module.modules()}
    single = {module: names for module in decoder.modules() if module not in inside and (names := own_names(module))}
    _check_whole(decoder, single)
    if (getattr(model.config.distributed_config, "dp_size", None) or 1) > 1:
        # FSDP2 puts the whole parameters of a module in place when the module, or one around it, is called.
        for module, names in single.items():
            module.register_forward_pre_hook(partial(_sum_in_call, sharding, names))
        single = {}
    decoder.forward = _split_pass(decoder, sharding, single)

    head, style = getattr(model, "lm_head", None), plan.get("lm_head")
    if head is not None and decoder is not model and type(style) is ColwiseParallel:
        _install(_ColwiseOfGathered(style, sharding, is_head=True), head, mesh)
        model.forward = _feed_head(model.forward, sharding)
    return model


def _check_model(model: PreTrainedModel) -> ResidualModel:
    """Return the decoder of a model. Raise ValueError if its sequence cannot be divided."""
    decoder = model.base_model if isinstance(model, PreTrainedModel) else None
    if not isinstance(decoder, ResidualModel):
        raise ValueError(
            f"the sequence of a {type(model).__name__} cannot be divided: the model must be of this family. Convert it "
            "by `attnres convert` first."
        )
    if (getattr(model, "tp_size", None) or 1) < 2:
        raise ValueError(
            "the sequence is divided among the ranks that divide the matrices, but this model has its matrices whole: "
            "load it with `distributed_config=DistributedConfig(tp_size=N)`."
        )
    if (getattr(model.config.distributed_config, "ep_size", None) or 1) > 1:
        raise ValueError("the sequence cannot be divided beside expert parallelism: leave out `ep_size`.")
    if "forward" in vars(decoder):
        raise ValueError("the sequence of this model is divided already, or another tool has replaced its `forward`.")
    return decoder


def _check_whole(decoder: ResidualModel, single: Mapping[nn.Module, Iterable[str]]) -> None:
    """Raise ValueError if a parameter of a module that computes single tokens is divided among the ranks."""
    places = {module: name for name, module in decoder.named_modules()}
    for module, names in single.items():
        for name in names:
            parameter = module._parameters[name]
            if isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ()):
                raise ValueError(
                    f"the tensor-parallel plan divides `{places[module]}.{name}`, whose module computes single tokens: "
                    "leave it out of `tp_plan` to divide the sequence."
                )


def _mixing_modules(layer: nn.Module) -> list[str]:
    """Return the names of a layer's attention and MLP: the modules of its sublayers that have matrices.

    Norms and dropouts, which compute single tokens, have none.
    """
    names = dict.fromkeys(name for sublayer in layer.sublayers for branch in sublayer.branches for name in branch)
    return [name for name in names if any(tensor.ndim > 1 for tensor in getattr(layer, name).parameters())]


def _owners(module: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a module that hold parameters, by name."""
    return {name: part for name, part in module.named_modules() if own_names(part)}


def _install(style: TensorParallelLayer, module: nn.Module, mesh: DeviceMesh) -> None:
    """Put another style in the place of the one by which `transformers` divides a module."""
    vars(module).pop("forward", None)  # a style is installed as this attribute, in front of the method of the class
    style.install_forward(module, mesh)


def _leave_in_parts(module: nn.Module, rules: Styles, sharding: SequenceSharding, mesh: DeviceMesh) -> bool:
    """Make a sublayer's module leave its output, and the gradient of its input, as parts that the ranks sum.

    This needs to know how the module uses its input: columns of the first matrices, rows of the last, or experts with
    a router. In any other module the sums stay where the plan of tensor parallelism makes them.

    Args:
        module: An attention or MLP.
        rules: The styles of its parts that hold parameters, by name; `None` for a part that is whole on every rank.
        sharding: The sequence parallelism.
        mesh: The ranks that divide the matrices.

    Returns:
        Whether the module was changed.
    """
    styles: dict[nn.Module, TensorParallelLayer] = {}
    routers: list[nn.Module] = []
    num_last = 0
    has_experts = any(isinstance(rule, MoeExpertsParallel) for rule in rules.values())
    for name, rule in rules.items():
        part = module.get_submodule(name)
        if isinstance(rule, MoeExpertsParallel) and "." not in name:
            styles[part] = _ExpertsInParts(sharding)
        elif type(rule) is ColwiseParallel and type(part) is nn.Linear and rule.output_layouts == Shard(-1):
            styles[part] = _ColwiseOfGathered(rule, sharding)
        elif type(rule) is RowwiseParallel and type(part) is nn.Linear and rule.input_layouts == Shard(-1):
            if part.bias is not None:  # it is added once, after the sum
                return False
            styles[part] = _RowwiseInParts(rule, sharding)
            num_last += 1
        elif rule is None and has_experts and name and "." not in name:
            routers.append(part)
        elif not isinstance(rule, ReplicatedWithGradAllReduce):
            return False
    if (num_last, len(routers)) not in ([(0, 1), (1, 1)] if has_experts else [(1, 0)]):
        return False
    for part, style in styles.items():
        _install(style, part, mesh)
    for router in routers:
        router.register_forward_pre_hook(partial(_count_router_once, sharding))
    return True


def _count_router_once(sharding: SequenceSharding, router: nn.Module, args: tuple) -> tuple | None:
    if sharding.split is None or not torch.is_grad_enabled():
        return None
    return _CountOnce.apply(args[0], sharding.size), *args[1:]


def _sum_in_call(sharding: SequenceSharding, names: list[str], module: nn.Module, args: tuple) -> None:
    sharding.gradients.watch(module, names)


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
        result = forward(_Gather.apply(hidden_states, split, 1, is_partial), *args, **kwargs)
        output, *rest = result if isinstance(result, tuple) else (result,)
        output = _Scatter.apply(output, split, 1, is_partial)
        return (output, *rest) if isinstance(result, tuple) else output

    module.forward = forward_on_all_tokens


def _in_split_of_pass(forward: Callable, sharding: SequenceSharding, is_first: bool) -> Callable:
    """Return a layer's `forward` on a rank's tokens; the first layer gets all tokens, and keeps those of the rank."""

    @wraps(forward)
    def forward_in_split(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        split = kwargs.pop(_SPLIT, None)
        if split is not None and is_first:
            if isinstance(hidden_states, DTensor):  # of a divided embedding
                hidden_states = split.pad(hidden_states.to_local(), 1)
            else:
                hidden_states = _Scatter.apply(hidden_states, split, 1, False)
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
        super().__init__(reader.model, reader.plan)
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
    forward = decoder.forward

    @wraps(forward)
    def forward_split(*args: Any, **kwargs: Any) -> Any:
        for module, names in single.items():
            sharding.gradients.watch(module, names)
        shape = shape_of(dict(zip(decoder.argument_names, args)) | kwargs)
        split = None if shape is None else sharding.split_of(shape[1])
        if split is None:
            with sharding.splitting(None):
                return forward(*args, **kwargs)
        is_dict = kwargs.pop("return_dict", None)
        is_dict = decoder.config.return_dict if is_dict is None else is_dict
        with sharding.splitting(split):
            outputs = forward(*args, **kwargs, return_dict=True, **{_SPLIT: split})
        outputs["last_hidden_state"] = _Gather.apply(outputs.last_hidden_state, split, 1, sharding.feeds_head)
        records = {"hidden_states": 1, "depth_attentions": 2}  # name -> dimension of the tokens
        for name, dim in records.items():
            if outputs.get(name) is not None:
                outputs[name] = tuple(_Gather.apply(record, split, dim, False) for record in outputs[name])
        # The head takes the depth weights from this list, where the decoder has put a rank's part of them.
        if kwargs.get("record_to"):
            kwargs["record_to"][-1] = outputs["depth_attentions"]
        return outputs if is_dict else outputs.to_tuple()

    return forward_split


def _feed_head(forward: Callable, sharding: SequenceSharding) -> Callable:
    """Return the `forward` of a language model whose divided head takes the decoder's output.

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


__all__ = ["SequenceSharding", "SequenceSplit", "shard_sequence"]
