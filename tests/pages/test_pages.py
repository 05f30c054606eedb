"""Tests that run every command and every block of Python of the pages, in order, in a directory with their files."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.main import get_command

from attnres import CONNECTIONS, AttnResKimiK3Config
from attnres.commands.app import app

from .. import forks
from ..hub.running import Hub
from .commands import ADDED, ELSEWHERE, PYTHON_ELSEWHERE, entry
from .reading import PAGES, ROOT, blocks_of, commands_of, inline_commands_of, name_of

BIN = Path(sys.executable).parent
BUILT_IN = {*CONNECTIONS}  # tests add others
WITH_CODE = [page for page in PAGES if any(block.language in ("bash", "python") for block in blocks_of(page))]
# Folders of the material that a command makes itself -> the beginning of that command.
MAKES = {"qwen3-attnres": "attnres convert Qwen/Qwen3-0.6B qwen3-attnres "}
ALLOWED = {"bash", "python", "yaml", "json", "text", "toml", "bibtex"}


def run_command(command: str, environment: dict[str, str]) -> str:
    """Run a command as the tables say, and return its output."""
    if entry(command, ELSEWHERE):
        return ""
    added = ADDED.get(entry(command, ADDED), ())
    words = [*shlex.split(command), *added]
    is_plain = not set(command) & set("$`|&;<>*")
    if words[0] == "attnres" and is_plain and words[1] != "push":
        done = forks.run("-m", *words, env=environment, timeout=300)
    else:
        line = shlex.join(words) if added else command
        shell = ["bash", "-euo", "pipefail", "-c", line]
        done = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def run_page(page: Path, environment: dict[str, str]) -> str:
    """Run all blocks of a page, and return the output of its commands."""
    namespace: dict[str, object] = {}
    printed = []
    for block in blocks_of(page):
        if block.title is not None:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.code, encoding="utf-8")
        elif block.language == "bash":
            printed += [run_command(command, environment) for command in block.commands()]
        elif block.language == "python" and not entry(block.code, PYTHON_ELSEWHERE):
            exec(compile(block.code, name_of(page), "exec"), namespace)
    return "".join(printed)


@pytest.fixture
def environment(hub: Hub, tmp_path_factory) -> dict[str, str]:
    """Return the environment of commands: the project's programs, and a Hub on this machine."""
    home = tmp_path_factory.mktemp("home")
    return hub.environ(hub.write_token, home) | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "HF_DATASETS_CACHE": str(home),
    }


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_a_page_runs(page, workplace, environment, hub, capsys):
    commands = commands_of(page)
    made = [name for name, by in MAKES.items() if any(f"{command} ".startswith(by) for command in commands)]
    folder = workplace(*made)
    printed = run_page(page, environment) + capsys.readouterr().out
    if check := CHECKS.get(name_of(page)):
        check(folder, printed, hub)


def check_readme(folder: Path, printed: str, hub: Hub) -> None:
    assert AutoModelForCausalLM.from_pretrained(folder / "runs/llama/checkpoint-20").config.num_hidden_layers == 8
    assert "top-1 agreement 100.00%" in printed
    assert (folder / "runs" / "new" / "model").exists()
    assert (folder / "inspection" / "report.html").exists()
    assert (folder / "scores" / "report.md").exists()


def check_tour(folder: Path, printed: str, hub: Hub) -> None:
    assert re.search(r"^attn_res \d", printed, re.MULTILINE)
    assert {"model", "results.json", "loss.png", "recipe.yaml"} <= {
        path.name for path in (folder / "runs/more").iterdir()
    }


def check_retrofit(folder: Path, printed: str, hub: Hub) -> None:
    assert printed.count("top-1 agreement 100.00%") == printed.count("Verified") >= 5


def check_train(folder: Path, printed: str, hub: Hub) -> None:
    """Check that `Monitor` logs the values that the page lists."""
    lines = [line for line in printed.splitlines() if "depth_entropy" in line and "'loss'" in line]
    documented = re.findall(r"`((?:depth|magnitude)_\w+)`", (ROOT / "docs/guides/train.md").read_text())
    assert lines and all(f"'{name}': " in lines[-1] for name in documented)
    assert len(set(documented)) == 7


def check_inspect(folder: Path, printed: str, hub: Hub) -> None:
    assert printed.endswith("tensor(True)\n")


def check_publish(folder: Path, printed: str, hub: Hub) -> None:
    """Check that the Hub has the model, its card, its results and the figures."""
    files = hub.files("me/qwen3-attnres")
    assert {"model.safetensors", "config.json", "backbones_attnres.py", "tokenizer.json", "README.md"} <= files.keys()
    assert {".eval_results/arc_challenge_25shot.yaml", "inspection/report.html"} <= files.keys()
    assert b"arc_challenge" in files["README.md"]


def check_kimi_k3(folder: Path, printed: str, hub: Hub) -> None:
    assert printed.count("Verified: ") == 4  # and `convert` fails where the functions differ
    assert printed.count("Not the same function: experts were packed as MXFP4") == 2
    assert any(name.endswith("weight_packed") for name in load_file(folder / "my-k3-packed" / "model.safetensors"))
    assert "2 blocks of 2 layers" in printed
    assert "The weights are in the released layout of Kimi K3" in printed
    before, after = (load_file(folder / name / "model.safetensors") for name in ("my-k3-text", "my-k3-again"))
    assert before.keys() == after.keys()
    assert AttnResKimiK3Config.from_pretrained(folder / "my-k3-saved").checkpoint_layout == "composite"
    assert (folder / "runs/k3-lora/adapter/adapter_config.json").exists()
    assert AttnResKimiK3Config.from_pretrained(folder / "runs/k3-lora/model").checkpoint_layout == "composite"
    for name in ("runs/k3-images/model", "runs/k3-images-trl/checkpoint-1"):
        assert AttnResKimiK3Config.from_pretrained(folder / name).vision_config is not None
        assert (folder / name / "preprocessor_config.json").exists()
    # The table of the page has the numbers that its code prints.
    rows = [line for line in printed.splitlines() if re.match(r"\| `(attnres-k3-tiny|kimi-k3)` \|", line)]
    assert len(rows) == 2 and set(rows) <= set((ROOT / "docs/guides/kimi_k3.md").read_text().splitlines())


def check_tune_kimi_k3(folder: Path, printed: str, hub: Hub) -> None:
    """Check the trained models: their layout, the token that ends a turn, and the reward model without `attnres`."""
    assert "<|open|>think<|sep|>" in printed and "Verified: " in printed
    ends = json.loads((folder / "Kimi-K3/config.json").read_text())["text_config"]["eos_token_id"]
    for name in ("runs/k3-sft/model", "runs/k3-dpo", "runs/k3-grpo", "k3-merged", "k3-tuned"):
        config = AttnResKimiK3Config.from_pretrained(folder / name)
        assert config.checkpoint_layout == "composite" and config.eos_token_id == ends, name
    assert (folder / "runs/k3-grpo-packed/adapter_config.json").exists()
    names = [
        json.loads((folder / name / "model.safetensors.index.json").read_text())["weight_map"].keys()
        for name in ("Kimi-K3", "k3-tuned")
    ]
    assert names[0] == names[1] and any(name.startswith("vision_tower.") for name in names[1])
    code = (
        "import sys; sys.modules['attnres'] = None\n"
        "from transformers import AutoModelForSequenceClassification as Auto, AutoTokenizer\n"
        "scorer = Auto.from_pretrained('runs/k3-reward', trust_remote_code=True)\n"
        "tokenizer = AutoTokenizer.from_pretrained('runs/k3-reward')\n"
        "chat = [{'role': 'user', 'content': 'Name a colour.'}, {'role': 'assistant', 'content': 'Red.'}]\n"
        "print(scorer(**tokenizer.apply_chat_template(chat, return_tensors='pt')).logits)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    score = r"tensor\(\[\[(\S+?)\]\]"
    assert float(re.findall(score, done.stdout)[0]) == pytest.approx(float(re.findall(score, printed)[-1]), abs=1e-3)


def check_connections(folder: Path, printed: str, hub: Hub) -> None:
    assert "mhc 4" in printed


def check_add_connection(folder: Path, printed: str, hub: Hub) -> None:
    """Check that the saved model loads with the page's last block in a process that cannot import `attnres`."""
    assert "a scaled, shifted stream" in printed and "top-1 agreement 100.00%" in printed
    assert "scaled_stream.py" in printed  # in the list of files that `push` would upload
    code = {path.name for path in (folder / "saved").glob("*.py")}
    assert {"scaled_stream.py", "connections_attnres.py"} <= code and "attn_res_attnres.py" not in code
    *_, last = (block.code for block in blocks_of(ROOT / "docs/guides/add_connection.md") if block.language == "python")
    (folder / "elsewhere").mkdir()
    shutil.copytree(folder / "saved", folder / "elsewhere/saved")
    (folder / "elsewhere/load.py").write_text(last, encoding="utf-8")
    packages = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    script = ROOT / "tests/modeling_attnres/without_attnres.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(script), packages, "load.py"],
        cwd=folder / "elsewhere",
        env=os.environ | {"HF_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "scaled_stream\n"


CHECKS = {
    "docs/guides/add_connection.md": check_add_connection,
    "README.md": check_readme,
    "docs/tour.md": check_tour,
    "docs/guides/retrofit.md": check_retrofit,
    "docs/guides/train.md": check_train,
    "docs/guides/inspect.md": check_inspect,
    "docs/guides/connections.md": check_connections,
    "docs/guides/kimi_k3.md": check_kimi_k3,
    "docs/guides/tune_kimi_k3.md": check_tune_kimi_k3,
    "docs/guides/publish.md": check_publish,
}


@pytest.mark.slow
def test_the_exactness_that_a_page_prints_is_what_its_code_prints(workplace, environment, capsys):
    page = ROOT / "docs/concepts/exactness.md"
    workplace()
    run_page(page, environment)
    shown = next(block.code for block in blocks_of(page) if block.language == "text" and block.code.startswith("sum: "))
    printed = capsys.readouterr().out
    table = page.read_text(encoding="utf-8").partition("## Rounding in bfloat16")[2]
    expected, actual = ([float(number) for number in re.findall(r"[\d.]+e[+-]\d+", text)] for text in (shown, printed))
    assert actual[0] < 1e-6 and actual[1] == pytest.approx(expected[1], rel=0.5)
    in_page, in_run = (
        {row.split("`")[1]: [float(number) for number in re.findall(r"([\d.]+)%", row)] for row in rows}
        for rows in (re.findall(r"^\| `.*%.*\|$", text, re.MULTILINE) for text in (table, printed))
    )
    assert in_page.keys() <= in_run.keys() == CONNECTIONS.keys()
    for name, numbers in in_page.items():
        assert in_run[name] == pytest.approx(numbers, rel=0.5, abs=0.1), name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_are_of_a_kind_that_is_run_or_shown(page):
    """The other tests do not see a fence without a language. YAML and JSON are files that commands use."""
    assert len(re.findall(r"^\s*```", page.read_text(encoding="utf-8"), re.MULTILINE)) == 2 * len(blocks_of(page))
    for block in blocks_of(page):
        assert block.language in ALLOWED
        assert block.title or block.language not in ("yaml", "json"), block


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_block_that_can_be_copied_alone_knows_the_models_that_it_loads(page):
    """The other tests run all blocks of a page in one process. Without the import, a block alone asks to run code."""
    for block in blocks_of(page):
        if block.language == "python" and re.search(
            r"import .*AutoModel[^.]*\n[^`]*AutoModel\w+\.from_pretrained", block.code
        ):
            assert re.search(r"^(import|from) attnres|trust_remote_code", block.code, re.MULTILINE), block.code


def test_the_tables_hold_what_pages_have():
    commands = [command for page in PAGES for command in commands_of(page)]
    blocks = [block.code for page in PAGES for block in blocks_of(page) if block.language == "python"]
    assert {entry(command, ELSEWHERE) for command in commands} - {None} == ELSEWHERE.keys()
    assert {entry(block, PYTHON_ELSEWHERE) for block in blocks} - {None} == PYTHON_ELSEWHERE.keys()
    run = [command for command in commands if not entry(command, ELSEWHERE)]
    assert {entry(command, ADDED) for command in run} - {None} == ADDED.keys()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_running_text_have_the_options_that_they_name(page):
    commands = get_command(app).commands
    for _, name, *words in inline_commands_of(page):
        options = {
            option for parameter in commands[name].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options | {"--help"}, (
            name,
            words,
        )


def test_tables_of_connections_are_made_from_what_they_declare(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    tables = importlib.import_module("tables")
    pages = {page: (ROOT / page).read_text(encoding="utf-8") for page in tables.PARTS}
    for page, text in pages.items():
        assert tables.with_parts(page, text) == text, "run `make tables`"
    table, _, fields = pages["docs/guides/connections.md"].partition("<!-- /connections -->")
    assert {*re.findall(r"^\| \[`(\w+)`\]", table, flags=re.MULTILINE)} == BUILT_IN
    own = {field for name in BUILT_IN - {"attn_res"} for field in CONNECTIONS[name].fields}
    assert {field for field in own if f"| `{field}` |" in fields} == own != set()
