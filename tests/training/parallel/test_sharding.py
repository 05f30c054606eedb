"""Shardings of a model are read, checked and refused in one process, and engines find the family's layers."""

import re
from dataclasses import fields, replace

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.distributed import DistributedConfig

from attnres.conversion import retrofit
from attnres.training.launch import Launch, check_launch, read_launch
from attnres.training.parallel.sharding import _joins_tensors, check_fsdp2, describe_sharding, make_sharding
from attnres.training.recipe import Recipe, read_recipe
from attnres.training.settings import ShardingSettings
from attnres.training.trainer import AttnResTrainer

from ...modeling_attnres.kimi_k3_release import write_packed
from ..running import ACCELERATE_YAMLS


@pytest.mark.parametrize(
    "settings, message",
    [
        ("{fsdp_sise: 2}", "`distributed` has no `fsdp_sise`. Did you mean `fsdp_size`?"),
        ("{pp_size: 2}", "`distributed` has no `pp_size`."),
        ("{fsdp_size: two}", "`distributed.fsdp_size` of the recipe is 'two', but must be a whole number."),
        ("{tp_size: 0}", "`distributed.tp_size` of the recipe is 0, but must be at least 1."),
        (
            "{fsdp_size: 4, ep_size: 3}",
            "`distributed.ep_size` of the recipe is 3, but must be a multiple of `tp_size`",
        ),
        ("{fsdp_size: 2}", "among 2 processes, but this run has 1. Start it by `accelerate launch --multi_gpu "),
        ("{fsdp_size: 2, tp_size: 2}", "among 4 processes, but this run has 1."),
    ],
)
def test_an_impossible_sharding_is_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        recipe = read_recipe("pretrain", ("model=x", "train=y", "out=z", f"distributed={settings}"))
        check_launch(recipe, Launch())


def test_sharding_by_two_engines_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    recipe = Recipe("x", ("y",), "z", steps=1, distributed={"fsdp_size": 2})
    with pytest.raises(ValueError, match="accelerate's FSDP would both shard the model"):
        check_launch(recipe, read_launch())


def test_deepspeed_is_refused_for_muon_and_for_models_in_parts_from_the_start(monkeypatch):
    recipe = Recipe("x", ("y",), "z", steps=1)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_INIT", "false")
    check_launch(recipe, read_launch())
    with pytest.raises(ValueError, match=r"Muon needs whole matrices, .* set optimizer=adamw"):
        check_launch(replace(recipe, optimizer="muon"), read_launch())
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_INIT", "true")
    with pytest.raises(ValueError, match="set `zero3_init_flag: false`"):
        check_launch(recipe, read_launch())


def test_a_switch_of_the_launcher_that_is_neither_true_nor_false_is_named(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "perhaps")
    with pytest.raises(ValueError, match=r"^`ACCELERATE_USE_FSDP` of the environment is 'perhaps', but must be "):
        read_launch()


def test_the_engines_of_the_recipe_are_fields_of_transformers_distributed_config():
    fields_of_transformers = {item.name for item in fields(DistributedConfig)}
    assert ShardingSettings.model_fields.keys() - {"sequence_parallel"} <= fields_of_transformers


def test_sharding_by_the_trainer_is_refused_in_a_single_process():
    recipe = Recipe("x", ("y",), "z", steps=1, trainer={"fsdp": "full_shard"})
    with pytest.raises(ValueError, match="but this run was not launched as several: start it by `accelerate launch`"):
        check_launch(recipe, Launch())


def test_loading_on_the_first_process_alone_is_refused_if_buffers_are_saved(tiny_model, monkeypatch, assets):
    path = next(path for path in ACCELERATE_YAMLS if path.stem == "fsdp2")
    flags = yaml.safe_load(path.read_text())["fsdp_config"] | {"fsdp_cpu_ram_efficient_loading": True}
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for name in ("fsdp_version", "fsdp_cpu_ram_efficient_loading"):  # as `accelerate launch` sets them
        monkeypatch.setenv(name.upper(), str(flags[name]).lower())
    with pytest.raises(ValueError, match=r"`fsdp_cpu_ram_efficient_loading: true`: its .*e_score_correction_bias"):
        check_fsdp2(tiny_model())
    check_fsdp2(retrofit(str(assets / "checkpoints" / "stories260K-hf")))
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    check_fsdp2(tiny_model())


def test_parameters_of_two_dtypes_are_refused_by_accelerates_fsdp2_without_mixed_precision(tiny_model, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    model = tiny_model().bfloat16()
    with pytest.raises(ValueError, match=r"parameters in bfloat16 and float32. Load it in float32"):
        check_fsdp2(model)
    check_fsdp2(model.float())
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    check_fsdp2(model.bfloat16())


def test_deepspeed_that_accelerate_ignores_on_cpus_is_refused(tiny_model, monkeypatch, tmp_path):
    """Each process would train a whole model, and nothing would say so."""
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = AttnResTrainer(tiny_model(), Recipe("x", ("y",), "z", steps=1), arguments)
    assert describe_sharding(trainer, None) == "1 process"
    # As `accelerate launch` sets it, but here after the trainer is made, which with it would import DeepSpeed.
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(RuntimeError, match=r"told to shard the model by DeepSpeed, .* give ddp\.yaml") as error:
        describe_sharding(trainer, None)
    assert "\n" not in str(error.value)


def test_a_model_that_one_process_holds_is_not_sharded():
    assert make_sharding(None) is None
    assert make_sharding(ShardingSettings(fsdp_size=1)) is None


def test_a_release_of_kimi_k3_needs_no_copy_to_be_sharded(tiny_model, tiny_kimi_k3, tmp_path):
    """The copy would take the memory and the disk of the whole model. Kimi Linear's convolutions need it."""
    for source in (tiny_kimi_k3, write_packed(tmp_path / "packed")):
        assert not _joins_tensors(str(source), AutoModelForCausalLM)
    tiny_model().save_pretrained(tmp_path / "hybrid")
    assert _joins_tensors(str(tmp_path / "hybrid"), AutoModelForCausalLM)


def test_adapters_of_matrices_that_are_cut_are_refused():
    changes = ("model=x", "train=y", "out=z", "distributed={tp_size: 2}")
    with pytest.raises(ValueError, match="`lora` of the recipe does not work with `tp_size` of `distributed`"):
        read_recipe("lora", changes)


@pytest.mark.parametrize("path", ACCELERATE_YAMLS, ids=lambda path: path.stem)
def test_accelerate_knows_every_key_of_the_configurations(path):
    config = load_config_from_file(str(path))  # refuses unknown keys, except in the parts of the engines
    options = {action.dest for action in launch_command_parser()._actions}
    assert {*config.fsdp_config, *config.deepspeed_config} <= options
    assert path.read_text().startswith("# ")


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_sharded_model_is_saved_with_its_own_code(tiny_model, one_process, tmp_path):
    tiny_model().save_pretrained(tmp_path / "whole")
    fully_shard(model := tiny_model())
    state = {name: tensor.full_tensor() for name, tensor in model.named_parameters()}
    model.save_pretrained(tmp_path / "sharded", state_dict=model.state_dict() | state)
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("whole", "sharded")]
    assert files[0] == files[1]


def test_engines_find_the_decoder_layers_of_the_family(tiny_model, assets):
    models = (tiny_model(), retrofit(str(assets / "checkpoints" / "stories260K-hf")))
    for model, name in zip(models, ("AttnResDecoderLayer", "AttnResLlamaDecoderLayer"), strict=True):
        for part in (model, model.model):
            assert set(part._no_split_modules) == {name}
        assert {type(layer).__name__ for layer in model.model.layers} == {name}
