"""`attnres train` from end to end, in separate processes: a real checkpoint on real text."""

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnres import AttnResLlamaForCausalLM
from attnres.conversion import retrofit
from attnres.training.data.blocks import DataSpec, load_blocks
from attnres.training.data.sets import prepare_data
from attnres.training.recipe import read_recipe
from attnres.utils.files import check_replaceable
from attnres.utils.model_files import WRITTEN_ADAPTER, WRITTEN_MODEL

from .. import forks
from .running import results, run_until

pytestmark = pytest.mark.slow

SIZES = ("length=64", "batch_size=4", "micro_batch_size=2", "tokens=null", "steps=12", "save_every=4", "log_every=2")
FEW = "held_out_sequences=8"  # most of the time would go into held-out losses
MTP = "mtp_loss_weight=0.3"
# A hybrid model with experts and a layer for multi-token prediction, from scratch, with Muon and balancing. A
# retrofit of a dense model, with AdamW: the first
# nine steps train only its residual tensors. The same retrofit with settings that save memory, on a stream.
RUNS = {
    "pretrain": ("pretrain", "model=attnres-tiny", "config={num_hidden_layers: 4}", "tokenizer={source}", MTP, FEW),
    "heal": ("heal", "model={retrofit}", "residual_alone=0.75", FEW),
    "finetune": (
        "finetune",
        "model={retrofit}",
        "streaming=true",
        "held_out={held_out}",
        "trainer={bf16: true, activation_checkpointing: true, report_to: tensorboard}",
    ),
}


@pytest.fixture(scope="module")
def folders(assets, once) -> dict[str, Path]:
    """Return a checkpoint, its retrofit, held-out text, and the folder of the shared runs."""
    source = assets / "checkpoints" / "stories260K-hf"

    def fill(folder: Path) -> None:
        retrofit(source, block_size=2).save_pretrained(folder / "retrofit")
        AutoTokenizer.from_pretrained(source).save_pretrained(folder / "retrofit")
        text = (assets / "corpora" / "tinystories" / "valid.txt").read_text()
        (folder / "held-out.txt").write_text(text[:8_000])

    shared = once("training", fill)
    return {"source": source, "retrofit": shared / "retrofit", "held_out": shared / "held-out.txt", "shared": shared}


@pytest.fixture(scope="module")
def command(folders, assets) -> Callable[..., list[str]]:
    """Return `command(run, out, *changes)`, which gives what follows `python` in the command line of one of `RUNS`."""
    text = assets / "corpora" / "tinystories" / "valid.txt"

    def build(run: str, out: Path, *changes: str) -> list[str]:
        recipe = [part if ": " in part else part.format(**folders) for part in RUNS[run]]
        return ["-m", "attnres_cli", "train", *recipe, f"train={text}", f"out={out}", *SIZES, *changes]

    return build


def run(arguments: list[str]) -> subprocess.CompletedProcess:
    """Run a command in a fork."""
    return forks.run(*arguments, timeout=300)


@pytest.fixture(scope="module")
def uninterrupted(once, folders, command) -> dict[str, Path]:
    """Return the folders of the runs that nothing interrupted."""
    outs = {name: folders["shared"] / name for name in RUNS}

    def train(_: Path) -> None:
        for name, out in outs.items():
            done = run(command(name, out))
            assert done.returncode == 0, done.stderr[-3000:]
            (out / "screen.txt").write_text(done.stdout)

    once("uninterrupted", train)
    return outs


def logged(out: Path, name: str) -> dict[int, float]:
    """Return the values that TensorBoard shows under a name, by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points = {}
    for folder in sorted((out / "runs").iterdir()):
        events = EventAccumulator(str(folder)).Reload()
        points |= {event.step: event.value for event in events.Scalars(name)}
    return points


def assert_same_run(out: Path, expected: Path, left_out: Collection[int] = ()) -> None:
    """Assert that loss curves and weights are equal, bit for bit."""
    curves = [[point for point in results(run)["training_loss"] if point[0] not in left_out] for run in (out, expected)]
    assert curves[0] == curves[1]
    found, weights = (load_file(folder / "model" / "model.safetensors") for folder in (out, expected))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_a_run_leaves_a_model_its_curve_and_its_held_out_loss(uninterrupted, folders, assets):
    out = uninterrupted["heal"]
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert isinstance(model, AttnResLlamaForCausalLM)
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    spec = DataSpec((str(assets / "corpora" / "tinystories" / "valid.txt"),))
    blocks = load_blocks(spec, tokenizer, 64, seed=0)
    held_out = torch.stack([blocks[i]["input_ids"] for i in range(len(blocks) - 8, len(blocks))]).long()
    with torch.no_grad():
        loss = model(held_out, labels=held_out).loss.item()
    assert results(out)["held_out_loss"] == pytest.approx(loss, abs=1e-4)
    assert (out / "loss.png").stat().st_size > 10_000
    assert [step for step, _ in results(out)["training_loss"]] == [2, 4, 6, 8, 10, 12]


def test_a_tenth_of_the_data_is_held_out_and_at_most_64_sequences_and_the_rest_is_trained_on_in_whole_batches(
    folders, assets
):
    tokenizer = AutoTokenizer.from_pretrained(folders["source"])
    for text, expected in ((folders["held_out"], 6), (assets / "corpora" / "tinystories" / "valid.txt", 64)):
        sizes = ("length=64", "batch_size=11", "micro_batch_size=1", "epochs=3")
        recipe = read_recipe("heal", (f"model={folders['retrofit']}", f"train={text}", "out=out", *sizes))
        train, held_out, _ = prepare_data(recipe, tokenizer)
        blocks = load_blocks(DataSpec((str(text),)), tokenizer, 64, seed=recipe.seed)
        assert len(held_out) == expected == min(64, len(blocks) // 10)
        left_out = (len(blocks) - expected) % 11
        assert left_out > 0 and len(train) == len(blocks) - expected - left_out
        assert f"the last {left_out} sequence" in train.info.description
        assert recipe.count_steps(len(train)) == 3 * len(train) / 11


def test_the_screen_shows_the_run_its_losses_and_its_results(uninterrupted):
    for out in uninterrupted.values():
        screen = (out / "screen.txt").read_text()
        assert screen.startswith("Model: ") and "\nstep 0: held-out loss " in screen
        assert "step 2: loss " in screen
        assert "gradient norm" in screen and "tokens/s" in screen
        assert " (before training " in screen and f"Written to {out}" in screen
        assert "depth entropy " in screen
    screen = (uninterrupted["pretrain"] / "screen.txt").read_text()
    assert "expert overload" in screen and "of two tokens ahead" in screen


def test_tensorboard_shows_the_numbers_of_the_run(uninterrupted):
    out = uninterrupted["finetune"]
    assert logged(out, "train/loss") == pytest.approx(dict(results(out)["training_loss"]), abs=1e-6)
    assert logged(out, "eval/loss")[12] == pytest.approx(results(out)["held_out_loss"], abs=1e-6)
    names = ("grad_norm", "tokens_per_second", "depth_entropy", "depth_distance", "magnitude_output")
    assert all(logged(out, f"train/{name}").keys() == {2, 4, 6, 8, 10, 12} for name in names)


@pytest.mark.parametrize(
    "options, least, most",
    [
        ("activation_checkpointing: true", 0, 1e-5),
        ("torch_compile: true, torch_compile_backend: eager", 0, 1e-4),
        ("bf16: true", 1e-5, 0.05),
    ],
)
def test_settings_that_save_memory_or_time_give_nearly_the_same_losses_and_float32_weights(
    options, least, most, command, uninterrupted, tmp_path
):
    done = run(command("heal", tmp_path / "out", f"trainer={{{options}}}"))
    assert done.returncode == 0, done.stderr[-3000:]
    losses, expected = (results(out)["training_loss"] for out in (tmp_path / "out", uninterrupted["heal"]))
    difference = max(abs(loss - other) for (_, loss), (_, other) in zip(losses, expected, strict=True))
    assert least <= difference <= most
    weights = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_in_the_first_stage_only_the_attn_res_vectors_move(uninterrupted, folders):
    start = load_file(folders["retrofit"] / "model.safetensors")

    def moved_until(step: int) -> set[str]:
        weights = load_file(uninterrupted["heal"] / f"checkpoint-{step}" / "model.safetensors")
        return {name for name in start if not torch.equal(start[name], weights[name])}

    assert moved_until(8) and all("_res_" in name for name in moved_until(8))
    assert any("_res_" not in name for name in moved_until(12))


@pytest.mark.parametrize("name", ["pretrain", "heal"])  # `finetune` is `heal` without a retrofit
def test_a_killed_run_resumes_bit_for_bit(name, uninterrupted, command, tmp_path):
    out = tmp_path / "out"
    for checkpoint in ("checkpoint-4", "checkpoint-8"):
        run_until(out / checkpoint, command(name, out))
        assert not (out / "results.json").exists()
    done = run(command(name, out))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Resuming from" in done.stdout
    assert_same_run(out, uninterrupted[name])
    assert sorted(path.name for path in out.iterdir()) == sorted(
        path.name for path in uninterrupted[name].iterdir() if path.name != "screen.txt"
    )


# Code that ends the process after it has written the last checkpoint, and before it writes the model.
ENDS = {
    "killed": "train.collect_results = lambda *_: os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": """
step_end = trainer.StopOnSignal.on_step_end
def end(self, args, state, control, **kwargs):
    if state.global_step == state.max_steps:
        os.kill(os.getpid(), signal.SIGTERM)
    step_end(self, args, state, control, **kwargs)
trainer.StopOnSignal.on_step_end = end
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_that_ends_after_its_last_checkpoint_makes_no_further_step(end, uninterrupted, command, tmp_path):
    out = tmp_path / "out"
    code = f"import os, signal\nfrom attnres.training import train, trainer\n{ENDS[end]}\n"
    code += "from attnres.commands.main import main; main()"
    ended = forks.run("-c", code, *command("heal", out)[2:])
    assert ended.returncode == {"killed": -signal.SIGKILL, "terminated": 128 + signal.SIGTERM}[end], ended.stderr
    last = out / "checkpoint-12"
    saved = {path.name: path.read_bytes() for path in last.iterdir()}
    done = run(command("heal", out))
    assert done.returncode == 0, done.stderr[-3000:]
    assert results(out)["steps"] == 12
    assert results(out)["held_out_loss"] == results(uninterrupted["heal"])["held_out_loss"]
    assert_same_run(out, uninterrupted["heal"])
    assert {path.name: path.read_bytes() for path in last.iterdir()} == saved
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-8"]


def test_a_run_does_not_resume_with_other_data(command, folders, tmp_path):
    text = tmp_path / "text.txt"
    shutil.copy(folders["held_out"], text)
    out = tmp_path / "out"
    arguments = command("heal", out, f"train={text}", "held_out_sequences=4")
    run_until(out / "checkpoint-4", arguments)
    text.write_text(text.read_text().replace("Once", "Twice"))
    done = run(arguments)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"attnres: `train` has changed since the run in {out} began")
    shutil.copy(folders["held_out"], text)
    assert run(arguments).returncode == 0


def test_small_data_ends_a_run_after_a_few_epochs(folders, tmp_path):
    """The recipe trains for 50 million tokens, and this text has ten thousand."""
    arguments = ["attnres", "train", "heal", f"model={folders['retrofit']}", f"train={folders['held_out']}"]
    done = forks.run("-m", *arguments, f"out={tmp_path / 'out'}", "length=64", "batch_size=8", timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    sequences = int(re.search(r"(\d+) sequences of 64 tokens to train on", done.stdout)[1])
    assert results(tmp_path / "out")["steps"] == 4 * sequences // 8
    assert re.search(r"(3\.9|4) epochs; into ", done.stdout)
    assert "Note: 97,657 steps would read this" in done.stdout
    assert re.search(r"^step 0: held-out loss .*\nTime: about \d+ s for \d+ steps\.$", done.stdout, re.MULTILINE)
    assert len(results(tmp_path / "out")["training_loss"]) >= 10


def test_healing_a_model_that_was_not_converted_is_refused(command, folders, tmp_path):
    done = run(command("heal", tmp_path / "out", f"model={folders['source']}"))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "has standard residual connections, so there is nothing to heal." in line
    assert f"`attnres convert {folders['source']} DIR`" in line and "add 'retrofit={}'" in line
    assert not (tmp_path / "out").exists()


def test_a_terminated_run_saves_a_checkpoint_and_resumes_from_it(uninterrupted, command, tmp_path):
    out = tmp_path / "out"
    arguments = command("heal", out, "save_every=100", "trainer.eval_steps=4")
    with forks.start(*arguments) as process:
        while not (line := process.stdout.readline()).startswith("step 2:"):
            assert line
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 143
    assert "The same command resumes from there." in output
    (checkpoint,) = out.glob("checkpoint-*")
    stopped = int(checkpoint.name.removeprefix("checkpoint-"))
    assert 2 <= stopped < 12
    assert run(arguments).returncode == 0
    # A point is the mean of two steps. A run that was stopped between them has the loss of the second.
    assert_same_run(out, uninterrupted["heal"], left_out=[stopped + 1] if stopped % 2 else [])


def test_an_interrupted_run_names_its_last_checkpoint_and_how_to_go_on(command, tmp_path):
    for save_every, message in (
        (9999, ", before the first checkpoint: the same command begins anew."),
        (1, ": the same command resumes from there."),
    ):
        out = tmp_path / str(save_every)
        arguments = command("heal", out, "steps=10000", f"save_every={save_every}")
        with forks.start(*arguments) as process:
            while not (line := process.stdout.readline()).startswith("step 4:"):
                assert line
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=120)
        assert process.returncode == 130
        assert message in output
        assert bool(list(out.glob("checkpoint-*"))) == (save_every == 1)


def test_a_loss_that_is_not_finite_names_the_step_the_documents_and_the_checkpoint(command, tmp_path):
    changes = ("residual_alone=0.25", "residual_lr_factor=0", "learning_rate=1e18", "save_every=1")
    done = run(command("heal", tmp_path / "out", *changes))  # nothing moves in the first three steps
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("attnres:")]
    assert "the loss is nan in step " in line or "the loss is inf in step " in line
    assert "valid.txt:" in line and line.endswith("checkpoint-3.")


def test_a_disk_that_is_full_leaves_the_last_checkpoint_whole(command, uninterrupted, tmp_path):
    """A limit on the size of files stands in for a full disk. The first checkpoint is written without it."""
    out = tmp_path / "out"
    run_until(out / "checkpoint-4", command("heal", out))
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))\n"
    code += "from attnres.commands.main import main; main()"
    done = forks.run("-c", code, *command("heal", out)[2:], timeout=300)
    assert done.returncode == 1
    assert "the checkpoint of step 8 could not be written: " in done.stderr
    assert "a file was cut short, as if by a full disk" in done.stderr or "File too large" in done.stderr
    assert "enforce fail" not in done.stderr and "os error" not in done.stderr
    assert f"The last one is {out / 'checkpoint-4'}." in done.stderr
    assert not list(out.glob(".*"))
    assert run(command("heal", out)).returncode == 0
    assert_same_run(out, uninterrupted["heal"])


def test_a_finished_run_is_refused_in_one_line(command, uninterrupted):
    done = run(command("heal", uninterrupted["heal"], "learning_rate=1"))
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("attnres:")]
    assert "holds a finished run. Give more `steps` to go on with it, or another `out`." in line
    assert "Traceback" not in done.stderr


def test_a_run_does_not_resume_with_another_recipe_once_it_has_a_checkpoint(command, tmp_path):
    out = tmp_path / "out"
    assert run(command("heal", out, "model=./absent")).returncode == 1
    assert not out.exists()
    run_until(out / "checkpoint-4", command("heal", out))
    done = run(command("heal", out, "learning_rate=1e-5"))
    assert done.returncode == 1
    assert "holds a run with learning_rate 0.0003, not 1e-05" in done.stderr


def test_a_finished_run_that_is_made_longer_goes_on_from_its_last_checkpoint(command, uninterrupted, tmp_path):
    """From there it has the rates of the longer run, whose first steps it made as a shorter one."""
    out = shutil.copytree(uninterrupted["heal"], tmp_path / "out")
    (out / "recipe.yaml").write_text((out / "recipe.yaml").read_text().replace(str(uninterrupted["heal"]), str(out)))
    done = run(command("heal", out, "steps=16"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        f"{out / 'checkpoint-12'}. The run has 16 steps instead of 12, and its schedule is that of 16." in done.stdout
    )
    assert results(out)["steps"] == 16
    assert results(out)["training_loss"][:6] == results(uninterrupted["heal"])["training_loss"]
    log = json.loads((out / "checkpoint-16" / "trainer_state.json").read_text())["log_history"]
    # `wsd` decays over the last half: the rate of step s is (16 - s) / 8 of the highest.
    rates = {line["step"]: line["learning_rate"] for line in log if "learning_rate" in line}
    assert [rates[14], rates[16]] == pytest.approx([3e-4 * 3 / 8, 3e-4 * 1 / 8])
    assert run(command("heal", out, "steps=16")).returncode == 1


def test_an_adapter_is_saved_as_a_small_file_and_its_merged_model_computes_the_same(command, folders, tmp_path):
    from peft import PeftModel

    out = tmp_path / "out"
    changes = ("lora={rank: 2}", "merge=true", "residual_alone=0", "steps=4")
    done = run(command("heal", out, *changes))
    assert done.returncode == 0, done.stderr[-3000:]
    assert (out / "adapter" / "adapter_model.safetensors").stat().st_size < 200_000
    base = AutoModelForCausalLM.from_pretrained(folders["retrofit"])
    adapted = PeftModel.from_pretrained(base, out / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(out / "model")
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=0, atol=1e-4)
        untrained = AutoModelForCausalLM.from_pretrained(folders["retrofit"])(ids).logits
    assert (merged(ids).logits - untrained).abs().max() > 1e-3
    # A run that was killed before it wrote its results may replace both folders.
    for kind, written in (("adapter", WRITTEN_ADAPTER), ("model", WRITTEN_MODEL)):
        check_replaceable(out / kind, written, overwrite=True)


def test_training_on_conversations_lowers_the_loss(command, folders, tmp_path):
    model = folders["shared"] / "chat"
    tokenizer = AutoTokenizer.from_pretrained(folders["retrofit"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '\n' }}"
        "{% endgeneration %}{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    AutoModelForCausalLM.from_pretrained(folders["retrofit"]).save_pretrained(model)
    tokenizer.save_pretrained(model)
    rows = [
        {"messages": [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": f"I say {i}. " * 5}]}
        for i in range(400)
    ]
    data = tmp_path / "chats.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["-m", "attnres_cli", "train", "sft", f"model={model}", f"train={data}"]
    arguments += [f"out={tmp_path / 'out'}", "learning_rate=1e-3", "held_out_sequences=16", *SIZES]
    arguments += ["steps=30", "save_every=30"]
    done = run(arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [loss for _, loss in results(tmp_path / "out")["training_loss"]]
    assert losses[-1] < 0.8 * losses[0]


def test_a_run_does_not_resume_from_a_checkpoint_with_an_empty_file(command, uninterrupted, tmp_path):
    name = "optimizer.pt"  # `test_checkpoints.py` tests the others
    out = shutil.copytree(uninterrupted["heal"], tmp_path / "out")
    (out / "results.json").unlink()
    (out / "recipe.yaml").write_text((out / "recipe.yaml").read_text().replace(str(uninterrupted["heal"]), str(out)))
    (out / "checkpoint-12" / name).write_bytes(b"")
    done = run(command("heal", out))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"attnres: {out / 'checkpoint-12' / name} is empty, so the run cannot resume from")


@pytest.mark.parametrize(
    "changes, message",
    [
        (("config={num_hidden_layers: many}",), "`config` does not fit "),
        (("trainer.report_to=nothing",), "`trainer` of the recipe: nothing is not supported"),
    ],
)
def test_an_impossible_value_is_refused_before_anything_is_tokenised(changes, message, command, tmp_path):
    done = run(command("finetune", tmp_path / "out", *changes))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert message in line and "unforeseen" not in line and "Tokenising" not in done.stderr


@pytest.mark.parametrize("package", ["peft", "datasets"])
def test_a_missing_package_is_an_error_in_one_line_that_says_what_to_install(package, command, tmp_path):
    (tmp_path / "empty.txt").touch()  # reading it would be another error
    arguments = command("heal", tmp_path / "out", "lora={rank: 2}", f"train={tmp_path}/empty.txt")[2:]
    # `None` in `sys.modules` makes the import of a package fail. A fork has imported it and the files that need it.
    code = f"""
import sys
for name in [name for name in sys.modules if name.startswith("attnres.training")]:
    del sys.modules[name]
sys.modules[{package!r}] = None
from attnres.commands.main import main
main()
"""
    done = forks.run("-c", code, *arguments)
    assert done.returncode == 1
    message = f"attnres: the package {package} is not installed. It comes with `attnres[train]`: pip install '"
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
