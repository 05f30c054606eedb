"""The description of a run before it begins, and the notes on settings that may be mistakes."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnres.conversion import retrofit
from attnres.training.data.blocks import DataSpec, load_blocks
from attnres.training.data.sets import RunData
from attnres.training.display import show_share
from attnres.training.recipe import Recipe
from attnres.training.report import describe_run


@pytest.fixture(scope="module")
def parts(assets, tmp_path_factory):
    """Return a model with 512 positions, its retrofit, and 13 blocks of 64 tokens from 2 documents."""
    folder = assets / "checkpoints" / "stories260K-hf"
    text = (assets / "corpora" / "tinystories" / "valid.txt").read_text()[:4000]
    file = tmp_path_factory.mktemp("header") / "text.jsonl"
    file.write_text("".join(json.dumps({"text": part}) + "\n" for part in (text[:2000], text[2000:])))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    blocks = load_blocks(DataSpec((str(file),)), tokenizer, 64, seed=0, cache=file.parent / "cache")
    return {"model": model, "retrofit": retrofit(folder, block_size=2), "blocks": blocks}


def described(parts, model: str, named: str = "lab/model", **changes) -> list[str]:
    blocks = parts["blocks"]
    train, held_out = blocks.select(range(len(blocks) - 3)), blocks.select(range(len(blocks) - 3, len(blocks)))
    recipe = Recipe(named, ("a",), "runs/x", **{"steps": 2, "batch_size": 4, "length": 64} | changes)
    return describe_run(recipe, parts[model], RunData(train, held_out, {}), torch.device("cpu"))


def test_the_header_names_model_parameters_data_and_steps(parts):
    model, parameters, processes, data, run = described(parts, "retrofit")
    assert processes == "1 process"
    assert model == (
        "Model: lab/model (attnres_llama), with its weights, Block AttnRes, 5 blocks of 2 sublayers (10 sublayers), "
        "scale sum"
    )
    total = sum(tensor.numel() for tensor in parts["retrofit"].parameters())
    assert parameters == f"Parameters: {total:,}, of which all are trained, on cpu"
    count = len(parts["blocks"])
    tokens = int(data.split(" documents, ")[1].split(" tokens")[0].replace(",", ""))
    assert data.startswith("Data: 2 documents, ") and count * 64 <= tokens < (count + 1) * 64
    assert data.endswith(f": {count - 3} sequences of 64 tokens to train on, 3 held out")
    assert run == f"Run: 2 steps of 4 sequences, 512 tokens, {8 / (count - 3):.2g} epochs; into runs/x"


def test_the_header_says_whether_the_weights_are_random(parts):
    assert described(parts, "model")[0] == "Model: lab/model (llama), with its weights, standard residual connections"
    named = described(parts, "retrofit", named="attnres-tiny")[0]
    assert named.startswith("Model: attnres-tiny (attnres_llama), from scratch, Block AttnRes")


def test_frozen_parameters_are_not_counted_as_trained(parts):
    parts["retrofit"].lm_head.weight.requires_grad_(False)
    try:
        trained = sum(tensor.numel() for tensor in parts["retrofit"].parameters() if tensor.requires_grad)
        assert f"of which {trained:,} are trained" in described(parts, "retrofit")[1]
    finally:
        parts["retrofit"].lm_head.weight.requires_grad_(True)


@pytest.mark.parametrize(
    "model, changes, note",
    [
        ("retrofit", {"steps": 1000}, "Note: the run reads its data "),
        ("retrofit", {"length": 513}, "Note: length=513 is beyond the 512 positions"),
        ("retrofit", {"steps": 1000, "epochs": 3}, "Note: 1,000 steps would read this "),
        ("model", {}, None),
    ],
)
def test_a_setting_that_may_be_a_mistake_gets_a_note(parts, model, changes, note):
    notes = [line for line in described(parts, model, **changes) if line.startswith("Note: ")]
    assert len(notes) == bool(note) and all(line.startswith(note) for line in notes)


def test_the_number_of_steps_that_a_note_proposes_gets_no_note(parts):
    (note,) = (line for line in described(parts, "retrofit", steps=1000) if line.startswith("Note: "))
    steps = int(note.partition("steps=")[2].split()[0])
    assert len(described(parts, "retrofit", steps=steps)) == 5
    assert len(described(parts, "retrofit", steps=steps + 1)) == 6


def test_a_run_that_small_data_shortens_gets_a_note_with_its_length(parts):
    run, note = described(parts, "retrofit", tokens=50_000_000, steps=None, epochs=4)[-2:]
    steps = 4 * (len(parts["blocks"]) - 3) // 4
    assert run.startswith(f"Run: {steps} steps of 4 sequences, {steps * 256:,} tokens, 4 epochs;")
    assert note.endswith("the run ends after epochs=4. Give more data for a longer run; steps=N sets another length.")


@pytest.mark.parametrize(
    "share, shown", [(0.93214, "0.9321"), (0.99996, "1 - 4.0e-05"), (1.0, "1 - 0.0e+00"), (1 + 1e-7, "1 - 0.0e+00")]
)
def test_a_share_close_to_one_is_shown_by_its_distance_from_one(share, shown):
    assert show_share(share) == shown
