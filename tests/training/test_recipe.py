"""Recipes: files with changes on the command line, checked before anything is loaded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnres.training.recipe import Recipe, read_recipe, recipe_names, write_recipe

NEEDED = ("model=m", "train=a.txt", "out=o")


def test_the_recipes_of_the_package_are_complete_with_model_data_and_folder():
    assert recipe_names() == ("finetune", "heal", "lora", "pretrain", "sft")
    for name in recipe_names():
        recipe = read_recipe(name, NEEDED)
        assert recipe.num_steps > 0
    assert read_recipe("lora", NEEDED).lora == {"rank": 16}
    assert read_recipe("sft", NEEDED).chat


def test_a_file_and_changes_to_it(tmp_path):
    (tmp_path / "mine.yaml").write_text("model: m\ntrain: [a.txt, b.txt]\nout: o\nsteps: 5\ntrainer: {bf16: true}\n")
    changes = ("learning_rate=3e-4", "trainer.report_to=tensorboard", "steps=1e2", "held_out=c.txt", "config={a: 1}")
    recipe = read_recipe(tmp_path / "mine.yaml", changes)
    assert (recipe.train, recipe.held_out) == (("a.txt", "b.txt"), ("c.txt",))
    assert recipe.trainer == {"bf16": True, "report_to": "tensorboard"}
    assert (recipe.learning_rate, recipe.steps, recipe.config) == (3e-4, 100, {"a": 1})


@given(
    steps=st.integers(1, 10**6),
    rate=st.floats(1e-8, 1.0),
    trainer=st.dictionaries(st.sampled_from(["bf16", "torch_compile"]), st.booleans()),
    lora=st.none() | st.just({"rank": 4}),
    held_out=st.lists(st.text("ab/", min_size=1), max_size=2),
)
def test_what_is_written_is_read_again(tmp_path_factory, steps, rate, trainer, lora, held_out):
    recipe = Recipe(
        "m", ("a",), "o", steps=steps, learning_rate=rate, trainer=trainer, lora=lora, held_out=tuple(held_out)
    )
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(write_recipe(recipe))
    assert read_recipe(path) == recipe


@pytest.mark.parametrize("recipe", [*recipe_names()])
def test_a_change_of_steps_or_tokens_takes_the_place_of_the_files(recipe):
    needed = ("model=m", "train=a.txt", "out=o", "tokenizer=t")
    assert read_recipe(recipe, (*needed, "steps=7")).num_steps == 7
    by_tokens = read_recipe(recipe, (*needed, "tokens=9000"))
    assert (by_tokens.steps, by_tokens.tokens) == (None, 9000)


def test_tokens_are_rounded_up_to_steps():
    assert Recipe("m", ("a",), "o", tokens=1001, batch_size=10, length=10).num_steps == 11


@pytest.mark.parametrize(
    "changes, message",
    [
        (("learning_rat=1",), "A recipe has no `learning_rat`. Did you mean `learning_rate`?"),
        (("steps",), "'steps' is not of the form key=value."),
        (("steps=many",), "`steps` of the recipe is 'many', which is not int."),
        (("steps=1.5",), "`steps` of the recipe is 1.5, which is not int."),
        (("chat=perhaps",), "`chat` of the recipe is 'perhaps', which is not bool."),
        (("steps=5", "tokens=5"), "Give the recipe either `steps` or `tokens`."),
        (("lora={rank: 2}", "retrofit={block_size: 2}"), "An adapter's base has to be on disk"),
        (("trainer.bf_16=true",), "`trainer` has no `bf_16`. Did you mean `bf16`?"),
        (("retrofit={blocksize: 2}",), "`retrofit` has no `blocksize`. Did you mean `block_size`?"),
        (("lora={ranks: 2}",), "`lora` has no `ranks`. Did you mean `rank`?"),
        (("optimizer=sgd",), "`optimizer` of the recipe is 'sgd', but must be 'adamw' or 'muon'."),
        (("schedule=linear",), "`schedule` of the recipe is 'linear', but must be 'cosine' or 'wsd'."),
        (("bad_rows=drop",), "`bad_rows` of the recipe is 'drop', but must be 'error' or 'skip'."),
        (("length=0",), "`length` of the recipe is 0, but must be at least 1."),
        (("warmup=100",), "`warmup` of the recipe is 100.0, but must be a share from 0 to 1."),
    ],
)
def test_a_value_that_cannot_be_used_is_named(changes, message):
    with pytest.raises(ValueError) as caught:
        read_recipe("finetune", (*NEEDED, *changes))
    assert message in str(caught.value)


def test_what_the_user_has_to_give_is_named():
    with pytest.raises(ValueError, match=r"The recipe lacks `model` and `train` and `out`: .* or give model=\.\.\."):
        read_recipe("finetune")
    with pytest.raises(
        FileNotFoundError, match=r"no file pretrian, and no recipe of that name. There is finetune, heal"
    ):
        read_recipe("pretrian")
