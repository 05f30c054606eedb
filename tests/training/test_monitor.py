"""The monitor: tokens/s over the time of training, FLOPs against counts by hand, depth attention, magnitudes."""

import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainerState, TrainingArguments

from attnres import peft_modules_to_save
from attnres.configuration import load
from attnres.conversion import retrofit
from attnres.training import callbacks as module
from attnres.training.callbacks import ExpertBalance, Monitor
from attnres.training.measures import depth_attention_summary, flops_per_token, peak_flops

from .running import BLOCKS, sizes_by_hooks, train


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that stands still until `clock(seconds)` moves it."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


class Work(TrainerCallback):
    """A callback that moves the clock by the time of each part of a run."""

    def __init__(self, clock):
        self.clock = clock

    def on_step_begin(self, *args, **kwargs):
        self.clock(2.0)

    def on_prediction_step(self, *args, **kwargs):
        self.clock(100.0)


# --- throughput


@pytest.mark.slow
def test_tokens_per_second_leave_out_the_time_of_evaluation(tiny_model, tmp_path, clock):
    lines = train(
        tiny_model(), tmp_path, Monitor(), Work(clock), steps=6, eval_strategy="steps", eval_steps=3, save_strategy="no"
    )
    # 48 tokens in a step of two seconds, whether or not the window held an evaluation of 400.
    assert [line["tokens_per_second"] for line in lines] == [pytest.approx(24.0)] * 3


def test_by_a_real_clock_the_windows_take_less_time_than_the_run(tiny_model, tmp_path):
    start = time.perf_counter()
    lines = train(tiny_model(), tmp_path, Monitor(), steps=6)
    seconds = time.perf_counter() - start
    # The windows lie in the run, one after the other, however long each takes.
    assert 0 < sum(2 * 48 / line["tokens_per_second"] for line in lines) < seconds


def test_each_window_is_measured_once(tiny_model, tmp_path):
    monitor = Monitor()
    lines = train(tiny_model(), tmp_path, monitor)
    assert monitor.metrics() == {}
    assert len(lines) == 2
    assert lines[0]["tokens_per_second"] != lines[1]["tokens_per_second"]


def test_windows_may_be_epochs(tiny_model, tmp_path, clock):
    lines = train(tiny_model(), tmp_path, Monitor(), Work(clock), logging_strategy="epoch")
    assert [line["tokens_per_second"] for line in lines] == [pytest.approx(24.0)] * 2


# --- model FLOP use


def test_the_flops_of_a_dense_model_equal_a_count_by_hand():
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    attention = 32 * 32 + 2 * 32 * 16 + 32 * 32
    parameters = 3 * (attention + 3 * 32 * 48 + 2 * 32) + 32 + 100 * 32
    assert flops_per_token(config, 64) == 6 * parameters + 12 * 3 * 4 * 8 * 64


def test_the_flops_of_a_model_with_experts_count_the_parameters_that_a_token_uses(tiny_model):
    config = tiny_model().config
    model = tiny_model()
    idle = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name) * 6 // 8
    stored = sum(tensor.numel() for tensor in model.state_dict().values())  # with the biases of the routers
    parameters = stored - model.model.embed_tokens.weight.numel() - idle
    mla, kda = 2 * 2 * 4 * (16 + 8 + 16), 2 * 6 * 2 * 16 * 16
    assert flops_per_token(config, 10) == 6 * parameters + 3 * (mla * 10 + kda)


def test_depth_attention_adds_less_than_a_hundredth_as_the_documentation_says():
    config = load("attnres-194m", attn_res_block_size=1)
    sources = sum(range(2, 2 * config.num_hidden_layers + 2))
    assert 3 * 4 * config.hidden_size * sources < 0.01 * flops_per_token(config, 8192)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("AMD Instinct MI300X", 1307.4e12),
        ("cpu", None),
    ],
)
def test_the_peak_is_found_by_the_name_of_the_device_or_unknown(name, peak):
    assert peak_flops(name) == peak


@pytest.mark.slow
def test_flop_use_is_the_share_of_the_peak_and_absent_if_the_peak_is_unknown(tiny_model, tmp_path, monkeypatch):
    model = tiny_model()
    assert all("model_flop_use" not in line for line in train(model, tmp_path, Monitor()))
    monkeypatch.setattr(module, "device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    for line in train(model, tmp_path, Monitor()):
        expected = line["tokens_per_second"] * flops_per_token(model.config, 12) / 312e12
        assert line["model_flop_use"] == pytest.approx(expected)
    model.lm_head.weight.requires_grad_(False)  # its gradient is not computed, so 6 N would be too much
    assert all("model_flop_use" not in line for line in train(model, tmp_path, Monitor()))


# --- depth attention


def test_the_measures_of_spread_are_extreme_for_uniform_weights_and_for_a_single_source():
    uniform = torch.full((4, 1, 3), 0.25)
    nearest = torch.zeros(3, 1, 3)
    nearest[-1] = 1.0
    alone = torch.ones(1, 1, 3)
    of_uniform, of_nearest = (depth_attention_summary((alone, weights)) for weights in (uniform, nearest))
    names = ("depth_entropy", "depth_distance", "depth_weight_nearest", "depth_weight_embedding")
    assert of_uniform == dict(zip(names, (1.0, 0.0, 0.25, 0.25)))
    assert of_nearest == dict(zip(names, (0.0, pytest.approx(2 / 3), 1.0, 0.0)))
    assert depth_attention_summary((uniform, nearest))["depth_entropy"] == 0.5
    assert depth_attention_summary((alone,)) == {}


def test_weights_that_do_not_add_up_to_one_count_as_shares():
    weights = torch.tensor([0.3, 0.1, 0.2])[:, None, None]
    summary = depth_attention_summary((weights,))
    assert summary == {name: pytest.approx(value) for name, value in depth_attention_summary((weights / 0.6,)).items()}
    assert summary["depth_distance"] == pytest.approx(1 / 2 - 1 / 3)


class Slices(Monitor):
    """A monitor that keeps the tokens it measures on."""

    def __init__(self, *args):
        super().__init__(*args)
        self.slices = []

    def _slice(self):
        arguments = super()._slice()
        self.slices.append(arguments["input_ids"])
        return arguments


def test_a_fresh_model_reads_uniformly_and_another_model_by_its_weights(tiny_model, tiny_config, tmp_path):
    torch.manual_seed(0)
    fresh = type(tiny_model())(tiny_config())
    line = train(fresh, tmp_path, Monitor(), steps=1, logging_steps=1, learning_rate=0.0)[0]
    assert line["depth_entropy"] == pytest.approx(1.0, abs=1e-6)
    assert line["depth_distance"] == pytest.approx(0.0, abs=1e-6)
    assert line["depth_weight_nearest"] == pytest.approx(line["depth_weight_embedding"])

    model = tiny_model()
    seen, monitor = [], Slices(5)
    handle = model.register_forward_pre_hook(lambda model, args, kwargs: seen.append(kwargs), with_kwargs=True)
    line = train(model, tmp_path, monitor, steps=1, logging_steps=1, learning_rate=0.0)[0]
    handle.remove()
    (ids,) = monitor.slices
    assert torch.equal(ids, seen[1]["input_ids"][:1, :5])  # the second micro-batch; the third pass is the slice
    assert len(seen) == 3
    with torch.no_grad():
        weights = model.eval()(ids, output_depth_attentions=True).depth_attentions
    rows = [a for a in weights if len(a) > 1]
    entropy = [(-(a * a.log()).sum(0) / torch.tensor(float(len(a))).log()).mean() for a in rows]
    distance = [torch.maximum(a, torch.tensor(1 / len(a))).sum(0).mean() - 1 for a in rows]  # the weight above uniform
    assert line["depth_entropy"] == pytest.approx(torch.stack(entropy).mean().item(), rel=1e-5)
    assert line["depth_distance"] == pytest.approx(torch.stack(distance).mean().item(), rel=1e-5)
    assert line["depth_weight_embedding"] == pytest.approx(sum(a[0].mean().item() for a in rows) / len(rows), rel=1e-5)
    assert line["depth_entropy"] < 0.95
    assert line["depth_distance"] > 0.1


# --- magnitudes


# One connection of each kind of state; `tests/analysis/test_magnitudes.py` measures the others by the same class.
@pytest.mark.parametrize("connection", ["standard", "attn_res", "denseformer", "dca", "gated_residual", "mhc"])
def test_magnitudes_are_the_sizes_of_the_sublayers_inputs(connection, tiny_model, tmp_path):
    model, monitor = tiny_model(residual_connection=connection), Slices()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(30.0)  # so that no two sizes are nearly the same
    line = train(model, tmp_path, monitor, steps=1, logging_steps=1, learning_rate=0.0)[0]
    sizes = sizes_by_hooks(model, monitor.slices[0])
    assert line["magnitude_output"] == pytest.approx(sizes[-1].item(), rel=1e-4)
    assert line["magnitude_growth"] == pytest.approx((sizes[-1] / sizes[0]).item(), rel=1e-4)
    assert line["magnitude_largest"] == pytest.approx(sizes[:-1].max().item(), rel=1e-4)
    assert any(name.startswith("depth") for name in line) == (connection == "attn_res")


@pytest.mark.slow
def test_the_residual_stream_grows_and_attention_residuals_stay_bounded(tiny_model, tmp_path):
    """Each sublayer is changed so that its output is large beside the embedding, whatever its input."""
    growth = {}
    for connection in ("standard", "attn_res"):
        model = tiny_model(residual_connection=connection, num_hidden_layers=8, layer_types=["full_attention"] * 8)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.normal_(std=1.0)
        line = train(model, tmp_path, Monitor(), steps=1, logging_steps=1, learning_rate=0.0)[0]
        growth[connection] = line["magnitude_growth"]
    assert growth["standard"] > 1.5 * growth["attn_res"] > 1


@pytest.mark.slow
def test_padding_is_not_measured(tiny_model, tmp_path):
    """Texts with more padding on the left than the slice has tokens give the same lines as texts without padding."""
    rows = [{"input_ids": block, "labels": block} for block in BLOCKS]
    padding = torch.zeros(6, dtype=torch.long)
    padded = [
        {
            "input_ids": torch.cat([padding, block]),
            "labels": torch.cat([padding - 100, block]),
            "attention_mask": torch.cat([padding, torch.ones_like(block)]),
        }
        for block in BLOCKS
    ]
    model, measured = tiny_model(), []
    for blocks in (rows, padded):
        line = train(model, tmp_path, Monitor(5), blocks=blocks, steps=1, logging_steps=1, learning_rate=0.0)[0]
        measured.append({name: value for name, value in line.items() if name.startswith(("depth", "magnitude"))})
    assert len(measured[0]) == 7
    assert measured[0] == measured[1]


def packed(sign: str) -> dict[str, torch.Tensor]:
    """Return a row of three documents with an argument that marks them, as collators of packed rows give it."""
    lengths = torch.tensor([4, 5, 3])
    ids = BLOCKS[0]
    signs = {
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "seq_idx": torch.repeat_interleave(torch.arange(3), lengths),
        "cu_seq_lens_q": torch.tensor([0, 4, 9, 12]),
    }
    return {"input_ids": ids, "labels": ids, sign: signs[sign]}


@pytest.mark.parametrize("sign", ["position_ids", "seq_idx", "cu_seq_lens_q"])
@pytest.mark.parametrize("tokens", [12, 7])
def test_the_documents_of_a_packed_row_are_measured_apart(sign, tokens, tiny_model):
    model, monitor = tiny_model(), Monitor(tokens)
    row = {name: value if name == "cu_seq_lens_q" else value[None] for name, value in packed(sign).items()}
    monitor.on_train_begin(TrainingArguments(report_to="none", use_cpu=True), TrainerState(), None, model=model)
    model.train()(**row, use_cache=False)
    line = monitor.metrics()
    documents = [ids[None] for ids in BLOCKS[0][:tokens].split([4, 5, 3] if tokens == 12 else [4, 3])]
    with torch.no_grad():
        parts = [model.eval()(ids, output_depth_attentions=True).depth_attentions for ids in documents]
        whole = model(BLOCKS[:1, :tokens], output_depth_attentions=True).depth_attentions
    expected = depth_attention_summary(torch.cat(weights, -1) for weights in zip(*parts))
    assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert depth_attention_summary(whole)["depth_entropy"] != pytest.approx(expected["depth_entropy"], rel=1e-4)


def test_positions_that_restart_under_a_mask_are_measured_as_they_are_trained():
    """With a mask they mark no documents, but the rotary embedding uses them."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model, monitor = retrofit(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))), Monitor()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    ids, positions = BLOCKS[:1], packed("position_ids")["position_ids"][None]
    row = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}
    monitor.on_train_begin(TrainingArguments(report_to="none", use_cpu=True), TrainerState(), None, model=model)
    model.train()(**row, use_cache=False)
    line = monitor.metrics()
    with torch.no_grad():
        expected = depth_attention_summary(model(**row, output_depth_attentions=True).depth_attentions)
    assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-5)


# --- no effect on training


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        {"bf16": True},
        {"eval_strategy": "steps", "eval_steps": 1},
    ],
    ids=["plain", "checkpointing", "reentrant-checkpointing", "bf16", "evaluation"],
)
def test_measuring_changes_neither_the_training_nor_the_load_of_the_experts(options, tiny_model, tmp_path):
    results, weights = [], []
    for callbacks in ([ExpertBalance(0.01)], [ExpertBalance(0.01), Monitor()]):
        model = tiny_model(attention_dropout=0.1)
        lines = train(model, tmp_path, *callbacks, logging_steps=1, **options)
        results.append([{k: line[k] for k in ("loss", "grad_norm", "expert_max_violation")} for line in lines])
        weights.append(model.state_dict())
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
    assert results[0] == results[1]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert "magnitude_output" in lines[-1]


def test_measuring_leaves_each_module_in_its_mode(tiny_model, tmp_path):
    in_eval_mode = []

    class Freeze(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            model.model.layers[0].self_attn.eval()

        def on_log(self, args, state, control, model=None, **kwargs):
            names = (name for name, module in model.named_modules() if not module.training)
            in_eval_mode.append({name.partition(".self_attn")[0] for name in names})

    train(tiny_model(), tmp_path, Freeze(), Monitor(), steps=1, logging_steps=1)
    assert in_eval_mode[0] == {"model.layers.0"}


def test_a_model_of_another_family_logs_its_throughput_only(tmp_path):
    config = LlamaConfig(
        vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    for line in train(LlamaForCausalLM(config), tmp_path, Monitor()):
        assert line["tokens_per_second"] > 0
        assert not any(name.startswith(("depth", "magnitude")) for name in line)


@pytest.mark.slow
def test_a_compiled_model_is_measured_and_not_compiled_more_often(tiny_model, tmp_path, clock):
    options = {"torch_compile": True, "torch_compile_backend": "eager"}
    frames, lines = [], []
    for callbacks in ([], [Monitor()]):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = tiny_model(num_hidden_layers=2, layer_types=["full_attention"] * 2)
        lines = train(model, tmp_path, *callbacks, Work(clock), ExpertBalance(), **options)
        frames.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert frames[0] == frames[1] > 0
    assert [line["tokens_per_second"] for line in lines] == [pytest.approx(24.0)] * 2
    assert 0 < lines[0]["depth_entropy"] < 1
    assert lines[0]["magnitude_output"] > 0
    assert lines[0]["expert_max_violation"] > 0


def test_a_model_with_adapters_is_measured_with_them(tiny_model, tmp_path):
    peft = pytest.importorskip("peft")
    extra = peft_modules_to_save(tiny_model())
    config = peft.LoraConfig(target_modules=["o_proj"], modules_to_save=extra, init_lora_weights=False)
    model, monitor = peft.get_peft_model(tiny_model(), config), Slices()
    line = train(model, tmp_path, monitor, steps=1, logging_steps=1, learning_rate=0.0)[0]
    sizes = sizes_by_hooks(model.merge_and_unload(), monitor.slices[0])
    assert line["magnitude_growth"] == pytest.approx((sizes[-1] / sizes[0]).item(), rel=1e-4)
    assert 0 < line["depth_distance"] < 1
    assert "model_flop_use" not in line
