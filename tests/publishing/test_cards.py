"""Commands add their steps to the model card, and take only licence, language and base model from a source's card."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

from attnres import AttnResForCausalLM
from attnres.configuration import load
from attnres.conversion import retrofit
from attnres.publishing.card_text import add_metadata, add_step, find_part, read_model_card
from attnres.publishing.cards import CardSubject, begin_card, complete, on_hub
from attnres.publishing.markdown import link_model

from .. import forks
from .publishing import publisher

QUICK = ("train=text.txt", "length=64", "batch_size=4", "tokens=null", "steps=2", "held_out_sequences=4")


@pytest.fixture(scope="module")
def folder(assets, tmp_path_factory) -> Path:
    """Return a folder with `source`, a real checkpoint that has a card, and `text.txt`."""
    folder = tmp_path_factory.mktemp("cards")
    shutil.copytree(assets / "checkpoints" / "stories260K-hf", folder / "source")
    card = "---\nlicense: other\nlicense_name: toy\nlanguage: [en, no]\ntags: [toy]\nbase_model: lab/base\n---\n# S\n"
    (folder / "source" / "README.md").write_text(card)
    with (assets / "corpora" / "tinystories" / "valid.txt").open() as text:
        (folder / "text.txt").write_text(text.read(200_000))
    return folder


def attnres(folder: Path, *arguments: object) -> str:
    done = forks.run("-m", "attnres_cli", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def card_of(model: Path) -> tuple[dict, str]:
    text = (model / "README.md").read_text()
    return ModelCard(text).data.to_dict(), text


def test_a_retrofit_keeps_licence_language_and_base_and_describes_the_step(folder):
    out = attnres(folder, "convert", "source", "retrofit", "--num-blocks", 5)
    data, text = card_of(folder / "retrofit")
    assert (data["license"], data["license_name"], data["language"]) == ("other", "toy", ["en", "no"])
    assert (data["base_model"], data["base_model_relation"]) == ("lab/base", "finetune")
    assert data["tags"] == ["attnres", "attn-res"]
    assert "# S\n" not in text
    verified = re.search(r"Verified: (.*)", out)[1]
    assert find_part(text, "origin").content.endswith(
        f"22 tensors added, all others as they were. The result computed the same function as its source: {verified}."
    )
    assert str(folder) not in text


@pytest.mark.slow
def test_steps_add_up_and_text_of_a_person_stays(folder):
    attnres(folder, "convert", "source", "first", "--num-blocks", 5)
    card = folder / "first" / "README.md"
    card.write_text(card.read_text().replace("license_name: toy", "license_name: mine") + "\n## Limits\n\nSmall.\n")
    attnres(folder, "convert", "first", "second", "--set-block-size", 5)
    attnres(folder, "train", "heal", "model=second", "out=runs/healed", *QUICK)
    data, text = card_of(folder / "runs" / "healed" / "model")
    steps = re.findall(r"^\*\*(.*?)\*\*", find_part(text, "origin").content, flags=re.MULTILINE)
    assert steps == ["Retrofit", "Other options for the residual connections", "Trained"]
    results = json.loads((folder / "runs" / "healed" / "results.json").read_text())
    assert f"Held-out loss {results['held_out_loss']:.4f} nats/token" in text
    assert "512 tokens in 2 steps of 4 sequences of 64 tokens" in text
    assert "on `text.txt`" in text
    assert data["license_name"] == "mine"
    assert text.rstrip().endswith("Small.")
    assert str(folder) not in text
    # The snippet names the model's folder in the run.
    assert 'name = "healed/model"' in text


@pytest.mark.slow
def test_a_run_from_scratch_and_a_merged_adapter_get_a_card_and_a_standard_model_gets_none(folder):
    attnres(folder, "train", "pretrain", "model=attnres-tiny", "tokenizer=source", "out=runs/scratch", *QUICK)
    _, text = card_of(folder / "runs" / "scratch" / "model")
    assert "**Trained from scratch**, the configuration `attnres-tiny`" in text
    attnres(folder, "convert", "source", "base", "--num-blocks", 5)
    attnres(folder, "train", "lora", "model=base", "out=runs/lora", "merge=true", "chat=false", *QUICK)
    _, text = card_of(folder / "runs" / "lora" / "model")
    assert "low-rank adapters merged into the weights" in text
    attnres(folder, "train", "finetune", "model=source", "out=runs/standard", *QUICK)
    assert not (folder / "runs" / "standard" / "model" / "README.md").exists()


@pytest.mark.slow
def test_a_retrofit_in_a_recipe_is_a_step_in_the_card(folder):
    attnres(folder, "train", "heal", "model=source", "retrofit={num_blocks: 5}", "out=runs/both", *QUICK)
    assert "**Retrofit** of `source`, Block AttnRes" in card_of(folder / "runs" / "both" / "model")[1]


@pytest.mark.parametrize("base", ["/models/llama", "../llama", "[lab/base, ./b]", "{a: b}"])
def test_a_path_that_a_tool_has_written_as_base_model_is_not_copied(tmp_path, base):
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\nbase_model: {base}\n---\n# S\n")
    data = ModelCard(begin_card(tmp_path)).data
    assert (data.license, data.base_model) == ("mit", None)
    (tmp_path / "README.md").write_text("---\nbase_model: [lab/a, lab/b]\n---\n")
    assert ModelCard(begin_card(tmp_path)).data.base_model == ["lab/a", "lab/b"]


OURS = "---\n{}\n---\n\n<!-- attnres:use 000000000000 -->\n## Use\n<!-- /attnres:use -->\n"
DAMAGED = {
    "brackets": b"---\nlicense: [\n---\n",
    "bytes": b"---\nlicense: mit\n---\n\xff\xfe",
    "no day": b"---\nlicense: mit\ndate: 2024-02-30\n---\n",
    "depth": b"---\na: " + b"[" * 3000 + b"\n---\n",
    "itself": b"---\nlicense: &a [*a]\n---\n",
    "ours, no day": OURS.format("date: 2024-02-30").encode(),
    "ours, a number": OURS.format("datasets: 5").encode(),
    "terms of another kind": b"---\nlicense: {a: b}\nbase_model: 5\nlanguage: 7\n---\n",
    "many marks": b"<!-- attnres:use 000000000000 -->\n" * 20_000,
}


@pytest.mark.parametrize("name", [*DAMAGED, "a folder"])
def test_a_source_with_a_damaged_card_is_converted_without_its_terms(folder, name):
    damaged = shutil.copytree(folder / "source", folder / name)
    (damaged / "README.md").unlink()
    if name in DAMAGED:
        (damaged / "README.md").write_bytes(DAMAGED[name])
    else:
        (damaged / "README.md").mkdir()
    attnres(folder, "convert", name, f"of {name}", "--no-verify")
    assert "license" not in card_of(folder / f"of {name}")[0]


@pytest.mark.slow
def test_a_run_on_a_model_with_a_damaged_card_writes_a_new_card(folder):
    attnres(folder, "convert", "source", "ours", "--num-blocks", 5)
    (folder / "ours" / "README.md").write_bytes(DAMAGED["ours, no day"])
    attnres(folder, "train", "heal", "model=ours", "out=runs/ours", *QUICK)
    assert "**Trained**, from `ours`" in card_of(folder / "runs" / "ours" / "model")[1]


def test_without_a_source_card_a_new_card_has_only_the_base_model():
    card = begin_card(None, "lab/x")
    data = yaml.safe_load(card.split("---")[1])
    assert data == {"base_model": "lab/x", "base_model_relation": "finetune"}


def test_a_model_on_the_hub_is_named_by_its_commit(tmp_path):
    commit = "0" * 39 + "1"
    cached = tmp_path / "models--lab--model" / "snapshots" / commit
    assert on_hub(cached, "lab/model") == ("lab/model", commit)
    assert on_hub(tmp_path, str(tmp_path)) == (None, None)
    assert link_model("lab/model", "lab/model", commit).count(commit) == 1
    assert link_model(None, str(tmp_path / "my-model")) == "`my-model`"


@pytest.mark.parametrize(
    ("backbone", "vllm"), [("attnres_llama", True), ("attnres_qwen3", True), ("attnres_mistral", False)]
)
def test_the_card_has_the_vllm_command_if_vllm_serves_the_backbone(tmp_path, backbone, vllm):
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(backbone, **small, intermediate_size=64, num_key_value_heads=2, head_dim=16)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    card = complete("", CardSubject(model.config, tmp_path, "me/model"))
    assert ("vllm serve me/model" in card) == vllm


def test_the_same_facts_give_the_same_card(tmp_path):
    model = AttnResForCausalLM(load("attnres-tiny"))
    model.save_pretrained(tmp_path)
    subject = CardSubject(model.config, tmp_path, "me/model", revision="1" * 40)
    card = complete(add_step("", "**Made** by hand."), subject)
    assert complete(card, subject) == card


PUSHES = """
import attnres
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({name!r})
model.push_to_hub("me/direct")
AutoTokenizer.from_pretrained({name!r}).push_to_hub("me/direct")
"""
TRAINS = """
import attnres, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator
rows = [dict(input_ids=torch.arange(3, 11), labels=torch.arange(3, 11)) for _ in range(4)]
trainer = Trainer(
    AutoModelForCausalLM.from_pretrained({name!r}),
    TrainingArguments("run", push_to_hub=True, hub_model_id="me/trained", max_steps=1, report_to="none", use_cpu=True),
    train_dataset=rows,
    data_collator=default_data_collator,
    processing_class=AutoTokenizer.from_pretrained({name!r}),
)
trainer.train()
trainer.push_to_hub()
"""
SAVES = """
import attnres
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({name!r})
model.save_pretrained("saved")
model.save_pretrained("saved", push_to_hub=True, repo_id="me/saved", max_shard_size="300KB")
AutoTokenizer.from_pretrained({name!r}).push_to_hub("me/saved")
model._upload_modified_files = lambda *args, **kwargs: 1 / 0
try:
    model.save_pretrained("saved", push_to_hub=True, repo_id="me/failed")
except ZeroDivisionError:
    print("failed")
"""
LOADS = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({repo!r}, trust_remote_code=True)
ids = AutoTokenizer.from_pretrained({repo!r}, trust_remote_code=True)("Once upon a time", return_tensors="pt")
assert model(**ids).logits.isfinite().all()
print(type(model).__name__)
"""


@pytest.mark.slow
def test_push_to_hub_and_the_trainer_publish_models_that_load(folder, tmp_path):
    model = retrofit(folder / "source", num_blocks=5)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(folder / "source").save_pretrained(tmp_path / "model")
    with publisher(tmp_path) as push:
        for repo, code in (("me/direct", PUSHES), ("me/trained", TRAINS)):
            done = push.run(code.format(name="model"))
            assert done["status"] == 0, done["err"][-3000:]
            done = push.run(LOADS.format(repo=repo))
            assert done["out"] == "AttnResLlamaForCausalLM\n", done["err"][-3000:]
            names = push.hub.files(repo).keys()
            assert {
                "config.json",
                "model.safetensors",
                "generation_config.json",
                "tokenizer.json",
                "README.md",
            } <= names
            assert {path.name for path in (tmp_path / "model").glob("*.py")} <= names
        done = push.run(SAVES.format(name="model"))
        assert done["out"] == "failed\n", done["err"][-3000:]
        done = push.run(LOADS.format(repo="me/saved"))
        assert done["out"] == "AttnResLlamaForCausalLM\n", done["err"][-3000:]
        # The second save replaces the first one. The third one replaces the second, although its upload fails.
        saved = push.hub.files("me/saved").keys()
        assert "model.safetensors.index.json" in saved and "model.safetensors" not in saved
        assert not [name for name in saved if name.startswith(".sav")]
        local = {path.name for path in (tmp_path / "saved").iterdir()}
        assert {name for name in local if "safetensors" in name or name.startswith(".sav")} == {"model.safetensors"}
        data, card = ModelCard(push.card("me/direct")).data, push.card("me/direct")
        assert data.tags == ["attnres", "attn-res"]
        assert 'name = "me/direct"' in card
        # A second push keeps the edits of a person on the Hub.
        push.edit("me/direct", "README.md", card + "\n## Limits\n")
        assert push.run(PUSHES.format(name="model"))["status"] == 0
        assert push.card("me/direct").rstrip().endswith("## Limits")
        assert push.card("me/direct").count("# direct") == 1


def test_results_of_others_in_the_metadata_stay_as_they_are():
    """`ModelCard` would join the results of two models under one name, and leave out what it does not know."""
    results = [
        {"name": name, "results": [{"task": {"type": "t"}, "metrics": [{"type": "acc", "value": 1, "stderr": 0.1}]}]}
        for name in ("first", "second")
    ]
    card = f"---\n{yaml.safe_dump({'model-index': results})}---\n\n# Mine\n"
    added = read_model_card(add_metadata(card, {"license": "mit"}, {"tags": ["attnres"]})).data.to_dict()
    assert added == {"model-index": results, "license": "mit", "tags": ["attnres"]}
