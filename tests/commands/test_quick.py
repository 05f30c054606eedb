"""Help, names, wrong paths, usage errors and missing data are reported before PyTorch is imported."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import NoneType
from typing import get_args

import pytest
from transformers import TrainingArguments
from typer.testing import CliRunner

from attnres import BACKBONES, CONNECTIONS, DEPTH_ATTENTION, PRESETS, AttnResConfig
from attnres.analysis import report_files
from attnres.attention_gate_attnres import GATE_FIELDS
from attnres.commands import connections
from attnres.commands.app import app
from attnres.commands.options_convert import DEFAULT_RESIDUAL, Scale
from attnres.commands.options_inspect import WRITTEN_REPORT
from attnres.configuration import count_parameters, load, names
from attnres.conversion.family import DEFAULT_CONNECTION
from attnres.eval.benchmarks import benchmarks
from attnres.mtp_attnres import MTP_FIELDS
from attnres.training.recipe import read_recipe, write_recipe
from attnres.training.settings import trainer_fields
from attnres.utils import declared as declarations
from attnres.utils import hub
from attnres.utils.declared import declared_connections
from attnres.utils.packaged import configurations, recipe_names
from attnres.value_residual_attnres import VALUE_RESIDUAL_FIELDS

ATTNRES = Path(sys.executable).with_name("attnres")
HEAVY = {"torch", "transformers", "numpy", "datasets", "lm_eval", "matplotlib", "attnres.family"}
# Arguments, exit status, and a part of the output.
CASES = [
    *(
        ((*words, *others), 1, f"attnres: {message} Merge it first: by `merge=true` of the recipe, or by ")
        for folder, message in (
            ("lora", "lora holds no model, only the adapter lora/adapter."),
            ("lora/adapter", "lora/adapter is an adapter, not a model (it has adapter_config.json)."),
        )
        for words, others in (
            (("convert", folder), ("out",)),
            (("inspect", folder), ()),
            (("eval", folder), ("--out", "out")),
            (("plan", folder), ("--devices", "8")),
            (("demo", "--checkpoint", folder), ()),
            (("train", "finetune", f"model={folder}"), ("train=a.txt", "out=out")),
        )
    ),
    (
        ("inspect", "model", "--tokenizer", "lora"),
        1,
        "attnres: lora holds no model, only the adapter lora/adapter. Name ",
    ),
    (("inspect", "model", "--tokenizer", "lora/adapter", "--out", "taken"), 1, "attnres: taken exists. "),
    (("--help",), 0, "attnres list "),
    (("--version",), 0, "attnres 0."),
    (("list", "tasks"), 0, "gpqa_diamond"),
    (("convert", "nowhere/at/all", "out"), 1, "attnres: nowhere/at/all is not a directory."),
    (("convert", "lab/model", "out"), 1, "attnres: lab/model is not a directory, and the Hub does not give it: "),
    (("convert", "model", "taken"), 1, "attnres: taken exists. "),
    (
        ("convert", "model", "out", "--streams", "3"),
        2,
        "--streams belongs to --residual gated_residual, hyper_connections, ",
    ),
    (("convert", "model", "out", "--residual", "highways"), 2, "'--residual': 'highways' is not one of 'attn_res', "),
    (("convert", "model", "out", "--residual", "mch"), 2, ". Did you mean `mhc`?"),
    (("list", "recipe"), 2, ". Did you mean `recipes`?"),
    (("convert", "model", "~/taken"), 1, "/taken exists. "),
    (("inspect", "model", "--out=~/taken"), 1, "/taken exists. "),
    (
        ("inspect", "model", "--revision", "abc"),
        2,
        "--revision belongs to models on the Hub, and model is a directory.",
    ),
    (
        ("inspect", "model", "--compare", "model", "--compare-revision", "abc"),
        2,
        "--compare-revision belongs to models on the Hub, and model is a directory.",
    ),
    (("train", "heal", "model=model", "train=a.txt", "out=~/taken"), 1, "/taken holds other files. "),
    (("convert", "model", "out", "--full", "--block-size", "2"), 2, "--block-size and --full exclude each other."),
    (("convert", "model", "out", "--to", "standard", "--residual", "standard"), 2, "--to and --residual exclude "),
    (("train", "heel"), 2, "There is no file heel, and no recipe of that name. The recipes are finetune, heal, "),
    (("train", "heal", "stepz=3"), 2, "Did you mean `steps`?"),
    (("train", "heal", "retrofit={block_size:", "4}"), 2, "A value with spaces needs quotes."),
    (("train", "heal"), 2, "The recipe lacks `model` and `train` and `out`: give model=... train=... out=..."),
    (("train", "heal", "model=attnres-tinny", "train=a.txt", "out=out"), 1, "Did you mean `attnres-tiny`?"),
    (("train", "heal", "model=my-attnres", "train=a.txt", "out=out"), 1, "its cache here does not have it.\n"),
    (("train", "heal", "model=./no", "train=a.txt", "out=out"), 1, "attnres: ./no is not a directory."),
    (("train", "heal", "model=model", "train=a.txt", "out=taken"), 1, "attnres: taken holds other files. "),
    *(
        (("train", "finetune", "model=model", "out=out", *changes), code, message)
        for code, message, *changes in (
            (1, "attnres: a.txt does not exist.\n", "train=a.txt"),
            (1, "attnres: empty holds no .jsonl, .json, .parquet or .txt file.\n", "train=text", "held_out=empty"),
            (1, "attnres: text/*.md matches no file.\n", "train=text/*.md"),
            (1, "attnres: text/odd.yml has an unknown suffix, which must be ", "train=text/odd.yml"),
            (1, "attnres: a/b is not a file or folder here, and the Hub does not give it: ", "train=a/b"),
            (1, "not a file or folder here, and the Hub does not give it: the Hub cannot be", "train=text/a.tx"),
            (1, "its cache here does not have it. Did you mean `text/a.txt`?", "train=text/a.tx"),
            (1, "attnres: `batch_size` 8 is not a multiple of ", "train=text", "batch_size=8", "micro_batch_size=3"),
            (1, "number must be a multiple of `stages`", "train=text", "pipeline={stages: 2}"),
            (1, "attnres: nobody/tokenizer is not a directory, and", "train=text", "tokenizer=nobody/tokenizer"),
            (1, "attnres: attnres-tiny starts from scratch: the rec", "train=text", "model=attnres-tiny"),
            (1, "attnres: run holds a run with seed 1, not 0. ", "train=text/a.txt", "out=run"),
            (1, "attnres: `out` /proc/x of the recipe cannot be written", "train=text", "out=/proc/x"),
            (2, "`trainer.bf16` of the recipe is 'maybe', but must be true or false.", "train=a", "trainer.bf16=maybe"),
            (2, "Did you mean `bf16`?", "train=a", "trainer.bf_16=true"),
            (2, "It is a field of the trainer: give `trainer.bf16`.", "train=a", "bf16=true"),
            (2, "is 'mch', but must be one of attn_res, ", "train=a", "retrofit.residual=mch"),
            (2, "`retrofit` has no `blocksize`. Did you mean", "train=a", "retrofit.blocksize=2"),
            (2, "`lora.rank` of the recipe is 0, but must be ", "train=a", "lora.rank=0"),
            (2, "`config.dtype` of the recipe is 'half', but ", "train=a", "config.dtype=half"),
        )
    ),
    (("convert", "model", "out"), 1, "attnres: not enough space in "),
    (("convert", "model", "/proc/x"), 1, "attnres: DST /proc/x cannot be written (No such file or directory): choose "),
    (("convert", "empty", "out"), 1, "attnres: empty has no config.json: give the directory of a model.\n"),
    (("convert", "model", "out", "--set", "attn_res_gatd=true"), 2, " Did you mean `attn_res_gated`?"),
    (("inspect", "model", "--out", "/proc/x"), 1, "attnres: --out /proc/x cannot be written (No such file or "),
    (("demo", "--out", "/proc/x"), 1, "attnres: --out /proc/x cannot be written (No such file or directory): choose "),
    (("demo", "--out", "taken"), 1, "attnres: taken exists. "),
    (("push", "model", "a/b/c"), 2, "'a/b/c' is not a repository id: it must be NAME or ORG/NAME"),
    (("eval", "empty", "--out", "out"), 1, "attnres: empty has no config.json: give the directory of a model.\n"),
    (("eval", "model", "--out", "/proc/x"), 1, "attnres: --out /proc/x cannot be written (No such file or directory)"),
    (("list",), 0, "smollm3"),
    (("plan", "attnres-tiny"), 2, "Missing option '--devices'."),
    (("plan", "attnres-tinny", "--devices", "8"), 1, "Did you mean `attnres-tiny`?"),
    (("plan", "attnres-tiny", "--devices", "8", "--optimizer", "muon", "--serve"), 2, "--optimizer needs --train."),
    (("eval",), 2, "Missing argument 'MODEL'."),
    (("eval", "model"), 2, "Missing option '--out'."),
    (("eval", "--print-task-path"), 0, "/tasks"),
    (("eval", "./no", "--out", "out"), 1, "attnres: ./no is not a directory."),
    (
        ("eval", "lora/adapter", "--out", "out"),
        1,
        "--model_args pretrained=BASE,peft=lora/adapter,trust_remote_code=True",
    ),
    (("eval", "model", "--out", "out", "--baseline", "lora/adapter"), 1, "attnres: lora/adapter is an adapter, not a "),
    (("eval", "model", "--out", "taken"), 1, "attnres: taken holds other files "),
    (("eval", "model", "--out", "out", "--data", "taken"), 1, "attnres: 15 of 15 benchmarks have no result"),
    (("eval", "model", "--out", "out", "--tasks", "mmlu"), 1, "attnres: 1 of 1 benchmark has no result"),
]


def environment(folder: Path) -> dict[str, str]:
    """Return an environment in which the Hub cannot be reached and nothing is cached."""
    without_proxy = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    return without_proxy | {
        "HOME": str(folder),
        "HF_HOME": str(folder / "home"),
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict:
    """Return the results of `quick_session.py` for all cases, in a folder with `model`, `taken` and the run `lora`."""
    folder = tmp_path_factory.mktemp("quick")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    # A file without data, since its size is that of weights for which no disk has space.
    with (folder / "model" / "model.safetensors").open("wb") as file:
        file.truncate(2**42)
    (folder / "empty").mkdir()
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("Once upon a time.")
    (folder / "text" / "odd.yml").touch()
    (folder / "run" / "checkpoint-4").mkdir(parents=True)
    changes = ("model=model", "train=text/a.txt", "out=run", "seed=1")
    (folder / "run" / "recipe.yaml").write_text(write_recipe(read_recipe("finetune", changes)))
    (folder / "lora" / "adapter").mkdir(parents=True)
    (folder / "lora" / "adapter" / "adapter_config.json").write_text("{}")
    (folder / "taken").mkdir()
    (folder / "taken" / "thesis.tex").write_text("five years")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("quick_session.py")],
        input=json.dumps([arguments for arguments, *_ in CASES]),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"left": {path.name for path in folder.iterdir()}}


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: " ".join(CASES[number][0]))
def test_commands_that_need_no_model_print_the_expected_text(number, seen):
    _, code, message = CASES[number]
    run = seen["runs"][number]
    assert run["code"] == code, run["err"]
    assert message in (run["err"] if code else run["out"])
    if code == 1:
        assert run["err"].count("\n") == 1


def test_these_commands_import_nothing_heavy_and_write_nothing(seen):
    assert "attnres.commands.app" in seen["modules"]
    assert not HEAVY & set(seen["modules"])
    assert seen["left"] == {"empty", "lora", "model", "run", "taken", "text"}


def test_python_m_attnres_answers_without_pytorch_too():
    """`accelerate launch -m attnres` starts each process so. `-X importtime` lists all imports."""
    command = [sys.executable, "-X", "importtime", "-m", "attnres", "list", "recipes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "attnres.commands.app" in imported and not HEAVY & imported
    assert "pretrain" in done.stdout


@pytest.mark.parametrize(
    "words, expected",
    [
        ("attnres con", {"convert"}),
        ("attnres convert --residual ", {*CONNECTIONS, *PRESETS}),
        ("attnres train pre", {"pretrain"}),
    ],
)
def test_the_shell_completes_commands_names_and_recipes(words, expected, tmp_path):
    request = {"_ATTNRES_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run([ATTNRES], env=os.environ | request, capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) == expected


def test_a_terminal_without_a_width_gets_all_lines():
    asked = [ATTNRES, "list", "recipes"]
    done = subprocess.run(
        asked, env=os.environ | {"COLUMNS": "0"}, capture_output=True, text=True, timeout=60, check=True
    )
    assert "pretrain" in done.stdout


def test_the_mark_of_a_report_is_that_of_the_reports_that_are_written():
    marks = [
        (written.title, written.marker, written.content) for written in (WRITTEN_REPORT, report_files.WRITTEN_REPORT)
    ]
    assert marks[0] == marks[1]


def test_the_source_text_of_connections_and_of_the_trainer_declares_what_their_classes_have(monkeypatch):
    monkeypatch.setattr(declarations, "_registered", {})  # without those that other tests register
    monkeypatch.setattr(declarations, "_files", {})
    declared = declared_connections()
    assert next(iter(declared)) == DEFAULT_CONNECTION
    assert declared.keys() == CONNECTIONS.keys() | PRESETS.keys()
    for name, text in declared.items():
        connection = CONNECTIONS[PRESETS.get(name, {}).get("residual_connection", name)]
        declarations.register_connection(connection)  # reads the class
        assert declared_connections()[connection.name] == text
        assert list(text.fields) == [*connection.fields, *GATE_FIELDS, *MTP_FIELDS, *VALUE_RESIDUAL_FIELDS]
    types = {item.name: item.type for item in dataclasses.fields(TrainingArguments)}
    assert trainer_fields().keys() == types.keys()
    for name, kinds in trainer_fields().items():
        if {*kinds} <= {"bool", "int", "float", "None"}:
            parts = get_args(types[name]) or (types[name],)
            assert {*kinds} == {"None" if part is NoneType else part.__name__ for part in parts}, name
        else:
            assert not {*(get_args(types[name]) or (types[name],))} <= {bool, int, float, NoneType}, name


def test_the_defaults_of_convert_are_those_of_the_registry():
    assert DEFAULT_RESIDUAL == DEFAULT_CONNECTION
    for scale in Scale:
        AttnResConfig(attn_res_scale=scale.value).check_fields()


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("recipes", recipe_names()),
        ("backbones", BACKBONES),
        ("configurations", names()),
        ("connections", CONNECTIONS | PRESETS),
        ("tasks", benchmarks()),
        ("implementations", DEPTH_ATTENTION),
    ],
)
def test_list_prints_every_name(kind, expected):
    heading, *listed = CliRunner().invoke(app, ["list", kind]).stdout.splitlines()
    assert heading.startswith(
        ("Recipes", "Backbones", "Configurations", "Residual connections", "Benchmarks", "Implementations")
    )
    assert kind != "connections" or max(map(len, listed)) <= 100  # fits a terminal
    # The table of connections has titles before its rows, and notes after them, which are not indented.
    rows = [line for line in listed if line.startswith("  ") and line.split() != " ".join(connections.TITLES).split()]
    assert [line.split()[0] for line in rows] == list(expected)
    assert kind != "recipes" or all(len(line.split()) > 4 for line in rows)  # its purpose


def test_headings_of_lists_end_their_lines_between_words_on_a_terminal():
    def heading(**environment: str) -> list[str]:
        printed = CliRunner().invoke(app, ["list", "configurations"], env=environment).stdout
        return re.sub(r"\x1b\[\d*m", "", printed).partition("  attnres-")[0].splitlines()

    (whole,) = heading(COLUMNS="80")
    lines = heading(COLUMNS="80", FORCE_COLOR="1")
    assert len(lines) > 1 and max(map(len, lines)) <= 80
    assert " ".join(line.strip() for line in lines) == whole


@pytest.mark.slow
def test_the_stored_sizes_of_configurations_are_those_that_are_counted():
    stored = json.loads((configurations() / "sizes.json").read_text())
    assert stored.keys() == {*names()}
    for name in stored:
        config = load(name)
        count = count_parameters(config)
        activated = count.activated_non_embedding
        # The paper names its models by the activated parameters. The report of Kimi K3 adds the output projection.
        with_head = activated + config.vocab_size * config.hidden_size
        assert stored[name] == {"parameters": count.total, "activated": activated, "with lm_head": with_head}


def test_configurations_are_listed_with_all_parameters_and_those_per_token():
    """The name of `attnres-194m` is the second number."""
    _, *listed = CliRunner().invoke(app, ["list", "configurations"]).stdout.splitlines()
    (line,) = [line for line in listed if "attnres-194m" in line]
    assert line.split() == ["attnres-194m", "3.68B", "parameters", "191.0M", "activated", "337.8M", "with", "lm_head"]
    assert max(map(len, listed)) < 80  # none is folded on a terminal of the usual width


def test_every_help_has_an_example():
    runner = CliRunner()
    for command in ("list", "convert", "eval", "train"):
        help_text = runner.invoke(app, [command, "--help"]).stdout
        assert f"\n  attnres {command} " in help_text, command


def test_train_names_a_missing_matplotlib_before_it_imports_pytorch(tmp_path):
    """Matplotlib draws the loss curve. `None` in `sys.modules` makes its import fail."""
    code = "import sys; sys.modules['matplotlib'] = None\nimport atexit\n"
    code += "atexit.register(lambda: print([name for name in ('torch', 'transformers') if name in sys.modules]))\n"
    code += "import attnres_cli; sys.argv[0] = 'attnres'; attnres_cli.main()"
    (tmp_path / "text.txt").write_text("Once upon a time.")
    arguments = ["train", "pretrain", "model=attnres-tiny", "train=text.txt", "out=out"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("attnres: attnres train needs the package matplotlib: pip install ")
    assert "'matplotlib" in done.stderr and "'datasets" in done.stderr and done.stderr.count("\n") == 1
    assert done.stdout == "[]\n"
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("endpoint", ["localhost:8080", "hf-mirror.example"])
def test_an_endpoint_that_is_not_an_address_is_named(endpoint, monkeypatch):
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.constants, "ENDPOINT", endpoint)
    with pytest.raises(ValueError, match=f"HF_ENDPOINT is '{endpoint}'"):
        hub.is_offline()


def test_a_proxy_for_everything_may_reach_the_hub(monkeypatch):
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://hub.invalid")
    assert hub.is_offline()
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert not hub.is_offline()


def test_an_empty_model_name_is_rejected():
    with pytest.raises(FileNotFoundError, match="the name of the model is empty"):
        hub.check_source("")


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_what_is_cached_is_read_without_requests_if_the_hub_cannot_be_reached(kind, tmp_path):
    """A request would be repeated for half a minute, and a tokenizer takes ten."""
    folder = tmp_path / "home" / "hub" / f"{kind}s--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (folder / "snapshots" / ("0" * 40) / "config.json").write_text("{}")
    check = "check_source('org/name')" if kind == "model" else "check_dataset('org/name', 'org/name')"
    code = f"""
import attnres_cli
attnres_cli.is_running = True
from attnres.utils.hub import check_dataset, check_source
{check}
from huggingface_hub import hf_hub_download
print(hf_hub_download("org/name", "config.json", repo_type="{kind}"))
"""
    offline = {key: value for key, value in environment(tmp_path).items() if key != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=offline, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.endswith("config.json\n") and done.stderr == ""
