"""`attnres plan` prints layouts as a table and as JSON, and says in one line why none fits."""

import json
from itertools import product
from pathlib import Path

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from attnres.checkpoints.source import ModelSource
from attnres.commands.app import app
from attnres.commands.errors import describe
from attnres.commands.options_plan import parse_memory
from attnres.commands.plan import read_config
from attnres.configuration import load
from attnres.planning import Costs, Device, Job, Layout, missing_engine, plan_layout
from attnres.training.parallel.pipeline_settings import PipelineSettings, count_replicas
from attnres.training.parallel.sharding import make_sharding
from attnres.training.settings import ShardingSettings

from ..modeling_attnres.kimi_k3_release import text_fields, write

# Nodes of one device leave out tensor parallelism, whose traces take time.
OPTIONS = ["--devices", "4", "--context", "256", "--batch-tokens", "4096", "--per-node", "1"]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> list[str]:
    """Return arguments of a plan for `attnres-tiny` with one layer of each kind."""
    folder = tmp_path_factory.mktemp("small")
    load("attnres-tiny", num_hidden_layers=4).save_pretrained(folder)
    return ["plan", str(folder), *OPTIONS]


def run(*arguments: str):
    return CliRunner().invoke(app, [*arguments])


def on_one_line(output: str) -> str:
    return " ".join(output.replace("│", " ").split())


def test_the_table_has_a_line_for_each_layout_and_names_what_dominates():
    done = run("plan", "attnres-tiny", *OPTIONS, "--shown", "3", "--runnable")
    assert done.exit_code == 0, done.output
    heading, *lines, total = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(name in heading for name in ("data x tensor x pipeline", "expert", "GB sent", "tokens/s", "runs here"))
    assert all(line.split()[-1] in ("yes", "no") for line in lines)
    assert "Memory is counted; times are estimates." in total


def test_each_reason_why_a_printed_layout_does_not_run_here_is_printed_once(small):
    table = run(*small, "--shown", "20").stdout.splitlines()
    rows = [line for line in table if line.split()[-1] in ("yes", "no")]
    plans = json.loads(run(*small, "--json").stdout)["plans"][: len(rows)]
    assert [line.split()[-1] for line in rows] == ["no" if plan["missing_engine"] else "yes" for plan in plans]
    reasons = [f"Does not run here: {plan['missing_engine']}." for plan in plans if plan["missing_engine"]]
    assert table[1 + len(rows) : -1] == [*dict.fromkeys(reasons)] != []


@pytest.mark.parametrize(
    ("text", "size"), [("80", 80e9), ("80GB", 80e9), ("80 gib", 80 * 2**30), ("0.5TB", 5e11), ("141.0", 141e9)]
)
def test_memory_is_given_with_a_unit_or_in_gigabytes(text, size):
    assert parse_memory(text) == size


def test_the_default_context_is_at_most_the_models(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(vocab_size=32, max_position_embeddings=64, **sizes).save_pretrained(tmp_path)
    done = run("plan", str(tmp_path), "--devices", "2", "--per-node", "1", "--json")
    job = json.loads(done.stdout)["job"]
    assert (job["context"], job["batch_tokens"], job["chunk"]) == (64, 128, 64)


def test_a_context_beyond_the_models_is_refused():
    done = run("plan", "attnres-tiny", "--devices", "4", "--context", "10000")
    assert "at most 8,192 tokens (`max_position_embeddings` of the model), got 10,000: give a shorter one" in str(
        done.exception
    )


def test_serving_is_planned_with_caches_and_experts_that_groups_share(small):
    done = run(*small, "--serve", "--json")
    plans = json.loads(done.stdout)["plans"]
    assert {plan["layout"]["expert"] for plan in plans} == {1, 2, 4}
    assert all(plan["memory"]["caches"] > 0 for plan in plans)
    # One device has one layout.
    alone = ["--serve", "--devices", "1", "--batch-tokens", "256"]
    assert "1 layout fits into 73.6 GB of 80 GB" in run(*small, *alone).stdout


def test_the_json_has_all_layouts_of_a_model_directory(tmp_path):
    LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    ).save_pretrained(tmp_path)
    options = ["--devices", "4", "--context", "128", "--batch-tokens", "1024", "--json"]
    reasons = {"--train": "tensor parallelism beside a pipeline", "--serve": "a pipeline that serves"}
    for mode, reason in reasons.items():
        done = run("plan", str(tmp_path), *options, mode)
        assert done.exit_code == 0, done.output
        read = json.loads(done.stdout)
        for plan in read["plans"]:
            assert Layout(**plan["layout"]).devices == 4
            assert plan["total_memory"] == pytest.approx(sum(plan["memory"].values()))
        assert max(plan["layout"]["tensor"] for plan in read["plans"]) > 1
        # The layouts that need another engine are marked, and left out on demand.
        assert reason in {plan["missing_engine"] for plan in read["plans"]}
        here = [plan for plan in read["plans"] if plan["missing_engine"] is None]
        runnable = json.loads(run("plan", str(tmp_path), *options, mode, "--runnable").stdout)["plans"]
        assert sorted(map(str, runnable)) == sorted(map(str, here))
    # A plan can be made again from what is printed.
    costs, plan = Costs(read_config(ModelSource(str(tmp_path))), Job(**read["job"])), read["plans"][0]
    again = plan_layout(costs, Layout(**plan["layout"]), Device(**read["device"]))
    assert (again.memory, again.seconds, again.sent) == (plan["memory"], plan["seconds"], plan["sent"])


LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}


def refusal(folder: Path, fields: object) -> str:
    """Return the error for a directory that holds these fields alone."""
    (folder / "config.json").write_text(json.dumps(fields))
    done = run("plan", str(folder), "--devices", "2", "--context", "64", "--per-node", "1", "--json")
    assert done.exception is not None and not done.stdout
    message, is_foreseen = describe(done.exception)
    assert is_foreseen and "\n" not in message
    return message


def test_code_that_comes_with_a_model_is_not_run_and_nobody_is_asked(tmp_path, monkeypatch):
    def answer(question: str = "") -> str:
        raise AssertionError(f"asked: {question}")

    monkeypatch.setattr("builtins.input", answer)
    (tmp_path / "foreign.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    message = refusal(tmp_path, {"model_type": "foreign", "auto_map": {"AutoConfig": "foreign.Foreign"}})
    assert "needs code that comes with the model, which is not run here" in message
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({}, "model_type"),
        ({"model_type": "zzz"}, "zzz"),
        (LLAMA | {"model_type": ["llama"]}, "unhashable type: 'list'"),
        (LLAMA | {"hidden_size": 1.5}, "hidden_size"),
        (LLAMA | {"vocab_size": None}, "vocab_size"),
        (LLAMA | {"num_attention_heads": 0}, "ZeroDivisionError"),
        (LLAMA | {"num_attention_heads": 7}, "attention heads"),
        (LLAMA | {"rms_norm_eps": 1}, "rms_norm_eps"),
        (LLAMA | {"max_position_embeddings": -1}, "`max_position_embeddings` of the model is -1"),
    ],
    ids=str,
)
def test_a_configuration_that_no_model_has_is_refused_in_one_line(tmp_path, fields, part):
    assert part in refusal(tmp_path, fields)


def test_a_revision_of_a_directory_is_refused(tmp_path):
    LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    done = run("plan", str(tmp_path), "--devices", "2", "--revision", "main")
    assert done.exit_code == 2
    assert "--revision belongs to models on the Hub" in on_one_line(done.output)


def test_the_recipe_takes_the_sizes_of_each_layout_that_runs_here():
    config = load("attnres-tiny")
    for *sizes, reshard, virtual in product(*[(1, 2, 4)] * 5, (False, True), (1, 2)):
        data, tensor, pipeline, expert, shard = sizes
        layout = Layout(*sizes, reshard, virtual=virtual)
        is_possible = data % shard == 0 and shard * tensor % expert == 0 and (pipeline > 1 or virtual == 1)
        if not is_possible or missing_engine(layout, True, config) is not None:
            continue
        if pipeline > 1:
            taken = PipelineSettings(stages=pipeline, virtual=virtual, fsdp=shard > 1)
            assert count_replicas(taken, layout.devices) == data
        else:
            sizes = {"fsdp_size": shard, "dp_replicate_size": data // shard, "tp_size": tensor, "ep_size": expert}
            sharding = ShardingSettings(**sizes, sequence_parallel=tensor > 1)
            make_sharding(sharding)
            assert sharding.count_processes() == layout.devices


@pytest.mark.slow
def test_what_a_plan_leaves_out_of_kimi_k3_is_said(tmp_path):
    """`attnres train` refuses a layer for multi-token prediction beside a pipeline or sharded states."""
    fields = text_fields(num_nextn_predict_layers=1, num_hidden_layers=2, kda_layers=[1], full_attn_layers=[2])
    write(tmp_path, fields, {}, vision=True)
    printed = run("plan", str(tmp_path), *OPTIONS, "--devices", "2", "--shown", "9").stdout
    reason = "the layer for multi-token prediction (`num_nextn_predict_layers`) beside a pipeline."
    assert f"Does not run here: {reason}" in printed and "no vision part is counted" in printed
    rows = [line.split() for line in printed.splitlines() if " x " in line][1:]
    assert {row[-1] for row in rows if row[4] == "2"} == {"no"} and ["yes"] in [row[-1:] for row in rows]


def test_a_model_that_fits_nowhere_gets_the_nearest_miss_and_a_remedy(small):
    done = run(*small, "--memory", "0.005")
    assert isinstance(done.exception, ValueError)
    message = str(done.exception)
    assert message.startswith("No layout of 4 devices fits: the nearest (data ")
    assert " GB of 0.0046 GB, mostly " in message
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "4", "--serve", "--optimizer", "muon"], "--optimizer needs --train."),
        (["--devices", "4", "--prefill-chunk", "64"], "--prefill-chunk needs --serve."),
        (["--devices", "0"], "Input should be greater than or equal to 1"),
        (["--devices", "4", "--revision", "main"], "attnres-tiny is a named configuration."),
        (["--devices", "4", "--train", "--serve"], "--train and --serve exclude each other: give one of them."),
        (["--devices", "4", "--memory", "80 apples"], "such as 80, 80GB or 80GiB, got '80 apples'."),
        (["--devices", "4", "--memory", "0"], "must be from 1 MB to 1,000 TB"),
    ],
)
def test_bad_usage_is_one_line(arguments, message):
    done = run("plan", "attnres-tiny", *arguments)
    assert done.exit_code == 2
    assert message in on_one_line(done.output)


def test_a_batch_that_holds_no_whole_sequences_is_refused():
    done = run("plan", "attnres-tiny", "--devices", "4", "--context", "256", "--batch-tokens", "300")
    assert done.exit_code == 2
    assert "must be a multiple of --context (256), got 300: 256 is one." in on_one_line(done.output)
