"""The table of findings: each cell against numbers done by hand, and the page against the stored inspections."""

import json

import pytest

from experiments import findings
from experiments.findings import InspectedModel

ATTENTION = {
    "mean": [[1.0, None, None], [0.25, 0.75, None], [0.5, 0.5, None], [0.5, 0.1, 0.4], [0.1, 0.2, 0.7]],
    "entropy": [None, 0.8, 1.0, 0.6, 0.5],
    "distance": [0.0, 0.25, 0.1, 0.3, 0.4],
    "embedding": [1.0, 0.25, 0.5, 0.5, 0.1],
}
NUMBERS = {
    "model": {"name": "a/block", "connection": "Block AttnRes, 2 blocks", "sublayers": 4, "hidden_size": 8},
    "depth": {
        "kinds": ["attention", "MLP"],
        "readers": ["attention 0", "MLP 0", "attention 1", "MLP 1", "output"],
        "sources": ["embedding", "block 1", "block 2"],
    },
    "depth_attention": ATTENTION,
    "magnitudes": {
        "stream": [1.0, 2.0, 4.0, 3.0, 2.0],
        "inputs": [0.5, 1, 1, 1, 2.0],
        "gradients": [9, 8.0, 4, 2, 1],
    },
    "interventions": {"hidden": [0.5, 2.0, 0.1], "uniform": [None, 0.1, 0.3, 0.0, 0.2]},
}
MODEL = InspectedModel("block", NUMBERS)


@pytest.mark.parametrize(
    ("measure", "cell"),
    [
        (findings.nearest, "3 of 4 give it most; 1.45 x even"),
        (findings.embedding, "0.30; 0.90 x even"),
        (findings.sharper, "attention 1.00, MLP 0.70"),
        (findings.by_token, "0.26, of the mean map 0.21"),
        (findings.growth, "largest / median 2.0; input of the output / embedding 4.0"),
        (findings.gradients, "8.0; largest / smallest 8"),
        (findings.used, "block 1 +2.00, uniform attention 1 +0.300"),
    ],
)
def test_cells_are_those_of_the_numbers(measure, cell):
    assert measure(MODEL) == cell


def test_a_model_without_depth_attention_has_the_other_rows():
    standard = InspectedModel("standard", NUMBERS | {"depth_attention": None})
    rows = [line.split(" | ") for line in findings.table([standard, MODEL]).splitlines()]
    assert [row[1] == findings.ABSENT for row in rows[4:]] == [True, True, True, True, False, False, False]


def test_models_are_named_by_file_and_by_their_own_names_where_there_are_two(tmp_path):
    (tmp_path / "one.json").write_text(json.dumps({"models": [NUMBERS]}))
    (tmp_path / "two.json").write_text(json.dumps({"models": [NUMBERS, NUMBERS]}))
    assert [model.name for model in findings.read(tmp_path)] == ["one", "two: block", "two: block"]
    findings.write(tmp_path, tmp_path / "page.md")
    assert findings.table(findings.read(tmp_path)) in (tmp_path / "page.md").read_text()
    with pytest.raises(FileNotFoundError, match=r"nothing holds no inspections: copy inspection.json"):
        findings.write(tmp_path / "nothing", tmp_path / "other.md")


@pytest.mark.parametrize(
    "damage",
    [
        {"depth_attention": {}},
        {"depth_attention": ATTENTION | {"mean": []}},
        {"magnitudes": None},
        {"magnitudes": NUMBERS["magnitudes"] | {"gradients": [0.0] * 5}},
        {"interventions": None},
        {"model": []},
    ],
    ids=str,
)
def test_an_inspection_that_lacks_what_the_table_shows_is_named(damage, tmp_path):
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"models": [NUMBERS | damage]}))
    with pytest.raises(
        ValueError, match=r"one\.json is damaged, or no inspection .*Error\(.*: move it away, or make it"
    ):
        findings.read(tmp_path)


def test_the_page_shows_the_stored_inspections():
    assert findings.table(findings.read()) in findings.PAGE.read_text()
