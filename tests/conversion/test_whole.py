"""A checkpoint that lacks tensors is refused by all that would go on with random ones."""

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


def test_every_command_names_it(incomplete, tmp_path):
    (tmp_path / "text.txt").write_text("Once upon a time there was a cat.\n" * 400)
    sizes = {"steps": 1, "length": 16, "batch_size": 1, "micro_batch_size": 1}
    recipe = Recipe(str(incomplete), (str(tmp_path / "text.txt"),), str(tmp_path / "out"), **sizes)
    for call in (
        lambda: run_train(recipe),
        lambda: SharedPrefixLM(str(incomplete), device="cpu"),
        lambda: Source(str(incomplete)).load(),
    ):
        with pytest.raises(ValueError, match=rf"^{incomplete} is incomplete: it lacks `{LACKING}`\."):
            call()
