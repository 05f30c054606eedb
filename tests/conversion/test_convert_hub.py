"""`attnres convert` converts repositories on the Hub: another process reads from a Hub on this machine."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import httpx
from transformers import AutoTokenizer

from attnres.checkpoints import checkpoint

from ..hub.running import Hub
from .checkpoints import assert_same_function, logits_of, save_tokenizer, standard_model

# Each case starts a process.
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return the folder of the session's results, with `seen.json`. Revisions of `lab/model` are in `hub/lab/model`."""
    folder = tmp_path_factory.mktemp("hub")
    model = folder / "hub" / "lab" / "model"
    standard_model().save_pretrained(model / "main", max_shard_size="20KB")
    save_tokenizer(model / "main")
    (model / "main" / "additional_chat_templates").mkdir()
    (model / "main" / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    (model / "main" / "training_log.txt").write_text("not needed")
    standard_model(num_hidden_layers=2).save_pretrained(model / "v1")
    for name in ("bare", "pickled"):
        shutil.copytree(model / "v1", model / name, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "adapter").mkdir()
    (model / "adapter" / "adapter_config.json").write_text("{}")
    torch.save(standard_model(num_hidden_layers=2).state_dict(), model / "pickled" / "pytorch_model.bin")

    with Hub.running(folder / "hub") as hub:
        hub.before("/stop", hub.stop)
        command = [sys.executable, HERE / "hub_session.py", folder]
        environment = hub.environ(home=folder / "home")
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def seen(folder) -> dict:
    return json.loads((folder / "seen.json").read_text())


@pytest.mark.parametrize(
    ("name", "revision"),
    [("main", "main"), ("v1", "v1"), ("pickled", "v1"), ("linked", "main"), ("v1 from the cache", "v1")],
)
def test_a_revision_is_converted(seen, folder, name, revision):
    assert seen[name]["code"] == 0, seen[name]["err"]
    assert "Verified: " in seen[name]["out"]
    result = folder / ("cached" if "cache" in name else name)
    assert_same_function(logits_of(result), logits_of(folder / "hub" / "lab" / "model" / revision))


def test_only_files_of_the_model_are_copied(folder):
    result = folder / "main"
    tokenizer, expected = (
        AutoTokenizer.from_pretrained(path) for path in (result, folder / "hub" / "lab" / "model" / "main")
    )
    assert tokenizer("Grüße")["input_ids"] == expected("Grüße")["input_ids"]
    assert (result / "additional_chat_templates" / "tool.jinja").read_text() == "{{ messages }}"
    assert not (result / "training_log.txt").exists()
    assert not [path for path in result.rglob("*") if path.is_symlink()]


def test_pickles_are_fetched_only_where_there_are_no_safetensors(folder):
    cached = {path.name for path in (folder / "home").rglob("*.bin")}
    assert cached == {"pytorch_model.bin"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no revision", "Revision Not Found"),
        ("no repository", "lab/absent is not a directory, and the Hub does not give it"),
        ("no Hub", "lab/other is not a directory, and the Hub does not give it"),
        ("no weights", "has no weights"),
        ("adapter", "lab/model is an adapter, not a model (it has adapter_config.json). Merge it first"),
        ("no name", "lab/mo del"),
    ],
)
def test_a_source_that_is_not_available_is_named_in_one_line(seen, folder, name, message):
    run = seen[name]
    lines = [line for line in run["err"].splitlines() if line.startswith("attnres: ")]
    assert run["code"] == 1 and len(lines) == 1, run["err"]
    assert message in lines[0]
    assert "Traceback" not in run["err"]
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith((".", "x"))) == []


def test_a_broken_connection_is_reported_in_one_line(monkeypatch):
    def snapshot_download(*args, **kwargs):
        raise httpx.ReadError("[Errno 104] Connection reset by peer")

    monkeypatch.setattr(checkpoint, "snapshot_download", snapshot_download)
    with pytest.raises(FileNotFoundError, match=r"the Hub does not give it: .* Connection reset by peer"):
        checkpoint.Checkpoint.open("lab/model")


def test_two_revisions_give_two_models(folder):
    assert (logits_of(folder / "main") - logits_of(folder / "v1")).abs().max() > 1
