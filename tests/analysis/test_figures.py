"""Figures of depth show the right numbers, and can be read at any depth, in black and white and on a page."""

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from attnres.analysis.depth_maps import DIVERGING, SEQUENTIAL
from attnres.analysis.figures import (
    draw_depth_attention,
    draw_interventions,
    draw_magnitudes,
    draw_mixing,
    draw_sinks,
    draw_weights_by_depth,
    finish,
)

from .. import forks
from . import measured
from .measured import depth

PARALLEL = ("layer",)
LAYERS = (2, 27)  # 4 and 54 sublayers
# Each figure, with as much and with as little content as it can have.
FIGURES = {
    "weights": lambda n: draw_depth_attention(measured.attention(depth(n))),
    "weights of blocks": lambda n: draw_depth_attention(measured.attention(depth(n, 6))),
    "weights of parallel layers": lambda n: draw_depth_attention(measured.attention(depth(n, 1, PARALLEL))),
    "spread": lambda n: draw_depth_attention(measured.attention(depth(n, 4)), "spread"),
    "relative": lambda n: draw_depth_attention(measured.attention(depth(n)), "relative"),
    "relative of blocks": lambda n: draw_depth_attention(measured.attention(depth(n, 6)), "relative"),
    "mixing": lambda n: draw_mixing(measured.mixing(depth(n))),
    "mixing with negative entries": lambda n: draw_mixing(measured.mixing(depth(n), negative=True)),
    "by depth": lambda n: draw_weights_by_depth(
        {"Full": measured.attention(depth(n)), "Block": measured.attention(depth(n, 6), 1)}
    ),
    "magnitudes": lambda n: draw_magnitudes(
        {f"a model with quite a long name, {seed}": measured.magnitudes(depth(n), seed=seed) for seed in range(4)}
    ),
    "magnitudes alone": lambda n: draw_magnitudes({"": measured.magnitudes(depth(n), 3.0, has_gradients=False)}),
    "sinks": lambda n: draw_sinks({"a": measured.sinks(n), "b": measured.sinks(n, every=4)}),
    "interventions": lambda n: draw_interventions(
        {"Full": measured.interventions(depth(n)), "Block": measured.interventions(depth(n, 6))}
    ),
    "interventions alone": lambda n: draw_interventions({"": measured.interventions(depth(n), has_uniform=False)}),
}


def texts_of(figure: Figure, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Text], np.ndarray, tuple[float, float]]:
    """Draw a figure, and return its texts, their boxes `[texts, (x0, y0, x1, y1)]`, and its size, all in pixels."""
    drawn, draw = {}, Text.draw

    def draw_and_record(self: Text, renderer: object, *arguments: object, **keywords: object) -> None:
        if self.get_visible() and self.get_text().strip():
            drawn[self] = self.get_window_extent(renderer).extents
        draw(self, renderer, *arguments, **keywords)

    canvas = FigureCanvasAgg(figure)
    with monkeypatch.context() as patch:
        patch.setattr(Text, "draw", draw_and_record)
        canvas.draw()
    return list(drawn), np.array(list(drawn.values())), canvas.get_width_height()


def maps_of(figure: Figure) -> list:
    """Return the axes of a figure that show a map, without the colour bar."""
    return [axes for axes in figure.axes if axes.get_images()]


def tick_texts(axis: matplotlib.axis.Axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def numbers_in(axes: matplotlib.axes.Axes) -> dict[tuple[int, int], float]:
    """Return the numbers that are written in the cells of a map, by row and column."""
    return {
        (round(text.get_position()[1]), round(text.get_position()[0])): float(text.get_text()) for text in axes.texts
    }


@pytest.mark.slow
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("name", FIGURES)
def test_no_text_is_cut_off_or_small_or_overlaps_another(name, layers, monkeypatch):
    figure = FIGURES[name](layers)
    texts, boxes, (width, height) = texts_of(figure, monkeypatch)
    outside = (boxes[:, :2].min(1) < 0) | (boxes[:, 2] > width) | (boxes[:, 3] > height)
    assert [text.get_text() for text, is_outside in zip(texts, outside) if is_outside] == []
    low, high = (op(boxes[:, None], boxes[None]) for op in (np.maximum, np.minimum))
    overlap = (high[..., 2:] - low[..., :2]).min(-1)  # of each pair, in pixels
    pairs = np.argwhere(np.triu(overlap > 0.5, 1))
    assert [(texts[i].get_text(), texts[j].get_text()) for i, j in pairs] == []
    assert min(text.get_fontsize() for text in texts) >= 7
    assert figure.get_figwidth() <= 800 / 96 and figure.get_figheight() <= 10
    for axes in figure.axes:
        is_colorbar = axes.get_label() == "<colorbar>"
        assert axes.get_ylabel() or axes in maps_of(figure)[1:], "a vertical axis without a label"
        assert axes.get_xlabel() or is_colorbar, "a horizontal axis without a label"


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_same_call_gives_the_same_file_with_any_settings_of_the_user(tmp_path, suffix):
    settings = {"font.size": 20, "xtick.labelsize": 20, "svg.hashsalt": None, "svg.fonttype": "none"}
    for name in (
        "relative of blocks",
        "mixing with negative entries",
        "by depth",
        "magnitudes",
        "interventions",
        "sinks",
    ):
        draw, paths = FIGURES[name], [tmp_path / f"{name} {i}.{suffix}" for i in range(2)]
        finish(draw(2), paths[0])
        with matplotlib.rc_context(settings | {"savefig.bbox": "tight"}):
            finish(draw(2), paths[1])
        first, second = (path.read_bytes() for path in paths)
        assert first == second, name
        assert first.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
        assert b"Date" not in first and b"dc:date" not in first


@pytest.mark.slow
def test_a_figure_without_a_path_is_returned_and_shown_once_by_a_notebook(tmp_path):
    figure = measured.attention(depth(2)).plot()
    assert isinstance(figure, Figure)
    assert figure._repr_png_().startswith(b"\x89PNG")
    path = tmp_path / "map.PNG"
    assert isinstance(measured.attention(depth(2)).plot(path), Figure)
    assert path.read_bytes() == figure._repr_png_()


@pytest.mark.slow
def test_every_measurement_has_a_figure(tmp_path):
    of = depth(2)
    every = (
        measured.attention(of),
        measured.mixing(of),
        measured.magnitudes(of),
        measured.sinks(2),
        measured.interventions(of),
    )
    for measurement in every:
        path = tmp_path / f"{type(measurement).__name__}.svg"
        measurement.plot(path)
        assert b"</svg>" in path.read_bytes()


def test_a_wrong_path_is_rejected_and_no_file_is_left(tmp_path):
    attention = measured.attention(depth(2))
    for name in ("map.pdf", "map"):
        with pytest.raises(ValueError, match=rf"must end in \.png or \.svg, got '{name}'"):
            attention.plot(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"the folder .*nowhere for map\.png was not found"):
        attention.plot(tmp_path / "nowhere" / "map.png")
    assert list(tmp_path.iterdir()) == []


def test_no_backend_is_chosen_and_pyplot_is_not_imported(tmp_path):
    code = (
        "import sys, matplotlib; matplotlib.use('svg')\n"
        "from attnres.analysis import AttentionSinks\n"
        "import attnres.analysis.loss_figures, torch\n"
        "AttentionSinks(torch.ones(2), torch.ones(2), 0.1).plot(sys.argv[1])\n"
        "assert matplotlib.get_backend() == 'svg' and 'matplotlib.pyplot' not in sys.modules\n"
    )
    process = forks.run("-c", code, tmp_path / "sinks.png")
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "sinks.png").exists()


def test_maps_can_be_read_in_black_and_white():
    lightness = SEQUENTIAL(np.arange(SEQUENTIAL.N))[:, :3] @ (0.299, 0.587, 0.114)
    assert (np.diff(lightness) < 0).all()
    assert lightness[0] > 0.9 and lightness[-1] < 0.15
    # Two hues are dark at both ends: without numbers, the cells of one end have dots.
    (axes, _) = draw_mixing(measured.mixing(depth(27), negative=True)).axes
    dots = {(row, column) for line in axes.lines if line.get_marker() == "." for column, row in line.get_xydata()}
    entries = measured.mixing(depth(27), negative=True).mean.tril()
    below = {(row, column) for row, column in torch.nonzero(entries < -0.2).tolist()}
    assert below and below <= dots
    assert not any(entries[int(row), int(column)] >= 0 for row, column in dots)


def test_numbers_in_a_map_match_the_data_and_have_a_visible_colour():
    attention = measured.attention(depth(6, 4))
    for values, tables in (("weight", attention.mean), ("spread", attention.spread), ("relative", attention.mean)):
        for place, axes in enumerate(maps_of(draw_depth_attention(attention, values))):
            rows = tables if values == "relative" else tables[[*range(place, 12, 2), 12]]
            result = numbers_in(axes)
            assert result == {
                (i, j): pytest.approx(rows[i, j].item(), abs=0.00501)
                for i, j in torch.nonzero(rows.isfinite()).tolist()
            }
            (image,) = axes.get_images()
            for text in axes.texts:
                column, row = text.get_position()
                background = image.to_rgba(image.get_array())[round(row), round(column), :3] @ (0.299, 0.587, 0.114)
                assert abs(background - (text.get_color() == "white")) >= 0.5
    assert not any(axes.texts for axes in maps_of(draw_depth_attention(measured.attention(depth(27)))))


def test_attention_and_mlp_sublayers_are_side_by_side_with_the_output_below():
    attention = measured.attention(depth(6))
    left, right = maps_of(draw_depth_attention(attention))
    assert (left.get_title(), right.get_title()) == ("attention sublayers", "MLP sublayers")
    for place, axes in enumerate((left, right)):
        assert tick_texts(left.yaxis) == [*map(str, range(6)), "output"] and list(axes.get_yticks()) == list(range(7))
        assert tick_texts(axes.xaxis)[:3] == ["embedding", "attention 0", "MLP 0"]
        shown = axes.get_images()[0].get_array()
        expected = attention.mean[[*range(place, 12, 2), 12]].numpy()
        np.testing.assert_array_equal(shown.filled(np.nan), expected)
    (only,) = maps_of(draw_depth_attention(measured.attention(depth(6, 1, PARALLEL))))
    assert tick_texts(only.yaxis) == [*map(str, range(6)), "output"]
    assert not only.get_title()


def test_unknown_values_are_rejected():
    with pytest.raises(ValueError, match="`values` must be one of 'weight', 'spread', 'relative', got 'weights'"):
        measured.attention(depth(2)).plot(values="weights")


@pytest.mark.parametrize(
    ("block_size", "axis", "sources"),
    [
        (1, "source: sublayer output", ["embedding", "attention 0", "MLP 0", "attention 1"]),
        (3, "source: block of 3 sublayers", ["embedding", "1", "2", "3"]),
        (8, "source: block of 8 sublayers", ["embedding", "1"]),
    ],
)
@pytest.mark.parametrize("values", ["weight", "relative"])
def test_axes_have_the_names_of_sources_and_readers(block_size, axis, sources, values):
    axes = draw_depth_attention(measured.attention(depth(4, block_size)), values).axes[0]
    assert axes.get_xlabel() == axis
    assert tick_texts(axes.xaxis)[:4] == sources
    if values == "relative":
        assert tick_texts(axes.yaxis) == list(depth(4).consumers)


@pytest.mark.parametrize("layers", [27, 60])
def test_if_names_do_not_fit_both_ends_and_whole_layers_keep_theirs(layers):
    of = depth(layers)
    axes = draw_mixing(measured.mixing(of)).axes[0]
    columns, rows = tick_texts(axes.xaxis), tick_texts(axes.yaxis)
    assert (columns[0], columns[-1], rows[0], rows[-1]) == ("embedding", of.outputs[-1], "attention 0", "output")
    assert all(name.startswith("attention") for name in (*columns[1:-1], *rows[:-1]))
    assert [of.outputs[round(place)] for place in axes.get_xticks()] == columns
    assert [of.consumers[round(place)] for place in axes.get_yticks()] == rows


@pytest.mark.parametrize("spread", [0.01, 0.5])
def test_a_map_has_contrast_however_little_its_weights_differ(spread):
    attention = measured.attention(depth(4, 4))
    weights = attention.mean
    weights[1:5, :2] = torch.tensor([0.5 - 0.1 * spread, 0.5 + 0.1 * spread])
    weights[5:] = torch.tensor([1 - spread, 1.0, 1 + spread]) / 3
    (image,) = draw_depth_attention(attention, "relative").axes[0].get_images()
    assert image.norm.vmin == -image.norm.vmax
    strongest = abs(image.get_array()).max()
    assert strongest >= 0.25 * image.norm.vmax
    assert (strongest >= image.norm.vmax) == (spread > 0.1)  # nearly uniform weights do not get strong colours


def test_a_weight_of_zero_is_drawn_as_small_and_not_as_missing():
    attention = measured.attention(depth(4))
    attention.mean[5, 2] = 0  # outside a window
    (image,) = draw_depth_attention(attention, "relative").axes[0].get_images()
    assert tuple(image.to_rgba(image.get_array())[5, 2]) == DIVERGING(0.0)
    assert image.get_array().mask[5, 6:].all()


def test_a_mixing_matrix_has_two_hues_only_if_it_has_negative_entries():
    for negative in (False, True):
        mixing = measured.mixing(depth(4), negative)
        axes = mixing.plot().axes[0]
        (image,) = axes.get_images()
        shown = image.get_array()
        assert (shown.mask == np.triu(np.ones((9, 9), bool), 1)).all()
        np.testing.assert_array_equal(shown.filled(0), mixing.mean.numpy())
        assert image.get_cmap() == (DIVERGING if negative else SEQUENTIAL)
        assert (image.norm.vmin, image.norm.vmax) == ((-2, 2) if negative else (0, 1))
        assert (tick_texts(axes.yaxis)[-1], tick_texts(axes.xaxis)[0]) == ("output", "embedding")


def test_models_differ_in_label_line_and_marker_and_kinds_in_filling():
    models = {"Full": measured.attention(depth(6)), "Block": measured.attention(depth(6, 6), 1)}
    figure = draw_weights_by_depth(models)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(models)
    handles = legend.get_lines()
    for look in ("get_linestyle", "get_marker", "get_color"):
        assert len({getattr(handle, look)() for handle in handles}) == 2
    titled = {axes.get_title(): axes for axes in figure.axes}
    names = {
        "entropy": "entropy",
        "distance from uniform weights": "distance",
        "weight on the embedding": "embedding",
        "weight on the nearest source": "nearest",
        "weight on the sources between": "rest",
    }
    assert titled.keys() == names.keys()
    for title, name in names.items():
        lines = [line for line in titled[title].get_lines() if line.get_marker() != "None"]
        for model, (first, second, output) in zip(models.values(), (lines[:3], lines[3:])):
            values = getattr(model, name)
            np.testing.assert_array_equal(first.get_ydata(), values[0:12:2])
            np.testing.assert_array_equal(second.get_ydata(), values[1:12:2])
            np.testing.assert_array_equal(output.get_ydata(), values[12:])
            assert list(second.get_xdata()) == [layer + 0.5 for layer in range(6)] and list(output.get_xdata()) == [6]
            assert (first.get_fillstyle(), second.get_fillstyle(), output.get_marker()) == ("full", "none", "*")
    assert "filled: attention; hollow: MLP; star: output" in figure.get_supxlabel()
    assert draw_weights_by_depth({"": models["Full"]}).legends == []
    assert "hollow" not in draw_weights_by_depth({"": measured.attention(depth(6, 1, PARALLEL))}).get_supxlabel()


def test_light_lines_stand_where_blocks_begin():
    def begins(**models):
        lines = draw_weights_by_depth(models).axes[0].get_lines()
        return [
            line.get_xdata()[0] for line in lines if list(line.get_ydata()) == [0, 1] and line.get_color() == "0.85"
        ]

    blocks = measured.attention(depth(6, 5))
    assert begins(a=blocks, b=measured.attention(depth(6))) == [-0.25, 2.25, 4.75]  # 12 sublayers in blocks of 5
    assert begins(a=measured.attention(depth(6, 6))) == [-0.25, 2.75]  # no line where the last block ends
    assert begins(a=blocks, b=measured.attention(depth(6, 4))) == []


def test_gradients_that_were_not_measured_have_no_panel_and_axes_with_a_large_span_are_logarithmic():
    measurement = measured.magnitudes(depth(6))
    figure = draw_magnitudes({"": measurement})
    axes = {axes.get_title(): axes for axes in figure.axes}
    scales = {title: of.get_yscale() for title, of in axes.items()}
    assert scales.pop("largest input") == "linear"
    assert len(scales) == 4 and set(scales.values()) == {"log"}
    of_embedding, *_ = (line for line in axes["output of sublayer"].get_lines() if line.get_marker() == "*")
    assert (*of_embedding.get_xdata(), *of_embedding.get_ydata()) == (-0.5, measurement.outputs[0])
    (stream,) = axes["stream, or sum of the block"].get_lines()
    np.testing.assert_array_equal(stream.get_ydata(), measurement.stream)
    without = draw_magnitudes({"": measured.magnitudes(depth(6), 3.0, has_gradients=False)})
    assert [of.get_title() for of in without.axes] == [title for title in axes if "gradient" not in title]
    assert {of.get_yscale() for of in without.axes} == {"linear"}
    both = draw_magnitudes({"a": measurement, "b": measured.magnitudes(depth(6), has_gradients=False)})
    assert len(both.axes) == 5


def test_layers_without_attention_weights_are_gaps_with_a_note():
    kimi, other = measured.sinks(8, every=4), measured.sinks(8, uniform=0.05)
    figure = draw_sinks({"kimi": kimi, "other": other})
    mean, strongest, _, _, *uniform = figure.axes[0].get_lines()
    np.testing.assert_array_equal(mean.get_ydata(), kimi.mean)
    np.testing.assert_array_equal(strongest.get_ydata(), kimi.strongest)
    assert (mean.get_fillstyle(), strongest.get_fillstyle()) == ("full", "none")
    assert [line.get_ydata()[0] for line in uniform] == [0.03, 0.05]
    assert all(line.is_dashed() for line in uniform)
    assert "linear attention" in figure.get_supxlabel()
    assert "linear attention" not in draw_sinks({"": other}).get_supxlabel()
    assert draw_sinks({"": measured.sinks(2, every=4)}).axes  # no layer has weights


def test_bars_of_hidden_sources_span_the_outputs_that_they_sum_up():
    models = {"Full": measured.interventions(depth(6)), "Block": measured.interventions(depth(6, 5))}
    figure = draw_interventions(models)
    hidden, uniform = figure.axes
    for bars, of in zip(hidden.collections, models.values()):
        result = [(*segment[:, 0], segment[0, 1]) for segment in bars.get_segments()]
        step = of.depth.block_size / 2
        ends = [-0.25, *(min(-0.25 + step * i, 5.75) for i in range(1, len(of.hidden)))]
        assert result == [(*span, rise) for span, rise in zip(zip([-0.75, *ends], ends), of.hidden.tolist())]
    assert hidden.get_yscale() == "symlog" and hidden.yaxis.get_transform().linthresh == 0.01
    assert "nats/token" in hidden.get_ylabel() and "nats/token" in uniform.get_ylabel()
    first = uniform.get_lines()[0]
    np.testing.assert_array_equal(first.get_ydata(), models["Full"].uniform[0:12:2])
    assert len(draw_interventions({"": measured.interventions(depth(6), has_uniform=False)}).axes) == 1
