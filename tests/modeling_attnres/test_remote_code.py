"""The code travels with the weights: without `attnres`, `trust_remote_code=True` gives the same model.

Three processes act as users (`remote_session.py`, `hub_session.py`, `mixed_session.py`); the first two cannot import
`attnres`. The tests compare their results with the models of this process.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, KimiLinearForCausalLM, PreTrainedTokenizerFast, pipeline

from attnres import AttnResForCausalLM, AttnResForSequenceClassification
from attnres.residual_attnres import residual_tensors

from ..hub.running import Hub
from .connections import close

# Each case starts processes that have not imported `attnres`.
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
FAMILY = ["AttnResModel", "AttnResForCausalLM", "AttnResForSequenceClassification"]
QUERY = "model.layers.1.mlp_res_proj.weight"


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, 99, (2, 11), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def models(once, tiny_model, ids) -> Path:
    """Save good and bad models, and return their folder."""
    return once("remote-code-models", lambda folder: save_models(folder, tiny_model, ids))


def save_models(folder: Path, tiny_model: Callable[..., AttnResForCausalLM], ids: torch.Tensor) -> None:
    """Save good and bad models, and token ids for them."""
    torch.save(ids, folder / "ids.pt")
    model = tiny_model(attn_res_block_size=3)
    model.save_pretrained(folder / "causal", max_shard_size="40KB")
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 99)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    specials = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials).save_pretrained(folder / "causal")
    torch.manual_seed(0)
    AttnResForSequenceClassification(model.config).save_pretrained(folder / "classifier")

    model.save_pretrained(folder / "whole")
    tensors = load_file(folder / "whole" / "model.safetensors")
    for name, changed in {
        "backbone": {name: tensor for name, tensor in tensors.items() if "_res_" not in name},
        "bad-missing": {name: tensor for name, tensor in tensors.items() if name != QUERY},
        "bad-nan": tensors | {QUERY: torch.full((1, 32), torch.nan)},
        "bad-truncated": tensors,
    }.items():
        shutil.copytree(folder / "whole", folder / name)
        save_file(changed, folder / name / "model.safetensors", metadata={"format": "pt"})
    os.truncate(folder / "bad-truncated" / "model.safetensors", 100_000)
    shutil.copytree(folder / "whole", folder / "bad-config")
    fields = json.loads((folder / "whole" / "config.json").read_text())
    (folder / "bad-config" / "config.json").write_text(json.dumps(fields | {"attn_res_block_size": 0}))


@pytest.fixture(scope="module")
def remote(once, models, run) -> dict:
    """Return the results of a process without `attnres`."""
    folder = once("remote-code", lambda folder: run("remote_session.py", models, folder / "seen.pt"))
    return torch.load(folder / "seen.pt")


@pytest.fixture(scope="module")
def model(models) -> AttnResForCausalLM:
    return AttnResForCausalLM.from_pretrained(models / "causal")


def test_the_process_never_imported_attnres(remote):
    assert remote["attnres_modules"] == []


def test_the_code_does_not_run_without_trust(remote):
    assert [error.split(":")[0] for error in remote["refused"]] == ["ValueError", "ValueError"]
    assert all("trust_remote_code=True" in error for error in remote["refused"])


def test_the_classes_come_from_the_files_beside_the_weights(remote):
    module, name, block_size = remote["config"]
    assert module.startswith("transformers_modules.causal.")
    assert (name, block_size) == ("AttnResConfig", 3)
    module, name = remote["class"]
    assert module.startswith("transformers_modules.causal.")
    assert name == "AttnResForCausalLM"


def test_from_config_makes_every_class_of_the_family(remote):
    assert remote["from_config"] == FAMILY


def test_the_logits_are_identical(remote, model, ids):
    assert close(remote["logits"], model(ids).logits)


def test_label_smoothing_of_remote_code_trains_the_next_token(remote, model, ids):
    log_p, labels = model(ids).logits[:, :-1].log_softmax(-1), ids[:, 1:]
    nll = -log_p.gather(-1, labels[..., None]).mean()
    assert close(remote["smoothed_loss"], 0.9 * nll - 0.1 * log_p.mean())


def test_documents_of_one_row_are_kept_apart(remote, model, ids):
    packed, alone = remote["packed"]
    assert close(packed[:, 4:8], alone)
    assert close(alone, model(ids[:, 4:8]).logits)


def test_the_depth_attentions_are_identical(remote, model, ids):
    expected = model(ids, output_depth_attentions=True).depth_attentions
    assert len(remote["depth_attentions"]) == len(expected)
    assert all(map(close, remote["depth_attentions"], expected))


def test_attention_and_experts_run_on_the_same_implementation_as_in_kimi_linear(remote, tiny_config):
    kimi = KimiLinearForCausalLM(tiny_config()).config
    assert remote["implementations"] == (kimi._attn_implementation, kimi._experts_implementation)


def test_the_base_model_is_identical(remote, model, ids):
    assert close(remote["last_hidden_state"], model.model(ids).last_hidden_state)


def test_the_classifier_is_identical(remote, models, ids):
    classifier = AttnResForSequenceClassification.from_pretrained(models / "classifier")
    assert close(remote["scores"], classifier(ids).logits)


def test_generation_is_identical(remote, model, ids):
    expected = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert torch.equal(remote["generated"], expected)


def test_the_pipeline_writes_the_same_text(remote, models):
    generator = pipeline("text-generation", model=str(models / "causal"))
    assert remote["text"] == generator("w5 w17 w42", max_new_tokens=5, do_sample=False)
    assert remote["text"][0]["generated_text"].removeprefix("w5 w17 w42")


def test_only_missing_attn_res_tensors_are_initialised(remote, model):
    new = residual_tensors(model)
    assert remote["new"] == sorted(new)
    for name, tensor in model.state_dict().items():
        initial = torch.zeros_like(tensor) if name.endswith("_proj.weight") else torch.ones_like(tensor)
        assert torch.equal(remote["backbone"][name], initial if name in new else tensor), name


@pytest.mark.parametrize(
    ("folder", "kind", "text"),
    [
        ("bad-missing", "ValueError", f"missing: {QUERY}."),
        ("bad-nan", "ValueError", f"`{QUERY}` holds NaN"),
        ("bad-truncated", "OSError", "bad-truncated/model.safetensors is truncated or damaged"),
        ("bad-config", "ValueError", "`attn_res_block_size` is 0, but must be an integer >= 1"),
    ],
)
def test_a_bad_checkpoint_is_reported_by_name(remote, folder, kind, text):
    error = remote["errors"][folder]
    assert error.startswith(f"{kind}: ")
    assert text in error


def test_a_model_saved_again_by_that_process_loads_there(remote, model, ids):
    assert close(remote["logits_again"], model(ids).logits)


def test_a_model_saved_again_by_that_process_loads_here(remote, models, model, ids):
    loaded = AutoModelForCausalLM.from_pretrained(models / "again")
    assert type(loaded) is AttnResForCausalLM
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    classifier = AttnResForSequenceClassification.from_pretrained(models / "classifier-again")
    assert close(classifier(ids).logits, remote["scores"])


@pytest.mark.parametrize("folders", [("causal", "again"), ("classifier", "classifier-again")])
def test_the_code_files_of_a_second_save_equal_those_of_the_first(remote, models, folders):
    first, again = ({path.name: path.read_text() for path in (models / name).glob("*.py")} for name in folders)
    assert set(first) >= {"configuration_attnres.py", "modeling_attnres.py", "residual_attnres.py"}
    assert again == first
    configs = [json.loads((models / name / "config.json").read_text()) for name in folders]
    assert configs[0] == configs[1]


@pytest.fixture(scope="module")
def mixed(once, models, run) -> dict:
    """Return the results of a process that loaded remote code first and then imported `attnres`."""
    session = ("mixed_session.py", models)
    folder = once("remote-code-mixed", lambda folder: run(*session, folder / "seen.pt", with_attnres=True))
    return torch.load(folder / "seen.pt")


def test_remote_code_finds_the_installed_implementations(mixed):
    assert mixed["implementations"] == [["auto", "eager", "numba", "fla", "triton"]] * 2


def test_remote_code_and_the_installed_package_live_side_by_side(mixed, model, ids):
    remote_class, local_class = mixed["classes"]
    assert remote_class.startswith("transformers_modules.causal.")
    assert local_class == "attnres.modeling_attnres.AttnResForCausalLM"
    assert all(close(logits, model(ids).logits) for logits in mixed["logits"])


def test_remote_code_and_the_installed_package_save_models_that_load(mixed, model, ids):
    assert all(close(logits, model(ids).logits) for logits in mixed["saved"])


@pytest.fixture(scope="module")
def revisions(once, tiny_model) -> Path:
    """Save the revisions `main` and `v1` of the repository `lab/model`, and return their folder."""

    def save(folder: Path) -> None:
        for seed, (revision, size) in enumerate({"main": 3, "v1": 2}.items()):
            model = tiny_model(seed=seed, attn_res_block_size=size)
            model.save_pretrained(folder / "lab" / "model" / revision, max_shard_size="40KB")

    return once("remote-code-hub", save) / "lab" / "model"


@pytest.fixture(scope="module")
def from_hub(once, revisions, models, run) -> tuple[dict, Path]:
    """Return the results of a process without `attnres` on the Hub, and the folder of its save of revision `v1`."""

    def ask(folder: Path) -> None:
        with Hub.running(revisions.parents[1]) as hub:
            run("hub_session.py", models / "ids.pt", folder / "saved", **hub.environ())

    folder = once("remote-code-from-hub", ask)
    return torch.load(folder / "saved.pt"), folder / "saved"


@pytest.mark.parametrize(
    ("name", "revision", "block_size"),
    [("default", "main", 3), ("main", "main", 3), ("v1", "v1", 2), ("v1 from the cache", "v1", 2)],
)
def test_a_revision_is_loaded_from_the_hub(from_hub, revisions, ids, name, revision, block_size):
    seen, _ = from_hub
    expected = AttnResForCausalLM.from_pretrained(revisions / revision)(ids).logits
    assert close(seen["logits"][name], expected)
    assert seen["block_size"][name] == block_size
    assert seen["class"][name].startswith("transformers_modules.lab.model.")


def test_the_two_revisions_differ(from_hub):
    seen, _ = from_hub
    assert not torch.allclose(seen["logits"]["main"], seen["logits"]["v1"], atol=1e-2)


def test_a_missing_revision_is_named(from_hub):
    assert "absent is not a valid git identifier" in from_hub[0]["absent"]


def test_a_model_from_the_hub_is_saved_with_its_own_code(from_hub, revisions, ids):
    seen, saved = from_hub
    assert {path.name for path in saved.glob("*.py")} == {path.name for path in (revisions / "v1").glob("*.py")}
    auto_map = json.loads((saved / "config.json").read_text())["auto_map"]
    assert not [reference for reference in auto_map.values() if "--" in reference]
    assert close(AutoModelForCausalLM.from_pretrained(saved)(ids).logits, seen["logits"]["v1"])
