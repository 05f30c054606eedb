"""The comparison from scratch: the same start and the same tokens for all, rates chosen apart, and honest tables."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from attnres.loading_attnres import attn_res_tensors
from attnres.training import compare
from attnres.training.compare import SELECTION_SEED, VARIANTS, Variant
from attnres.training.stored_runs import Store

TRAINING = Path(compare.__file__).parent
LAYERS = {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]}
SIZES = {"num_hidden_layers": 2, "num_local_experts": 4, **LAYERS}


@pytest.fixture
def small(monkeypatch) -> None:
    """Two layers, and few sequences."""
    for name, value in {"LENGTH": 32, "BATCH_SIZE": 2, "HELD_OUT": 4, "CHARACTERS": 60_000, "CHANGES": SIZES}.items():
        monkeypatch.setattr(compare, name, value)


@pytest.fixture
def corpus(tmp_path) -> Path:
    words = [f"{a}{b}{c}" for a in "bdkmt" for b in "aeiou" for c in "lnrs"]
    numbers = torch.randint(len(words), (12_000,), generator=torch.Generator().manual_seed(0)).tolist()
    text = " ".join(words[number] for number in numbers)
    (tmp_path / "train.txt").write_text(text[:40_000])
    (tmp_path / "valid.txt").write_text(text[40_000:])
    return tmp_path


def store_of(runs: list[tuple[Variant, int, float]], path: Path) -> Store:
    store = Store(path, {})
    for variant, seed, loss in runs:
        store.add({"recipe": vars(variant), "seed": seed, "after": loss, "curve": [[1, loss]]})
    return store


def test_one_seed_gives_every_variant_the_same_backbone(small):
    models = {label: compare.build(Variant(size, 1e-3, 0), 3) for label, size in VARIANTS.items()}
    tensors = {label: dict(model.named_parameters()) for label, model in models.items()}
    attnres = {label: set(attn_res_tensors(model)) for label, model in models.items()}
    assert not attnres["standard"] and attnres["Full"]
    for label, own in tensors.items():
        assert own.keys() - attnres[label] == tensors["standard"].keys()
        assert all(torch.equal(own[name], tensors["standard"][name]) for name in tensors["standard"])
    other = dict(compare.build(Variant(None, 1e-3, 0), 4).named_parameters())
    assert not torch.equal(other["lm_head.weight"], tensors["standard"]["lm_head.weight"])


def test_every_variant_sees_the_same_batches_and_rates_are_chosen_on_other_text(small, corpus, monkeypatch):
    data, seen = compare.load_data(corpus), []
    assert not {tuple(row) for row in data.selection.tolist()} & {tuple(row) for row in data.valid.tolist()}
    monkeypatch.setattr(compare, "train", lambda model, blocks, run, *rest: seen.append((blocks, run.seed)) or [])
    monkeypatch.setattr(compare.ExpertBalance, "metrics", lambda self: {"expert_load_entropy": 1.0})
    monkeypatch.setattr(compare, "sequence_losses", lambda model, blocks: seen.append(blocks) or torch.ones(1))
    for variant in (Variant(None, 1e-3, 512), Variant(2, 2e-3, 512)):
        for seed in (0, SELECTION_SEED):
            compare.measure(variant, data, seed, lambda: None)
    (batches, _), reported, (others, _), selected, (again, _), *_ = seen
    assert len(batches) == 16 and torch.equal(batches, again) and not torch.equal(batches, others)
    assert reported is data.valid and selected is data.selection


def test_the_rate_is_each_variants_best_of_the_sweep(tmp_path):
    losses = {1e-3: 3.0, 2e-3: 2.5, 4e-3: 2.7}
    runs = [(Variant(4, rate, 64), SELECTION_SEED, loss) for rate, loss in losses.items()]
    runs += [(Variant(None, rate, 64), SELECTION_SEED, -loss) for rate, loss in losses.items()]
    runs += [(Variant(4, 4e-3, 64), 0, 0.1), (Variant(4, 4e-3, 128), SELECTION_SEED, 0.1)]  # what is reported
    store = store_of(runs, tmp_path / "runs.json")
    assert compare.best_rate(store, 4, 64) == 2e-3
    assert compare.best_rate(store, None, 64) == 1e-3


def test_the_sweep_goes_on_while_the_best_rate_is_the_last_one(tmp_path, monkeypatch):
    """Upwards for one variant, downwards for another."""
    best = {None: 8e-3, 4: 1e-3, 2: 2e-3, 1: 1.9e-3}
    measured = []

    def measure(variant: Variant, data, seed: int, on_step) -> dict:
        measured.append((variant.block_size, variant.rate))
        loss = abs(math.log(variant.rate / best[variant.block_size]))
        return {"recipe": vars(variant), "seed": seed, "after": loss, "seconds": 0.0}

    monkeypatch.setattr(compare, "measure", measure)
    store = Store(tmp_path / "runs.json", {})
    assert compare.sweep(None, store, 64) == {**best, 1: 2e-3}
    assert measured[12:] == [(None, 8e-3), (4, 5e-4), (None, 16e-3)]
    assert (
        compare.sweep_table(store, 64).splitlines()[0] == "| model | 0.0005 | 0.001 | 0.002 | 0.004 | 0.008 | 0.016 |"
    )
    assert "| Block, S=2 |  | 0.6931 | 0.0000 | 0.6931 |  |  |" in compare.sweep_table(store, 64)


def test_the_table_has_differences_within_seeds(tmp_path):
    variants = {"standard": Variant(None, 1e-3, 64), "Full": Variant(1, 2e-3, 64)}
    losses = {"standard": (5.0, 6.0, 7.0), "Full": (4.9, 5.8, 7.3)}
    runs = [(variants[label], seed, loss) for label in variants for seed, loss in enumerate(losses[label])]
    table = compare.report_table(store_of(runs[:-1], tmp_path / "runs.json"), variants, [0, 1, 2])
    assert "| standard | 0.001 | 3 | 6.0000 ± 1.0000 |  |" in table
    assert "| Full | 0.002 | 2 | 5.3500 ± 0.6364 | -0.1500 ± 0.0707 |" in table


def test_the_command_trains_stores_and_goes_on(small, corpus, tmp_path, monkeypatch, capsys):
    """Twice the same command: the second finds everything, and the tables come out the same."""
    monkeypatch.setattr(compare, "VARIANTS", {"standard": None, "Full": 1})
    monkeypatch.setattr(compare, "RATES", (1e-3, 2e-3))
    monkeypatch.setattr(compare, "best_rate", lambda store, size, tokens: 1.5e-3)  # within: the sweep ends
    results, tables = tmp_path / "out" / "compare.json", tmp_path / "out" / "RESULTS.md"
    arguments = ["--corpus", str(corpus), "--tokens", "256", "--sweep-tokens", "128", "--seeds", "0", "1"]
    arguments += ["--results", str(results), "--tables", str(tables)]
    compare.main(arguments)
    runs = json.loads(results.read_text())["runs"]
    assert [(run["recipe"]["tokens"], run["seed"]) for run in runs] == [(128, SELECTION_SEED)] * 4 + [
        (256, seed) for seed in (0, 0, 1, 1)
    ]
    assert all(run["curve"][-1][0] == run["recipe"]["tokens"] // 64 for run in runs)
    assert {len(run.get("depth_attention", ())) for run in runs} == {0, 5}  # four sublayers and the output
    assert results.with_suffix(".png").stat().st_size > 10_000
    before = results.read_bytes(), tables.read_bytes()
    assert len(re.findall(r"\| Full \|", tables.read_text())) == 2
    monkeypatch.setattr(compare, "measure", None)
    compare.main(arguments)
    assert (results.read_bytes(), tables.read_bytes()) == before


def test_a_corpus_that_is_too_small_is_refused(small, corpus):
    data = compare.load_data(corpus)
    with pytest.raises(ValueError, match=r"the corpus has .* tokens; 10,000,000 are wanted"):
        compare.measure(Variant(None, 1e-3, 10**7), data, 0, lambda: None)
    (corpus / "valid.txt").write_text("a few words")
    with pytest.raises(ValueError, match=r"valid.txt gives 0 sequences"):
        compare.load_data(corpus)
    with pytest.raises(SystemExit):
        compare.parse(["--corpus", "x", "--seeds", str(SELECTION_SEED)])


def test_the_tables_in_the_repository_are_those_of_the_stored_runs():
    content = json.loads((TRAINING / "results" / "compare.json").read_text())
    store = Store(TRAINING / "results" / "compare.json", content["setting"])
    sweep, *reported = sorted({run["recipe"]["tokens"] for run in content["runs"]})
    text = (TRAINING / "RESULTS.md").read_text()
    assert compare.sweep_table(store, sweep) in text
    rates = {size: compare.best_rate(store, size, sweep) for size in VARIANTS.values()}
    for tokens in reported:
        variants = {label: Variant(size, rates[size], tokens) for label, size in VARIANTS.items()}
        assert compare.report_table(store, variants, [0, 1, 2]) in text
