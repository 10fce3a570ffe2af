"""Figures of language modelling show the means, part what lies close together, and leave nothing unnamed."""

import dataclasses

import numpy as np
import pytest
from lm_examples import EDGES, make_all_runs, make_failed, make_run
from test_figures import assert_readable

from compactattn.report import lm_figures
from compactattn.report.figures import draw_training
from compactattn.report.lm_comparison import compare, smooth_positions
from compactattn.report.lm_paper import ROWS, TOP_SOFTMAX, TOP_UNIFORM
from compactattn.report.palette import describe_looks, look_of
from compactattn.report.sections import make_sections

DRAW = {
    "validation": lm_figures.draw_validation,
    "positions": lm_figures.draw_positions,
    "differences": lm_figures.draw_differences,
}


@pytest.fixture(scope="module")
def comparison():
    return compare(make_all_runs(depths=(8,), few=False))[0]


@pytest.fixture(scope="module")
def drawn(comparison):
    return {name: draw(comparison) for name, draw in DRAW.items()}


@pytest.mark.parametrize("name", list(DRAW))
def test_no_text_is_clipped_covers_another_or_is_tiny(drawn, name, monkeypatch):
    assert_readable(drawn[name], monkeypatch)


def test_two_lines_with_long_names_can_be_read(monkeypatch):
    runs = [make_run(2.5, rate=rate, kernel=kernel) for rate in (1e-3, 5e-3) for kernel in ("gaussian", "topk_uniform(32)")]
    for draw in DRAW.values():
        assert_readable(draw(compare(runs)[0]), monkeypatch)


def test_validation_is_drawn_whole_then_closer_then_as_a_difference(comparison, drawn):
    whole, closer, gaps = drawn["validation"].axes
    assert whole.get_xlim()[0] == 0
    assert closer.get_xlim()[0] == gaps.get_xlim()[0] == 1000
    for line, curve in zip(comparison.lines, whole.get_lines(), strict=False):
        assert [(int(x), y) for x, y in curve.get_xydata()] == line.runs[0].validations
    for line, curve in zip(comparison.lines, closer.get_lines(), strict=False):
        assert [(int(x), y) for x, y in curve.get_xydata()] == line.runs[0].validations[9:]
    base = np.array(comparison.lines[0].runs[0].validations[9:])
    zero, *curves = gaps.get_lines()
    assert list(zero.get_ydata()) == [0, 0]
    for line, curve in zip(comparison.lines[1:], curves, strict=False):
        expected = np.array(line.runs[0].validations[9:])[:, 1] - base[:, 1]
        np.testing.assert_allclose(curve.get_ydata(), expected)


def test_a_line_that_would_squeeze_the_others_leaves_the_closer_view_with_an_arrow(comparison, drawn):
    names = {line.label for line in comparison.lines}
    _, closer, gaps = drawn["validation"].axes
    assert {text.get_text() for text in closer.texts} == names - {"normReLU"} | {"normReLU ↑"}
    assert {text.get_text() for text in gaps.texts} == names - {"normReLU", "Gaussian"} | {"normReLU ↑"}
    far = next(line for line in comparison.lines if line.label == "normReLU").runs[0].validations[-1][1]
    near = [line.runs[0].validations[-1][1] for line in comparison.lines if line.label != "normReLU"]
    assert min(near) > closer.get_ylim()[0]
    assert max(near) < closer.get_ylim()[1] < far
    assert lm_figures.find_far({"a": 1.0, "b": 1.01, "c": 1.02, "d": 3.0}) == {"d"}
    assert lm_figures.find_far({"a": 1.0, "b": 3.0}) == set()
    assert lm_figures.find_far({"a": 1.0, "b": 1.0}) == set()


@pytest.fixture(scope="module")
def parted():
    """A line far above the others and a transformer far below them."""
    ends = {"gaussian": 2.50, "sparsemax": 2.49, "biweight": 2.48, "triweight": 2.47, "relumax": 2.51, "norm_relu": 3.5}
    runs = [make_run(loss, kernel=kernel) for kernel, loss in ends.items()]
    return compare([*runs, make_run(1.7, kernel="gaussian", architecture="transformer")])[0]


def test_a_line_far_below_leaves_the_closer_views_too(parted, monkeypatch):
    figure = lm_figures.draw_validation(parted)
    whole, *closer = figure.axes
    for panel in closer:
        arrows = {text.get_text() for text in panel.texts if text.get_text()[-1] in "↑↓"}
        assert arrows == {"normReLU ↑", "Transformer ↓"}
    assert closer[1].get_ylim()[1] - closer[1].get_ylim()[0] < 0.1
    assert whole.get_ylim()[0] < 1.7
    assert lm_figures.describe_arrows(figure) == " An arrow marks a line that is above or below the panel."
    assert_readable(figure, monkeypatch)


def test_a_far_line_stays_where_it_takes_little_room_or_there_is_no_wider_view(parted):
    panel = lm_figures.draw_positions(parted).axes[0]
    names = {text.get_text() for text in panel.texts}
    assert "Transformer" in names  # whose losses reach half as far below those of the others as these among themselves
    assert lm_figures.find_far({"a": 1.0, "b": 2.0, "c": 2.01, "d": 2.02, "e": 3.0}) == {"a", "e"}


def test_all_rows_look_different_without_their_colour_too():
    """But for the profile, which is what the colour says."""
    looks = {variant: look_of(variant) for variant in ROWS}
    assert len(set(looks.values())) == len(ROWS)
    for kind in (TOP_SOFTMAX, TOP_UNIFORM):
        assert len({looks[variant].marker for variant in kind}) == len({looks[variant].dashes for variant in kind}) == len(kind)
    assert "keeps the k nearest keys, with more dots for a larger k." in describe_looks(ROWS)
    assert "with more dots" not in describe_looks([TOP_SOFTMAX[0], TOP_UNIFORM[0]])


def test_each_split_has_a_panel_of_smoothed_losses(comparison, drawn):
    panels = drawn["positions"].axes
    assert [panel.get_title("left") for panel in panels] == [
        "validation: loss",
        "Simple English Wikipedia: loss",
        "TinyStories: loss",
    ]
    for split, panel in zip(comparison.splits, panels, strict=True):
        for line, curve in zip(comparison.lines, panel.get_lines(), strict=False):
            np.testing.assert_array_equal(curve.get_xdata(), EDGES[1:])
            np.testing.assert_array_equal(curve.get_ydata(), list(smooth_positions(line, split).values()))


def test_differences_are_to_gaussian_attention_on_the_same_split(comparison, drawn):
    for split, panel in zip(comparison.splits, drawn["differences"].axes, strict=True):
        base = np.array(list(smooth_positions(comparison.base(split), split).values()))
        zero, *curves = panel.get_lines()
        others = [line for line in comparison.lines if line.label != "Gaussian"]
        for line, curve in zip(others, curves, strict=False):
            np.testing.assert_allclose(curve.get_ydata(), np.array(list(smooth_positions(line, split).values())) - base)
        assert panel.get_ylim()[0] <= 0 <= panel.get_ylim()[1]
        assert list(zero.get_ydata()) == [0, 0]


def test_a_line_that_diverged_is_drawn_as_far_as_it_came_and_says_so(monkeypatch):
    runs = [
        make_run(2.6, kernel="gaussian"),
        make_run(),
        make_failed(step=700, kernel="biweight"),
        make_failed(kernel="relumax"),
    ]
    (comparison,) = compare(runs)
    figure = lm_figures.draw_validation(comparison)
    whole, closer, gaps = figure.axes
    failed = [f"{name}: diverged at step {step}, loss nan" for name, step in (("1-ReLUmax", 400), ("1.5-entmax", 700))]
    assert {" ".join(text.get_text().split()) for text in whole.texts} == set(failed)
    assert {text.get_text() for text in closer.texts} == {"Gaussian", "sparsemax"}
    assert {text.get_text() for text in gaps.texts} == {"sparsemax"}
    assert max(x for curve in whole.get_lines()[3:4] for x in curve.get_xdata()) == 600
    assert_readable(figure, monkeypatch)
    training = draw_training(comparison.lines)
    assert set(failed) < {" ".join(text.get_text().split()) for text in training.axes[0].texts}
    assert_readable(training, monkeypatch)


def of_last(count, *runs):
    """A comparison of runs that kept their last validations alone."""
    return compare([dataclasses.replace(run, validations=run.validations[-count:]) for run in runs])[0]


def test_a_closer_view_that_would_show_no_more_is_left_out(monkeypatch):
    pair = make_run(), make_run(2.6, kernel="gaussian")
    titles = {1: [lm_figures.ALL], 2: [lm_figures.ALL], 5: [lm_figures.ALL, lm_figures.GAPS]}
    for count, expected in (titles | {15: [lm_figures.ALL, lm_figures.LATE, lm_figures.GAPS]}).items():
        figure = lm_figures.draw_validation(of_last(count, *pair))
        assert [panel.get_title("left") for panel in figure.axes] == expected
        if count < 15:
            assert {text.get_text() for text in figure.axes[0].texts} == {"sparsemax", "Gaussian"}
        assert_readable(figure, monkeypatch)


def test_a_single_point_has_an_axis_that_it_can_be_read_by():
    (panel,) = lm_figures.draw_validation(of_last(1, make_run())).axes
    low, high = panel.get_ylim()
    assert low < 2.5 < high < 1.2 * low
    assert sum(low <= tick <= high for tick in panel.get_yticks()) >= 2


def test_captions_tell_of_what_is_drawn_alone(comparison, drawn):
    assert "above the panel" in lm_figures.describe_arrows(drawn["validation"])
    assert "less the loss of Gaussian attention" in lm_figures.describe_views(drawn["validation"])
    alone = compare([make_run(), make_run(kernel="relumax")])
    (section,) = make_sections([run for line in alone[0].lines for run in line.runs])
    captions = " ".join(picture.caption for picture in section.pictures)
    assert "the last half closer." in captions
    assert "mean over windows, as" in captions
    assert "seeds" not in captions
    (seeded,) = make_sections([make_run(), make_run(seed=1)])
    told = " ".join(picture.caption for picture in seeded.pictures)
    assert "training step, the mean over seeds; the" in told
    assert "mean over windows and seeds, as" in told
    assert "a solid line normalises itself, a dashed line is anchored at the best key." in captions
    for absent in ("Gaussian", "arrow", "dotted", "Long dashes"):
        assert absent not in captions, absent
    (single,) = make_sections([make_run()])
    assert not any("From the lowest loss up" in str(part) for part in single.parts)
    assert any("From the lowest loss up" in str(part) for part in section.parts)


def test_what_there_is_nothing_to_draw_for_is_not_drawn():
    bare = dataclasses.replace(make_run(), validations=[])
    bare = dataclasses.replace(bare, evaluation=[dataclasses.replace(row, by_position=None) for row in bare.evaluation])
    (comparison,) = compare([bare])
    assert [draw(comparison) for draw in DRAW.values()] == [None, None, None]
    (alone,) = compare([make_run()])  # no Gaussian to hold it against
    assert len(lm_figures.draw_validation(alone).axes) == 2
    assert lm_figures.draw_differences(alone) is None
    (base,) = compare([make_run(kernel="gaussian")])
    assert lm_figures.draw_differences(base) is None
