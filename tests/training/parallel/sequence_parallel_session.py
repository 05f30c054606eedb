"""Compare sharded models with whole ones: `torchrun ... sequence_parallel_session.py FOLDER`.

FOLDER holds a directory for each model. The first process computes what is expected in one process, and each process
compares what it has itself. The largest differences over all processes go into `results.json` in the folder.
"""

import json
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from attnres.training.parallel.sequence_parallel import shard_sequence
from attnres.training.parallel.tensor_parallel import sum_gradients_of_norms, sums_again
from tests.live import SentBytes, growth_over_layers

# Lengths: not divisible by four ranks, and less than the number of ranks; and divisible.
LENGTHS, EVEN = (13, 3), 16
TRAINED, THOROUGH = ("llama", "qwen3", "kimi_linear"), ("llama", "kimi_linear")


def batches(length: int) -> list[dict[str, Tensor]]:
    """Return two batches of four rows, one of them padded on the left."""
    made = []
    for seed in range(2):
        ids = torch.randint(3, 90, (4, length), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(ids)
        mask[seed, : length // 4] = 0
        made.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return made


def train(model: PreTrainedModel, length: int, recompute: bool, parts: tuple[int, int] = (0, 1)) -> dict[str, Tensor]:
    """Accumulate the gradients of two batches; return them with the loss and all outputs of the last batch.

    Args:
        model: The model.
        length: Length of the rows.
        recompute: Whether activations are recomputed in the backward pass.
        parts: This process's part of each batch, and the number of parts.
    """
    model.train().zero_grad()
    model.activation_checkpointing_enable() if recompute else model.activation_checkpointing_disable()
    for batch in batches(length):
        batch = {name: rows.chunk(parts[1])[parts[0]] for name, rows in batch.items()}
        count = (batch["labels"][:, 1:] != -100).sum()  # the sum of losses is the same in parts and in whole batches
        outputs = model(**batch, use_cache=False, **{f"output_{name}": True for name in records(model)})
        (outputs.loss * count).backward()
    result = {"logits": outputs.logits.detach(), "loss": outputs.loss.detach()}
    for name in records(model):
        result |= {f"{name} {i}": tensor.detach() for i, tensor in enumerate(outputs[name] or ()) if tensor is not None}
    return result | gradients(model)


def records(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the records that the model's connection has."""
    names, config = ["hidden_states", "depth_attentions"], model.config
    if config.residual_connection == "attn_res":
        names += ["prefix_sums"] if config.attn_res_window else ["prefix_sums", "running_sums"]
    return tuple(names)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the whole gradients by name."""
    return whole_tensors({name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def whole_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors, of which each process may have a part, as a whole."""
    return {n: (part.full_tensor() if isinstance(part, DTensor) else part).clone() for n, part in tensors.items()}


def descend(model: PreTrainedModel) -> dict[str, Tensor]:
    """Make two steps of gradient descent; return the losses, and the weights after them.

    Its steps are proportional to the gradients. (Those of Adam have a size of their own, also where rounding is all of
    a gradient.)
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-3, momentum=0.9)
    losses = []
    for _ in range(2):
        losses.append(train(model, EVEN, recompute=False)["loss"])
        optimizer.step()
    return {"losses": torch.stack(losses)} | whole_tensors({n: p.detach() for n, p in model.named_parameters()})


@torch.no_grad()
def infer(model: PreTrainedModel, length: int) -> dict[str, Tensor]:
    """Return logits of a batch, and logits of generation with the prompt in one pass and in chunks."""
    model.eval()
    batch = {name: rows for name, rows in batches(length)[0].items() if name != "labels"}
    result = {"logits": model(**batch).logits, "of the decoder": model.base_model(**batch).last_hidden_state}
    for chunk in (None, 6):
        options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "prefill_chunk_size": chunk}
        generated = model.generate(**batch, **options, return_dict_in_generate=True, output_logits=True)
        result |= {f"token {i} (chunks of {chunk})": logits for i, logits in enumerate(generated.logits)}
    return result


def largest_difference(found: dict[str, Tensor], compute: Callable[[], dict[str, Tensor]]) -> tuple[float, str]:
    """Return the largest difference over tensors and processes: the norm of the difference to the norm of the tensor.

    Args:
        found: The tensors of this process.
        compute: The first process calls it, for the expected tensors.

    Returns:
        The difference, and the name of the tensor.
    """
    (expected,) = box = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    (expected,) = box

    assert found.keys() == expected.keys()
    # A gradient that is zero in one process may be as small as rounding in another.
    worst = max((((found[k] - v).norm() / v.norm().clamp(min=1e-6)).item(), k) for k, v in expected.items())
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, worst)
    return max(everywhere)


def compare(folder: Path, size: int) -> dict[str, Any]:
    """Compare a model that is sequence parallel among all processes, in training and in inference."""
    whole = AutoModelForCausalLM.from_pretrained(folder) if dist.get_rank() == 0 else None
    sharded = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=size))
    shard_sequence(sharded)
    # Two models go through everything, the others through the longest way.
    is_thorough = folder.name in THOROUGH
    result = {}
    for length in LENGTHS if is_thorough else LENGTHS[:1]:
        recompute = length == LENGTHS[0]
        found = train(sharded, length, recompute)
        expected = partial(train, whole, length, recompute)
        result[f"training, length {length}"] = largest_difference(found, expected)
    if is_thorough:
        result["inference"] = largest_difference(infer(sharded, LENGTHS[0]), partial(infer, whole, LENGTHS[0]))
    if folder.name in TRAINED:
        result["steps of training"] = largest_difference(descend(sharded), partial(descend, whole))
    return result


def measure(folder: Path, size: int) -> dict[str, Any]:
    """Measure memory and communication of the whole model, of tensor parallelism, and of sequence parallelism."""
    models = {"whole": AutoModelForCausalLM.from_pretrained(folder)}
    for name in ("matrices", "sequence"):
        models[name] = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=size))
    shard_sequence(models["sequence"])
    ids = torch.arange(64)[None] % 90
    result: dict[str, Any] = {"memory": {}, "forward": {}, "backward": {}}
    for name, model in models.items():
        # The least of three passes, since a thread of gloo may hold the last tensor that it has sent for a moment more.
        with torch.no_grad():
            passes = [growth_over_layers(model.base_model, partial(model, ids, use_cache=False)) for _ in range(3)]
        result["memory"][name] = min(growth for (growth,) in passes)
        with SentBytes(size) as forward:
            loss = model(ids, labels=ids, use_cache=False).loss
        with SentBytes(size) as backward:
            loss.backward()
        result["forward"][name], result["backward"][name] = forward.sent, backward.sent
    config = models["whole"].config
    result["hidden"] = ids.numel() * config.hidden_size * 4
    vectors = [p for p in models["whole"].model.parameters() if p.ndim == 1 or p.shape[0] == 1]
    result["vectors"] = sum(p.nbytes for p in vectors)
    result["sublayers"] = config.num_sublayers
    try:
        shard_sequence(models["sequence"])
    except ValueError as error:
        result["a second time"] = str(error)
    return result


Change = Callable[[PreTrainedModel], Any]


def sharded_gradients(
    folder: Path, sharding: DistributedConfig, change: Change, is_autocast: bool = False, **options: Any
) -> dict[str, Tensor]:
    """Return the gradients of a sharded model; each group of processes computes a part of the batch.

    Args:
        folder: The directory of the model.
        sharding: The sharding; its `dp_size` is the number of parts of the batch.
        change: A function that changes the sharded model.
        is_autocast: Whether to compute in bfloat16 by autocast.
        options: Options of `from_pretrained`.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=sharding, **options)
    change(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        train(model, LENGTHS[0], True, (dist.get_rank() // sharding.tp_size, sharding.dp_size))
    # FSDP2 takes the mean over the parts of the batch, of losses that are sums.
    return {name: sharding.dp_size * grad for name, grad in gradients(model).items()}


@cache  # several shardings are compared with the same gradients
def whole_gradients(folder: Path, is_autocast: bool = False, **options: Any) -> dict[str, Tensor]:
    """Return the gradients of the whole model; the arguments are those of `sharded_gradients`."""
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        train(model, LENGTHS[0], True)
    return gradients(model)


def compare_gradients(
    folder: Path, sharding: DistributedConfig, change: Change = sum_gradients_of_norms
) -> tuple[float, str]:
    """Compare the gradients of a sharded model with those of the whole one."""
    return largest_difference(sharded_gradients(folder, sharding, change), partial(whole_gradients, folder))


def errors_in_16_bits(folder: Path, sharding: DistributedConfig, change: Change, **how: Any) -> dict[str, float]:
    """Return the errors of all gradients in bfloat16, of the sharded and of the whole model, against float32."""
    found = {"sharded": sharded_gradients(folder, sharding, change, **how)}
    if dist.get_rank() > 0:
        return {}
    found["whole"], exact = whole_gradients(folder, **how), whole_gradients(folder)
    assert all(grads.keys() == exact.keys() for grads in found.values())

    def norm(tensors: Iterable[Tensor]) -> Tensor:
        return torch.stack([tensor.float().norm() for tensor in tensors]).norm()

    size = norm(exact.values())
    return {way: (norm(grads[k] - exact[k] for k in exact) / size).item() for way, grads in found.items()}


# Shardings among four processes, by the names of the fields of `DistributedConfig`.
SHARDINGS = {
    "FSDP2 replicas": {"fsdp_size": 2, "dp_replicate_size": 2},
    "TP x FSDP2": {"tp_size": 2, "fsdp_size": 2},
    "EP x FSDP2": {"fsdp_size": 4, "ep_size": 2},
}


def compare_shardings(folder: Path, size: int) -> dict[str, Any]:
    """Compare the shardings among four processes, and measure memory and communication."""
    results: dict[str, Any] = {"llama": {"measured": measure(folder / "llama", size)}, "kimi_linear": {}}
    for name in THOROUGH:
        sharding = DistributedConfig(**SHARDINGS["TP x FSDP2"])
        results[name]["training beside FSDP2"] = compare_gradients(folder / name, sharding, shard_sequence)
    hybrid, half = folder / "kimi_linear", {"dtype": torch.bfloat16}
    for name, fields in SHARDINGS.items():
        results[name] = compare_gradients(hybrid, DistributedConfig(**fields))
    matrices, experts = DistributedConfig(tp_size=size), DistributedConfig(**SHARDINGS["EP x FSDP2"])
    results["16 bits"] = {
        "TP with sequence parallelism": errors_in_16_bits(hybrid, matrices, shard_sequence, **half),
        "the same by autocast": errors_in_16_bits(hybrid, matrices, shard_sequence, is_autocast=True),
        "EP": errors_in_16_bits(hybrid, experts, sum_gradients_of_norms, **half),
    }
    return results


def compare_tensor_parallel(folder: Path, size: int) -> dict[str, Any]:
    """Compare tensor parallelism alone, with and without the correction for norms."""
    sharding = DistributedConfig(tp_size=size)
    results: dict[str, Any] = {
        f"TP of {name}": compare_gradients(folder / name, sharding) for name in ("qwen3", "gemma3", "kimi_k3")
    }
    was_corrected = []
    compared = compare_gradients(
        folder / "qwen3", sharding, lambda model: was_corrected.append(any(map(sums_again, model.modules())))
    )
    return results | {"TP without the correction": (compared, any(was_corrected))}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    models = sorted(path for path in folder.iterdir() if path.is_dir())
    results = {path.name: compare(path, size) for path in models}
    if results.keys() >= {*THOROUGH}:
        further = compare_shardings(folder, size)
        results = further | {name: results[name] | further[name] for name in results}
    else:
        results |= compare_tensor_parallel(folder, size)
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
