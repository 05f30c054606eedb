"""Figures of training have the right lines and are written."""

import pytest
from matplotlib.text import Text
from scipy import stats

from attnres.analysis import loss_figures
from attnres.analysis.loss_figures import plot_loss_curves, plot_paired_runs


def test_curves_are_drawn_and_written(tmp_path, monkeypatch):
    curves = {"a": [(1, 3.0), (2, 2.5)], "b": [(2, 2.6)], "c": [(2, 2.5)]}
    plot_loss_curves(curves, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    drawn = []
    monkeypatch.setattr(loss_figures, "finish", lambda figure, path: drawn.append(figure))
    plot_loss_curves(curves, tmp_path / "difference.png", compare=("b", "c"))
    upper, lower = drawn[0].axes
    assert [(line.get_label(), list(line.get_ydata())) for line in upper.get_lines()] == [
        (label, [loss for _, loss in points]) for label, points in curves.items()
    ]
    assert lower.get_lines()[0].get_ydata() == pytest.approx([0.1])
    assert lower.get_title() == "b - c"
    assert upper.get_ylabel() == "loss (nats/token)"  # the legend says of which text


def test_lines_are_means_over_seeds_and_the_difference_is_taken_within_a_seed(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(loss_figures, "finish", lambda figure, path: drawn.append(figure))
    steps = range(2, 42, 2)
    runs = {
        "a": [[(step, seed + 1.0 / step) for step in steps] for seed in range(3)],
        "b": [[(step, seed + 0.5 + 1.0 / step) for step in steps] for seed in range(3)],
    }
    plot_paired_runs(runs, tmp_path / "runs.png", points=5)
    upper, lower = drawn[0].axes
    a, *singles, b = upper.get_lines()[:5]
    assert singles[2].get_ydata() - a.get_ydata() == pytest.approx([1.0] * 5)  # seed 2
    assert a.get_xdata()[0] == 5.0  # the mean of steps 2, 4, 6 and 8
    assert a.get_ydata()[0] == pytest.approx(1.0 + (1 / 2 + 1 / 4 + 1 / 6 + 1 / 8) / 4)
    assert (b.get_ydata() - a.get_ydata()) == pytest.approx([0.5] * 5)
    assert lower.get_lines()[0].get_ydata() == pytest.approx([-0.5] * 5)
    (band,) = lower.collections
    assert band.get_paths()[0].get_extents().height < 1e-9  # seeds that differ in both alike


def test_the_band_is_the_interval_of_the_mean_difference(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(loss_figures, "finish", lambda figure, path: drawn.append(figure))
    by_seed = [-0.3, -0.2, -0.4]
    runs = {"a": [[(1, 5 + lead), (2, 5 + lead)] for lead in by_seed], "b": [[(1, 5.0), (2, 5.0)]] * 3}
    plot_paired_runs(runs, tmp_path / "runs.png", points=2)
    (band,) = drawn[0].axes[1].collections
    box = band.get_paths()[0].get_extents()
    expected = stats.ttest_1samp(by_seed, 0).confidence_interval(0.95)
    assert (box.y0, box.y1) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_text_can_be_read_where_a_phone_shows_the_figure_at_350_pixels(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(loss_figures, "finish", lambda figure, path: drawn.append(figure))
    points = [(1, 3.0), (2, 2.5)]
    plot_loss_curves({"a": points, "b": points}, tmp_path / "loss.png", compare=("a", "b"))
    plot_paired_runs({"a": [points] * 2, "b": [points] * 2}, tmp_path / "runs.png")
    for figure in drawn:
        shown = [text for text in figure.findobj(Text) if text.get_text()]
        assert len(shown) > 5
        assert min(text.get_fontsize() for text in shown) * 350 / (72 * figure.get_figwidth()) >= 8
