"""What a run shows: tokens/s over the right time, FLOPs against sums done by hand, the depth attention's spread."""

import time

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from attnres import CONNECTIONS
from attnres.configuration import load
from attnres.training import monitor as module
from attnres.training.balance import ExpertBalance
from attnres.training.monitor import Monitor, depth_attention_summary, flops_per_token, peak_flops

BLOCKS = torch.randint(3, 90, (8, 12), generator=torch.Generator().manual_seed(0))


class LoggingTrainer(Trainer):
    """A trainer that adds the measurements to its log, as the package's own does."""

    measured: tuple = ()

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            for callback in self.measured:
                logs |= callback.metrics()
        super().log(logs, *args, **kwargs)


def train(model, folder, *callbacks, steps=4, **options):
    """Train in steps of 2 micro-batches of 2 blocks, and return the lines of the log that have a loss."""
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        **{"logging_steps": 2, "save_strategy": "no", "learning_rate": 1e-3} | options,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = [{"input_ids": block, "labels": block} for block in BLOCKS]
    trainer = LoggingTrainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=list(callbacks))
    trainer.measured = [callback for callback in callbacks if hasattr(callback, "metrics")]
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless told: `clock(seconds)` moves it."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


class Work(TrainerCallback):
    """Moves the clock by what each part of a run takes."""

    def __init__(self, clock):
        self.clock = clock

    def on_step_begin(self, *args, **kwargs):
        self.clock(2.0)

    def on_prediction_step(self, *args, **kwargs):
        self.clock(100.0)


# --- throughput


def test_tokens_per_second_are_those_of_training_without_evaluation(tiny_model, tmp_path, clock):
    lines = train(
        tiny_model(), tmp_path, Monitor(), Work(clock), steps=6, eval_strategy="steps", eval_steps=3, save_strategy="no"
    )
    # 48 tokens in a step of two seconds, whether or not the window held an evaluation of 400.
    assert [line["tokens_per_second"] for line in lines] == [pytest.approx(24.0)] * 3


def test_a_real_clock_gives_a_rate_near_the_runs_own(tiny_model, tmp_path):
    start = time.perf_counter()
    lines = train(tiny_model(), tmp_path, Monitor(), steps=6)
    seconds = time.perf_counter() - start
    assert lines[-1]["tokens_per_second"] > 0.9 * 6 * 48 / seconds


def test_measurements_are_given_once_and_each_window_has_its_own(tiny_model, tmp_path):
    monitor = Monitor()
    lines = train(tiny_model(), tmp_path, monitor)
    assert monitor.metrics() == {}
    assert len(lines) == 2
    assert lines[0]["tokens_per_second"] != lines[1]["tokens_per_second"]


def test_windows_may_be_epochs(tiny_model, tmp_path, clock):
    lines = train(tiny_model(), tmp_path, Monitor(), Work(clock), logging_strategy="epoch")
    assert [line["tokens_per_second"] for line in lines] == [pytest.approx(24.0)] * 2


# --- model FLOP use


def test_flops_of_a_dense_model_are_those_counted_by_hand():
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


def test_flops_of_a_model_with_experts_count_what_a_token_passes_through(tiny_model):
    config = tiny_model().config
    model = tiny_model()
    idle = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name) * 6 // 8
    parameters = sum(p.numel() for p in model.parameters()) - model.model.embed_tokens.weight.numel() - idle
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
def test_the_peak_is_that_of_the_named_device_or_unknown(name, peak):
    assert peak_flops(name) == peak


def test_flop_use_is_the_share_of_the_peak_and_absent_where_that_is_unknown(tiny_model, tmp_path, monkeypatch):
    model = tiny_model()
    assert all("model_flop_use" not in line for line in train(model, tmp_path, Monitor()))
    monkeypatch.setattr(module, "_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    for line in train(model, tmp_path, Monitor()):
        expected = line["tokens_per_second"] * flops_per_token(model.config, 12) / 312e12
        assert line["model_flop_use"] == pytest.approx(expected)
    model.lm_head.weight.requires_grad_(False)  # its gradient is not computed, so 6 N would be too much
    assert all("model_flop_use" not in line for line in train(model, tmp_path, Monitor()))


# --- depth attention


def test_the_spread_is_extreme_for_uniform_and_for_single_sources():
    uniform = torch.full((4, 1, 3), 0.25)
    nearest = torch.zeros(3, 1, 3)
    nearest[-1] = 1.0
    alone = torch.ones(1, 1, 3)
    of_uniform, of_nearest = (depth_attention_summary((alone, weights)) for weights in (uniform, nearest))
    assert of_uniform == {"depth_entropy": 1.0, "depth_weight_nearest": 0.25, "depth_weight_embedding": 0.25}
    assert of_nearest == {"depth_entropy": 0.0, "depth_weight_nearest": 1.0, "depth_weight_embedding": 0.0}
    assert depth_attention_summary((uniform, nearest))["depth_entropy"] == 0.5
    assert depth_attention_summary((alone,)) == {}


def test_a_fresh_model_is_logged_as_uniform_and_another_by_its_own_weights(tiny_model, tiny_config, tmp_path):
    torch.manual_seed(0)
    fresh = type(tiny_model())(tiny_config())
    line = train(fresh, tmp_path, Monitor(), steps=1, logging_steps=1, learning_rate=0.0)[0]
    assert line["depth_entropy"] == pytest.approx(1.0, abs=1e-6)
    assert line["depth_weight_nearest"] == pytest.approx(line["depth_weight_embedding"])

    model = tiny_model()
    seen = []

    class Spy(Monitor):
        def _see_batch(self, model, inputs, kwargs):
            seen.append(kwargs["input_ids"])
            super()._see_batch(model, inputs, kwargs)

    line = train(model, tmp_path, Spy(slice_tokens=5), steps=1, logging_steps=1, learning_rate=0.0)[0]
    last = seen[1]  # the second micro-batch; after it comes the slice
    assert seen[2].shape == (1, 5)
    with torch.no_grad():
        weights = model.eval()(last[:1, :5], output_depth_attentions=True).depth_attentions
    rows = [a for a in weights if len(a) > 1]
    entropy = [(-(a * a.log()).sum(0) / torch.tensor(float(len(a))).log()).mean() for a in rows]
    assert line["depth_entropy"] == pytest.approx(torch.stack(entropy).mean().item(), rel=1e-5)
    assert line["depth_weight_embedding"] == pytest.approx(sum(a[0].mean().item() for a in rows) / len(rows), rel=1e-5)
    assert line["depth_entropy"] < 0.95


def test_measuring_changes_neither_the_training_nor_the_load_of_the_experts(tiny_model, tmp_path):
    results = []
    for callbacks in ([ExpertBalance(0.01)], [ExpertBalance(0.01), Monitor()]):
        model = tiny_model(attention_dropout=0.1)
        lines = train(model, tmp_path, *callbacks, logging_steps=1)
        assert model.training
        results.append([{k: line[k] for k in ("loss", "grad_norm", "expert_max_violation")} for line in lines])
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
    assert results[0] == results[1]


def test_a_model_without_attention_residuals_logs_its_throughput_only(tiny_model, tmp_path):
    config = LlamaConfig(
        vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    others = [tiny_model(residual_connection=name) for name in CONNECTIONS if name != "attn_res"]
    for model in (*others, LlamaForCausalLM(config)):
        for line in train(model, tmp_path, Monitor()):
            assert line["tokens_per_second"] > 0
            assert not any(name.startswith("depth") for name in line)


def test_compiled_models_are_measured_too(tiny_model, tmp_path, clock):
    torch._dynamo.reset()
    model = tiny_model(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    options = {"torch_compile": True, "torch_compile_backend": "eager"}
    lines = train(model, tmp_path, Monitor(), Work(clock), ExpertBalance(), **options)
    assert [line["tokens_per_second"] for line in lines] == [pytest.approx(24.0)] * 2
    assert 0 < lines[0]["depth_entropy"] < 1
    assert lines[0]["expert_max_violation"] > 0
