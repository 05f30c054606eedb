"""The table of findings: each cell agrees with numbers computed by hand, and the page with the stored inspections."""

from experiments import findings

MODEL = {
    "model": {"name": "a/block", "connection": "Block AttnRes, 2 blocks", "sublayers": 4, "hidden_size": 8},
    "depth": {
        "kinds": ["attention", "MLP"],
        "readers": ["attention 0", "MLP 0", "attention 1", "MLP 1", "output"],
        "sources": ["embedding", "block 1", "block 2"],
    },
    "depth_attention": {
        "mean": [[1.0, None, None], [0.25, 0.75, None], [0.5, 0.5, None], [0.5, 0.1, 0.4], [0.1, 0.2, 0.7]],
        "entropy": [None, 0.8, 1.0, 0.6, 0.5],
        "distance": [0.0, 0.25, 0.1, 0.3, 0.4],
        "embedding": [1.0, 0.25, 0.5, 0.5, 0.1],
    },
    "magnitudes": {
        "stream": [1.0, 2.0, 4.0, 3.0, 2.0],
        "inputs": [0.5, 1, 1, 1, 2.0],
        "gradients": [9, 8.0, 4, 2, 1],
    },
    "interventions": {"hidden": [0.5, 2.0, 0.1], "uniform": [None, 0.1, 0.3, 0.0, 0.2]},
}


def test_the_cells_agree_with_numbers_computed_by_hand():
    assert findings.column(MODEL) == [
        "Block AttnRes",
        "4, 8",
        "3 of 4 give it most; 1.45 x even",
        "0.30; 0.90 x even",
        "attention 1.00, MLP 0.70",
        "0.26, of the mean map 0.21",
        "largest / median 2.0; input of the output / embedding 4.0",
        "8.0; largest / smallest 8",
        "block 1 +2.00, uniform attention 1 +0.300",
    ]


def test_a_model_without_depth_attention_has_the_other_rows():
    cells = findings.column(MODEL | {"depth_attention": None})
    assert [cell == "no depth attention" for cell in cells[2:]] == [True, True, True, True, False, False, False]


def test_the_page_shows_the_stored_inspections(tmp_path, monkeypatch):
    page = findings.PAGE.read_text()
    head, table = page.split("<!-- findings -->")
    (tmp_path / "page.md").write_text(f"{head}<!-- findings -->\n<!-- end -->{table.split('<!-- end -->')[1]}")
    monkeypatch.setattr(findings, "PAGE", tmp_path / "page.md")
    findings.write()
    assert (tmp_path / "page.md").read_text() == page
