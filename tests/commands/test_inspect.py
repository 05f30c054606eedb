"""`attnres inspect` writes and serves reports, and rejects wrong input in one line."""

import json
import os
import re
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from attnres.conversion import retrofit
from attnres.residual_attnres import residual_tensors

from .. import forks

# The first fixture inspects models.
pytestmark = pytest.mark.slow

NUMBERS = ["attention_sinks.csv", "depth_attention.csv", "depth_mixing.csv", "inspection.json", "interventions.csv"]
QUICK = ("--tokens", 512, "--length", 64, "--intervention-tokens", 64)


def inspect(folder: Path, *arguments: object, **options) -> subprocess.CompletedProcess[str]:
    return forks.run("-m", "attnres_cli", "inspect", *arguments, cwd=folder, **options)


@pytest.fixture(scope="module")
def models(assets, tmp_path_factory) -> Path:
    """Return a folder with `source`, a real checkpoint, and `retrofit`, its retrofit with random queries."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "source").symlink_to(assets / "checkpoints" / "stories260K-hf")
    (folder / "text.txt").symlink_to(assets / "corpora" / "tinystories" / "valid.txt")
    model, generator = retrofit(folder / "source", num_blocks=5), torch.Generator().manual_seed(0)
    for name, tensor in residual_tensors(model).items():
        if name.endswith("_res_proj.weight"):
            torch.nn.init.normal_(tensor, std=0.3, generator=generator)
    model.save_pretrained(folder / "retrofit")
    AutoTokenizer.from_pretrained(folder / "source").save_pretrained(folder / "retrofit")
    return folder


@pytest.fixture(scope="module")
def report(models) -> Path:
    done = inspect(models, "source", "--compare", "retrofit", "--text", "text.txt", "--out", "report", *QUICK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("Written to report: report.html")
    return models / "report"


def test_the_report_holds_page_figures_and_numbers(report):
    names = sorted(path.name for path in report.iterdir())
    figures = {name.partition(".")[0] for name in names if name.endswith(".png")}
    assert {name for name in names if name.endswith((".json", ".csv"))} == {*NUMBERS, "sublayers.csv"}
    assert figures == {
        *("depth_attention_b", "depth_attention_relative_b", "depth_attention_spread_b", "mixing_a", "mixing_b"),
        *("weights_by_depth", "magnitudes", "sinks", "interventions"),
    }
    drawn = [f"{name}{suffix}" for name in figures for suffix in (".png", ".svg")]
    assert names == sorted([*NUMBERS, "sublayers.csv", "report.html", *drawn])
    models = json.loads((report / "inspection.json").read_text())["models"]
    assert [model["model"]["name"] for model in models] == ["source", "retrofit"]
    assert models[0]["text"]["name"] == "text.txt" and models[0]["text"]["tokens"] == 512
    assert models[1]["depth_attention"]["distance"][-1] > 0.01
    page = (report / "report.html").read_text()
    assert "https://" not in re.sub(r'href="https://[^"]*"|<script.*?</script>', "", page, flags=re.DOTALL)


def test_the_same_call_writes_the_same_bytes_with_any_settings_of_matplotlib(models, report, tmp_path):
    before = {path.name: path.read_bytes() for path in report.iterdir()}
    style = "axes.grid: True\nfont.family: serif\ntext.usetex: True\nsvg.image_inline: False\npath.sketch: 1, 100, 2\n"
    (tmp_path / "matplotlibrc").write_text(style)
    # This has the effect of `MATPLOTLIBRC`, which a process that has imported matplotlib no longer reads.
    styled = f"import matplotlib; matplotlib.rc_file({str(tmp_path / 'matplotlibrc')!r})"
    run = f"{styled}; from attnres.commands.main import main; main()"
    call = ("source", "--compare", "retrofit", "--text", "text.txt", *QUICK)
    refused = inspect(models, *call, "--out", "report")
    assert refused.returncode == 1 and "report exists" in refused.stderr and "--overwrite" in refused.stderr
    done = forks.run("-c", run, "inspect", *call, "--out", "report", "--overwrite", cwd=models)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in report.iterdir() if path.read_bytes() != before.pop(path.name)] == []
    assert not before
    foreign = inspect(models, *call, "--out", "source", "--overwrite")
    assert foreign.returncode == 1 and "does not hold a report" in foreign.stderr
    assert sorted(path.name for path in models.iterdir()) == ["report", "retrofit", "source", "text.txt"]


def test_one_model_is_inspected_on_the_default_text_by_another_tokenizer_without_interventions(models, tmp_path):
    (tmp_path / "bare").mkdir()
    for path in (models / "retrofit").iterdir():
        if "token" not in path.name:
            (tmp_path / "bare" / path.name).symlink_to(path)
    options = ("--intervention-tokens", 0, "--tokens", 600, "--length", 300)
    done = inspect(tmp_path, "bare", "--tokenizer", models / "source", *options)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "inspection" / "inspection.json").read_text())["models"][0]
    assert result["interventions"] is None and not (tmp_path / "inspection" / "interventions.csv").exists()
    assert "language reference" in result["text"]["name"] and result["text"]["sequences"] == 2


def break_weight(models: Path, folder: Path) -> None:
    """Make `broken`, a copy of the retrofit with NaN in a weight."""
    (folder / "broken").mkdir()
    for path in (models / "retrofit").iterdir():
        (folder / "broken" / path.name).write_bytes(path.read_bytes())
    (path,) = (folder / "broken").glob("*.safetensors")
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})


def damage_source(models: Path, folder: Path) -> None:
    """Make copies of `source`: without the tensors of a layer, cut in the middle, with wrong and missing sizes."""
    for name in ("lacking", "cut", "wrong", "null"):
        (folder / name).mkdir()
        for path in (models / "source").iterdir():
            (folder / name / path.name).write_bytes(path.read_bytes())
    path = folder / "lacking" / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if "layers.3." not in name}
    save_file(tensors, path, metadata={"format": "pt"})
    path = folder / "cut" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    path = folder / "null" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": None}))
    path = folder / "wrong" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 100}))


def test_a_report_replaces_only_a_report(models, report, tmp_path):
    shutil.copytree(report, tmp_path / "r")
    shutil.copytree(models / "source", tmp_path / "r" / "model")
    done = inspect(tmp_path, "r/model", "--out", "r", "--overwrite", *QUICK)
    assert done.returncode == 2 and "r/model lies in --out r" in " ".join(done.stderr.split())
    done = inspect(tmp_path, models / "source", "--out", "r", "--overwrite", *QUICK)
    assert done.returncode == 1 and "r holds model, which is not part of a report" in done.stderr
    shutil.rmtree(tmp_path / "r" / "model")
    (tmp_path / "r" / "notes.csv").write_text("mine")
    done = inspect(tmp_path, models / "source", "--out", "r", "--overwrite", *QUICK)
    assert done.returncode == 1 and "r holds notes.csv, which is not part of a report" in done.stderr


# Runs `attnres inspect` with a limit on the size of files, which is like a full disk.
_LIMITED = """
import resource, sys
from attnres.commands.main import main

limit, sys.argv = int(sys.argv[1]), ["attnres", "inspect", *sys.argv[2:]]
sys.dont_write_bytecode = True  # Python would store cut bytecode
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
main()
"""


def test_a_file_that_exceeds_a_limit_is_named(models, tmp_path):
    done = forks.run("-c", _LIMITED, 2000, models / "source", *QUICK, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    file = tmp_path / ".inspection.partial" / "inspection.json"
    assert done.stderr.splitlines()[-1] == f"attnres: {file}: File too large"
    assert sorted(tmp_path.iterdir()) == []


def test_wrong_input_is_rejected_in_one_line_and_nothing_is_written(models, tmp_path):
    break_weight(models, tmp_path)
    damage_source(models, tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("Once upon a time.")
    (tmp_path / "rows.jsonl").write_text('{"text": "Once upon a time."}\n')
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / name).symlink_to(models / "source" / name)
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2}')
    before = sorted(tmp_path.iterdir())
    source, blocks = models / "source", models / "retrofit"
    for arguments, status, message in (
        ((), 2, "MODEL is missing"),
        (("nowhere/at/all",), 1, "nowhere/at/all is not a directory"),
        ((source, "--compare", "./nothing"), 1, "nothing is not a directory"),
        ((source, "--compare-revision", "main"), 2, "--compare-revision needs --compare"),
        ((blocks, "--text", "empty.txt"), 1, "empty.txt holds no text"),
        ((blocks, "--text", "short.txt"), 1, r"short.txt has \d+ tokens, but one sequence takes 255"),
        ((blocks, "--text", "gone.txt"), 2, "gone.txt"),
        ((blocks, "--length", 100_000), 1, "`length` must be from 2 to 512, .* got 100000"),
        (("broken",), 1, "`model.layers.1.mlp.up_proj.weight` holds values that are not finite"),
        (("bare",), 1, "bare has no tokenizer that loads: save one there by .*, or name one by --tokenizer"),
        (("lacking",), 1, r"lacking is incomplete: it lacks `model.layers.3.\S+` and \d+ other tensors"),
        (("cut",), 1, "cut/model.safetensors is truncated or damaged"),
        (("null",), 1, "null"),
        (("adapter",), 1, r"adapter is an adapter, not a model \(it has adapter_config.json\)"),
        ((blocks, "--text", "rows.jsonl"), 1, "rows.jsonl must be plain text"),
        (("wrong",), 1, r"has shape \[172, 64\], but must be \[100, 64\]"),
        ((source, "--out", "short.txt/x"), 1, "short.txt"),
        ((source, "--tokenizer", "./gone"), 1, "gone is not a directory"),
        (("--serve", "--out", "elsewhere"), 1, "elsewhere has no report.html"),
        (("--serve", "--tokens", 5), 2, "--tokens needs MODEL"),
        ((blocks, "--device", "cuda:77"), 1, "the device must be one of auto, cpu.*, got 'cuda:77'"),
    ):
        done = inspect(tmp_path, *arguments)
        assert done.returncode == status, (arguments, done.stderr)
        last = done.stderr.strip().splitlines()[-1]
        assert re.search(message, last), (arguments, done.stderr)
        assert "Traceback" not in done.stderr and "unforeseen" not in done.stderr, (arguments, done.stderr)
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_leaves_nothing(models, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=100k tmpfs '{disk}' 2>/dev/null"):
        pytest.skip("a small disk needs the right to mount one")
    try:
        done = inspect(tmp_path, models / "source", "--out", disk / "report", "--intervention-tokens", 0, *QUICK[:4])
        assert done.returncode == 1 and "No space left" in done.stderr.splitlines()[-1]
        assert list(disk.iterdir()) == []
    finally:
        os.system(f"umount '{disk}'")


def test_the_report_is_served_to_a_browser_on_this_machine(report, tmp_path):
    """A script in place of the browser writes the address that it is called with to a file."""
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path / "opened"}\n')
    browser.chmod(0o755)
    environment = os.environ | {"BROWSER": f"{browser} %s"}
    command = ("-m", "attnres_cli", "inspect", "--serve", "--out", report)
    with forks.start(*command, cwd=tmp_path, env=environment) as process:
        address = process.stdout.readline().split()[0]
        assert address.startswith("http://127.0.0.1:") and address.endswith("/report.html")
        with urllib.request.urlopen(address, timeout=60) as answer:
            assert answer.read() == (report / "report.html").read_bytes()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert "Traceback" not in errors and process.returncode in (0, 130)
    assert (tmp_path / "opened").read_text().strip() == address
