"""A model sharded among two or four processes, on CPUs, trains as in one: FSDP2, tensor and expert parallel."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnres.configuration import load

from ... import forks
from ..running import ACCELERATE_YAMLS, results, run_until, wait_for

SIZES = ("length=64", "batch_size=4", "micro_batch_size=1", "tokens=null", "steps=4", "save_every=2", "log_every=1")
FEW = "held_out_sequences=8"  # most of the time would go into held-out losses
TP = "tensor_parallel"
# A hybrid with balanced experts, from scratch and from a published layout; Kimi K3; and a retrofit, with tied weights.
RUNS = {
    "scratch": ("pretrain", "model=attnres-tiny", "config={{num_hidden_layers: 4}}", "tokenizer={source}", FEW),
    "hybrid": ("pretrain", "model={hybrid}", FEW),
    "kimi_k3": ("pretrain", "model={kimi_k3}", FEW),
    "retrofit": ("heal", "model={source}", "retrofit={{block_size: 2}}", "residual_alone=0.5", FEW),
    "stream": ("heal", "model={source}", "retrofit={{block_size: 2}}", "streaming=true", "held_out={short}"),
}


@pytest.fixture(scope="module")
def folders(assets, tmp_path_factory) -> dict[str, Path]:
    source, shared = assets / "checkpoints" / "stories260K-hf", tmp_path_factory.mktemp("many-devices")
    tokenizer = AutoTokenizer.from_pretrained(source)
    models = {"hybrid": "attnres-tiny", "kimi_k3": "attnres-k3-tiny"}
    for name, configuration in models.items():
        torch.manual_seed(0)
        config = load(configuration, num_hidden_layers=4, vocab_size=len(tokenizer))
        AutoModelForCausalLM.from_config(config).save_pretrained(shared / name)
        tokenizer.save_pretrained(shared / name)
    text = assets / "corpora" / "tinystories" / "valid.txt"
    # Six sequences: a pass over them ends within a step.
    short = shared / "short.txt"
    short.write_text(text.read_text(encoding="utf-8")[:800], encoding="utf-8")
    return {"source": source, "text": text, "short": short} | {name: shared / name for name in models}


@pytest.fixture(scope="module")
def arguments(folders) -> Callable[..., list[str]]:
    """Return `arguments(run, out, *changes)`, which gives the arguments of `attnres train`."""

    def build(run: str, out: Path, *changes: str) -> list[str]:
        recipe = [part.format(**folders) for part in RUNS[run]]
        text = folders["short" if run == "stream" else "text"]
        data = (f"train={text}", f"out={out}", "optimizer=adamw", "learning_rate=3e-4")
        return [*recipe, *data, *SIZES, *changes]

    return build


@pytest.fixture(scope="module")
def single(once, arguments) -> Callable[[str], Path]:
    """Return `single(run)`, which gives the folder of a run in one process."""

    def out_of(run: str) -> Path:
        def train(folder: Path) -> None:
            done = forks.run("-m", "attnres_cli", "train", *arguments(run, folder / "out"), timeout=300)
            assert done.returncode == 0, done.stderr[-4000:]

        return once(f"{run}-on-one", train) / "out"

    return out_of


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "stdin": subprocess.DEVNULL}
ON_CPUS = os.environ | {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}


def options_of(config: str, processes: int = 2) -> list[str]:
    """Return the options of `accelerate launch` in full precision, by one of its YAML files."""
    (path,) = [path for path in ACCELERATE_YAMLS if path.stem == config]
    options = ["--config_file", str(path), "--num_processes", str(processes), "--mixed_precision", "no"]
    return [*options, "--main_process_port", "0"]


def launch(arguments: list[str]) -> subprocess.Popen:
    """Start two processes as a user does."""
    launcher = ["-m", "accelerate.commands.launch", *options_of("ddp"), "-m", "attnres_cli"]
    return subprocess.Popen([sys.executable, *launcher, "train", *arguments], env=ON_CPUS, **PIPES)


def run_in_forks(
    arguments: list[str], config: str = "ddp", processes: int = 2, stopped_after: str = ""
) -> subprocess.CompletedProcess:
    """Run processes in the environment that `accelerate launch` gives them; see `many_devices_session.py`."""
    ways = {"AS_ON_GPUS": "true"} if config == "fsdp2" else {}
    ways |= {"STOPPED_AFTER": stopped_after} if stopped_after else {}
    script = [str(Path(__file__).with_name("many_devices_session.py"))] if ways else ["-m", "attnres_cli"]
    return forks.launch(*script, "train", *arguments, processes=processes, env=environment_of(config, processes) | ways)


def environment_of(config: str, processes: int) -> dict[str, str]:
    """Return the environment that `accelerate launch` gives all processes."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES"):
            patch.setenv(name, ON_CPUS[name])
        arguments = [*options_of(config, processes), "-m", "attnres_cli"]
        options, _, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
        return prepare_multi_gpu_env(options)


def run_to_the_end(arguments: list[str], processes: int = 2) -> str:
    """Run processes as [`run_in_forks`] does, and return their output."""
    done = run_in_forks(arguments, processes=processes)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def finish(process: subprocess.Popen, code: int = 0) -> tuple[str, str]:
    """Wait for the launcher, and return its output and errors."""
    with process:
        try:
            output, errors = process.communicate(timeout=300)
        finally:
            kill(process)
    assert (process.returncode == 0) == (code == 0), errors[-4000:]
    return output, errors


def kill(process: subprocess.Popen) -> None:
    """End the launcher and all processes that it started."""
    if process.poll() is None:
        root = psutil.Process(process.pid)
        for one in (*root.children(recursive=True), root):
            one.kill()


def read_weights(model: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a model directory from all of its files."""
    return {name: tensor for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_run(out: Path, expected: Path, tolerance: float = 1e-4) -> None:
    """Assert that loss curves agree, and that model directories have the same files, configuration and weights.

    The weights may be in one file, or in several with an index.
    """
    for curve in ("training_loss", "held_out_losses"):
        for (step, loss), point in zip(results(out)[curve], results(expected)[curve], strict=True):
            assert [step, pytest.approx(loss, abs=tolerance)] == point
    models = [folder / "model" for folder in (out, expected)]
    others = [{path.name for path in model.iterdir() if not path.name.startswith("model")} for model in models]
    assert others[0] == others[1]
    assert len({(model / "config.json").read_text() for model in models}) == 1
    found, weights = map(read_weights, models)
    assert found.keys() == weights.keys()
    for name in weights:
        difference = (found[name] - weights[name]).abs().float()
        assert difference.mean() <= tolerance / 100, name
        # Where a gradient is as small as rounding, AdamW's step may have either sign: a few numbers in all.
        assert (difference > tolerance).float().mean() <= tolerance * 10, name
    assert not list(out.glob(".*"))
    AutoModelForCausalLM.from_pretrained(models[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "run, config, distributed, processes, stopped_after, how",
    [
        ("retrofit", "fsdp2", None, 2, "", "the model sharded by accelerate (FSDP2)"),
        ("stream", "ddp", None, 2, "3", "each with the whole model (DDP)"),
        ("retrofit", "ddp", "{fsdp_size: 2}", 2, "1", "sharded by transformers (FSDP2 2)"),
        ("retrofit", TP, "{tp_size: 2, sequence_parallel: true}", 2, "", "by transformers (TP 2, sequence parallel)"),
        ("hybrid", TP, "{tp_size: 2, fsdp_size: 2}", 4, "1", "by transformers (FSDP2 2, TP 2)"),
        ("kimi_k3", TP, "{fsdp_size: 4, ep_size: 2}", 4, "1", "by transformers (FSDP2 4, EP 2)"),
    ],
)
def test_several_processes_give_the_run_of_one(
    run, config, distributed, processes, stopped_after, how, single, arguments, tmp_path, monkeypatch
):
    """Each group computes its part of the batch; with tensor parallelism, a process has half of each matrix.

    With accelerate's FSDP2, the first process alone has the weights at the start; embedding and head are tied. Some
    runs are stopped before a checkpoint is due, and resumed: a stream in a later pass, the others after the first step.
    """
    out = tmp_path / "out"
    if config == "fsdp2":
        monkeypatch.setenv("FIRST_PROCESS_LOADS", "true")
    changes = [f"distributed={distributed}"] if distributed else []
    if run == "kimi_k3":  # with checkpointing, which the run in one process has not
        changes.append("trainer.gradient_checkpointing=true")
    done = run_in_forks(arguments(run, out, *changes), config, processes, stopped_after)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("Written to") == 1
    lines = [line for line in done.stdout.splitlines() if line.startswith(f"{processes} processes, ")]
    assert all(line.endswith(how) for line in lines)
    assert len(lines) == 1 + done.stdout.count("Resuming from") == 1 + len(stopped_after)
    assert_same_run(out, single(run))
    # The last checkpoint holds the same model, also if each process has written its part.
    shards = processes if distributed else 0
    assert len(list((out / "checkpoint-4").glob("shard-*.safetensors"))) == shards
    models = [AutoModelForCausalLM.from_pretrained(out / name).state_dict() for name in ("model", "checkpoint-4")]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distributed", "stop"),
    [((), "a signal"), (("distributed={fsdp_size: 2}",), "a kill")],
    ids=["whole, a signal", "sharded, a kill"],
)
def test_a_run_of_two_processes_that_is_stopped_resumes_bit_for_bit(distributed, stop, single, arguments, tmp_path):
    stopped, expected = tmp_path / "stopped", tmp_path / "expected"
    done = run_in_forks(arguments("scratch", expected, *distributed))
    assert done.returncode == 0, done.stderr[-4000:]
    assert_same_run(expected, single("scratch"))

    command = arguments("scratch", stopped, *distributed)
    if stop == "a kill":
        words = ("-m", "attnres_cli", "train", *command)
        with forks.ranks(environment_of("ddp", 2), 2) as ranks:
            run_until(stopped / "checkpoint-2", words, ranks)
    else:
        process = launch(command)
        while not (line := process.stdout.readline()).startswith("step 2:"):
            assert line
        second = next(p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == "1")
        second.send_signal(signal.SIGTERM)  # to one of them
        output, _ = finish(process, code=143)
        assert "The same command resumes from there." in output
    assert not (stopped / "results.json").exists()

    assert "Resuming from" in run_to_the_end(command)
    assert_same_run(stopped, expected, tolerance=0)


def assert_same_checkpoint(found: Path, expected: Path) -> None:
    """Assert that weights, optimizer, schedule and random numbers are the same, bit for bit."""
    folders = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.suffix in BINARY}
        for folder in (found, expected)
    ]
    assert {path.name for path in folders[0]} >= {"scheduler.pt", "rng_state_0.pth", "__0_0.distcp"}
    assert folders[0] == folders[1]


BINARY = {".safetensors", ".distcp", ".pt", ".pth"}


@pytest.mark.slow
def test_a_pipeline_gives_the_run_of_one_process_and_resumes_also_with_more_stages(single, arguments, tmp_path):
    """Kimi K3 has balanced experts and checkpointing, and accumulates gradients. A process of its pipeline is killed.

    The other ends, and says so in one line. The last checkpoint stays good.
    """
    stopped, expected, copy = (tmp_path / name for name in ("stopped", "expected", "copy"))
    ways = "micro_batch_size=2", "trainer.gradient_checkpointing=true"
    command = arguments("kimi_k3", expected, *ways, "pipeline={stages: 2, virtual: 2, microbatches: 2}")
    output = run_to_the_end(command)
    stages = "2 stages with 2 chunks (Interleaved1F1B, 2 micro-batches, layers 1+1+1+1, time limit 600 s)"
    assert f"2 processes, each of {stages}" in output
    assert_same_run(expected, single("kimi_k3"))
    counts = results(expected)["pipeline"]
    assert counts["sent_bytes"] == counts["sent_gradient_bytes"] == sum(counts["transition_bytes"]) > 0
    assert counts["cached_bytes_peak"] > 0
    assert sorted(path.name for path in (expected / "checkpoint-4").glob("model[-.]*")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]

    command = arguments("kimi_k3", stopped, *ways, "pipeline={stages: 2, virtual: 2, microbatches: 2}")
    words = ("-m", "attnres_cli", "train", *command)
    with forks.ranks(environment_of("ddp", 2), 2) as ranks, ExitStack() as stack:
        first, second = [stack.enter_context(forks.start(*words, env=rank)) for rank in ranks]
        wait_for(stopped / "checkpoint-2", first)
        second.kill()
        _, errors = first.communicate(timeout=60)
    assert first.returncode == 1 and "Traceback" not in errors
    assert errors.splitlines()[-1] == "attnres: another process of this run has ended; see its message."
    shutil.copytree(stopped, copy)

    output = run_to_the_end(command)
    assert "Resuming from" in output
    assert_same_run(stopped, expected, tolerance=0)
    assert_same_checkpoint(stopped / "checkpoint-4", expected / "checkpoint-4")

    # In the same folder, since a run does not resume in another one.
    shutil.rmtree(stopped)
    copy.rename(stopped)
    command = arguments("kimi_k3", stopped, *ways, "pipeline={stages: 3, microbatches: 2, schedule: GPipe}")
    output = run_to_the_end(command, processes=3)
    assert "Resuming from" in output and "3 processes, each of 3 stages" in output
    assert_same_run(stopped, expected)


@pytest.mark.slow
def test_two_pipelines_sharded_by_fsdp2_give_the_run_of_one_process(single, arguments, tmp_path):
    """Each pipeline computes half of the batch; each of its stages has half of every matrix. Embeddings are tied."""
    changes = "micro_batch_size=2", "pipeline={stages: 2, microbatches: 2, fsdp: true}"
    output = run_to_the_end(arguments("retrofit", tmp_path / "out", *changes), processes=4)
    assert "4 processes, 2 pipelines sharded by FSDP2, each of 2 stages with 1 chunk (1F1B" in output
    assert_same_run(tmp_path / "out", single("retrofit"))


@pytest.mark.slow
def test_a_pipeline_ends_with_its_best_checkpoint_and_counts_each_token_once(arguments, tmp_path):
    """The model learns other text than the held-out one, so that the loss grows."""
    out = tmp_path / "out"
    for name, text in {"train": "the dog ran. ", "held-out": "Why? NO! "}.items():
        (tmp_path / f"{name}.txt").write_text(text * 60)
    data = f"train={tmp_path}/train.txt", f"held_out={tmp_path}/held-out.txt", "length=16", "warmup=0"
    changes = *data, "steps=3", "save_every=1", "keep=9", "learning_rate=0.01", "micro_batch_size=2"
    ways = "trainer={load_best_model_at_end: true, include_num_input_tokens_seen: all}", "pipeline={stages: 2}"
    output = run_to_the_end(arguments("scratch", out, *changes, *ways))
    (_, first), *losses = results(out)["held_out_losses"]
    best, lowest = min(losses, key=lambda point: point[1])
    assert best < 3 and losses[-1][1] > first
    assert (results(out)["best_step"], results(out)["held_out_loss"]) == (best, lowest)
    assert f"Held-out loss of step {best}, the best: {lowest:.4f}" in output
    folders = [out / name for name in ("model", f"checkpoint-{best}", "checkpoint-3")]
    model, checkpoint, last = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    assert all(torch.equal(model[name], checkpoint[name]) for name in model)
    assert not torch.equal(model["lm_head.weight"], last["lm_head.weight"])
    assert json.loads((out / "checkpoint-3" / "trainer_state.json").read_text())["num_input_tokens_seen"] == 3 * 4 * 16


STOPS = """
import json, os, signal
from pathlib import Path
from attnres.commands.main import main
from attnres.training.parallel.pipeline import TrainingPipeline

folder, rank, batches = Path(os.environ["FOLDER"]), os.environ["RANK"], []
begin, step = TrainingPipeline.__init__, TrainingPipeline.step

def count_parameters(self, model, *arguments):
    sizes = [[parameter.numel(), parameter.is_meta] for parameter in model.parameters()]
    (folder / f"sizes-{rank}").write_text(json.dumps(sizes))
    begin(self, model, *arguments)

def stop_after_the_checkpoint(self, *arguments):
    batches.append(arguments)
    if rank == "1" and len(batches) == 5:  # the first of the two of step 3
        (folder / "stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    return step(self, *arguments)

TrainingPipeline.__init__, TrainingPipeline.step = count_parameters, stop_after_the_checkpoint
main()
"""


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_run_after_the_time_limit(single, arguments, tmp_path):
    """The other process says so in one line. Without the stopped process, which a launcher kills, none is left.

    Each process makes its part of a model from scratch, and each parameter is in one part. The same command resumes. In
    bfloat16 the run is that of one process up to rounding.
    """
    outs = [tmp_path / name for name in ("pipeline", "one")]
    changes = "micro_batch_size=2", "trainer.bf16=true"
    command = arguments("scratch", outs[0], *changes, "pipeline={stages: 2, timeout: 20}")
    environment = environment_of("ddp", 2) | {"FOLDER": str(tmp_path)}
    with forks.ranks(environment, 2) as ranks, ThreadPoolExecutor() as threads:
        ends = [threads.submit(forks.run, "-c", STOPS, "train", *command, env=rank, timeout=200) for rank in ranks]
        first = ends[0].result()
        process = psutil.Process(int((tmp_path / "stopped").read_text()))
        assert process.status() == psutil.STATUS_STOPPED
        assert not process.children()
        process.kill()
        assert ends[1].result().returncode == -signal.SIGKILL
    assert first.returncode == 1
    (line,) = [line for line in first.stderr.splitlines() if line.startswith("attnres: ")]
    assert "process 0 has waited too long for the other processes: one of them hangs, or a step takes longer." in line
    assert "`pipeline.timeout` of the recipe" in line
    assert not (outs[0] / "results.json").exists()
    parts = zip(*(json.loads((tmp_path / f"sizes-{rank}").read_text()) for rank in range(2)), strict=True)
    assert all(sizes[0] == sizes[1] and sum(is_absent) == 1 for sizes, is_absent in (zip(*both) for both in parts))

    output = run_to_the_end(arguments("scratch", outs[0], *changes, "pipeline={stages: 2}"))
    assert "Resuming from" in output
    done = forks.run("-m", "attnres_cli", "train", *arguments("scratch", outs[1], *changes))
    assert done.returncode == 0, done.stderr[-4000:]
    for curve in ("training_loss", "held_out_losses"):
        pipeline, one = (torch.tensor(results(out)[curve])[:, 1] for out in outs)
        torch.testing.assert_close(pipeline, one, rtol=2e-3, atol=0)
    losses = [results(out)["training_loss"][0][1] for out in (*outs, single("scratch"))]
    assert losses[2] not in losses[:2]  # in float32, before the first update


@pytest.mark.slow
def test_an_error_of_one_process_is_reported_without_the_lost_connection_of_the_other(arguments, tmp_path):
    """Without a launcher, which would end the other process before it notices."""
    command = ("-m", "attnres_cli", "train", *arguments("retrofit", tmp_path / "out", "retrofit={block_size: 0}"))
    with forks.ranks(environment_of("ddp", 2), 2) as ranks, ThreadPoolExecutor() as threads:
        ends = [threads.submit(forks.run, *command, env=rank, timeout=200) for rank in ranks]
    assert [end.result().returncode for end in ends] == [1, 1]
    first, second = (end.result().stderr for end in ends)
    assert "attnres: `retrofit` of the recipe is {'block_size': 0}: " in first
    assert second == "attnres: another process of this run has ended; see its message.\n"
    assert "unforeseen" not in first and "gloo" not in first


@pytest.mark.slow
def test_sharding_that_accelerate_would_ignore_is_refused(arguments, tmp_path):
    """When told to shard a model among CPUs, accelerate trains a whole model in each process."""
    command = ("-m", "attnres_cli", "train", *arguments("retrofit", tmp_path / "out"))
    done = forks.launch(*command, env=environment_of("fsdp2", 2))
    assert done.returncode == 1
    assert "attnres: accelerate was told to shard the model by FSDP, but cannot do so here" in done.stderr
    assert "ddp.yaml" in done.stderr and "distributed={fsdp_size: N}" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_a_sharded_run_with_its_documents(arguments, tmp_path):
    # Nothing moves in the first steps, so that there is a good checkpoint.
    start = ("residual_alone=0.5", "residual_lr_factor=0")
    changes = (*start, "learning_rate=1e18", "save_every=1", "distributed={fsdp_size: 2}")
    done = run_in_forks(arguments("retrofit", tmp_path / "out", *changes))
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("attnres: the loss is ")]
    assert lines and all("valid.txt:" in line and "checkpoint-" in line for line in lines)


SHARDED_IN_16_BITS = """
import sys
import torch
import attnres
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

torch.distributed.init_process_group("gloo")
sharding = DistributedConfig(fsdp_size=2)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, distributed_config=sharding)
whole = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).state_dict()
for name, parameter in model.named_parameters():
    assert torch.equal(parameter.full_tensor(), whole[name]), name
token_ids = torch.arange(16)[None]
loss = model(token_ids, labels=token_ids, use_cache=False).loss
loss.backward()
if torch.distributed.get_rank() == 0:
    print(loss.item())
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("member", ["attn_res", "hyper_connections", "Kimi K3"])
def test_a_model_in_16_bits_with_tensors_in_float32_is_sharded_by_transformers(tiny_model, tmp_path, member):
    if member == "Kimi K3":
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(load("attnres-k3-tiny", num_hidden_layers=4, vocab_size=99))
    else:
        model = tiny_model(residual_connection=member)
    # `transformers` cannot shard the published layout of Kimi Linear as it loads it, but that of Kimi K3.
    model.save_pretrained(tmp_path / "model", save_original_format=member == "Kimi K3")
    done = forks.launch("-c", SHARDED_IN_16_BITS, tmp_path / "model", env=ON_CPUS)
    assert done.returncode == 0, done.stderr[-4000:]
    loss = float(done.stdout)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    token_ids = torch.arange(16)[None]
    assert loss == pytest.approx(whole(token_ids, labels=token_ids).loss.item(), abs=1e-2)
