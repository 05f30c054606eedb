"""A converted real checkpoint writes the same text and has the same loss and scores, also as remote code."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, pipeline

from .checkpoints import convert_well

HERE = Path(__file__).parent
WITHOUT_ATTNRES = HERE.parent / "modeling_attnres" / "without_attnres.py"
BEGINNING = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


@pytest.fixture(scope="module")
def source(assets) -> Path:
    return assets / "checkpoints" / "stories260K-hf"


@pytest.fixture(scope="module")
def result(source, tmp_path_factory) -> Path:
    """Return the checkpoint converted to five blocks of two sublayers."""
    folder = tmp_path_factory.mktemp("converted") / "stories"
    convert_well(source, folder)
    return folder


@pytest.fixture(scope="module")
def models(source, result) -> list[PreTrainedModel]:
    return [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (source, result)]


@pytest.fixture
def run(tmp_path) -> Callable[..., None]:
    """Return `run(*command)`, which runs a process with empty caches and without a network."""

    def run_offline(*command: str | Path) -> None:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))
        }
        environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-4000:]

    return run_offline


@pytest.mark.slow
def test_a_greedy_continuation_is_the_same_to_the_letter(source, result, models):
    texts = []
    for folder, model in zip((source, result), models):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = model.generate(torch.tensor([[tokenizer.bos_token_id]]), max_new_tokens=200, do_sample=False)
        assert ids.shape == (1, 201)
        texts.append(tokenizer.decode(ids[0], skip_special_tokens=True).strip())
    assert texts[0].startswith(BEGINNING)
    assert texts[1] == texts[0]


@torch.no_grad()
def mean_loss(model: PreTrainedModel, stories: list[torch.Tensor]) -> float:
    """Return the mean loss in nats per token."""
    losses = [(model(s[None], labels=s[None]).loss.double() * (len(s) - 1)).item() for s in stories]
    return sum(losses) / sum(len(s) - 1 for s in stories)


@pytest.mark.slow
def test_the_loss_on_stories_is_the_same(assets, source, models):
    tokenizer = AutoTokenizer.from_pretrained(source)
    text = (assets / "corpora" / "tinystories" / "valid.txt").read_text(encoding="utf-8")
    stories = [story.strip() for story in text.split("<|endoftext|>") if story.strip()][:25]
    # The tokenizer puts <s> before each story; the model was trained on 512 tokens.
    ids = [torch.tensor(tokenizer(story)["input_ids"][:512]) for story in stories]
    assert {int(story[0]) for story in ids} == {tokenizer.bos_token_id}
    before, after = (mean_loss(model, ids) for model in models)
    assert 1.3 < before < 1.6
    assert abs(after - before) <= 1e-5


def test_a_pipeline_writes_the_same_text(source, result):
    texts = []
    for folder in (source, result):
        generate = pipeline("text-generation", model=str(folder))
        texts.append(generate("Lily and Ben", max_new_tokens=60, do_sample=False)[0]["generated_text"])
    assert texts[0] == texts[1] and len(texts[0]) > 100


@pytest.mark.slow
def test_a_pipeline_without_attnres_writes_the_same_text(source, result, run, tmp_path):
    site_packages = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    isolated = [sys.executable, "-I", "-S", WITHOUT_ATTNRES, site_packages]
    run(*isolated, HERE / "serving_session.py", result, "Lily and Ben", tmp_path / "seen.json")
    seen = json.loads((tmp_path / "seen.json").read_text())
    generate = pipeline("text-generation", model=str(source))
    assert seen["text"] == generate("Lily and Ben", max_new_tokens=60, do_sample=False)[0]["generated_text"]
    assert seen["class"].startswith("transformers_modules.stories.")
    assert "trust_remote_code=True" in seen["untrusted"]


STORIES = """
task: stories
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{story}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
"""
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{story[:200]}}"
doc_to_choice: "{{[story[200:260], other[200:260]]}}"
doc_to_target: 0
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


@pytest.mark.slow
def test_the_scores_in_lm_evaluation_harness_are_the_same(assets, source, result, run, tmp_path):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install attnres[eval]")
    text = (assets / "corpora" / "tinystories" / "valid.txt").read_text(encoding="utf-8")
    stories = [story.strip() for story in text.split("<|endoftext|>") if len(story) > 300]
    rows = [{"story": story[:800], "other": other[:800]} for story, other in pairwise(stories)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tasks").mkdir()
    for name, task in {"stories": STORIES, "choices": CHOICES}.items():
        (tmp_path / "tasks" / f"{name}.yaml").write_text(task.replace("DATA", str(tmp_path / "data.jsonl")))
    run(sys.executable, HERE / "evaluation_session.py", tmp_path / "tasks", tmp_path / "seen.json", source, result)
    before, after = json.loads((tmp_path / "seen.json").read_text())
    assert {name: counts["effective"] for name, counts in before["samples"].items()} == {"stories": 20, "choices": 20}
    scores, again = before["results"], after["results"]
    assert 1.5 < scores["stories"]["byte_perplexity,none"] < 2.5
    assert scores["choices"]["acc,none"] > 0.5
    assert again["choices"] == scores["choices"]
    for metric in ("word_perplexity,none", "byte_perplexity,none"):
        assert again["stories"][metric] == pytest.approx(scores["stories"][metric], rel=1e-5)
