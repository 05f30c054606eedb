"""A checkpoint that lacks tensors, or is not of its configuration, is refused before anything of its size is made."""

import json
import shutil
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from attnres.commands.inspect import Source
from attnres.conversion import retrofit
from attnres.eval.shared_prefix import SharedPrefixLM
from attnres.training.recipe import Recipe
from attnres.training.train import run_train

LACKING = "model.layers.2.mlp.down_proj.weight"


@pytest.fixture(params=["standard", "retrofit"])
def incomplete(request, assets, tmp_path) -> Path:
    """A directory with a tokenizer whose weights lack one tensor."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, folder = assets / "checkpoints" / "stories260K-hf", tmp_path / "incomplete"
    model = AutoModelForCausalLM.from_pretrained(source)
    (model if request.param == "standard" else retrofit(model, block_size=2)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[LACKING]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def train(model: Path, **config) -> None:
    text = model.parent / "text.txt"
    text.write_text("Once upon a time there was a cat.\n" * 400)
    sizes = {"steps": 1, "length": 16, "batch_size": 1, "micro_batch_size": 1}
    run_train(Recipe(str(model), (str(text),), str(model.parent / "out"), config=config, **sizes))


LOADS = {
    "train": train,
    "eval": lambda model: SharedPrefixLM(str(model), device="cpu"),
    "inspect": lambda model: Source(str(model)).load(),
    "retrofit": retrofit,
}


def test_every_command_names_it(incomplete):
    for load in LOADS.values():
        with pytest.raises(ValueError, match=rf"^{incomplete} is incomplete: it lacks `{LACKING}`\."):
            load(incomplete)


HUGE = {
    "num_labels": 10**9,
    "vocab_size": 10**9,
    "intermediate_size": 10**9,
    "hidden_size": 2**30,
    "num_hidden_layers": 10_000,
    # Fewer than there are bytes in the files, so that the shapes alone tell.
    "intermediate_size ": 10**6,
    # No file holds a tensor of it.
    "attn_res_block_size": 10**400,
}
