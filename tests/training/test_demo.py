"""The demo through its command line, in separate processes, on little text."""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from attnres.training.demo import difference, document_losses
from attnres.training.text import python_sources

from .. import forks


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n<|endoftext|>\n".join(python_sources(60_000)))
    return path


@pytest.fixture
def stories(assets, tmp_path) -> Path:
    """Return a text that is the same for every Python, so that the few steps of a test have the same result."""
    path = tmp_path.with_name(f"{tmp_path.name}-text") / "stories.txt"
    path.parent.mkdir()
    path.write_text((assets / "corpora" / "tinystories" / "valid.txt").read_text()[:60_000])
    return path


def attnres(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess:
    return forks.run("-m", "attnres_cli", *arguments, cwd=cwd)


# Runs `attnres` where a demo has one seed.
ONE_SEED = """
from attnres.commands.main import main
from attnres.training import demo

demo.SEEDS = 1
main()
"""


def error_line(process: subprocess.CompletedProcess) -> str:
    """Return the one line that a failed command printed to stderr."""
    assert process.returncode == 1, process.stderr
    lines = process.stderr.strip().splitlines()
    assert len(lines) == 1, process.stderr
    return lines[0]


def test_the_difference_is_within_seeds_and_documents():
    by_document = torch.tensor([0.1, 0.4, 0.7], dtype=torch.float64)
    first = torch.stack([by_document + seed for seed in range(3)])
    lead = difference(first + 5.0, torch.full((3, 3), 5.0, dtype=torch.float64))
    assert lead["by_seed"] == pytest.approx([0.4, 1.4, 2.4])
    half = 4.302653 / 3**0.5  # of 3 seeds whose standard deviation is 1
    assert (lead["mean"], lead["interval"]) == (pytest.approx(1.4), pytest.approx((1.4 - half, 1.4 + half)))
    assert lead["over_documents"] == pytest.approx(by_document.std().item() / 3**0.5)


def test_the_loss_of_a_document_is_the_models_on_its_sequences(tiny_model):
    model = tiny_model().train()
    documents = [torch.randint(3, 20, (rows, 16)) for rows in (3, 1)]
    losses = document_losses(model, documents)
    with torch.no_grad():
        assert losses.tolist() == pytest.approx([model.eval()(ids, labels=ids).loss.item() for ids in documents])


@pytest.mark.slow
def test_the_demo_compares_over_seeds_shows_an_exact_retrofit_and_saves_a_model_that_loads(stories, tmp_path):
    process = attnres("demo", "--out", "a", "--minutes", 0.09, "--text", stories, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert os.listdir(tmp_path) == ["a"]
    assert {p.name for p in (tmp_path / "a").iterdir()} == {
        "model",
        "results.json",
        "loss_curves.png",
        "depth_attention.png",
    }
    results = json.loads((tmp_path / "a" / "results.json").read_text())
    losses, difference = results["held_out_loss"], results["difference"]
    for row in zip(results["seeds"], losses["standard"], losses["Block AttnRes"], difference["by_seed"], strict=True):
        assert row[3] == pytest.approx(row[2] - row[1], abs=1e-9)
        numbers = r"\W+".join([str(row[0]), f"{row[1]:.4f}", f"{row[2]:.4f}", rf"[+-]{abs(row[3]):.4f}"])
        assert re.search(numbers, process.stdout)
    assert len(set(losses["standard"])) == 3
    assert difference["mean"] == pytest.approx(statistics.mean(difference["by_seed"]))
    low, high = difference["interval"]
    assert (low + high) / 2 == pytest.approx(difference["mean"])
    half = 4.302653 * statistics.stdev(difference["by_seed"]) / 3**0.5
    assert high - low == pytest.approx(2 * half, rel=1e-5)
    assert f"{difference['mean']:+.4f} [{low:+.4f}, {high:+.4f}]" in process.stdout
    assert "This is not the difference at the end of a training" in process.stdout
    lower = sum(number < 0 for number in difference["by_seed"])
    assert f"Block AttnRes has the lower loss with {lower} of 3 seeds." in process.stdout
    curves = results["training_loss"]
    assert all(curve[-1][1] < curve[0][1] - 0.3 for by_seed in curves.values() for curve in by_seed)
    for standard, attn_res in zip(curves["standard"], curves["Block AttnRes"], strict=True):
        assert standard[0] == pytest.approx(attn_res[0], abs=1e-3)  # the same weights, and the same first batch

    same = results["retrofit"]
    assert same["max_abs_logit_difference"] <= 1e-4 * same["max_abs_logit"]
    assert same["top1_agreement"] == 1.0 and same["same_text"]
    opening = stories.read_text()[:20]
    assert f"both write the same text:\n'{opening}" in process.stdout
    assert results["sample"].startswith(opening) and results["sample"].splitlines()[0][:70] in process.stdout
    assert results["text"]["sha256"][:12] in process.stdout
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "model")
    assert (model.config.residual_connection, model.config.attn_res_scale) == ("attn_res", "mean")
    assert any(parameter.any() for name, parameter in model.named_parameters() if name.endswith("res_proj.weight"))

    # The same seed gives the same numbers, but a folder with anything else stays.
    (tmp_path / "a" / "model" / "notes.md").write_text("mine")
    refused = error_line(attnres("demo", "--out", "a", "--overwrite", cwd=tmp_path))
    assert "a holds model/notes.md, which is not part of a demo" in refused
    (tmp_path / "a" / "model" / "notes.md").unlink()
    arguments = ("demo", "--out", "a", "--minutes", 0.01, "--text", stories, "--overwrite")
    again = forks.run("-c", ONE_SEED, *arguments, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    of_one = json.loads((tmp_path / "a" / "results.json").read_text())
    for measured in ("held_out_loss", "training_loss"):
        assert of_one[measured] == {name: by_seed[:1] for name, by_seed in results[measured].items()}
    for measured in ("text", "model", "steps", "retrofit", "depth_attention", "sample"):
        assert of_one[measured] == results[measured]


@pytest.mark.slow
def test_with_a_checkpoint_the_demo_begins_with_its_retrofit_and_runs_none_of_its_code(stories, assets, tmp_path):
    """It continues the user's text, and the saved files do not name the code either."""
    start = Path(shutil.copytree(assets / "checkpoints" / "stories260K-hf", tmp_path / "start"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "evil.py").write_text(
        f"open({str(tmp_path / 'sprung')!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast\n\n\nclass T(PreTrainedTokenizerFast): ...\n"
    )
    config = start / "tokenizer_config.json"
    fields = json.loads(config.read_text()) | {"auto_map": {"AutoTokenizer": [None, f"{other}--evil.T"]}}
    config.write_text(json.dumps(fields))
    process = attnres("demo", "--checkpoint", "start", "--minutes", 0.07, "--text", stories, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    acts = [process.stdout.index(name) for name in ("Act one: ", "same text:", "Act two: both", "Held-out loss")]
    assert acts == sorted(acts)
    results = json.loads((tmp_path / "attnres-demo" / "results.json").read_text())
    assert results["retrofit"]["top1_agreement"] == 1.0 and results["retrofit"]["same_text"]
    for losses in results["held_out_loss"].values():  # a few steps at a low rate change the model little
        assert losses == pytest.approx([results["held_out_loss_before"]] * 3, abs=0.1)
    assert results["sample"].startswith(stories.read_text()[:20])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "attnres-demo" / "model")
    assert saved.config.model_type == "attnres_llama"
    assert saved.config.attn_res_scale == "sum"
    assert not (tmp_path / "sprung").exists()
    written = tmp_path / "attnres-demo" / "model" / "tokenizer_config.json"
    assert "evil" not in written.read_text()
    AutoTokenizer.from_pretrained(start, trust_remote_code=True)
    assert (tmp_path / "sprung").exists(), "the trap must work where code is run"


@pytest.mark.slow
def test_bad_input_ends_in_one_line_and_loses_nothing(tmp_path):
    config = GPT2Config(vocab_size=9, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    line = error_line(attnres("demo", "--checkpoint", "gpt2", cwd=tmp_path))
    assert "'gpt2'" in line and "Supported" in line and "'kimi_linear'" in line

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert "--overwrite" in error_line(attnres("demo", "--out", "mine", cwd=tmp_path))
    assert "does not hold a demo" in error_line(attnres("demo", "--out", "mine", "--overwrite", cwd=tmp_path))
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"

    (tmp_path / "short.txt").write_text("Too short.\n")
    assert "longer --text" in error_line(attnres("demo", "--text", "short.txt", cwd=tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["gpt2", "mine", "short.txt"]


@pytest.mark.parametrize(
    "arguments", [("--minutes", "0"), ("--minutes", "x"), ("--text", "absent.txt"), ("--no",)], ids=str
)
def test_bad_usage_exits_with_2(arguments, tmp_path):
    process = attnres("demo", *arguments, cwd=tmp_path)
    assert process.returncode == 2
    assert arguments[0] in process.stderr


@pytest.mark.slow
def test_an_interrupt_leaves_nothing_behind(text, tmp_path):
    with forks.start("-m", "attnres_cli", "demo", "--text", text, cwd=tmp_path) as process:
        deadline = time.monotonic() + 120
        while not os.listdir(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert os.listdir(tmp_path), "the demo did not begin to write"
        time.sleep(3)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in error
    assert os.listdir(tmp_path) == []
