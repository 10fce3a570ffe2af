"""The pictures show what the op computes, and are fit to print."""

import itertools
import math
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.text import Text

from compactattn.kernels import Anchored, Fixed, Nearest, Normalising, parse
from compactattn.report import gallery

FIGURES = {"kernels": gallery.draw_profiles, "transformations": gallery.draw_transformations, "overview": gallery.draw_overview}


@pytest.fixture(scope="module")
def figures():
    return {name: draw() for name, draw in FIGURES.items()}


# -- numbers -------------------------------------------------------------------------------------

INSIDE = np.vectorize(lambda u: float(abs(u) < 1))
CLASSICAL = {
    "rectified(1)": lambda u: 3 / 4 * (1 - u**2) * INSIDE(u),
    "rectified(2)": lambda u: 15 / 16 * (1 - u**2) ** 2 * INSIDE(u),
    "rectified(3)": lambda u: 35 / 32 * (1 - u**2) ** 3 * INSIDE(u),
    "ball": lambda u: INSIDE(u) / 2,
    "gaussian": lambda u: np.exp(-(u**2) / 2) / math.sqrt(2 * math.pi),
    "truncated_gaussian(1/2)": lambda u: np.exp(-(u**2) / 2) * INSIDE(u) / (math.sqrt(2 * math.pi) * math.erf(math.sqrt(0.5))),
}


@pytest.mark.parametrize("curve", gallery.CURVES, ids=lambda curve: curve.kernel)
def test_profile_is_the_classical_kernel_of_unit_integral(curve):
    u, density = gallery.evaluate_profile(curve.kernel)
    assert density.sum() * (u[1] - u[0]) == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(density, CLASSICAL[curve.kernel](u), atol=2e-5)  # the midpoint rule at du = 1/200


def test_curves_are_listed_in_the_order_of_their_peaks():
    peaks = [gallery.evaluate_profile(curve.kernel)[1].max() for curve in gallery.CURVES]
    assert peaks == sorted(peaks, reverse=True)


def test_plane_has_u1_across_and_u2_up():
    u1, u2, w = gallery.evaluate_plane("gaussian")
    scores = np.stack(np.broadcast_arrays(0.0, u1[None, :], u2[:, None]), -1)
    expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(w, expected, rtol=1e-12)


def test_no_cell_has_tied_scores():
    u1, u2, _ = gallery.evaluate_plane("gaussian")
    assert np.abs(u1[None, :] - u2[:, None]).min() > 1e-6
    assert min(np.abs(u1).min(), np.abs(u2).min()) > 1e-6


@pytest.mark.parametrize(
    ("kernel", "counts"),
    [("gaussian", [3]), ("topk_uniform(2)", [2, 2, 2]), ("sparsemax", [1, 1, 1, 2, 2, 2, 3]), ("norm_relu", [1, 1, 2, 3])],
)
def test_each_region_of_constant_support_gets_one_digit(kernel, counts):
    _, _, w = gallery.evaluate_plane(kernel)
    labels = gallery.label_regions(w)
    assert sorted(count for *_, count in labels) == counts
    for row, column, count in labels:
        neighbourhood = w[row - 8 : row + 9, column - 8 : column + 9]  # half the size of a digit
        assert ((neighbourhood > 0).sum(-1) == count).all()


# -- the table -----------------------------------------------------------------------------------


def test_each_cell_has_the_profile_of_its_column_and_the_rule_of_its_row():
    for rule, row in zip((Fixed, Anchored, Normalising, Nearest), gallery.TABLE, strict=True):
        for r, cell in zip(gallery.INK, row, strict=True):
            if isinstance(cell, gallery.Cell):
                kernel = parse(cell.kernel)
                assert (kernel.r, type(kernel.rule)) == (r, rule), cell.name


def test_figure_1_names_the_profile_of_each_kernel():
    cells = list(itertools.chain(*gallery.FIGURE_1))
    assert len(set(cells)) == 10
    for cell in cells:
        profile = str(parse(cell.kernel).profile).replace("step", "uniform")
        assert profile in cell.estimator, cell.name


def test_a_panel_is_white_exactly_where_the_weight_is_zero(figures):
    panel = next(axes for axes in figures["transformations"].axes if axes.get_title() == "1.5-entmax")
    (image,) = panel.get_images()
    u1, u2, w = gallery.evaluate_plane("entmax(1.5)")
    np.testing.assert_array_equal(image.get_array().mask, w[..., 1] == 0)
    colours = image.to_rgba(image.get_array())[..., :3]
    np.testing.assert_array_equal((colours == 1).all(-1), w[..., 1] == 0)
    column, row = np.searchsorted(u1, 3.5), np.searchsorted(u2, -3.5)
    assert image.get_array()[row, column] == 1  # u₁ far above the others takes all the weight


def test_fixed_bandwidth_marks_where_nothing_is_in_reach(figures):
    for axes in figures["transformations"].axes:
        starred = any(text.get_text() == "3*" for text in axes.texts)
        assert starred == (axes.get_title() in [cell.name for cell in gallery.TABLE[0] if isinstance(cell, gallery.Cell)])


# -- fit to print --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_is_clipped_or_covers_another(figures, name):
    figure = figures[name]
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts]
    assert len(boxes) > 15
    for text, box in boxes:
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert inside, text
    for (one, box), (other, its_box) in itertools.combinations(boxes, 2):
        assert not box.overlaps(its_box), (one, other)


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_is_too_small_to_print(figures, name):
    sizes = {text.get_fontsize() for text in figures[name].findobj(Text) if text.get_visible() and text.get_text()}
    assert min(sizes) >= 6.5


def test_gallery_is_the_same_bytes_every_time(figures, tmp_path):
    settings = dict(matplotlib.rcParams)
    paths = gallery.write_gallery(tmp_path / "deep" / "er")
    assert [path.name for path in paths] == [f"{name}.{suffix}" for name in FIGURES for suffix in ("svg", "png")]
    again = itertools.chain(*(gallery.save_figure(figure, tmp_path / name) for name, figure in figures.items()))
    for path, its_twin in zip(paths, again, strict=True):
        assert path.read_bytes() == its_twin.read_bytes(), path.name
        if path.suffix == ".svg":
            assert "<dc:date>" not in path.read_text()
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
    height, width, _ = imread(tmp_path / "overview.png").shape
    assert width / height == pytest.approx(2, rel=0.05)
    assert dict(matplotlib.rcParams) == settings
