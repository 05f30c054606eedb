"""Commands take Kimi K3 like any model of the family, and never build plain Kimi Linear from its fields."""

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import lm_eval
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import Modality

from attnres import AttnResKimiK3ForCausalLM
from attnres.analysis.axis import depth_axis
from attnres.checkpoints.source import ModelSource
from attnres.checkpoints.tokenizers import load_tokenizer
from attnres.checkpoints.whole import load_whole
from attnres.commands.eval import EvaluatedModel
from attnres.commands.eval import _load_model as load_evaluated
from attnres.commands.inspect import InspectedSource
from attnres.eval.benchmarks import benchmarks, load
from attnres.eval.shared_prefix import SharedPrefixLM
from attnres.eval.stored_results import ResultStore
from attnres.kimi_k3_attnres import KimiK3Experts, KimiK3PackedExperts
from attnres.kimi_k3_shapes_attnres import released_shapes
from attnres.publishing.publication import make_publication
from attnres.residual_attnres import FamilyWarning
from attnres.training.lora import add_adapters, load_adapter
from attnres.training.measures import flops_per_token

from .. import forks
from ..checkpoints.kimi_release import BYTE_OF, write_tokenizer
from ..conversion.checkpoints import Run, convert_well, files_of, run_attnres, save_tokenizer
from ..modeling_attnres import kimi_k3_release as release

SHORT = ("length=32", "batch_size=2", "steps=2", "held_out_sequences=2", "log_every=1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with `release` (composite, packed), `text` (the text model alone) and `text.txt`."""
    folder = tmp_path_factory.mktemp("kimi-k3")
    fields = release.text_fields(vocab_size=300)
    tensors = release.random_tensors(fields)
    packed, _ = release.pack_experts(tensors)
    release.write(folder / "packed", fields | {"quantization_config": release.QUANTIZATION}, packed, vision=True)
    release.write(folder / "text", fields, tensors, layout="text")
    for name in ("packed", "text"):
        save_tokenizer(folder / name)
    convert_well(folder / "packed", folder / "converted")
    (folder / "text.txt").write_text(" ".join(f"number {i} times itself is {i * i}." for i in range(400)))
    return folder


def run_well(*arguments: str | Path) -> Run:
    run = run_attnres(*arguments)
    assert run.code == 0, run.err
    return run


@pytest.mark.parametrize("command", ["inspect", "push", "finetune", "lora"])
def test_a_text_model_that_names_kimi_linear_is_refused_with_the_remedy(folder, tmp_path, command):
    source, out = folder / "text", tmp_path / "out"
    arguments = {
        "inspect": ("inspect", source, "--out", out, "--text", folder / "text.txt"),
        "push": ("push", source, "me/model", "--dry-run"),
        "finetune": ("train", "finetune", f"model={source}", f"train={folder / 'text.txt'}", f"out={out}", *SHORT),
        "lora": ("train", "lora", f"model={source}", f"train={folder / 'text.txt'}", f"out={out}", *SHORT),
    }
    line = run_attnres(*arguments[command]).error
    assert "holds Kimi K3" in line and f"`attnres convert {source} OUT`" in line


@pytest.mark.parametrize("command", ["inspect", "push", "finetune"])
def test_a_wrong_field_of_a_release_is_named_with_its_file(folder, tmp_path, command):
    source, out = tmp_path / "release", tmp_path / "out"
    release.write(source, release.text_fields(moe_magic=3), release.random_tensors(release.text_fields()))
    arguments = {
        "inspect": ("inspect", source, "--out", out, "--text", folder / "text.txt"),
        "push": ("push", source, "me/model", "--dry-run"),
        "finetune": ("train", "finetune", f"model={source}", f"train={folder / 'text.txt'}", f"out={out}", *SHORT),
    }
    line = run_attnres(*arguments[command]).error
    assert "`moe_magic` (3)" in line and str(source / "config.json") in line


def test_a_publication_of_a_release_without_its_code_names_the_conversion(folder):
    assert f"`attnres convert {folder / 'packed'} OUT`" in run_attnres("push", folder / "packed", "me/model").error


def test_an_evaluation_refuses_a_text_model_that_names_kimi_linear(folder, assets, tmp_path):
    with pytest.raises(ValueError, match=r"holds Kimi K3.*attnres convert"):
        SharedPrefixLM(pretrained=str(folder / "text"), device="cpu")
    data = ("--data", assets / "hub", "--tasks", "hellaswag")
    assert "holds Kimi K3" in run_attnres("eval", folder / "text", "--out", tmp_path, *data).error


def test_an_evaluation_and_an_inspection_keep_experts_packed(folder, tmp_path):
    source = ModelSource(str(folder / "packed"))
    evaluated = load_evaluated(EvaluatedModel("packed", source, source.tokenizer(), ResultStore(tmp_path, {})), 2)
    inspected, _ = InspectedSource(source.name).load()
    for model in (evaluated.model, inspected):
        assert {type(layer.mlp.experts) for layer in model.model.layers[1:]} == {KimiK3PackedExperts}
    unpacked = SharedPrefixLM(pretrained=source.name, device="cpu")
    assert {type(layer.mlp.experts) for layer in unpacked.model.model.layers[1:]} == {KimiK3Experts}
    counts = [lm.get_model_info()["model_num_parameters"] for lm in (evaluated, unpacked)]
    assert counts[0] == counts[1] == unpacked.model.num_parameters()


def test_an_evaluation_takes_an_adapter_on_packed_experts_that_is_loaded_before(folder, tmp_path):
    source = str(folder / "packed")
    add_adapters(ModelSource(source).build(packed_experts=True), rank=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="PEFT does not load an adapter onto packed experts: leave out"):
        SharedPrefixLM(source, peft=str(tmp_path), packed_experts=True, device="cpu")
    adapted = load_adapter(ModelSource(source).build(packed_experts=True), tmp_path)
    lm = SharedPrefixLM(adapted, tokenizer=source)
    assert lm.model is adapted and lm.loglikelihood_rolling([SimpleNamespace(args=("One and one",))])[0] < 0


def check_inspection(source: Path, text: Path, out: Path) -> None:
    """Inspect a release, and assert that each block of layers is a source."""
    few = ("--tokens", "128", "--length", "64", "--intervention-tokens", "64")
    with pytest.warns(FamilyWarning, match=r"vision_tower\.\*: 15 tensors\."):
        run = run_well("inspect", source, "--out", out, "--text", text, *few)
    (model,) = json.loads((out / "inspection.json").read_text())["models"]
    assert model["depth"]["sources"] == ["embedding", "block 1", "block 2", "block 3"]
    assert model["depth"]["block_size"] == 6  # three layers of two sublayers
    assert all(f"{source.name}: {name}\n" in run.out for name in ("depth attention", "magnitudes", "interventions"))
    assert "source: block of 3 layers" in (out / "depth_attention.svg").read_text()


@pytest.mark.slow
def test_commands_take_a_release_with_its_own_tokenizer_as_it_is(tmp_path):
    """The table, the chat format and the control tokens of the release, without running its code."""
    source, chat = tmp_path / "k3", tmp_path / "chat.jsonl"
    release.write_packed(source, vision=True, vocab_size=512)
    write_tokenizer({character: byte for character, byte in BYTE_OF.items()}, source)
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "Four."}]
    chat.write_text(f"{json.dumps({'messages': turns})}\n" * 24)
    sizes = ("length=1024", "batch_size=2", "steps=2", "held_out_sequences=2")
    run_well("train", "sft", f"model={source}", f"train={chat}", f"out={tmp_path / 'run'}", *sizes)
    (tmp_path / "text.txt").write_text("One and one make two. " * 20)
    check_inspection(source, tmp_path / "text.txt", tmp_path / "inspected")
    convert_well(source, tmp_path / "converted")
    folders = (tmp_path / "run" / "model", tmp_path / "converted")
    ours, *copies = [load_tokenizer(source), *(AutoTokenizer.from_pretrained(folder) for folder in folders)]
    text = ours.apply_chat_template(turns, tokenize=False)
    assert text.endswith("Four.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>")
    for copy in copies:
        assert copy(text)["input_ids"] == ours(text)["input_ids"]
        assert copy.apply_chat_template(turns, tokenize=False) == text
    assert SharedPrefixLM(pretrained=str(source), device="cpu").tok_encode("<|sep|>") == [256 + 5]


@pytest.mark.slow
@torch.no_grad()
def test_transformers_serve_loads_a_release_as_a_language_model(folder):
    manager = ModelManager(device="cpu", dtype="float32")
    try:
        model, tokenizer = manager.load_model_and_processor(manager.process_model_name(str(folder / "packed")))
        assert type(model) is AttnResKimiK3ForCausalLM
        assert manager.get_model_modality(model) is Modality.LLM
        ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
        expected = AutoModelForCausalLM.from_pretrained(folder / "packed", dtype=torch.float32)(ids).logits
        assert model(ids).logits.equal(expected)
    finally:
        manager.shutdown()


def test_each_block_of_layers_is_a_source(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "packed")
    weights = model(torch.tensor([[5, 6, 7]]), output_depth_attentions=True).depth_attentions
    depth = depth_axis(model, [1 if of_consumer is None else len(of_consumer) for of_consumer in weights])
    assert depth.sources == ("embedding", "block 1", "block 2", "block 3")
    assert (depth.block_size, depth.block) == (6, "block of 3 layers")


def test_a_publication_counts_unpacked_parameters_and_names_the_layout(folder):
    publication = make_publication(folder / "converted")
    config = publication.subject.config
    count = sum(math.prod(shape) for shape in released_shapes(config).values())
    assert publication.subject.parameters == count
    card = publication.card_for("me/model", None)
    assert "composite model, under `language_model`, with routed experts packed as MXFP4, with a vision part" in card
    assert "`kimi_k3` architecture" in card and f"{count:,} parameters" in card


def test_a_publication_can_be_undone_to_the_release(folder, tmp_path):
    publication = make_publication(folder / "converted")
    for name, path in publication.files.items():
        (tmp_path / "downloaded" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, tmp_path / "downloaded" / name)
    convert_well(tmp_path / "downloaded", tmp_path / "again", "--to", "released", "--no-verify")
    before, after = files_of(folder / "packed"), files_of(tmp_path / "again")
    assert after == before


@pytest.fixture(scope="module")
def trained(folder) -> tuple[Path, Run]:
    """Return the folder of a small model that was trained from scratch, and the run."""
    changes = "config={num_experts: 4, linear_attn_config: {gate_lower_bound: -3}}"
    run = run_well(
        *("train", "pretrain", "model=attnres-k3-tiny", changes, f"tokenizer={folder / 'text'}"),
        *(f"train={folder / 'text.txt'}", f"out={folder / 'trained'}", *SHORT),
    )
    return folder / "trained" / "model", run


@pytest.mark.slow
def test_a_small_model_is_trained_from_scratch_and_saved_in_the_released_layout(trained):
    saved, run = trained
    assert "blocks of 2 layers" in run.out
    count = f"{make_publication(saved).subject.parameters:,}"
    assert f"Parameters: {count}, of which all are trained" in run.out
    assert f"{count} parameters" in (saved / "README.md").read_text()
    config = json.loads((saved / "config.json").read_text())
    assert config["model_type"] == "kimi_k3"
    text = config["text_config"]
    assert (text["num_experts"], text["linear_attn_config"]["gate_lower_bound"]) == (4, -3)
    assert all(name.startswith("language_model.") for name in load_file(saved / "model.safetensors"))
    assert "released layout of Kimi K3" in (saved / "README.md").read_text()
    assert type(AutoModelForCausalLM.from_pretrained(saved)) is AttnResKimiK3ForCausalLM


@pytest.mark.parametrize(("optimizer", "values"), [("adamw", 4), ("muon", 3)])
def test_a_model_whose_training_takes_more_than_the_memory_is_refused_before_any_work(
    folder, tmp_path, monkeypatch, optimizer, values
):
    """AdamW keeps two moments of each parameter beside weight and gradient, and Muon one."""
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)  # otherwise only the weights are in memory
    data = (f"tokenizer={folder / 'text'}", f"train={folder / 'text.txt'}", f"out={tmp_path / 'out'}")
    line = run_attnres("train", "pretrain", "model=kimi-k3", f"optimizer={optimizer}", *data, *SHORT).error
    assert re.search(r"kimi-k3 has 2,77\d,\d{3},\d{3},\d{3} parameters, whose weights, gradients and moments", line)
    (size,) = re.findall(rf"\({optimizer}\) in bfloat16 take ([\d.]+) GB of memory", line)
    assert float(size) == pytest.approx(2 * values * 2777.1, rel=1e-4)
    assert "Choose a smaller configuration" in line


def test_a_checkpoint_that_is_larger_than_the_memory_is_refused_before_it_is_loaded(folder, tmp_path, monkeypatch):
    source = folder / "packed"
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(source).parameters())
    memory = SimpleNamespace(available=2 * parameters - 1)  # the release is in bfloat16
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    with pytest.raises(ValueError, match=rf"the weights of {source} take .* MB of memory, but .* are free"):
        load_whole(AutoModelForCausalLM, str(source), device_map="cpu")
    packed = AutoModelForCausalLM.from_pretrained(source, packed_experts=True, dtype=torch.float32)
    memory.available = sum(parameter.nbytes for parameter in packed.parameters()) - 1
    with pytest.raises(ValueError, match=r"take .* of memory"):
        load_whole(AutoModelForCausalLM, str(source), packed_experts=True, dtype="float32")
    memory.available += 1
    load_whole(AutoModelForCausalLM, str(source), packed_experts=True, dtype="float32")
    memory.available = 2 * parameters
    assert load_whole(AutoModelForCausalLM, str(source), device_map="cpu").dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"take .* of memory"):
        load_whole(AutoModelForCausalLM, str(source), dtype="float32")


@pytest.mark.slow
def test_a_small_model_learns_conversations(trained, tmp_path):
    model, data = shutil.copytree(trained[0], tmp_path / "model"), tmp_path / "chats.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content + '\n' }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(model)
    turns = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i} ok."}] for i in range(60)]
    data.write_text("\n".join(json.dumps({"messages": messages}) for messages in turns))
    settings = ("length=64", "batch_size=4", "steps=8", "learning_rate=3e-3", "held_out_sequences=2", "log_every=1")
    run_well("train", "sft", f"model={model}", f"train={data}", f"out={tmp_path / 'out'}", *settings)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    losses = [loss for _, loss in results["training_loss"]]
    assert losses[-1] < 0.9 * losses[0]
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")) is AttnResKimiK3ForCausalLM


@pytest.mark.slow
@torch.no_grad()
def test_benchmarks_of_choices_and_of_text_score_a_trained_model_as_the_stock_harness(trained, assets, tmp_path):
    saved, out, data = trained[0], tmp_path / "out", assets / "hub"
    command = ("-m", "attnres_cli", "eval", saved, "--out", out, "--data", data, "--tasks", "arc_challenge,cmath")
    run = forks.run(*command, "--limit", "1")
    assert run.returncode == 0, run.stderr
    lm = HFLM(AutoModelForCausalLM.from_pretrained(saved), tokenizer=AutoTokenizer.from_pretrained(saved))
    for benchmark in ("arc_challenge", "cmath"):
        expected = lm_eval.evaluate(lm, load(benchmarks()[benchmark], data), limit=1, bootstrap_iters=0)["samples"]
        for task, samples in expected.items():
            actual = json.loads((out / "model" / f"{task}.json").read_text())["samples"]
            assert len(actual) == len(samples) > 0
            for sample, reference in zip(actual, samples):
                if benchmark == "cmath":
                    assert sample["resps"] == reference["resps"]
                else:
                    ours, stock = ([value for ((value, _),) in one["resps"]] for one in (sample, reference))
                    assert ours == pytest.approx(stock, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["finetune", "lora"])
def test_packed_weights_are_trained_on(folder, tmp_path, recipe):
    source, out = folder / "packed", tmp_path / "out"
    merged = ("merge=true",) if recipe == "lora" else ()
    with pytest.warns(FamilyWarning) as caught:
        arguments = (f"model={source}", f"train={folder / 'text.txt'}", f"out={out}", *merged, *SHORT)
        run = run_well("train", recipe, *arguments)
    assert ("experts packed as MXFP4" in run.out) == (recipe == "lora")
    message, *others = (str(warning.message) for warning in caught if warning.category is FamilyWarning)
    assert "Left out of the checkpoint" in message and "vision_tower.*: 15 tensors." in message
    assert len(others) == bool(merged) and all("packing these again moved them" in other for other in others)
    card = (out / "model" / "README.md").read_text()
    left_out = "the vision part is left out" + ("" if merged else " and packed experts are saved unpacked")
    assert f"Of the source, {left_out}." in card
    before = AutoModelForCausalLM.from_pretrained(source).state_dict()
    after = AutoModelForCausalLM.from_pretrained(out / "model").state_dict()
    changed = {name for name, tensor in after.items() if not tensor.equal(before[name].to(tensor.dtype))}
    # After a few small steps, experts that are packed again are what they were, as the warning says.
    for part in (
        "self_attn.kv_b_proj",
        "self_attn.g_proj",
        "mlp_res_proj",
        *(() if merged else ("experts.down_proj",)),
    ):
        assert any(part in name for name in changed), part
    config = json.loads((out / "model" / "config.json").read_text())
    assert ("quantization_config" in config["text_config"]) == bool(merged)
    assert "model.layers.0.self_attention_res_proj.weight" not in changed


@pytest.mark.parametrize(
    ("recipe", "source", "words"),
    [
        ("finetune", "packed", "`packed_experts` in `config` freezes the experts"),
        ("lora", "plain", "the experts of .*plain are not packed"),
    ],
)
def test_packed_experts_that_a_recipe_cannot_have_are_refused(folder, tmp_path, recipe, source, words):
    AutoModelForCausalLM.from_pretrained(folder / "packed").save_pretrained(tmp_path / "plain")
    model = folder / source if source == "packed" else tmp_path / source
    arguments = (f"model={model}", f"train={folder / 'text.txt'}", f"out={tmp_path / 'out'}")
    run = run_attnres("train", recipe, *arguments, "config={packed_experts: true}", *SHORT)
    assert re.search(words, run.error) and "\n" not in run.error.strip()
    assert not (tmp_path / "out").exists()


def test_flops_count_the_layers_experts_and_heads_of_the_released_shapes(folder):
    config = AutoModelForCausalLM.from_pretrained(folder / "packed").config
    shapes = {name: shape for name, shape in released_shapes(config).items() if "embed_tokens" not in name}
    activated = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        activated += size // 4 if ".experts." in name else size  # two of eight experts
    softmax = 3 * 2 * 4 * (8 + 4 + 6) * 100  # layers, heads, sizes of query and value, length
    linear = 4 * 6 * 3 * 8 * 8
    assert flops_per_token(config, 100) == 6 * activated + 3 * (softmax + linear)


def test_the_list_counts_the_released_size():
    lines = run_well("list", "configurations").out.splitlines()
    (line,) = [line for line in lines if "kimi-k3 " in line]
    assert "2.78T parameters" in line and "104.19B with lm_head" in line
