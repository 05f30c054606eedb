"""If a file of an earlier run is damaged, the next run names it and the remedy in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from attnres.commands.errors import describe
from attnres.commands.eval import run_eval
from attnres.conversion import retrofit
from attnres.eval.benchmarks import pick
from attnres.eval.shared_prefix import SharedPrefixLM
from attnres.eval.start import EvalOptions, check_run

TASK = "arc_challenge"


@pytest.fixture(scope="module")
def model(assets) -> str:
    return str(assets / "checkpoints" / "stories260K-hf")


@pytest.fixture(scope="module")
def evaluated(model, hub, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("evaluated") / "out"
    run_eval(EvalOptions(model, out, benchmarks=pick(TASK), data=hub, limit=3))
    return out


@pytest.fixture
def refusal(evaluated, model, hub, tmp_path, monkeypatch) -> Callable[[], str]:
    """Return `refusal()`: the line that the next run prints, on a copy of the folder at `tmp_path / "out"`."""
    monkeypatch.setattr("attnres.commands.eval._load_model", lambda *_: pytest.fail("a model was loaded"))
    shutil.copytree(evaluated, tmp_path / "out")

    def run() -> str:
        with pytest.raises((AttributeError, LookupError, TypeError, ValueError, FileExistsError)) as error:
            check_run(EvalOptions(model, tmp_path / "out", pick(TASK), data=hub))
            run_eval(EvalOptions(model, tmp_path / "out", benchmarks=pick(TASK), data=hub, limit=3))
        line, is_foreseen = describe(error.value)
        assert is_foreseen
        return line

    return run


@pytest.mark.parametrize("content", ["", "{}", "[]", "null"])
@pytest.mark.parametrize("name", [f"model/{TASK}.json", "model/setup.json", "results.json"])
def test_the_message_names_an_emptied_or_truncated_file(name, content, refusal, tmp_path):
    (tmp_path / "out" / name).write_text(content)
    message = refusal()
    assert str(tmp_path / "out" / name) in message
    assert ("remove the folder" if name.endswith("setup.json") else "Remove it") in message


@pytest.mark.parametrize("change", [{"results": []}, {"group_subtasks": {"a": 3}}])
def test_a_results_file_with_parts_of_another_form_is_named(change, refusal, tmp_path):
    path = tmp_path / "out" / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert str(path) in refusal()


def test_a_model_without_a_tokenizer_is_refused_before_the_data_is_read(model, tmp_path, monkeypatch):
    monkeypatch.setattr("attnres.commands.eval.load_all", lambda *_: pytest.fail("the data was loaded"))
    retrofit(model, block_size=2).save_pretrained(tmp_path / "bare")
    for names in ({"model": str(tmp_path / "bare")}, {"model": model, "baseline": str(tmp_path / "bare")}):
        with pytest.raises(ValueError, match=f"^{tmp_path / 'bare'} has no tokenizer that loads: save one there by "):
            run_eval(EvalOptions(out=tmp_path / "out", benchmarks=pick(TASK), **names))
    assert not (tmp_path / "out").exists()


@pytest.fixture
def changed_model(model, tmp_path) -> Callable[..., str]:
    """Return `changed_model(**settings)`: a copy of the model with these settings of its tokenizer."""

    def change(**settings) -> str:
        shutil.copytree(model, tmp_path / "changed")
        path = tmp_path / "changed" / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        return str(path.parent)

    return change


def test_a_tokenizer_without_bos_and_eos_is_refused_before_the_data_is_read(changed_model, tmp_path, monkeypatch):
    monkeypatch.setattr("attnres.commands.eval.load_all", lambda *_: pytest.fail("the data was loaded"))
    name = changed_model(bos_token=None, eos_token=None)
    with pytest.raises(ValueError, match=f"^The tokenizer of {name} names neither a BOS nor an EOS .* as `eos_token`"):
        run_eval(EvalOptions(name, tmp_path / "out", benchmarks=pick(TASK)))
    with pytest.raises(ValueError, match="names neither a BOS nor an EOS"):
        SharedPrefixLM(name, device="cpu")


def test_a_tokenizer_without_eos_is_refused_before_answers_are_generated(changed_model, hub, tmp_path, monkeypatch):
    monkeypatch.setattr("attnres.commands.eval._load_model", lambda *_: pytest.fail("a model was loaded"))
    name = changed_model(eos_token=None)
    with pytest.raises(ValueError, match=f"^The tokenizer of {name} names no EOS token, at which an answer ends"):
        run_eval(EvalOptions(name, tmp_path / "out", benchmarks=pick("gsm8k"), data=hub, limit=1))


@pytest.mark.parametrize("file", ["merges.txt", "a.tiktoken"])
def test_results_of_a_model_are_not_reused_after_a_file_of_its_tokenizer_changed(file, changed_model, hub, tmp_path):
    """A copy of an evaluated model gets a file of another kind of tokenizer, and then another one."""
    path = Path(changed_model(), file)
    path.write_text("a b")
    arguments = {"out": tmp_path / "out", "benchmarks": pick(TASK), "data": hub, "limit": 1}
    run_eval(EvalOptions(str(path.parent), **arguments))
    path.write_text("a b c")
    with pytest.raises(FileExistsError, match=r"holds results whose setup\.json has other 'files'"):
        run_eval(EvalOptions(str(path.parent), **arguments))


def test_results_of_a_model_are_not_reused_after_weights_in_another_folder_changed(changed_model, hub, tmp_path):
    folder = Path(changed_model())
    weights, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    names = load_file(weights).keys()
    (folder / "parts").mkdir()
    weights.rename(weights := folder / "parts/one.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "parts/one.safetensors")}))
    arguments = {"out": tmp_path / "out", "benchmarks": pick(TASK), "data": hub, "limit": 1}
    run_eval(EvalOptions(str(folder), **arguments))
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    with pytest.raises(FileExistsError, match=r"holds results whose setup\.json has other 'files'"):
        run_eval(EvalOptions(str(folder), **arguments))
