"""Recipes: files with changes on the command line, checked before anything is loaded."""

import re
from dataclasses import fields

import datasets
import pytest
from accelerate import PartialState
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments

from attnres.training import prepare
from attnres.training.recipe import DECIDED_BY_RUN, Recipe, read_recipe, recipe_names, write_recipe

NEEDED = ("model=m", "train=a.txt", "out=o")


def test_the_recipes_of_the_package_are_complete_with_model_data_and_folder():
    assert recipe_names() == ("finetune", "heal", "lora", "pretrain", "sft")
    for name in recipe_names():
        recipe = read_recipe(name, NEEDED)
        assert recipe.count_steps(10_000) > 0
        assert recipe.epochs <= 4, "small data is not learned by heart"
    assert read_recipe("lora", NEEDED).lora == {"rank": 16}
    assert read_recipe("sft", NEEDED).chat


def test_every_key_is_described():
    described = re.findall(r"^ {8}(\w+): ", Recipe.__doc__.partition("Raises:")[0], re.MULTILINE)
    assert sorted(described) == sorted(item.name for item in fields(Recipe))


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
    for change in ("steps=7", "tokens=9000", "epochs=2"):
        name, _, value = change.partition("=")
        read = read_recipe(recipe, (*needed, change))
        lengths = {"steps": read.steps, "tokens": read.tokens, "epochs": read.epochs}
        assert {key: length for key, length in lengths.items() if length is not None} == {name: int(value)}
    assert read_recipe(recipe, (*needed, "steps=7")).count_steps(sequences=16) == 7


def test_tokens_are_rounded_up_to_steps():
    assert Recipe("m", ("a",), "o", tokens=1001, batch_size=10, length=10).count_steps(1000) == 11


@pytest.mark.parametrize(
    "lengths, sequences, steps",
    [
        ({"tokens": 50_000_000, "epochs": 4}, 88, 11),  # 100,000 tokens
        ({"tokens": 50_000_000, "epochs": 4}, 10**6, 1526),
        ({"tokens": 50_000_000, "epochs": 4}, None, 1526),
        ({"epochs": 0.5}, 640, 10),
        ({"epochs": 0.5}, 10, 1),
        ({"steps": 5}, 32, 5),
    ],
)
def test_epochs_end_a_run_where_nothing_else_does_before(lengths, sequences, steps):
    assert Recipe("m", ("a",), "o", length=1024, batch_size=32, **lengths).count_steps(sequences) == steps


@pytest.mark.parametrize(
    "changes, message",
    [
        (("learning_rat=1",), "A recipe has no `learning_rat`. Did you mean `learning_rate`?"),
        (("steps",), "'steps' is not of the form key=value. A value with spaces needs quotes."),
        (
            ("config={dtype:", "float32,", "eos_token_id:", "[1,", "2]}", "steps=5"),
            "The shell divides config={dtype: float32, eos_token_id: [1, 2]} at its spaces: put it in quotes, 'c",
        ),
        (("train=[a.txt,", "b.txt]"), "put it in quotes, 'train=[a.txt, b.txt]'."),
        (("steps=many",), "`steps` of the recipe is 'many', which is not int."),
        (("steps=1.5",), "`steps` of the recipe is 1.5, which is not int."),
        (("chat=perhaps",), "`chat` of the recipe is 'perhaps', which is not bool."),
        (("steps=5", "tokens=5"), "The recipe has both `steps` and `tokens`: give one of them."),
        (("steps=null", "epochs=null"), "The recipe has no length: give `steps`, `tokens` or `epochs`."),
        (("epochs=2", "streaming=true"), "The length of a stream is not known before it ends: give `steps` or "),
        (("epochs=0",), "`epochs` of the recipe is 0.0, but must be a number above 0."),
        (("lora={rank: 2}", "retrofit={block_size: 2}"), "An adapter's base has to be on disk"),
        (
            ("trainer.output_dir=elsewhere",),
            "`trainer.output_dir` of the recipe is not to be set, as the run decides it: give `out` instead.",
        ),
        (("trainer.max_steps=1",), "the run decides it: give `steps` instead."),
        (("trainer.per_device_train_batch_size=7",), "the run decides it: give `micro_batch_size` instead."),
        (("trainer.optim=sgd",), "the run decides it: give `optimizer` instead."),
        (("trainer.label_names=[a]",), "the run decides it: leave it out."),
        (("trainer.bf_16=true",), "`trainer` has no `bf_16`. Did you mean `bf16`?"),
        (("retrofit={blocksize: 2}",), "`retrofit` has no `blocksize`. Did you mean `block_size`?"),
        (("retrofit={attn_res_gatd: true}",), "`retrofit` has no `attn_res_gatd`. Did you mean `attn_res_gated`?"),
        (("retrofit={residual: identity_hc, stream: 2}",), "`retrofit` has no `stream`. Did you mean `streams`?"),
        (("retrofit={residual: denseformer, scale: sum}",), "`retrofit` has no `scale`."),
        (("retrofit={residual: [1]}",), "there is no residual connection [1]; there is 'attn_res', "),
        (("lora={ranks: 2}",), "`lora` has no `ranks`. Did you mean `rank`?"),
        (("optimizer=sgd",), "`optimizer` of the recipe is 'sgd', but must be 'adamw' or 'muon'."),
        (("schedule=linear",), "`schedule` of the recipe is 'linear', but must be 'cosine' or 'wsd'."),
        (("bad_rows=drop",), "`bad_rows` of the recipe is 'drop', but must be 'error' or 'skip'."),
        (("length=0",), "`length` of the recipe is 0, but must be at least 2"),
        (("length=99999999999",), "`length` of the recipe is 99999999999, but must be at least 2"),
        (("trainer.dataloader_num_workers=-5",), "`trainer.dataloader_num_workers` of the recipe is -5, but must be"),
        (("length=1",), "`length` of the recipe is 1, but must be at least 2"),
        (("warmup=100",), "`warmup` of the recipe is 100.0, but must be a share from 0 to 1."),
        (("config={dtype: nope}",), "`config.dtype` of the recipe is 'nope', but must be auto or a type of PyTorch"),
        (("config={dtype",), "config={dtype is broken YAML: "),
        (("config={1: 2}",), "`config` of the recipe is {1: 2}, which is not a mapping of names to values."),
        (("model.a=1",), "`model` of the recipe is 'm', which is not a mapping"),
        (("lora=5",), "`lora` of the recipe is 5, which is not a mapping"),
        (("retrofit={model_or_path: m}",), "`retrofit` has no `model_or_path`."),
        (("lora={model: m}",), "`lora` has no `model`."),
        (("lora={rank: 0}",), "`rank` of the adapters is 0, but must be a whole number, at least 1."),
        (("lora={rank: many}",), "`rank` of the adapters is 'many', but must be a whole number"),
        (("lora={alpha: -1}",), "`alpha` of the adapters is -1, but must be a number above 0."),
        (("lora={dropout: .nan}",), "`dropout` of the adapters is nan, but must be a share"),
        (("lora={targets: []}",), "`targets` of the adapters is [], but must be a list of names."),
        (("lora={expert_rank: 1.5}",), "`expert_rank` of the adapters is 1.5, but must be a whole number"),
        (("column=on",), "`column` of the recipe is True, which is not text; put it in quotes."),
        (("column=null",), "`column` of the recipe is None, which is not text"),
        (("out=[a, b]",), "`out` of the recipe is ['a', 'b'], which is not text"),
        (("train={a: b}",), "`train` of the recipe is {'a': 'b'}, which is not a list of names."),
        (("train=[null]",), "`train` of the recipe is None, which is not text"),
        (("chat=1",), "`chat` of the recipe is 1, which is not bool."),
        (("learning_rate=true",), "`learning_rate` of the recipe is True, which is not float."),
    ],
)
def test_a_value_that_cannot_be_used_is_named(changes, message):
    with pytest.raises(ValueError) as caught:
        read_recipe("finetune", (*NEEDED, *changes))
    assert message in str(caught.value)


def test_a_model_that_is_not_on_the_hub_may_be_a_misspelt_configuration():
    for what, hint in (("model", True), ("tokenizer", False)):
        with pytest.raises(FileNotFoundError) as caught, prepare.explain_missing(what, "attnres-tinny"):
            raise OSError("404")
        assert str(caught.value).endswith(" Did you mean `attnres-tiny`?") == hint


def test_more_held_out_than_there_is_is_named(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine " * 20)
    changes = ("model=m", f"train={tmp_path / 'text.txt'}", "out=o", "length=16", "batch_size=1")
    read = [read_recipe("finetune", (*changes, f"held_out_sequences={number}")) for number in (1, 1000)]
    count = sum(map(len, prepare.prepare_data(read[0], tokenizer)[:2]))
    message = f"^`held_out_sequences` of the recipe is 1000, but the data has only {count} sequences of 16 tokens: "
    with pytest.raises(ValueError, match=message):
        prepare.prepare_data(read[1], tokenizer)


def test_a_recipe_refuses_what_the_run_sets_itself(monkeypatch, tmp_path):
    """A recipe may set the fields of `TrainingArguments` for which the run only has another default."""
    seen = {}
    monkeypatch.setattr(prepare, "TrainingArguments", lambda **arguments: seen.update(arguments) or TrainingArguments())
    monkeypatch.chdir(tmp_path)
    prepare.prepare_arguments(read_recipe("finetune", NEEDED), PartialState(cpu=True), None)
    assert seen.keys() - DECIDED_BY_RUN.keys() == {
        *("eval_strategy", "eval_steps", "eval_on_start"),
        *("report_to", "dataloader_pin_memory"),
    }
    # Versions of `transformers` add and remove fields. A name that no version has would be a mistake in this test.
    assert DECIDED_BY_RUN.keys() - {item.name for item in fields(TrainingArguments)} <= {"warmup_ratio"}


NUMBERS = [item.name for item in fields(Recipe) if item.type in (int, float, int | None)]
MAY_BE_ZERO = {
    *("warmup", "decay", "min_rate", "residual_alone", "seed"),
    *("weight_decay", "residual_lr_factor", "max_grad_norm", "expert_balancing"),
}


@pytest.mark.parametrize("value", ["-3", "0", ".nan", ".inf", "-.inf", "1e999"])
@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_is_negative_or_infinite_or_none_and_few_are_zero(name, value):
    if value == "0" and name in MAY_BE_ZERO:
        assert getattr(read_recipe("finetune", (*NEEDED, f"{name}=0")), name) == 0
        return
    with pytest.raises(ValueError, match=f"^`{name}` of the recipe is .+, (but must be|which is not) "):
        read_recipe("finetune", (*NEEDED, f"{name}={value}"))


@pytest.mark.parametrize("change", ["out=", "model=", "train=", "train=[]", 'out=""'])
def test_an_empty_name_is_one_that_is_lacking(change):
    with pytest.raises(ValueError, match=f"lacks `{change.partition('=')[0]}`"):
        read_recipe("finetune", (*NEEDED, change))


@pytest.mark.parametrize(
    "change", ['train=[a, ""]', 'held_out=""', 'tokenizer=""', 'column=""', 'split=""', 'held_out_split=""']
)
def test_an_empty_name_among_others_is_refused(change):
    with pytest.raises(ValueError, match=f"`{change.partition('=')[0]}` of the recipe is empty"):
        read_recipe("finetune", (*NEEDED, change))


BOMB = b"config:\n  a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"  %c: &%c [%b]\n" % (name, name, b", ".join([b"*%c" % of] * 9)) for of, name in zip(b"abcdefgh", b"bcdefghi")
)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"model: [m\n", "is broken YAML: .* line 2"),
        (b"- a\n- b\n", "is not a recipe: it should hold `key: value` lines"),
        (b"[]", "is not a recipe: it should hold `key: value` lines"),
        (b"0", "is not a recipe: it should hold `key: value` lines"),
        (bytes(range(128, 256)), "is not text in UTF-8"),
        (b"a\x00b", "is broken YAML"),
        (b"1: 2\n", "A recipe has no `1`"),
        (b"steps: 2026-02-30\n", "is broken YAML: day is out of range"),
        (BOMB, r"is broken YAML: its aliases \(`\*name`\) repeat more than 1,000,000 values and characters"),
        (b"config: &c {a: *c}\n", "is broken YAML: the value in line 1 contains itself"),
        (b"model: !!python/object:os.system {}\n", "is broken YAML: could not determine a constructor"),
    ],
    ids=["unclosed", "list", "empty-list", "naught", "binary", "zero", "number", "date", "aliases", "itself", "object"],
)
def test_a_file_that_is_no_recipe_is_named(content, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_recipe(path, NEEDED)
    assert str(path) in str(caught.value) or "has no `1`" in message


def test_what_yaml_takes_for_a_number_or_a_date_may_be_a_name():
    recipe = read_recipe("finetune", ("model=7", "train=[1, 2026-01-31]", "out=2026-01-31"))
    assert (recipe.model, recipe.train, recipe.out) == ("7", ("1", "2026-01-31"), "2026-01-31")


def test_what_the_user_has_to_give_is_named():
    with pytest.raises(
        ValueError, match=r"The recipe lacks `model` and `train` and `out`: give model=\.\.\. train=\.\.\. out="
    ):
        read_recipe("finetune")
    with pytest.raises(
        FileNotFoundError, match=r"no file pretrian, and no recipe of that name. The recipes are finetune, heal"
    ):
        read_recipe("pretrian")
