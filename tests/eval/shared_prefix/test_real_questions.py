"""`SharedPrefixLM` gives the results of the stock harness on real questions, in one process and in two."""

import json
import os
from pathlib import Path

import lm_eval
import pytest
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnres.conversion import retrofit
from attnres.eval.benchmarks import benchmarks, load
from attnres.eval.shared_prefix import SharedPrefixLM

from ... import forks

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def source(assets) -> Path:
    return assets / "checkpoints" / "stories260K-hf"


def evaluate(lm: HFLM, name: str, data: Path, limit: int) -> dict:
    return lm_eval.evaluate(lm, load(benchmarks()[name], data), limit=limit, bootstrap_iters=0)["results"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hellaswag", "arc_challenge"])
def test_real_questions_have_the_results_of_the_stock_harness(name, source, assets):
    """Prompts of ARC are longer than the model's context, so their beginning is cut off."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    results = [
        evaluate(lm(made, tokenizer=tokenizer, batch_size=8), name, assets / "hub", limit=4)
        for lm, made in ((HFLM, model), (SharedPrefixLM, model), (SharedPrefixLM, retrofit(model, block_size=2)))
    ]
    assert results[0] == results[1] == results[2]


@pytest.mark.slow
def test_several_processes_share_the_questions(source, assets, tmp_path):
    command = [HERE / "several_processes_session.py", source, assets / "hub", tmp_path / "results.json"]
    done = forks.launch(*command, env=os.environ | {"ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["processes"] == 2
    assert results["requests"] == 16  # four of the seven questions
    expected = evaluate(HFLM(str(source), device="cpu", batch_size=4), "hellaswag", assets / "hub", limit=7)
    assert results["results"] == expected
