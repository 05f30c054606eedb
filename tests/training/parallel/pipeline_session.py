"""Train small models in pipelines of four processes, each of which runs `pipeline_session.py FOLDER`.

Each case of `CASES` trains some steps by a pipeline, and the same steps with the whole model in one process. In
bfloat16, one process also trains in float32, to see how large the rounding is. The first process writes the differences
and the counts of bytes to `FOLDER/results.json`.
"""

import copy
import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[3]))  # the script is run by its path

from attnres.backbones_attnres import config_on
from attnres.kimi_linear_configuration_attnres import AttnResConfig
from attnres.residual_attnres import residual_tensors
from attnres.training.parallel.pipeline import Pipeline
from attnres.training.parallel.pipeline_settings import PipelineSettings
from tests.conftest import TINY

STEPS, LENGTH = 3, 6
LLAMA = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}


def case(stages: int, virtual: int, schedule: str, microbatches: int, kimi: bool = False, **others) -> dict:
    """Describe a case: the pipeline, the model's fields, and how it is trained."""
    ways = {"layers": None, "cache": True, "fsdp": False, "narrow": None}
    ways |= {"checkpointing": False, "accumulated": 1, "rows": 1, "steps": STEPS}
    pipeline = {"stages": stages, "virtual": virtual, "schedule": schedule, "microbatches": microbatches}
    return {"pipeline": pipeline, "kimi": kimi} | {k: others.pop(k, v) for k, v in ways.items()} | {"fields": others}


COUNTED = [(2, 1), (2, 4), (4, 2)]  # stages and chunks of each, in the cases whose bytes are counted
# With two stages, two pipelines run beside each other.
CASES = {
    "GPipe, P=2": case(2, 1, "GPipe", 4, num_hidden_layers=5, attn_res_block_size=3),
    "1F1B, P=4": case(4, 1, "1F1B", 6, num_hidden_layers=6, attn_res_block_size=5),
    "GPipe, P=4, fewer micro-batches": case(4, 1, "GPipe", 2, num_hidden_layers=4, attn_res_block_size=1),
    "Interleaved1F1B, P=2, V=2": case(2, 2, "Interleaved1F1B", 4, num_hidden_layers=7, attn_res_block_size=3),
    "Interleaved1F1B, P=4, V=2": case(4, 2, "Interleaved1F1B", 8, num_hidden_layers=8, attn_res_block_size=2),
    "LoopedBFS, P=2, V=4": case(2, 4, "LoopedBFS", 3, num_hidden_layers=8, attn_res_block_size=1),
    # Layers read blocks that their chunk sends, and whose graph the engine cuts after half of the backward pass.
    "InterleavedZeroBubble, P=2, V=2": case(
        2, 2, "InterleavedZeroBubble", 3, layers=[2, 3, 2, 2], num_hidden_layers=9, attn_res_block_size=3
    ),
    "InterleavedZeroBubble, checkpointing": case(
        2, 2, "InterleavedZeroBubble", 2, checkpointing=True, steps=2, num_hidden_layers=4, attn_res_block_size=3
    ),
    # The weights of its gates are used again at each later depth.
    "InterleavedZeroBubble, Gated Residual": case(
        2, 2, "InterleavedZeroBubble", 2, steps=2, num_hidden_layers=5, residual_connection="gated_residual"
    ),
    "InterleavedZeroBubble, P=4, V=1": case(4, 1, "InterleavedZeroBubble", 8, num_hidden_layers=4),
    "tied embeddings": case(
        4, 1, "1F1B", 4, num_hidden_layers=4, attn_res_block_size=2, tie_word_embeddings=True, accumulated=2
    ),
    "gradient checkpointing": case(
        2, 2, "Interleaved1F1B", 4, checkpointing=True, rows=2, num_hidden_layers=4, attn_res_block_size=3
    ),
    "streams": case(2, 2, "Interleaved1F1B", 2, num_hidden_layers=4, residual_connection="mhc"),
    "DenseFormer": case(2, 2, "InterleavedZeroBubble", 2, num_hidden_layers=4, residual_connection="denseformer"),
    "standard": case(4, 1, "1F1B", 4, num_hidden_layers=4, residual_connection="standard"),
    "a window": case(2, 2, "Interleaved1F1B", 2, num_hidden_layers=8, attn_res_block_size=1, attn_res_window=2),
    "FSDP2": case(2, 1, "1F1B", 3, fsdp=True, num_hidden_layers=4, attn_res_block_size=3, tie_word_embeddings=True),
    "FSDP2, interleaved": case(
        2, 2, "Interleaved1F1B", 2, fsdp=True, accumulated=2, num_hidden_layers=4, attn_res_block_size=1
    ),
    "Kimi Linear with experts": case(2, 2, "Interleaved1F1B", 4, kimi=True, attn_res_block_size=3),
    # Weights in bfloat16; and weights in float32, with autocast to bfloat16, as `trainer.bf16=true` sets it. They make
    # five steps, for which the test's limit was chosen.
    "weights in bfloat16": case(
        2,
        2,
        "Interleaved1F1B",
        4,
        narrow="weights",
        steps=5,
        num_hidden_layers=6,
        attn_res_block_size=3,
        tie_word_embeddings=True,
    ),
    "autocast to bfloat16": case(
        4, 1, "1F1B", 4, narrow="autocast", steps=5, num_hidden_layers=6, attn_res_block_size=5
    ),
    "autocast to bfloat16, streams": case(
        2, 2, "Interleaved1F1B", 2, narrow="autocast", steps=5, num_hidden_layers=4, residual_connection="mhc"
    ),
    # Chunks end inside blocks: one layer, then two layers a chunk, with blocks of two layers.
    **{
        f"counts, P={stages}, V={virtual}, {'cached' if cache else 'naive'}": case(
            stages,
            virtual,
            "Interleaved1F1B" if virtual > 1 else "1F1B",
            stages,
            cache=cache,
            steps=1,  # each sends the same
            layers=[1] + [2] * (stages * virtual - 1),
            num_hidden_layers=2 * stages * virtual - 1,
            attn_res_block_size=4,
        )
        for stages, virtual in COUNTED
        for cache in (False, True)
    },
}


def build(described: dict) -> PreTrainedModel:
    """Build the model of a case, the same on every process, with depth weights far from uniform."""
    torch.manual_seed(0)
    if described["kimi"]:
        config = AttnResConfig(**TINY | described["fields"])
    else:
        config = config_on("llama")(**LLAMA | described["fields"])
    model = AutoModelForCausalLM.from_config(config)
    for tensor in residual_tensors(model).values():
        torch.nn.init.normal_(tensor, mean=1.0 if tensor.ndim == 1 else 0.0, std=0.2)
    return model


def make_step(model: PreTrainedModel, described: dict) -> torch.optim.Optimizer:
    """Return the optimizer. It is linear in the gradients, so that it does not amplify differences in rounding."""
    if described["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def batches_of(described: dict, step: int, replicas: int) -> list[list[dict]]:
    """Return the batches of a step: a list for each accumulated batch, of one batch for each pipeline."""
    generator = torch.Generator().manual_seed(step)
    rows = described["pipeline"]["microbatches"] * described["rows"]
    shape = described["accumulated"], replicas, rows, LENGTH
    ids = torch.randint(3, 40, shape, generator=generator)
    labels = torch.where(torch.rand(shape, generator=generator) < 0.2, -100, ids)
    return [[{"input_ids": i, "labels": t} for i, t in zip(*pair)] for pair in zip(ids, labels)]


def count_items(batches: list[list[dict]]) -> torch.Tensor:
    """Return the number of labels to predict in all batches."""
    return sum((batch["labels"][:, 1:] != -100).sum() for row in batches for batch in row)


def run(described: dict) -> dict:
    """Train by a pipeline and in one process, and return differences and counts."""
    ways = {name: described[name] for name in ("layers", "cache", "fsdp")}
    settings = PipelineSettings(**described["pipeline"], **ways)
    exact = build(described)
    whole = copy.deepcopy(exact)
    if described["narrow"] == "weights":
        exact = copy.deepcopy(whole.bfloat16()).float()
    pipeline = Pipeline(copy.deepcopy(whole), settings, torch.device("cpu"))
    autocast = nullcontext
    if described["narrow"] == "autocast":
        autocast = partial(torch.autocast, "cpu", torch.bfloat16)
        pipeline.forward_contexts.append(autocast)
        pipeline.output_dtype = torch.bfloat16
    part, names = pipeline.model, {name for name, _ in pipeline.model.named_parameters()}
    # In one process, with the dtypes of the pipeline; and in float32, if that is something else.
    models = {whole.train(): autocast} | ({exact.train(): nullcontext} if described["narrow"] else {})
    optimizers = [make_step(model, described) for model in (part, *models)]
    worst, rounding = {}, {}
    compared = [(worst, part, whole), (rounding, whole, exact)][: len(models)]
    for step in range(described["steps"]):
        batches = batches_of(described, step, pipeline.replicas)
        items, losses = count_items(batches), torch.zeros(1 + len(models))
        for row in batches:
            # Every process has the loss of its pipeline.
            losses[0] += pipeline.step(row[pipeline.replica], items)
            for number, (model, context) in enumerate(models.items(), start=1):
                for batch in row:
                    with context():
                        loss = model(**batch, num_items_in_batch=items, use_cache=False).loss
                    loss.backward()
                    losses[number] += loss.detach()
        pipeline.reduce_gradients()
        pipeline.end_step()
        dist.all_reduce(losses)
        losses /= torch.tensor([settings.stages, *[dist.get_world_size()] * len(models)])
        norms = [pipeline.clip_gradients(float("inf"))]
        norms += [torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]) for model in models]
        for index, (differences, found, expected) in enumerate(compared):
            note(differences, "loss", difference(losses[index], losses[index + 1]))
            note(differences, "norm", difference(norms[index], norms[index + 1]))
            for parameter, other in pairs(found, expected):
                # Some gradients are so small that rounding is a large part of them.
                scale = max(norms[index + 1].item() / 10, other.grad.norm().item())
                error = (full(parameter.grad).float() - other.grad.float()).norm().item()
                note(differences, "gradients", error / scale)
        pipeline.clip_gradients(0.5)
        for model in models:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # Of another shape than the micro-batches, except in short cases, since tracing takes long.
    ids = torch.arange(3, 15).view(3, 4) if described["steps"] >= STEPS else torch.arange(3, 3 + LENGTH).view(1, LENGTH)
    logits, outputs = pipeline.evaluate({"input_ids": ids}), []
    for model, context in models.items():
        with context():  # with gradients on, as the pipeline: an inference plan reads in another order
            outputs.append(model.eval()(ids, use_cache=False).logits.detach())
    if logits is not None:
        note(worst, "logits", difference(logits, outputs[0]))
    if described["narrow"]:
        note(rounding, "logits", difference(*outputs))
    for differences, found, expected in compared:
        for parameter, other in pairs(found, expected):
            note(differences, "weights", difference(full(parameter.detach()), other.detach()))
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"worst": worst, "names": sorted(names)})
    in_order = [name for name in (n for n, _ in whole.named_parameters())]
    return {
        "worst": {name: max(one["worst"].get(name, 0.0) for one in gathered) for name in (*worst, "logits")},
        "rounding": rounding,
        "is_complete": {name for one in gathered for name in one["names"]} >= {*in_order},
        "results": pipeline.results(),
    }


def note(differences: dict[str, float], name: str, value: float) -> None:
    """Keep a difference if it is the largest of its name."""
    differences[name] = max(differences.get(name, 0.0), value)


def pairs(part: PreTrainedModel, whole: PreTrainedModel) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each parameter of a part beside that of the whole model, where a tied head is the embedding's weight."""
    expected = dict(whole.named_parameters())
    tied = whole.get_input_embeddings().weight
    return [(parameter, expected.get(name, tied)) for name, parameter in part.named_parameters()]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole that may be divided by FSDP2."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the norm of the expected tensor."""
    return ((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-6)).item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    chosen = sys.argv[2:] or [*CASES]
    found = {name: run(CASES[name]) for name in chosen}
    if dist.get_rank() == 0:
        (Path(sys.argv[1]) / "results.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
