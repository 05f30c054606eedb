"""A recipe is read once, and a run then goes from file to file without asking it again."""

import sys
from itertools import groupby
from pathlib import Path

import pytest
from transformers import Trainer

from attnres.training.recipe import read_recipe
from attnres.training.train import run_train

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def calls(assets, tmp_path_factory) -> list[tuple[str, str]]:
    """Return the file and the name of each function of this project that a run enters before its first step."""
    folder = tmp_path_factory.mktemp("walk")
    (folder / "text.txt").write_text("Once upon a time there was a little girl. " * 500)
    model, text, out = assets / "checkpoints" / "stories260K-hf", folder / "text.txt", folder / "out"
    sizes = ("steps=1", "batch_size=1", "micro_batch_size=1", "length=32", "held_out_sequences=1")
    recipe = read_recipe("finetune", (f"model={model}", f"train={text}", f"out={out}", *sizes))
    entered, begun = [], []

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and not begun and path.is_relative_to(ROOT) and ".venv" not in path.parts:
            entered.append((path.relative_to(ROOT).as_posix(), frame.f_code.co_name))

    class Loop(Exception):
        """The loop of training begins."""

    def stop(*args, **options):
        begun.append(True)
        raise Loop

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Loop):
        patch.setattr(Trainer, "train", stop)
        sys.setprofile(note)
        try:
            run_train(recipe, "finetune")
        finally:
            sys.setprofile(None)
    return entered


@pytest.mark.slow
def test_no_value_of_a_recipe_is_checked_again_in_the_run(calls):
    again = {name for path, name in calls if path == "training/settings.py"}
    assert again <= {"explained", "given"}  # the first one for the environment
    assert not [name for path, name in calls if path == "training/parallel/pipeline_settings.py"]


@pytest.mark.slow
def test_the_kind_of_a_model_is_found_out_once(calls):
    assert [name for _, name in calls].count("configuration_names") <= 2  # of the model, and of its tokenizer


@pytest.mark.slow
def test_a_run_stays_in_the_file_that_prepares_it(calls):
    visits = [path for path, _ in groupby(path for path, _ in calls)]
    assert visits.count("training/prepare.py") <= 7  # twice for the arguments of `Trainer`, and it opens the tokenizer
