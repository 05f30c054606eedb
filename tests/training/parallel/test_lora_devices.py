"""Adapters trained in two and four processes, by FSDP2, experts and pipelines, are those of one process.

All runs of a number of processes are one launch, since most of its time goes into starting.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from attnres.configuration import load

from ... import forks
from ...modeling_attnres.kimi_k3_release import write_packed
from ..running import results
from .test_many_devices import environment_of, read_weights

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attn_res_block_size": 3,
    "max_position_embeddings": 128,
}
SIZES = ("length=64", "batch_size=4", "micro_batch_size=2", "tokens=null", "epochs=null", "steps=4", "warmup=0")
COUNTS = ("save_every=2", "log_every=1", "held_out_sequences=8", "learning_rate=3e-3", "lora.rank=4", "merge=true")
# Of each number of processes: the model, how it is shared, and the step after which the run is stopped and resumed.
RUNS = {
    1: [
        ("kimi_k3", "", None),
        ("shared", "", None),
        ("hybrid", "", None),
        ("llama", "", None),
        ("qwen3", "", None),
        ("packed", "", None),
    ],
    2: [
        ("kimi_k3", "distributed={fsdp_size: 2}", 1),
        ("shared", "distributed={fsdp_size: 2, ep_size: 2}", 3),
        ("kimi_k3", "pipeline={stages: 2, virtual: 2, microbatches: 2}", 1),
        ("hybrid", "distributed={fsdp_size: 2}", None),
        ("llama", "distributed={fsdp_size: 2}", None),
        ("qwen3", "pipeline={stages: 2, microbatches: 2}", 3),
        ("packed", "distributed={fsdp_size: 2, ep_size: 2}", 1),
        ("packed", "pipeline={stages: 2, microbatches: 2}", None),
    ],
    4: [
        ("kimi_k3", "distributed={fsdp_size: 4, ep_size: 2}", 1),
        ("shared", "pipeline={stages: 2, microbatches: 2, fsdp: true}", None),
        ("hybrid", "pipeline={stages: 2, microbatches: 2}", None),
    ],
}
OPTIONS = {
    "shared": ("lora.shared_outer=true",),
    "packed": ("config={dtype: float32}", "learning_rate=3e-4"),
}


@pytest.fixture(scope="module")
def models(assets, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    tokenizer = AutoTokenizer.from_pretrained(assets / "checkpoints" / "stories260K-hf")
    size = len(tokenizer)
    configs = {
        "kimi_k3": load("attnres-k3-tiny", num_hidden_layers=4, vocab_size=size),
        "hybrid": load("attnres-tiny", num_hidden_layers=4, vocab_size=size),
        "llama": AutoConfig.for_model("attnres_llama", vocab_size=size, **SMALL),
        "qwen3": AutoConfig.for_model("attnres_qwen3", vocab_size=size, **SMALL),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    (root / "shared").symlink_to(root / "kimi_k3")
    tokenizer.save_pretrained(write_packed(root / "packed", vocab_size=size))
    return root


@pytest.fixture(scope="module")
def runs(models, assets, once):
    """Return `runs(processes)`, which gives the folders of the runs of so many processes."""

    def out_of(processes: int) -> list[Path]:
        def train(folder: Path) -> None:
            text, commands = assets / "corpora" / "tinystories" / "valid.txt", []
            for number, (model, way, stopped_after) in enumerate(RUNS[processes]):
                places = (f"model={models / model}", f"train={text}", f"out={folder / str(number)}")
                changes = (*OPTIONS.get(model, ()), *([way] if way else []))
                # In a batch of one sequence for each of four processes.
                sizes = (*SIZES, "micro_batch_size=1") if processes == 4 and "distributed" in way else SIZES
                arguments = ["lora", *places, *sizes, *COUNTS, *changes]
                commands.append({"arguments": arguments, "stopped_after": stopped_after})
            (folder / "commands.json").write_text(json.dumps(commands))
            session = Path(__file__).with_name("lora_session.py")
            if processes == 1:
                done = forks.run(session, folder / "commands.json", timeout=900)
            else:
                words = str(session), str(folder / "commands.json")
                done = forks.launch(*words, processes=processes, env=environment_of("ddp", processes), timeout=900)
            assert done.returncode == 0, done.stderr[-8000:]
            stops = sum(stopped_after is not None for *_, stopped_after in RUNS[processes])
            assert done.stdout.count("Resuming from") == stops
            assert done.stdout.count("Written to") == len(commands)

        folder = once(f"adapters-on-{processes}", train)
        return [folder / str(number) for number in range(len(RUNS[processes]))]

    return out_of


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_adapters_of_several_processes_are_those_of_one(processes, runs):
    """The losses, the adapter, and the merged model."""
    single = dict(zip([model for model, *_ in RUNS[1]], runs(1), strict=True))
    for out, (model, way, _) in zip(runs(processes), RUNS[processes], strict=True):
        expected = single[model]
        for curve in ("training_loss", "held_out_losses"):
            for (step, loss), point in zip(results(out)[curve], results(expected)[curve], strict=True):
                assert [step, pytest.approx(loss, abs=1e-5)] == point, (model, way)
        for name in ("adapter", "model"):
            found, weights = read_weights(out / name), read_weights(expected / name)
            assert found.keys() == weights.keys()
            for tensor in weights:
                # Also the codes of packed experts, which such small differences leave as they are.
                assert (found[tensor].float() - weights[tensor].float()).abs().max() < 1e-5, (model, way, tensor)
        assert ("weight_packed" in "".join(weights)) == (model == "packed")
        assert (out / "adapter" / "adapter_config.json").read_text() == (
            expected / "adapter" / "adapter_config.json"
        ).read_text()
        assert not [*out.glob(".*"), *(out / "adapter").glob(".*")]
