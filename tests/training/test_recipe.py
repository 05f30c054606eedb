"""Recipes: files with changes on the command line, checked before anything is loaded."""

import re
from dataclasses import fields

import datasets
import huggingface_hub
import pytest
from accelerate import PartialState
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments

from attnres.checkpoints.source import ModelSource
from attnres.training import prepare
from attnres.training.data.sets import prepare_data
from attnres.training.recipe import Recipe, read_recipe, recipe_names, write_recipe
from attnres.training.settings import DECIDED_BY_RUN

NEEDED = ("model=m", "train=a.txt", "out=o")


def test_the_recipes_of_the_package_are_complete_with_model_data_and_folder():
    assert recipe_names() == ("finetune", "heal", "lora", "pretrain", "sft")
    for name in recipe_names():
        recipe = read_recipe(name, NEEDED)
        assert recipe.count_steps(10_000) > 0
        assert recipe.epochs <= 4, "small data is not learned by heart"
    assert read_recipe("lora", NEEDED).lora.given() == {"rank": 16}
    assert read_recipe("sft", NEEDED).chat


def test_the_docstring_describes_every_key():
    described = re.findall(r"^ {8}(\w+): ", Recipe.__doc__.partition("Raises:")[0], re.MULTILINE)
    assert sorted(described) == sorted(item.name for item in fields(Recipe))


def test_changes_replace_the_values_of_a_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("model: m\ntrain: [a.txt, b.txt]\nout: o\nsteps: 5\ntrainer: {bf16: true}\n")
    changes = ("learning_rate=3e-4", "trainer.report_to=tensorboard", "steps=1e2", "held_out=c.txt", "config={a: 1}")
    recipe = read_recipe(tmp_path / "mine.yaml", changes)
    assert (recipe.train, recipe.held_out) == (("a.txt", "b.txt"), ("c.txt",))
    assert recipe.trainer.given() == {"bf16": True, "report_to": "tensorboard"}
    assert (recipe.learning_rate, recipe.steps, recipe.config) == (3e-4, 100, {"a": 1})


@pytest.mark.slow
@given(
    steps=st.integers(1, 10**6),
    rate=st.floats(1e-8, 1.0),
    trainer=st.dictionaries(st.sampled_from(["bf16", "torch_compile"]), st.booleans()),
    lora=st.none() | st.just({"rank": 4}),
    held_out=st.lists(st.text("ab/", min_size=1), max_size=2),
)
def test_a_recipe_that_is_written_reads_back_equal(tmp_path_factory, steps, rate, trainer, lora, held_out):
    recipe = Recipe(
        "m", ("a",), "o", steps=steps, learning_rate=rate, trainer=trainer, lora=lora, held_out=tuple(held_out)
    )
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(write_recipe(recipe))
    assert read_recipe(path) == recipe


@pytest.mark.parametrize("recipe", [*recipe_names()])
def test_a_change_of_the_length_of_the_run_replaces_the_length_in_the_file(recipe):
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
def test_a_run_has_the_smaller_number_of_steps_by_tokens_and_by_epochs(lengths, sequences, steps):
    assert Recipe("m", ("a",), "o", length=1024, batch_size=32, **lengths).count_steps(sequences) == steps


@pytest.mark.parametrize(
    "changes, message",
    [
        (("learning_rat=1",), "A recipe has no `learning_rat`. Did you mean `learning_rate`?"),
        (("lr=1",), "A recipe has no `lr`. Give `learning_rate` instead."),
        (("num_train_epochs=1",), "A recipe has no `num_train_epochs`. Give `epochs` instead."),
        (("save_only_model=true",), "A recipe has no `save_only_model`. There is model, train, "),
        (("bf16=true",), "A recipe has no `bf16`. It is a field of the trainer: give `trainer.bf16`."),
        (("steps",), "'steps' is not of the form key=value. A value with spaces needs quotes."),
        (("model=attnres-tiny", "lora={}"), "attnres-tiny starts from scratch: an adapter would have no base. Leave "),
        (("train=[a.txt,", "b.txt]"), "A value with spaces needs quotes."),
        (("steps=many",), "`steps` of the recipe is 'many', but must be a whole number."),
        (("steps=1.5",), "`steps` of the recipe is 1.5, but must be a whole number."),
        (("chat=perhaps",), "`chat` of the recipe is 'perhaps', but must be true or false."),
        (("steps=5", "tokens=5"), "The recipe has both `steps` and `tokens`: give one of them."),
        (("steps=null", "epochs=null"), "The recipe must have `steps`, `tokens` or `epochs`: give one of them."),
        (("epochs=2", "streaming=true"), "The length of a stream is not known before it ends: give `steps` or "),
        (("epochs=0",), "`epochs` of the recipe is 0, but must be greater than 0."),
        (("lora={rank: 2}", "retrofit={block_size: 2}"), "an adapter's base has to be on disk"),
        (("mtp_loss_weight=0.3", "retrofit={}"), "`mtp_loss_weight` and `retrofit` of the recipe exclude each other"),
        (("mtp_loss_weight=-1",), "`mtp_loss_weight` of the recipe is -1, but must be at least 0."),
        (
            ("mtp_loss_weight=0.3", "trainer.label_smoothing_factor=0.1"),
            "`mtp_loss_weight` of the recipe does not work with `trainer.label_smoothing_factor`",
        ),
        (
            ("trainer.output_dir=elsewhere",),
            "`trainer.output_dir` of the recipe must not be set, since the run sets it: give `out` instead.",
        ),
        (("trainer.max_steps=1",), "the run sets it: give `steps` instead."),
        (("trainer.per_device_train_batch_size=7",), "the run sets it: give `micro_batch_size` instead."),
        (("trainer.optim=sgd",), "the run sets it: give `optimizer` instead."),
        (("trainer.label_names=[a]",), "`trainer.label_names` of the recipe must not be set: leave it out."),
        (("trainer.save_only_model=true",), "must not be set: leave it out."),
        (("trainer.train_sampling_strategy=group_by_length",), "must not be set: leave it out."),
        (("trainer.auto_find_batch_size=true",), "the run sets it: give `micro_batch_size` instead."),
        (("trainer.bf16='false'",), "`trainer.bf16` of the recipe is 'false', but must be true or false."),
        (("trainer.bf16=none",), "`trainer.bf16` of the recipe is 'none', but must be true or false."),
        (("trainer.bf16_full_eval=true",), "must not be set: leave it out."),
        (("trainer.parallelism_config={tp_size: 2}",), "the run sets it: give `distributed` instead."),
        (("trainer.label_smoothing_factor=1.5",), "is 1.5, but must be less than 1."),
        (("trainer.label_smoothing_factor=much",), "is 'much', but must be a number."),
        (
            ("distributed={tp_size: 2, sequence_parallel: true}", "trainer.neftune_noise_alpha=5"),
            "`trainer.neftune_noise_alpha` of the recipe does not work with `sequence_parallel`",
        ),
        (("trainer={bf16: true, bf16: false}",), "the key 'bf16' stands here a second time: remove one"),
        (("trainer.bf_16=true",), "`trainer` has no `bf_16`. Did you mean `bf16`?"),
        (("retrofit={blocksize: 2}",), "`retrofit` has no `blocksize`. Did you mean `block_size`?"),
        (("retrofit={attn_res_gatd: true}",), "`retrofit` has no `attn_res_gatd`. Did you mean `attn_res_gated`?"),
        (("retrofit={residual: identity_hc, stream: 2}",), "`retrofit` has no `stream`. Did you mean `streams`?"),
        (("retrofit={residual: denseformer, scale: sum}",), "`retrofit` has no `scale`."),
        (("retrofit={residual: [1]}",), "`retrofit.residual` of the recipe is [1], but must be one of attn_res, "),
        (("retrofit={residual: densformer}",), "Did you mean `denseformer`?"),
        (("lora={ranks: 2}",), "`lora` has no `ranks`. Did you mean `rank`?"),
        (("lora={r: 2}",), "`lora` has no `r`. There is rank, alpha, "),
        (("optimizer=sgd",), "`optimizer` of the recipe is 'sgd', but must be 'adamw' or 'muon'."),
        (("schedule=linear",), "`schedule` of the recipe is 'linear', but must be 'cosine' or 'wsd'."),
        (("bad_rows=drop",), "`bad_rows` of the recipe is 'drop', but must be 'error' or 'skip'."),
        (("length=0",), "`length` of the recipe is 0, but must be at least 2"),
        (("length=99999999999",), "`length` of the recipe is 99999999999, but must be less than 2147483648"),
        (("trainer.dataloader_drop_last=true",), "must not be set: leave it out."),
        *(
            ((f"trainer.accelerator_config={{{name}}}",), f"`trainer.accelerator_config.{message}")
            for name, message in [
                ("split_batches: true", "split_batches` of the recipe is True, but must be False."),
                ("dispatch_batches: true", "dispatch_batches` of the recipe is True, but must be False."),
                ("even_batches: false", "even_batches` of the recipe is False, but must be True."),
                ("use_seedable_sampler: false", "use_seedable_sampler` of the recipe is False, but must be True."),
                ("gradient_accumulation_kwargs: {num_steps: 3}", "gradient_accumulation_kwargs` has no `num_steps`."),
            ]
        ),
        *(
            ((f"trainer.ddp_timeout={seconds}",), "`trainer.ddp_timeout` of the recipe is ")
            for seconds in ("0", "long", "1.5", "true", "10000000000")
        ),
        *(
            (("trainer.load_best_model_at_end=true", *changes), message)
            for message, *changes in [
                ("does not work with `distributed`, whose checkpoints are in parts", "distributed={fsdp_size: 2}"),
                ("needs a held-out loss for each checkpoint and no other: leave out", "trainer.eval_steps=10"),
                ("needs a held-out loss for each checkpoint: leave out `trainer.eval_d", "trainer.eval_delay=5"),
                ("chooses the lowest held-out loss: leave out `metric_for", "trainer.greater_is_better=true"),
                ("chooses the lowest held-out loss: leave out", "trainer.metric_for_best_model=runtime"),
            ]
        ),
        *(
            ((way, "trainer.average_tokens_across_devices=false"), f"must be true with {name}, where several")
            for way, name in [
                ("pipeline={stages: 2}", "`pipeline`"),
                ("distributed={tp_size: 2}", "`tp_size` of `distributed`"),
            ]
        ),
        (("length=1",), "`length` of the recipe is 1, but must be at least 2"),
        (("warmup=100",), "`warmup` of the recipe is 100, but must be at most 1."),
        (("config={dtype: nope}",), "`config.dtype` of the recipe is 'nope', but must be auto, bfloat16"),
        (("config={dtype",), "config={dtype is broken YAML: "),
        (("config={1: 2}",), "`config` of the recipe has a key that is no text, but must be a mapping of names to"),
        (("model.a=1",), "`model` of the recipe is 'm', but must be a mapping"),
        (("lora=5",), "`lora` of the recipe is 5, but must be a mapping"),
        (("retrofit={model_or_path: m}",), "`retrofit` has no `model_or_path`."),
        (("lora={model: m}",), "`lora` has no `model`."),
        (("lora={rank: 0}",), "`lora.rank` of the recipe is 0, but must be at least 1."),
        (("lora={rank: many}",), "`lora.rank` of the recipe is 'many', but must be a whole number"),
        (("lora={alpha: -1}",), "`lora.alpha` of the recipe is -1, but must be greater than 0."),
        (("lora={dropout: .nan}",), "`lora.dropout` of the recipe is nan, but must be a finite number."),
        (("lora={targets: []}",), "`lora.targets` of the recipe is [], but must be a list with at least one item."),
        (("lora={expert_rank: 1.5}",), "`lora.expert_rank` of the recipe is 1.5, but must be a whole number"),
        (("column=null",), "`column` of the recipe is None, but must be text"),
        (("out=[a, b]",), "`out` of the recipe is ['a', 'b'], but must be text"),
        (("train={a: b}",), "`train` of the recipe is {'a': 'b'}, but must be a list."),
        (("train=[null]",), "`train` of the recipe is None, but must be text"),
        (("streaming=true", "steps=1"), "A stream has no end to take `held_out_sequences` from: give `held_out`."),
        (("chat=1",), "`chat` of the recipe is 1, but must be true or false."),
        (("learning_rate=true",), "`learning_rate` of the recipe is True, but must be a number."),
    ],
)
def test_an_error_names_the_key_the_value_and_the_remedy(changes, message):
    with pytest.raises(ValueError) as caught:
        read_recipe("finetune", (*NEEDED, *changes))
    assert message in str(caught.value)


def test_values_of_the_trainer_are_read_as_its_fields_take_them():
    changes = ("trainer.label_smoothing_factor=1e-9", "trainer.data_seed=1e3", "trainer.eval_strategy=no")
    trainer = read_recipe("finetune", (*NEEDED, *changes, "trainer.logging_strategy=no")).trainer.given()
    expected = {"label_smoothing_factor": 1e-9, "data_seed": 1000, "eval_strategy": "no", "logging_strategy": "no"}
    assert trainer == expected
    assert type(trainer["data_seed"]) is int


def test_half_precision_with_a_scaled_loss_is_refused_on_a_cpu():
    recipe = Recipe("m", ("a",), "o", steps=1, trainer={"fp16": True})
    with pytest.raises(ValueError, match=r"`trainer\.fp16` of the recipe has no effect on a CPU: leave it out, or use"):
        prepare.prepare_arguments(recipe, PartialState(cpu=True))


def test_fields_of_the_trainer_that_change_no_rows_are_accepted():
    trainer = {
        "accelerator_config": {"dispatch_batches": False, "gradient_accumulation_kwargs": {"sync_each_batch": True}},
        "activation_checkpointing_kwargs": {"every_n_layers": 2, "use_reentrant": False},
        "ddp_static_graph": True,  # without effect in one process
        "torch_compile_backend": "INDUCTOR",
        "label_smoothing_factor": 0.1,
    }
    recipe = Recipe("m", ("a",), "o", steps=1, trainer=trainer)
    assert prepare.prepare_arguments(recipe, PartialState(cpu=True)).activation_checkpointing_kwargs


def test_a_stream_is_read_by_each_process_also_with_other_settings_of_accelerate():
    trainer = {"accelerator_config": {"non_blocking": True}}
    recipe = Recipe("m", ("a",), "o", steps=1, streaming=True, held_out=("b",), trainer=trainer)
    settings = prepare.prepare_arguments(recipe, PartialState(cpu=True)).accelerator_config
    assert (settings.non_blocking, settings.dispatch_batches) == (True, False)


def test_a_tilde_is_the_home_directory_in_names_of_models_data_and_out(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    changes = ("model=~/m", "out=~/o", "train=[~/a.txt, b.txt]", "held_out=~/c.txt", "tokenizer=~/t", "column='~/x'")
    recipe = read_recipe("finetune", changes)
    assert (recipe.model, recipe.out, recipe.tokenizer) == (f"{tmp_path}/m", f"{tmp_path}/o", f"{tmp_path}/t")
    assert (recipe.train, recipe.held_out) == ((f"{tmp_path}/a.txt", "b.txt"), (f"{tmp_path}/c.txt",))
    assert recipe.column == "~/x"


def test_a_misspelt_configuration_gets_a_suggestion(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # else it would be tried for 90 seconds
    for read, is_suggested in ((ModelSource.config, True), (ModelSource.tokenizer, False)):
        with pytest.raises(FileNotFoundError) as caught:
            read(ModelSource("attnres-tinny"))
        assert str(caught.value).endswith(" Did you mean `attnres-tiny`?") == is_suggested


def test_holding_out_more_sequences_than_there_are_is_refused(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine " * 20)
    changes = ("model=m", f"train={tmp_path / 'text.txt'}", "out=o", "length=16", "batch_size=1")
    read = [read_recipe("finetune", (*changes, f"held_out_sequences={number}")) for number in (1, 1000)]
    count = sum(map(len, prepare_data(read[0], tokenizer)[:2]))
    message = f"^`held_out_sequences` of the recipe is 1000, but the data has only {count} sequences of 16 tokens: "
    with pytest.raises(ValueError, match=message):
        prepare_data(read[1], tokenizer)


def test_a_recipe_may_set_a_field_of_the_trainer_only_if_the_run_has_just_a_default_for_it(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(prepare, "TrainingArguments", lambda **given: seen.update(given) or TrainingArguments())
    monkeypatch.chdir(tmp_path)
    prepare.prepare_arguments(read_recipe("finetune", NEEDED), PartialState(cpu=True))
    assert seen.keys() - DECIDED_BY_RUN.keys() == {
        *("eval_strategy", "eval_steps", "eval_on_start"),
        *("report_to", "dataloader_pin_memory"),
    }
    # Versions of `transformers` add and remove fields. A name that no version has would be a mistake in this test.
    assert DECIDED_BY_RUN.keys() - {item.name for item in fields(TrainingArguments)} <= {"warmup_ratio"}


NUMBERS = [
    *("length", "batch_size", "micro_batch_size", "steps", "tokens", "epochs", "held_out_sequences", "learning_rate"),
    *("log_every", "save_every", "keep"),
]
MAY_BE_ZERO = [
    *("warmup", "decay", "min_rate", "residual_alone", "seed"),
    *("weight_decay", "residual_lr_factor", "max_grad_norm", "expert_balancing"),
]


@pytest.mark.parametrize("value", ["-3", "0", ".nan", ".inf", "-.inf", "1e999"])
@pytest.mark.parametrize("name", NUMBERS + MAY_BE_ZERO)
def test_numbers_must_be_finite_and_not_negative_and_most_must_not_be_zero(name, value):
    if value == "0" and name in MAY_BE_ZERO:
        assert getattr(read_recipe("finetune", (*NEEDED, f"{name}=0")), name) == 0
        return
    with pytest.raises(ValueError, match=f"^`{name}` of the recipe is .+, but must be "):
        read_recipe("finetune", (*NEEDED, f"{name}={value}"))


@pytest.mark.parametrize("change", ["out=", "model=", "train=", "train=[]", 'out=""'])
def test_an_empty_needed_key_counts_as_missing(change):
    with pytest.raises(ValueError, match=f"lacks `{change.partition('=')[0]}`"):
        read_recipe("finetune", (*NEEDED, change))


@pytest.mark.parametrize(
    "change", ['train=[a, ""]', 'held_out=""', 'tokenizer=""', 'column=""', 'split=""', 'held_out_split=""']
)
def test_an_empty_name_in_a_list_or_an_optional_key_is_refused(change):
    with pytest.raises(ValueError, match=f"`{change.partition('=')[0]}` of the recipe is empty"):
        read_recipe("finetune", (*NEEDED, change))


@pytest.mark.parametrize(
    "content, message",
    [
        (b"model: [m\n", "is broken YAML: .* line 2"),
        (b"- a\n- b\n", "is not a recipe: it must hold `key: value` lines"),
        (b"[]", "is not a recipe: it must hold `key: value` lines"),
        (b"0", "is not a recipe: it must hold `key: value` lines"),
        (bytes(range(128, 256)), "is not text in UTF-8"),
        (b"a\x00b", "is broken YAML"),
        (b"1: 2\n", "A recipe has no `1`"),
        (b"steps: 2026-02-30\n", "is broken YAML: day is out of range"),
        (b"model: !!python/object:os.system {}\n", "is broken YAML: could not determine a constructor"),
    ],
    ids=["unclosed", "list", "empty-list", "naught", "binary", "zero", "number", "date", "object"],
)
def test_a_file_that_is_not_a_recipe_is_named(content, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_recipe(path, NEEDED)
    assert str(path) in str(caught.value) or "has no `1`" in message


def test_a_name_may_look_like_a_number_or_a_date():
    recipe = read_recipe("finetune", ("model=7", "train=[1, 2026-01-31]", "out=2026-01-31"))
    assert (recipe.model, recipe.train, recipe.out) == ("7", ("1", "2026-01-31"), "2026-01-31")


def test_missing_keys_and_files_are_named():
    with pytest.raises(
        ValueError, match=r"The recipe lacks `model` and `train` and `out`: give model=\.\.\. train=\.\.\. out="
    ):
        read_recipe("finetune")
    with pytest.raises(
        FileNotFoundError, match=r"no file pretrian, and no recipe of that name. The recipes are finetune, heal"
    ):
        read_recipe("pretrian")


@pytest.mark.parametrize("text", ["on", "no", "007", "3.10", "1e3", "1_000", "0x1F", "2026-01-31"])
@pytest.mark.parametrize("in_file", [False, True])
def test_names_are_taken_as_they_are_written(text, in_file, tmp_path):
    """YAML reads these as booleans, numbers or a date."""
    lines = [f"{name}={text}" for name in ("model", "out", "column", "tokenizer")] + [f"train=[{text}, b.txt]"]
    path = tmp_path / "recipe.yaml"
    path.write_text("steps: 3\n" + "".join(line.replace("=", ": ", 1) + "\n" for line in lines if in_file))
    recipe = read_recipe(path, [] if in_file else lines)
    assert {recipe.model, recipe.out, recipe.column, recipe.tokenizer} == {text}
    assert recipe.train == (text, "b.txt")
    assert read_recipe(path, ["steps=4", *lines, "tokenizer=null"]).tokenizer is None


def test_null_leaves_a_switch_of_the_trainer_off():
    switches = ("bf16", "fp16", "load_best_model_at_end", "dataloader_pin_memory")
    changes = ["model=m", "train=a.txt", "out=o", "steps=1", *(f"trainer.{name}=null" for name in switches)]
    assert read_recipe("finetune", changes).trainer.given() == dict.fromkeys(switches)
