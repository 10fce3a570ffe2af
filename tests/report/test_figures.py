"""Figures show the numbers, keep their text readable, and go into a page without asking for anything."""

import itertools
import re

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from report_examples import make_all_runs, make_inspection, make_run

from compactattn.kernels import parse
from compactattn.report import figures, maps, palette, svg
from compactattn.report.comparison import compare
from compactattn.report.inspection import Inspection
from compactattn.report.paper import MAIN, ROWS

INSPECTIONS = [make_inspection(kernel, layer) for layer in (0, 1) for kernel in ("gaussian", "sparsemax", "relumax(r=2)")]


@pytest.fixture(scope="module")
def comparison():
    return compare(make_all_runs(seeds=2))[0]


@pytest.fixture(scope="module")
def drawn(comparison):
    short = [make_inspection("biweight", length=20, heads=1), make_inspection("gaussian", length=20)]
    labelled = Inspection("biweight", 0, 0, short[0].weights, short[0].support, short[0].bandwidth, ["$x"] * 20)
    few = compare([make_run(kernel="gaussian"), make_run(), make_run(seed=1)])[0]
    all_long = [run for run in make_all_runs(seeds=1) if run.config.data["task"] == "mqmtar"]
    all_long += [make_run(kernel=kernel, layers=12, width=768) for kernel in ("norm_relu", "topk_uniform(32)")]
    long = compare(all_long)[0]
    assert max(len(line.label) for line in long.lines) > 35
    return {
        "extrapolation": figures.draw_extrapolation(comparison),
        "few": figures.draw_extrapolation(few),
        "long": figures.draw_extrapolation(long),
        "long training": figures.draw_training(long.lines),
        "paper": figures.draw_against_paper(comparison),
        "training": figures.draw_training(comparison.lines),
        "attention": maps.draw_attention(INSPECTIONS),
        "labelled": maps.draw_attention([labelled, short[1]]),
        "support": maps.draw_support(INSPECTIONS),
        "heads": maps.draw_heads(INSPECTIONS),
    }


NAMES = ["extrapolation", "few", "long", "long training", "paper", "training", "attention", "labelled", "support", "heads"]


def assert_readable(figure, monkeypatch):
    """No text of the figure is clipped, covers another or is tiny."""
    texts, draw = [], Text.draw
    monkeypatch.setattr(Text, "draw", lambda self, renderer: (texts.append(self), draw(self, renderer)))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [text for text in texts if text.get_visible() and text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts]
    assert len(boxes) > 8
    assert min(text.get_fontsize() for text in texts) >= 6.5
    for text, box in boxes:
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert inside, text
    for (one, box), (other, its_box) in itertools.combinations(boxes, 2):
        assert not box.padded(-0.5).overlaps(its_box.padded(-0.5)), (one, other)


@pytest.mark.parametrize("name", NAMES)
def test_no_text_is_clipped_covers_another_or_is_tiny(drawn, name, monkeypatch):
    assert_readable(drawn[name], monkeypatch)


def test_the_curves_are_the_means(comparison, drawn):
    panel = drawn["extrapolation"].axes[0]
    for line, drawn_line in zip(comparison.lines, panel.get_lines(), strict=False):
        np.testing.assert_array_equal(drawn_line.get_xdata(), list(line.cells))
        np.testing.assert_array_equal(drawn_line.get_ydata(), [summary.mean for summary in line.cells.values()])
    assert panel.get_xscale() == "log"


def test_every_line_is_named_beside_the_plot(comparison, drawn):
    for name in ("extrapolation", "training"):
        written = {text.get_text() for text in drawn[name].axes[0].texts}
        assert written == {line.label for line in comparison.lines}


def test_no_name_is_joined_to_an_end_that_is_out_of_view():
    _, panel = figures.one_panel(3)
    panel.set(xlim=(0, 1), ylim=(0, 1))
    look = palette.look_of(MAIN.rows[0].variant)
    figures.name_ends(panel, [("below", -0.05, 1.0, look), ("within", 0.5, 1.0, look), ("above", 1.05, 1.0, look)])
    leaders = [line for line in panel.get_lines() if line.get_linewidth() == 0.5]
    assert [line.get_ydata()[0] for line in leaders] == [0.5]


def test_bands_are_drawn_over_seeds_while_they_can_be_told_apart(comparison):
    def bands(runs):
        (compared,) = compare(runs)
        return len(figures.draw_extrapolation(compared).axes[0].collections)

    assert bands([make_run(), make_run(seed=1), make_run(kernel="gaussian")]) == 2
    assert bands([make_run(), make_run(kernel="gaussian")]) == 0
    assert not figures.shows_bands(comparison)


def test_training_curves_need_losses():
    (comparison,) = compare([make_run(losses=[])])
    assert figures.draw_training(comparison.lines) is None


def test_rows_of_the_paper_all_look_different():
    looks = [palette.look_of(row.variant) for row in MAIN.rows]
    assert len(set(looks)) == len(looks)
    for variant in ROWS:
        assert palette.look_of(variant).colour in palette.DARK


def test_blank_is_exactly_zero(drawn):
    for inspection, panel in zip(INSPECTIONS, drawn["attention"].axes, strict=False):
        (image,) = panel.get_images()
        np.testing.assert_array_equal(np.ma.getmaskarray(image.get_array()), inspection.weights == 0)
        colours = image.to_rgba(image.get_array())[..., :3]
        np.testing.assert_array_equal((colours == 1).all(-1), inspection.weights == 0)
    tiny = np.array([[1e-30, 0.0], [0.5, 0.5]])
    (image,) = maps.draw_attention([Inspection("gaussian", 0, 0, tiny, np.ones((1, 2)), np.ones((1, 2)))]).axes[0].get_images()
    assert np.ma.getmaskarray(image.get_array()).tolist() == [[False, True], [False, False]]


def test_a_bandwidth_or_support_that_is_nowhere_known_can_be_drawn():
    nothing = np.full((2, 5), np.nan)
    svg.embed(maps.draw_heads([Inspection("gaussian", 0, 0, np.zeros((5, 5)), nothing, nothing)]), "x", "")


def test_support_names_every_kernel_on_axes_of_one_range():
    mixed = [make_inspection("sparsemax", length=64), make_inspection("gaussian", 1, length=47)]
    panels = maps.draw_support(mixed).axes
    assert {panel.get_xlim() for panel in panels} == {(1, 64)}
    assert {text.get_text() for text in panels[-1].texts} == {"sparsemax", "Gaussian"}


def test_positions_count_from_one_and_panels_of_other_lengths_have_their_own():
    mixed = [make_inspection("gaussian", length=64), make_inspection("sparsemax", length=47)]
    for panel, length in zip(maps.draw_attention(mixed).axes, (64, 47), strict=False):
        assert panel.get_images()[0].get_extent() == [0.5, length + 0.5, length + 0.5, 0.5]
        assert panel.get_xticks()[0] == panel.get_yticks()[0] == 1
    for inspections, labelled in ((mixed, [True, True]), (mixed[:1] * 2, [False, True])):
        panels = maps.draw_heads(inspections).axes[:2]
        assert [panel.xaxis.get_tick_params()["labelbottom"] for panel in panels] == labelled
        assert [panel.get_xticks()[0] for panel in panels] == [1, 1]
        assert {panel.get_images()[0].get_extent()[0] for panel in panels} == {0.5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": np.ones(3)}, "weights of an inspection has 1 dimensions; it needs 2"),
        (
            {"support": np.ones((2, 4))},
            "an inspection of 3 queries has support (2, 4) and bandwidth (2, 3); both are (heads, 3)",
        ),
        ({"tokens": ["a"]}, "an inspection of 3 keys has 1 tokens; give one for each, or none"),
        ({"head": 2}, "head 2 is not one of the 2 heads, which are numbered from 0"),
        ({"kernel": "entmix"}, "unknown kernel 'entmix'"),
    ],
)
def test_an_inspection_that_does_not_fit_together_is_refused(change, message):
    whole = {
        "kernel": "sparsemax",
        "layer": 0,
        "head": 0,
        "weights": np.ones((3, 3)),
        "support": np.ones((2, 3)),
        "bandwidth": np.ones((2, 3)),
    }
    with pytest.raises(ValueError) as error:
        Inspection(**whole | change)
    assert str(error.value).startswith(message)


def test_names_are_spread_in_order_apart_and_near_where_they_belong():
    draws = np.random.default_rng(0)
    for count in (1, 2, 5, 11):
        wanted = np.sort(draws.choice([0.0, 0.0, 0.1, 0.5, 1.0], count) + 0.01 * draws.random(count))
        places = figures.spread(list(wanted), 0.06, 0, 1)
        assert (np.diff(places) >= 0.06 - 1e-9).all()
        assert places.min() >= -1e-9
        assert places.max() <= 1 + 1e-9
    np.testing.assert_allclose(figures.spread([0.1, 0.4, 0.9], 0.06, 0, 1), [0.1, 0.4, 0.9])
    np.testing.assert_allclose(figures.spread([0.5, 0.5], 0.1, 0, 1), [0.45, 0.55])


def test_an_embedded_figure_names_nothing_outside_and_shares_no_id(drawn):
    one, two = (svg.embed(drawn["extrapolation"], name, 'said "so" <b>') for name in ("one", "two"))
    assert "http" not in one
    assert "xmlns" not in one
    assert 'aria-label="said &quot;so&quot; &lt;b&gt;"' in one
    ids = [set(re.findall(r'\bid="([^"]+)"', text)) for text in (one, two)]
    assert ids[0].isdisjoint(ids[1])
    used = re.findall(r'(?:href="|url\()#([^")]+)', one)
    assert used
    assert set(used) <= ids[0]


def test_an_embedded_figure_follows_the_theme_and_stays_the_same(drawn):
    text = svg.embed(drawn["extrapolation"], "one", "")
    blue = palette.colour_of(parse("sparsemax"))
    assert blue not in text
    assert f"var(--c{blue[1:]})" in text
    assert f"--c{blue[1:]}:{blue};" in palette.css_variables()
    assert text == svg.embed(drawn["extrapolation"], "one", "")
