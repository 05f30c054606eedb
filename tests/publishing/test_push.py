"""`attnres push` publishes models on a Hub on this machine, from which others load them."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from copy import deepcopy
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, parse_eval_result_entries

from attnres.publishing.card_text import digest, find_part

HERE = Path(__file__).parent
WITHOUT = HERE.parent / "modeling_attnres" / "without_attnres.py"
LISTED = re.compile(r"^(\S+) +([\d.,]+ (?:bytes|kB|MB))$", re.MULTILINE)


@pytest.fixture
def model(published_model) -> Path:
    return published_model


def copied(model: Path, name: str) -> Path:
    return shutil.copytree(model, model.with_name(name))


@pytest.mark.slow
def test_the_listed_files_are_the_uploaded_files(push, model):
    mine = copied(model, "listed")
    (mine / "optimizer.pt").write_bytes(b"of a run")
    (mine / "notes.py").write_text("secret = 1")
    done = push("push", "listed", "me/listed")
    assert done["status"] == 0, done["err"]
    listed = dict(LISTED.findall(done["out"]))
    files = push.hub.files("me/listed")
    assert {*listed} == {*files} - {".gitattributes"}
    assert "Stays here: notes.py, optimizer.pt." in done["out"]
    assert {
        "config.json",
        "tokenizer.json",
        "README.md",
        "attn_res_attnres.py",
        "model-00001-of-00002.safetensors",
    } <= {*listed}
    assert all(files[name] == (mine / name).read_bytes() for name in listed if name != "README.md")
    assert done["out"].rstrip().endswith(f"Published: {push.hub.url}/me/listed")
    assert not any("hf_" in entry["path"] for entry in push.hub.log())


def test_the_card_is_valid_and_pins_the_commit_of_the_files(push, model):
    push("push", "model", "me/pinned")
    commits = push.hub.repositories["me/pinned"].commits
    (upload,) = [oid for oid, commit in commits.items() if commit.title == "Upload model"]
    card = push.card("me/pinned")
    assert f'name, revision = "me/pinned", "{upload}"' in card
    assert f"pretrained=me/pinned,revision={upload},trust_remote_code=True" in card
    data = ModelCard(card).data
    assert (data.library_name, data.pipeline_tag, data.tags) == (
        "transformers",
        "text-generation",
        ["attnres", "attn-res"],
    )
    push.hub.forget()
    push.edit("me/pinned", "README.md", card)  # `huggingface_hub` validates a card before it uploads it
    assert push.hub.log("POST", "/api/validate-yaml")
    assert "**Retrofit** of `stories`" in find_part(card, "origin").content
    assert (
        "The result computed the same function as its source: max |logit difference|"
        in find_part(card, "origin").content
    )


def test_pushing_again_changes_nothing(push, model):
    push("push", "model", "me/again")
    commits = push.commits("me/again")
    push.hub.forget()
    done = push("push", "model", "me/again")
    assert done["out"].rstrip().endswith(f"Nothing has changed: {push.hub.url}/me/again")
    assert push.commits("me/again") == commits
    assert not push.hub.log("PUT")


def test_a_dry_run_sends_no_request_and_shows_files_and_card(push, model):
    push.hub.forget()
    done = push("push", "model", "me/dry", "--dry-run", token=None)
    assert done["status"] == 0, done["err"]
    assert not push.hub.log()
    assert {"README.md", "config.json"} <= dict(LISTED.findall(done["out"])).keys()
    assert 'name, revision = "me/dry", "COMMIT"' in done["out"]
    assert "## How it was made" in done["out"]


@pytest.mark.slow
def test_a_published_model_generates_without_attnres(push, model, tmp_path):
    """The card's snippet runs as it is printed, in a new process where `attnres` cannot be imported."""
    push("push", "model", "lab/stories")
    (snippet,) = re.findall(r"```python\n(.*?)```", push.card("lab/stories"), flags=re.DOTALL)
    script = tmp_path / "snippet.py"
    script.write_text(snippet + "\nimport sys\nassert model.__module__.startswith('transformers_modules.'), model\n")
    site = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    done = subprocess.run(
        [sys.executable, "-I", "-S", WITHOUT, site, script],
        env=push.hub.environ(home=tmp_path / "home"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, here = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    outputs = here.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=20)
    assert done.stdout.strip() == tokenizer.decode(outputs[0], skip_special_tokens=True).strip()


@pytest.mark.slow
def test_the_command_for_the_harness_in_the_card_evaluates(push, model, assets, tmp_path):
    """The command runs on a few items, in the folder with the data `allenai/ai2_arc`."""
    push("push", "model", "lab/evaluated")
    (line,) = re.findall(r"^lm_eval .*$", push.card("lab/evaluated"), flags=re.MULTILINE)
    environment = push.hub.environ(home=tmp_path / "home")
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command = f"{line} --limit 4 --device cpu --output_path {tmp_path / 'out'}"
    done = subprocess.run(
        command, shell=True, env=environment, cwd=assets / "hub", capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["arc_challenge"]["sample_len"] == 4


def test_a_branch_and_a_pull_request_leave_main_alone(push, model):
    push("push", "model", "me/many")
    main = push.hub.files("me/many")
    changed = copied(model, "changed")
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"changed": True}))
    done = push("push", "changed", "me/many", "--revision", "dev")
    assert done["out"].rstrip().endswith(f"{push.hub.url}/me/many/tree/dev")
    assert json.loads(push.hub.files("me/many", "dev")["config.json"])["changed"]
    done = push("push", "changed", "me/many", "--create-pr", "--message", "Changed")
    assert done["out"].rstrip().endswith(f"{push.hub.url}/me/many/discussions/1")
    assert json.loads(push.hub.files("me/many", "refs/pr/1")["config.json"])["changed"]
    assert push.hub.repositories["me/many"].commit("refs/pr/1").title == "Model card: the commit to load"
    assert "Changed" in push.commits("me/many")
    assert push.hub.files("me/many") == main


def test_a_pull_request_can_change_the_card_alone(push, model):
    push("push", "model", "me/card")
    card = copied(model, "card")
    (card / "README.md").write_text((card / "README.md").read_text() + "\n## Limits\n\nSmall.\n")
    done = push("push", "card", "me/card", "--create-pr")
    assert done["out"].rstrip().endswith(f"{push.hub.url}/me/card/discussions/1")
    assert "## Limits" in push.card("me/card", "refs/pr/1")


def test_files_of_others_stay_and_older_weights_are_removed(push, model, tiny_model):
    push.run("from huggingface_hub import HfApi; HfApi().create_repo('me/used')")
    for name in ("model.safetensors", "training/log.txt", "LICENSE"):
        push.edit("me/used", name, f"{name} of others")
    done = push("push", "model", "me/used")
    assert (
        "Removed from the repository, as older weights that would be loaded instead: model.safetensors." in done["out"]
    )
    files = push.hub.files("me/used")
    assert "model.safetensors" not in files
    assert files["training/log.txt"] == b"training/log.txt of others"


def test_text_of_a_person_in_the_card_stays(push, model):
    """The card is edited in the browser, then locally, then in both places."""
    mine = copied(model, "mine")
    push("push", "mine", "me/mine")
    edited = push.card("me/mine").replace("library_name", "license: mit\nlibrary_name") + "\n## Bias\n\nMuch.\n"
    push.edit("me/mine", "README.md", edited)
    config = json.loads((mine / "config.json").read_text())
    (mine / "config.json").write_text(json.dumps(config | {"changed": True}))
    assert push("push", "mine", "me/mine")["status"] == 0
    card = push.card("me/mine")
    assert "## Bias\n\nMuch." in card
    assert ModelCard(card).data.license == "mit"
    assert re.search(r'"me/mine", "(\w+)"', card)[1] != re.search(r'"me/mine", "(\w+)"', edited)[1]

    (mine / "README.md").write_text((mine / "README.md").read_text() + "\n## Limits\n")
    done = push("push", "mine", "me/mine")
    assert done["status"] == 1
    assert "README.md was edited on the Hub, and the local one was edited too" in done["err"]
    assert push.card("me/mine") == card
    assert push("push", "mine", "me/mine", "--overwrite-card")["status"] == 0
    assert "## Limits" in push.card("me/mine")
    assert "## Bias" not in push.card("me/mine")


def test_an_interrupted_upload_continues_where_it_stopped(push, model):
    push.hub.fail("cut", "/storage/upload/", after_bytes=1000, skip=1, times=None)
    done = push("push", "model", "me/cut")
    assert done["status"] == 1 and len(done["waits"]) == 5
    assert len(done["err"].strip().splitlines()) == 1, done["err"]
    assert "The same command goes on" in done["err"]
    assert re.search(r"Error while uploading '\S+' to the Hub: \w+", done["err"]), "it must give the reason"
    assert push.commits("me/cut") == ["initial commit"]
    push.hub.heal()
    sent = {entry["path"] for entry in push.hub.log("PUT") if entry["status"] == 200}
    push.hub.forget()
    assert push("push", "model", "me/cut")["status"] == 0
    again = {entry["path"] for entry in push.hub.log("PUT")}
    assert len(sent) == len(again) == 1
    assert not sent & again


def test_each_file_of_weights_is_sent_alone(push, model):
    """If `hf_xet` sent the files together, one failure would lose them all."""
    push.hub.forget()
    assert push("push", "model", "me/each")["status"] == 0
    steps = [entry["path"] for entry in push.hub.log() if re.search("/objects/batch|/storage/upload/", entry["path"])]
    assert [path.split("/")[-1] == "batch" for path in steps] == [True, False, True, False]


def test_a_refused_upload_by_xet_is_an_error_of_one_line(push, model):
    """Users have `hf_xet`. It first requests a token, which the Hub of the tests refuses."""
    done = push.run(
        "import sys\nfrom huggingface_hub import constants\nfrom attnres.commands.main import main\n"
        "constants.HF_HUB_DISABLE_XET, sys.argv = False, ['attnres', 'push', 'model', 'me/xet']\n"
        "try:\n    main()\nfinally:\n    constants.HF_HUB_DISABLE_XET = True"
    )
    assert done["status"] == 1
    assert push.hub.log(path="/xet-write-token/")
    assert len(done["err"].strip().splitlines()) == 1, done["err"]
    assert "The same command goes on" in done["err"]
    assert push.commits("me/xet") == ["initial commit"]


def test_a_lost_answer_makes_no_second_commit(push, model):
    push.hub.fail("lost", "/commit/")
    assert push("push", "model", "me/lost")["status"] in (0, 1)
    assert push("push", "model", "me/lost")["status"] == 0
    assert push.commits("me/lost") == ["initial commit", "Upload model", "Model card: the commit to load"]


def test_requests_are_repeated_while_the_hub_is_busy(push, model):
    paths = ("/preupload/", "/objects/batch", "/commit/", "/api/repos/create", "validate-yaml")
    for path in paths:
        for status, wait in ((429, "7"), (500, "5"), (503, "400")):
            push.hub.fail("status", path, status=status, headers={"Retry-After": wait})
    done = push("push", "model", "me/busy")
    assert done["status"] == 0, done["err"]
    assert push.commits("me/busy")[1:] == ["Upload model", "Model card: the commit to load"]
    for path in paths:
        assert [entry["status"] for entry in push.hub.log(path=path)][:4] == [429, 500, 503, 200], path
    waits = Counter(done["waits"])
    # A pause is as long as the Hub requests, but at most 5 minutes. The client repeats uploads a second later.
    assert [waits[seconds] for seconds in (7, 5, 300)] == [3, 3, 3]
    assert [waits[seconds] for seconds in (8, 6, 401)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "token", "message"),
    [
        (["me/refused"], None, "no token for the Hub. Log in to the Hub by `hf auth login`, or set HF_TOKEN"),
        (["me/refused"], "hf_wrong", "Log in by `hf auth login`"),
        (["me/refused"], "hf_read_of_me", "Use a token that may do this"),
        (["other/refused"], "hf_write_of_me", "Use a token that may do this"),
        (["me/refused/too"], "hf_write_of_me", "is not a repository id"),
        (["me/open", "--private"], "hf_write_of_me", "me/open exists and is public"),
        (["me/open", "--revision", "refs/pr/7"], "hf_write_of_me", "refs/pr/7"),
    ],
)
def test_a_refusal_is_one_line_and_changes_nothing(push, model, arguments, token, message):
    if "me/open" not in push.hub.repositories:
        push.run("from huggingface_hub import HfApi; HfApi().create_repo('me/open')")
    before = deepcopy(push.hub.repositories)
    done = push("push", "model", *arguments, token=token)
    assert done["status"] in (1, 2)
    assert message in " ".join(done["err"].split())
    assert push.hub.repositories == before


def test_a_new_repository_is_private_if_asked_or_if_its_organization_makes_it_so(push, model):
    cases = ("me/shown", [], False), ("me/hidden", ["--private"], True), ("closed/hidden", [], True)
    for repo, options, is_private in cases:
        assert push("push", "model", repo, *options)["status"] == 0
        assert push.hub.repositories[repo].private == is_private


def test_results_and_figures_are_published(push, model):
    scores, report = model.with_name("scores"), model.with_name("report")
    (scores / ".eval_results").mkdir(parents=True)
    entry = {"dataset": {"id": "cais/mmlu", "task_id": "mmlu"}, "value": 26.5, "notes": "5-shot | acc"}
    (scores / ".eval_results" / "mmlu.yaml").write_text(json.dumps([entry]))
    report.mkdir()
    for name in ("inspection.json", "depth_attention.png", "depth_attention_spread.png", "report.html"):
        (report / name).write_text('{"written_by": "attnres inspect"}')
    done = push("push", "model", "me/whole", "--results", "scores", "--inspection", "report")
    assert done["status"] == 0, done["err"]
    files = push.hub.files("me/whole")
    assert parse_eval_result_entries(json.loads(files[".eval_results/mmlu.yaml"]))[0].value == 26.5
    assert {f"inspection/{path.name}" for path in report.iterdir()} <= files.keys()
    card = push.card("me/whole")
    assert "| cais/mmlu | mmlu | 26.5 | 5-shot &#124; acc |" in card
    assert "](inspection/depth_attention.png)" in card


def test_the_hashes_in_the_card_are_those_of_the_code_and_stand_there_only_on_request(push, model):
    push("push", "model", "me/hashes", "--hashes")
    from hashlib import sha256

    files = push.hub.files("me/hashes")
    stated = dict(re.findall(r"^\| `(\S+\.py)` \| `(\w{64})` \|$", push.card("me/hashes"), flags=re.MULTILINE))
    assert stated == {name: sha256(content).hexdigest() for name, content in files.items() if name.endswith(".py")}
    push("push", "model", "me/hashes")
    assert not re.search(r"[0-9a-f]{64}", push.card("me/hashes"))


def _without_auto_map(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))


BROKEN = {
    "no weights": (lambda f: [p.unlink() for p in f.glob("*.safetensors")], r"is incomplete: .* is not there"),
    "half a shard": (
        lambda f: (f / "model-00001-of-00002.safetensors").write_bytes(
            (f / "model-00001-of-00002.safetensors").read_bytes()[:9999]
        ),
        r"model-00001-of-00002\.safetensors",
    ),
    "a shard less": (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), r"model-00002-of-00002\.safetensors"),
    "no auto_map": (_without_auto_map, "has no `auto_map`"),
    "no code": (lambda f: (f / "backbones_attnres.py").unlink(), r"lacks backbones_attnres\.py"),
    "code less": (lambda f: (f / "attn_res_attnres.py").unlink(), r"attn_res_attnres\.py is not there"),
    "a link away": (
        lambda f: ((f / "tokenizer.json").unlink(), (f / "tokenizer.json").symlink_to("/etc/hostname")),
        "outside the model's directory",
    ),
    "the token": (
        lambda f: (f / "generation_config.json").write_text('{"token": "hf_write_of_me"}'),
        r"generation_config\.json, line 1, holds a secret .your Hub token.",
    ),
    "a bad card": (lambda f: (f / "README.md").write_text("---\n- a\n- b\n---\n"), "the metadata of the card"),
    "a bad model index in the card": (
        lambda f: (f / "README.md").write_text("---\nmodel-index: 5\n---\n"),
        r"`model-index` must be a list \(in .*README\.md\)",
    ),
    "bad YAML in the card": (lambda f: (f / "README.md").write_text("---\na: [\n---\n"), "the metadata of the card"),
    "bad results": (
        lambda f: ((f / ".eval_results").mkdir(), (f / ".eval_results" / "a.yaml").write_text("a: 1")),
        r"\.eval_results/a\.yaml\)\. Remove it",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_model_that_would_not_load_is_not_published(push, model, name):
    broken = copied(model, f"broken {name}")
    BROKEN[name][0](broken)
    push.hub.forget()
    done = push("push", broken.name, "me/broken")
    assert done["status"] == 1
    assert re.search(BROKEN[name][1], done["err"]), done["err"]
    assert len(done["err"].strip().splitlines()) == 1
    assert not push.hub.log()


def test_a_standard_model_and_an_adapter_are_refused_with_a_remedy(push, model):
    done = push("push", "stories", "me/standard")
    assert "which is not of the attnres family. Use `hf upload`." in done["err"]
    adapter = model.with_name("adapter")
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    assert "holds an adapter" in push("push", "adapter", "me/adapter")["err"]
    shutil.copytree(adapter, model.with_name("lora") / "adapter")
    assert "lora holds no model, only the adapter lora/adapter. Merge" in push("push", "lora", "me/adapter")["err"]


@pytest.mark.parametrize("command", [("push", "run", "me/run"), ("convert", "run", "x"), ("eval", "run", "--out", "x")])
def test_the_error_for_the_folder_of_a_run_names_its_model(push, model, command):
    (model.parent / "run" / "model").mkdir(parents=True, exist_ok=True)
    shutil.copy(model / "config.json", model.parent / "run" / "model")
    assert "run holds no model itself. Its model is run/model: name that." in push(*command)["err"]


def test_push_does_not_change_the_directory(push, model):
    before = {path: digest(path.read_bytes().hex()) for path in model.rglob("*") if path.is_file()}
    push("push", "model", "me/untouched")
    assert before == {path: digest(path.read_bytes().hex()) for path in model.rglob("*") if path.is_file()}
