"""If a file of an earlier run is damaged, the next run names it and the remedy in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from attnres.commands.eval import run_eval
from attnres.conversion import retrofit
from attnres.eval.benchmarks import pick
from attnres.eval.options import EvalOptions
from attnres.eval.start import check_run
from attnres.eval.store import ResultStore

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
    """Return `refusal()`: the message of the next run on a copy of the folder, at `tmp_path / "out"`."""
    monkeypatch.setattr("attnres.commands.eval._load_model", lambda *_: pytest.fail("a model was loaded"))
    shutil.copytree(evaluated, tmp_path / "out")

    def run() -> str:
        with pytest.raises((ValueError, FileExistsError)) as error:
            check_run(EvalOptions(model, tmp_path / "out", pick(TASK), data=hub))
            run_eval(EvalOptions(model, tmp_path / "out", benchmarks=pick(TASK), data=hub, limit=3))
        assert "\n" not in str(error.value)
        return str(error.value)

    return run


# Each changed result is stored with a valid hash, as another version of the package would store it.
@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda result: result.clear(), "results"),
        (lambda result: result.pop("configs"), "configs"),
        (lambda result: result.update(configs=[]), "configs"),
        (lambda result: result.update(configs={}), f"{TASK} of configs"),
        (lambda result: result["configs"][TASK].update(metadata=3), f"metadata of {TASK} of configs"),
        (lambda result: result["n-samples"][TASK].pop("effective"), f"effective of {TASK} of n-samples"),
        (lambda result: result["results"][TASK].pop("acc_norm,none"), f"acc_norm,none of {TASK} of results"),
        (lambda result: result["model"].clear(), "model_num_parameters of model"),
        (lambda result: result.update(dataset_revision={}), "dataset_revision"),
        (lambda result: result.update(samples=None), "samples"),
        (lambda result: result["samples"][1].pop("target_hash"), "samples"),
        (lambda result: result["samples"][1].update(doc_id=[]), "samples"),
        (lambda result: result["samples"][1].update(acc_norm=None), "acc_norm of a sample"),
        (lambda result: result["samples"][1].update(acc_norm=float("nan")), "acc_norm of a sample"),
        (lambda result: result["configs"][TASK].update(output_type="generate_until"), "answer_tokens"),
    ],
)
def test_the_message_on_a_stored_result_of_another_form_names_the_part(change, part, refusal, tmp_path):
    path = tmp_path / "out" / "model" / f"{TASK}.json"
    store = ResultStore(path.parent, json.loads((path.parent / "setup.json").read_text()))
    result = store.read(TASK)
    change(result)
    store.write(TASK, result)
    message = refusal()
    assert message.startswith(f"{path} is not in the format of this version: its {part} is missing or has another form")
    assert message.endswith("Remove it, and the same command computes it again.")


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", '{"results": ', '{"sha256": 3}', "NaN", "\x00"])
@pytest.mark.parametrize("name", [f"model/{TASK}.json", "model/setup.json", "results.json"])
def test_the_message_names_an_emptied_or_truncated_file(name, content, refusal, tmp_path):
    (tmp_path / "out" / name).write_text(content)
    message = refusal()
    assert message.startswith(f"{tmp_path / 'out' / name} ")
    assert ("remove the folder" if name.endswith("setup.json") else "Remove it") in message


@pytest.mark.parametrize("change", [{"results": []}, {"group_subtasks": {"a": 3}}, {"config": {"model_args": 3}}])
def test_a_results_file_with_parts_of_another_form_is_named(change, refusal, tmp_path):
    path = tmp_path / "out" / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert refusal().startswith(f"{path} is damaged (")


def test_a_model_without_a_tokenizer_is_refused_before_the_data_is_read(model, tmp_path, monkeypatch):
    monkeypatch.setattr("attnres.commands.eval.load_all", lambda *_: pytest.fail("the data was loaded"))
    retrofit(model, block_size=2).save_pretrained(tmp_path / "bare")
    for names in ({"model": str(tmp_path / "bare")}, {"model": model, "baseline": str(tmp_path / "bare")}):
        with pytest.raises(ValueError, match=f"^{tmp_path / 'bare'} has no tokenizer that loads: save one there by "):
            run_eval(EvalOptions(out=tmp_path / "out", benchmarks=pick(TASK), **names))
    assert not (tmp_path / "out").exists()
