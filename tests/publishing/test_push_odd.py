"""`attnres push` copes with edits by people and other tools, failures, and hostile directories."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard


@pytest.fixture
def model(published_model) -> Path:
    return published_model


@pytest.fixture
def copy(published_copy) -> Path:
    return published_copy


def changed(path: Path, **fields: object) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | fields))


def test_weights_that_would_be_loaded_instead_are_removed_and_no_other_files(push, model):
    stale = {
        "model.safetensors",
        "adapter_config.json",
        "adapter_model.safetensors",
        "model-00003-of-00003.safetensors",
    }
    others = {
        "models/other/weights.safetensors",
        "model-card-data/emb.safetensors",
        "model_ema.safetensors",
        "modelling.py",
    }
    push.run("from huggingface_hub import HfApi; HfApi().create_repo('me/used')")
    for name in stale | others:
        push.edit("me/used", name, name)
    done = push("push", "model", "me/used")
    assert done["status"] == 0, done["err"]
    names = push.hub.files("me/used").keys()
    assert others <= names
    assert not stale & names
    assert all(name in done["out"].partition("Removed")[2] for name in stale)


def test_a_gitignore_of_the_repository_leaves_nothing_out(push, model):
    push.run("from huggingface_hub import HfApi; HfApi().create_repo('me/ignoring')")
    push.edit("me/ignoring", ".gitignore", "*.safetensors\n*_attnres.py\n")
    assert push("push", "model", "me/ignoring")["status"] == 0
    assert {path.name for path in model.iterdir()} <= push.hub.files("me/ignoring").keys()


def test_a_card_that_is_edited_during_the_upload_keeps_the_edit(push, model, copy, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the Hub is on this machine
    push("push", "model", "me/race")
    changed(copy / "config.json", changed=True)
    api = HfApi(endpoint=push.hub.url, token=push.hub.write_token)
    edited = push.card("me/race") + "\n## Bias\n"
    push.hub.before(  # at the first request of the upload
        "/preupload/",
        lambda: api.upload_file(repo_id="me/race", path_in_repo="README.md", path_or_fileobj=edited.encode()),
    )
    done = push("push", copy.name, "me/race")
    assert done["status"] == 0, done["err"]
    assert push.card("me/race").count("## Bias") == 1


def test_local_metadata_is_added_to_a_card_that_was_edited_on_the_hub(push, copy):
    push("push", copy.name, "me/both")
    push.edit("me/both", "README.md", push.card("me/both").replace("tags:", "language: en\ntags:") + "\n## Bias\n")
    card = copy / "README.md"
    card.write_text(card.read_text().replace("tags:", "license: mit\nlanguage: de\ntags:", 1))
    done = push("push", copy.name, "me/both")
    assert done["out"].count("Published") == 1
    assert "it keeps its `language`" in done["out"]
    data = ModelCard(push.card("me/both")).data
    assert (data.license, data.language) == ("mit", "en")
    assert "## Bias" in push.card("me/both")


def test_a_push_that_failed_at_the_card_is_not_taken_for_an_edit(push, copy):
    push.hub.fail("status", "/commit/", status=403, skip=1)
    assert push("push", copy.name, "me/failed")["status"] == 1
    (copy / "README.md").write_text((copy / "README.md").read_text() + "\n## Limits\n")
    done = push("push", copy.name, "me/failed")
    assert done["status"] == 0, done["err"]
    assert "## Limits" in push.card("me/failed")


def test_metadata_keeps_its_comments_and_forms(push, copy):
    """A comment, a list in one line, the version 1.10 and the language `no` stay as they were written."""
    card = (
        (copy / "README.md")
        .read_text()
        .replace(
            "tags:", "# by hand\nversion: 1.10\nlanguage: [en, 'no']\nlicense: mit  # as its source\ntags:\n- toy", 1
        )
    )
    (copy / "README.md").write_text("\ufeff" + card, encoding="utf-8")
    done = push("push", copy.name, "me/written")
    assert done["status"] == 0, done["err"]
    text = push.card("me/written")
    for line in ("# by hand", "version: 1.10", "language: [en, 'no']", "license: mit  # as its source"):
        assert f"\n{line}\n" in text
    assert ModelCard(text).data.tags == ["toy", "attnres", "attn-res"]
    assert text.startswith("---\n")


@pytest.mark.parametrize("metadata", ["license: nonsense", "base_model: {a: b}", "tags: [{a: b}]"])
def test_metadata_that_the_hub_refuses_is_refused_before_anything_is_uploaded(push, copy, metadata):
    card = (copy / "README.md").read_text()
    (copy / "README.md").write_text(
        card.replace("tags:", f"{metadata}\nmore:" if "tags" in metadata else f"{metadata}\ntags:", 1)
    )
    done = push("push", copy.name, "me/invalid")
    assert done["status"] == 1
    assert len(done["err"].strip().splitlines()) == 1, done["err"]
    assert "unforeseen" not in done["err"]
    assert push.commits("me/invalid") == ["initial commit"]


@pytest.mark.slow
def test_a_damaged_card_on_the_hub_is_reported_before_anything_is_uploaded(push, tmp_path):
    damaged = ["date: 2024-02-30", "a: " + "[" * 3000, "- a", "a: ["]
    for number, metadata in enumerate(damaged):
        branch = tmp_path / "me" / f"damaged{number}" / "main"
        branch.mkdir(parents=True)
        (branch / "README.md").write_text(f"---\n{metadata}\n---\n# Mine\n")
    push.hub.repositories.load(tmp_path)
    for number in range(len(damaged)):
        done = push("push", "model", f"me/damaged{number}")
        assert done["status"] == 1
        assert "(in README.md on the Hub). Mend it there." in done["err"]
        assert len(push.commits(f"me/damaged{number}")) == 1


def test_names_of_files_are_shown_literally(push, copy):
    for name in ("LICENSE[red].txt", "LICENSE\n[1].txt", "odd[b].bin", "odd\x1b[2J.bin"):
        (copy / name).write_text("x")
    done = push("push", copy.name, "me/names", "--dry-run")
    assert done["status"] == 0, done["err"]
    assert "LICENSE[red].txt" in done["out"] and "LICENSE\\n[1].txt" in done["out"]
    assert "odd[b].bin" in done["out"] and "\x1b" not in done["out"]


@pytest.mark.parametrize("name", ["[red]", "[bold]x", "<b>", "a\nb", "-m", "a\x1b[2Jb", "{x}"])
def test_a_folder_of_any_name_is_published_and_its_name_is_shown_literally(push, model, name):
    folder = shutil.copytree(model, model.with_name(name))
    shown = name.replace("\n", "\\n").replace("\x1b", "\\x1b")
    done = push("push", "--dry-run", "--", name, "x")
    assert done["status"] == 0, done["err"]
    assert f"you can add it to the metadata in {shown}/README.md." in done["out"]
    changed(folder / "config.json", auto_map={})
    refused = push("push", "--dry-run", "--", name, "x")
    shutil.rmtree(folder)
    (line,) = refused["err"].splitlines()
    assert refused["status"] == 1
    # A message is one line, in which any white space becomes one space.
    assert " ".join(name.split()).replace("\x1b", "\\x1b") + "/config.json has no `auto_map`" in line


STRAY = (
    *("NOTICE-internal.md", "LICENSE-draft.txt", "private.model", "prompts.jinja", "vocab-customers.json"),
    *("chat_template.old.json", "customers.tiktoken", "model-old.safetensors", "source_code/keys.py"),
    *(
        "inspection/customers.csv",
        "inspection/me.png",
        "inspection/depth_attention_c.svg",
        "inspection/report.html.bak",
    ),
)
KNOWN = ("LICENSE.md", "NOTICE", "spiece.model", "tokenizer.model.v3", "additional_chat_templates/rag.jinja")


def test_only_files_of_known_names_are_uploaded_and_the_others_are_listed(push, copy):
    for name in (*STRAY, *KNOWN):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text("x")
    report = {"inspection.json", "sublayers.csv", "depth_attention_b.svg", "sinks.png"}
    for name in report:
        (copy / "inspection" / name).write_text('{"written_by": "attnres inspect"}')
    dry = push("push", copy.name, "me/known", "--dry-run")
    done = push("push", copy.name, "me/known")
    assert done["status"] == 0, done["err"]
    files = push.hub.files("me/known").keys()
    assert not {*STRAY} & files
    assert {*KNOWN, *(f"inspection/{name}" for name in report)} <= files
    for output in (dry["out"], done["out"]):
        assert {*STRAY} == {*output.partition("Stays here: ")[2].partition(".\n")[0].split(", ")}
        assert "`hf upload me/known FILE` adds another file" in output


def test_a_folder_inspection_without_a_report_is_not_published(push, copy):
    (copy / "inspection").mkdir()
    for name in ("inspection.json", "report.html"):
        (copy / "inspection" / name).write_text('{"customers": []}')
    assert (
        "Stays here: inspection/inspection.json, inspection/report.html."
        in push("push", copy.name, "me/x", "--dry-run")["out"]
    )
    done = push("push", copy.name, "me/x", "--inspection", f"{copy.name}/inspection", "--dry-run")
    assert done["status"] == 1
    assert "is no report of `attnres inspect`" in done["err"]


def test_a_vocabulary_is_published_if_the_code_of_its_tokenizer_names_it(push, copy):
    (copy / "tokenization_my.py").write_text('VOCAB_FILES_NAMES = {"vocab_file": "my.tiktoken"}\nclass MyTok: pass\n')
    for name in ("my.tiktoken", "other.tiktoken"):
        (copy / name).write_text("IQ== 0")
    changed(copy / "tokenizer_config.json", nested={"auto_map": {"AutoTokenizer": ["tokenization_my.MyTok", None]}})
    assert push("push", copy.name, "me/vocabulary")["status"] == 0
    files = push.hub.files("me/vocabulary")
    assert {"my.tiktoken", "tokenization_my.py"} <= files.keys()
    assert "other.tiktoken" not in files


@pytest.mark.parametrize(
    "name", ["README.md", "tokenizer_config.json", "attn_res_attnres.py", "LICENSE", "inspection/sublayers.csv"]
)
def test_a_secret_in_a_published_file_is_refused_with_its_line_and_not_shown(push, copy, name):
    secret = "ghp_" + "".join(chr(ord("a") + number % 26) + str(number % 10) for number in range(18))
    path = copy / name
    (copy / "inspection").mkdir()
    (copy / "inspection" / "inspection.json").write_text('{"written_by": "attnres inspect"}')
    before = path.read_text().rstrip("\n") + "\n" if path.exists() else ""
    path.write_text(f"{before}\n# {secret}\n{secret}\n" if path.suffix != ".json" else before)
    if path.suffix == ".json":
        changed(path, key=secret)
        path.write_text(json.dumps(json.loads(path.read_text()), indent=1))
    lines = [number for number, line in enumerate(path.read_text().splitlines(), 1) if secret in line]
    push.hub.forget()
    for option in ([], ["--dry-run"]):
        done = push("push", copy.name, "me/secret", *option)
        assert done["status"] == 1
        assert f"{copy.name}/{name}, line {lines[0]}, holds a secret (" in done["err"]
        assert secret not in done["out"] + done["err"]
        assert len(done["err"].strip().splitlines()) == 1
    assert not push.hub.log()


def test_a_secret_in_a_file_that_is_not_published_is_no_error(push, copy):
    (copy / ".env").write_text("HF_TOKEN=hf_" + "abcdefghi1" * 4)
    assert "Stays here: .env." in push("push", copy.name, "me/env", "--dry-run")["out"]


def test_many_files_that_are_not_published_are_counted(push, copy):
    (copy / "many").mkdir()
    for number in range(200):
        (copy / "many" / f"{number}").touch()
    assert "and 180 other files" in push("push", copy.name, "me/many", "--dry-run")["out"]


def test_the_code_of_a_tokenizer_is_published(push, copy):
    (copy / "tokenization_my.py").write_text("from .helper import X\nclass MyTok: pass\n")
    (copy / "helper.py").write_text("X = 1\n")
    changed(copy / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_my.MyTok", None]})
    assert push("push", copy.name, "me/tokenizer")["status"] == 0
    assert {"tokenization_my.py", "helper.py"} <= push.hub.files("me/tokenizer").keys()


def _link(folder: Path) -> None:
    (folder / "inspection").symlink_to("/etc")
    (folder / ".eval_results").mkdir()
    (folder / ".eval_results" / "a.yaml").symlink_to("/etc/hostname")


REFUSED = {
    "code of others": (
        lambda f: changed(f / "config.json", auto_map={"AutoModelForCausalLM": "evil/repo--modeling.X"}),
        "by code in another repository",
    ),
    "code elsewhere": (
        lambda f: changed(f / "config.json", auto_map={"AutoModelForCausalLM": "/tmp/x.X"}),
        "not the name of a class in a file there",
    ),
    "code above": (
        lambda f: changed(f / "config.json", auto_map={"AutoModelForCausalLM": "x/../decoder_attnres.X"}),
        "not the name of a class in a file there",
    ),
    "a link": (_link, "outside the model's directory"),
    "a card of bytes": (lambda f: (f / "README.md").write_bytes(b"M\xfcller"), "is not UTF-8 text"),
    "a card as a folder": (lambda f: ((f / "README.md").unlink(), (f / "README.md").mkdir()), "Is a directory"),
    "the token far down": (
        lambda f: (f / "vocab.txt").write_text("x" * 11_000_000 + "hf_write_of_me"),
        "vocab.txt, line 1, holds a secret (your Hub token)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_directory_is_refused_in_one_line(push, copy, name):
    REFUSED[name][0](copy)
    push.hub.forget()
    done = push("push", copy.name, "me/refused")
    assert done["status"] == 1
    assert REFUSED[name][1] in done["err"]
    assert len(done["err"].strip().splitlines()) == 1
    assert "unforeseen" not in done["err"]
    assert not push.hub.log()


def test_a_name_without_an_account_gets_the_account_of_the_token(push, model):
    push.hub.forget()
    for token in (None, push.hub.write_token):
        dry = push("push", "model", "bare", "--dry-run", token=token)
        assert dry["status"] == 0, dry["err"]
        assert "goes to the account of your token, as YOUR-NAME/bare. Give ORG/NAME to choose" in dry["out"]
        assert 'name, revision = "YOUR-NAME/bare", "COMMIT"' in dry["out"]
    assert not push.hub.log()
    done = push("push", "model", "bare")
    assert done["status"] == 0, done["err"]
    assert f"Published: {push.hub.url}/me/bare" in done["out"]
    assert 'name, revision = "me/bare", "' in push.card("me/bare")
    assert "YOUR-NAME" not in push.card("me/bare")


def test_a_dry_run_names_the_metadata_that_the_hub_will_refuse(push, copy):
    card = copy / "README.md"
    card.write_text(
        card.read_text().replace("tags:", "base_model: /models/llama\ndatasets:\n- me/data\n- ./x\ntags:", 1)
    )
    out = push("push", copy.name, "me/x", "--dry-run")["out"]
    assert "its `base_model` must name Hub ids, not /models/llama." in out
    assert "its `datasets` must name Hub ids, not ./x." in out


def test_an_empty_folder_of_results_is_ignored(push, copy):
    (copy / ".eval_results").mkdir()
    assert push("push", copy.name, "me/empty", "--dry-run")["status"] == 0


@pytest.mark.parametrize("arguments", [["me/x", "--revision", ""], ["me/x", "--revision", "../x"], ["a/b/c"], ["-x"]])
def test_bad_names_are_bad_usage(push, model, arguments):
    done = push("push", "model", *arguments)
    assert done["status"] == 2
    assert "repo_type" not in done["err"]


TEMPLATE = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. This model card has been "
    "automatically generated."
)


def test_push_to_hub_replaces_the_template_only_if_no_person_has_filled_it(push, model):
    template = ModelCard.from_template(
        ModelCard("---\nlicense: mit\n---\n").data,
        model_description=TEMPLATE,
    )
    pushes = (
        "import attnres\nfrom transformers import AutoModelForCausalLM\n"
        "AutoModelForCausalLM.from_pretrained('model').push_to_hub('me/template')"
    )
    push.run("from huggingface_hub import HfApi; HfApi().create_repo('me/template')")
    push.edit("me/template", "README.md", str(template))
    done = push.run(pushes)
    assert done["status"] == 0, done["err"][-2000:]
    assert "More Information Needed" not in push.card("me/template")
    assert ModelCard(push.card("me/template")).data.license == "mit"
    push.edit("me/template", "README.md", str(template).replace("### Direct Use", "### Direct Use\n\nFor stories.\n"))
    assert push.run(pushes)["status"] == 0
    assert "For stories." in push.card("me/template")
