"""On other backbones too the code travels with the weights: a process without `attnres` loads the same models."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from .connections import close

# Its cases run in a process that has not imported `attnres`.
pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
# Two of the models have gated attention.
CASES = {
    "llama": {"attention_gate": "value", "attention_gate_granularity": "headwise"},
    "gemma3_text": {},
    "mixtral": {},
    "gpt_neox": {"attention_gate": "sdpa"},
}


@pytest.fixture(scope="module")
def originals(backbones) -> dict[str, PreTrainedModel]:
    return {case: backbones.build_member(case, attn_res_block_size=3, **fields) for case, fields in CASES.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, backbones, originals) -> Path:
    folder = tmp_path_factory.mktemp("models")
    torch.save(backbones.token_ids(), folder / "ids.pt")
    for case, model in originals.items():
        model.save_pretrained(folder / case, max_shard_size="40KB")
    return folder


@pytest.fixture(scope="module")
def remote(folders, run) -> dict:
    """Return the results of a process without `attnres`."""
    run("remote_backbones_session.py", folders, folders / "seen.pt")
    return torch.load(folders / "seen.pt")


def test_the_process_never_imported_attnres(remote):
    assert remote["attnres_modules"] == []


@pytest.mark.parametrize("case", CASES)
def test_the_classes_are_made_from_the_files_beside_the_weights(remote, originals, case):
    seen, model = remote["models"][case], originals[case]
    name, config = type(model).__name__, type(model.config).__name__
    module = f"transformers_modules.{case}."
    assert seen["class"][0].startswith(module) and seen["class"][1] == name
    assert seen["config"][0].startswith(module) and seen["config"][1:] == (config, 3)
    assert seen["made"] == type(model).auto_classes and len(seen["made"]) == (4 if case == "gemma3_text" else 5)
    assert seen["report"] == {}


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_remote_code_computes_records_and_generates_the_same(remote, originals, backbones, case):
    seen, model, token_ids = remote["models"][case], originals[case], backbones.token_ids()
    expected = model(token_ids, output_hidden_states=True, output_depth_attentions=True)
    assert close(seen["logits"], expected.logits)
    for name in ("hidden_states", "depth_attentions"):
        assert len(seen[name]) == len(expected[name])
        assert all(map(close, seen[name], expected[name]))
    assert close(seen["base"], model.base_model(token_ids).last_hidden_state)
    generated = model.generate(token_ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(seen["generated"], generated)
    assert "attention_maks" in seen["refused"]


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_a_model_saved_again_by_remote_code_is_the_same_there_and_here(remote, folders, originals, backbones, case):
    expected = originals[case](backbones.token_ids()).logits
    assert close(remote["models"][case]["again"], expected)
    loaded = AutoModelForCausalLM.from_pretrained(folders / case / "again")
    assert type(loaded) is type(originals[case])
    assert close(loaded(backbones.token_ids()).logits, expected)
    first, again = (
        {name for shard in folder.glob("*.safetensors") for name in load_file(shard)}
        for folder in (folders / case, folders / case / "again")
    )
    assert again == first
    code, code_again = (
        {path.name: path.read_text() for path in folder.glob("*.py")}
        for folder in (folders / case, folders / case / "again")
    )
    assert "backbones_attnres.py" in code and code_again == code
