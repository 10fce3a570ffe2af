"""Figures of RegBench show the numbers, ours and the paper's, with a look of its own for every variant."""

import dataclasses

import numpy as np
import pytest
from regbench_examples import make_all_runs, make_run, make_score
from test_figures import assert_readable

from compactattn.report import palette, regbench_figures
from compactattn.report.evaluations import Bins, Reference
from compactattn.report.regbench_comparison import MEASURES, compare
from compactattn.report.regbench_paper import ROWS


@pytest.fixture(scope="module")
def comparison():
    return compare(make_all_runs())[0]


@pytest.fixture(scope="module")
def drawn(comparison):
    wide = compare(make_all_runs(sizes=(1000, 2500, 5000, 10_000, 20_000, 40_000)))[0]
    few = compare(
        [
            make_run(seed=seed, kernel=kernel, examples=size)
            for seed in (0, 1)
            for size in (1000, 2500)
            for kernel in ("gaussian", "sparsemax")
        ]
    )[0]
    return {
        "sizes": regbench_figures.draw_sizes(comparison),
        "wide": regbench_figures.draw_sizes(wide),
        "few": regbench_figures.draw_sizes(few),
        "paper": regbench_figures.draw_beside_paper(comparison),
        "wide paper": regbench_figures.draw_beside_paper(wide),
        "positions": regbench_figures.draw_positions(comparison, 1000),
        "validation": regbench_figures.draw_validation(comparison, 1000),
    }


@pytest.mark.parametrize("name", ["sizes", "wide", "few", "paper", "wide paper", "positions", "validation"])
def test_no_text_is_clipped_covers_another_or_is_tiny(drawn, name, monkeypatch):
    assert_readable(drawn[name], monkeypatch)


def test_the_curves_are_the_means_on_a_log_axis(comparison, drawn):
    for measure, panel in zip(MEASURES, drawn["sizes"].axes, strict=True):
        assert panel.get_xscale() == "log"
        for line, drawn_line in zip(comparison.lines, panel.get_lines(), strict=False):
            np.testing.assert_array_equal(drawn_line.get_xdata(), [1000, 2500, 5000])
            np.testing.assert_array_equal(drawn_line.get_ydata(), [cell.of(measure).mean for cell in line.cells.values()])
        low, high = panel.get_ylim()
        assert all(low <= cell.of(measure).mean <= high for line in comparison.lines for cell in line.cells.values())


def test_the_papers_numbers_are_dashed_and_hollow_beside_ours(comparison, drawn):
    for line, panel in zip(comparison.lines, drawn["paper"].axes, strict=True):
        papers, ours, *_ = panel.get_lines()
        assert panel.get_title("left") == line.label
        assert list(papers.get_ydata()) == [ROWS[line.variant].cells[size].accuracy for size in comparison.sizes]
        assert list(ours.get_ydata()) == [line.cells[size].accuracy.mean for size in comparison.sizes]
        assert (papers.get_color(), papers.get_markerfacecolor()) == (palette.MUTED, "none")
        assert papers.is_dashed()


def test_every_line_is_named_beside_the_plot(comparison, drawn):
    for name in ("sizes", "positions", "validation"):
        for panel in drawn[name].axes:
            assert {text.get_text() for text in panel.texts} == {line.label for line in comparison.lines}


def test_bands_are_drawn_over_seeds_alone(drawn):
    assert [len(panel.collections) for panel in drawn["few"].axes] == [2, 2]
    assert all(len(panel.get_yticks()) > 1 for panel in drawn["few"].axes)
    assert [len(panel.collections) for panel in drawn["sizes"].axes] == [0, 0]


GRAMS = [Reference("a 2-gram of the context", 0.828, 0.304), Reference("a 3-gram of the context", 0.936, 0.212)]


@pytest.fixture(scope="module")
def with_references():
    filtered = Reference("a filter that knows the automaton and not its state", 0.973, 0.038)
    runs = [dataclasses.replace(run, evaluation=[run.evaluation[0]]) for run in make_all_runs()]
    row = dataclasses.replace(runs[0].evaluation[0], references=(*GRAMS, filtered))
    return regbench_figures.draw_sizes(compare([dataclasses.replace(runs[0], evaluation=[row]), *runs[1:]])[0])


def test_n_grams_of_the_context_are_grey_lines_with_their_names(with_references, drawn, monkeypatch):
    assert_readable(with_references, monkeypatch)
    for panel, plain, shares in zip(with_references.axes, drawn["sizes"].axes, ([0.828, 0.936], [0.304, 0.212]), strict=True):
        names = {text.get_text() for text in panel.texts} - {text.get_text() for text in plain.texts}
        assert names == {"2-gram", "3-gram"}
        found = [line.get_ydata()[0] for line in panel.get_lines() if line.get_color() == palette.MUTED]
        assert found == shares
        assert all(panel.get_ylim()[0] < share < panel.get_ylim()[1] for share in shares)


def test_all_variants_look_different_without_their_colour_too():
    looks = [palette.look_of(variant) for variant in ROWS]
    assert len(set(looks)) == len(looks)
    recurrent = [look for variant, look in zip(ROWS, looks, strict=True) if variant.kernel is None]
    assert len({look.marker for look in recurrent}) == 5
    attending = {look.marker for variant, look in zip(ROWS, looks, strict=True) if variant.kernel}
    assert not {look.marker for look in recurrent} & attending
    assert all(look.colour in palette.DARK for look in looks)


def test_positions_are_pooled_over_seeds_and_thin_bins_left_out():
    def run(seed, right):
        bins = Bins((0, 2, 4, 6, 8), (100, 300, 0, 1), (right, 150, 0, 1), (0.1,) * 4)
        return dataclasses.replace(make_run(seed=seed), evaluation=[make_score(0.9, 0.3, by_position=bins)])

    (line,) = compare([run(0, 100), run(1, 50)])[0].lines
    assert regbench_figures.pool_positions(line, 1000) == [(0.5, 0.75), (2.5, 0.5)]
    assert regbench_figures.pool_positions(line, 2500) == []


def test_what_no_run_has_kept_is_not_drawn():
    bare = dataclasses.replace(make_run(score={"by_position": None}), validations=[])
    (comparison,) = compare([bare])
    assert regbench_figures.draw_positions(comparison, 1000) is None
    assert regbench_figures.draw_validation(comparison, 1000) is None


def test_validation_is_drawn_against_epochs_of_one_size():
    (comparison,) = compare([make_run(epochs=20), make_run(epochs=20, examples=2500)])
    curve = regbench_figures.draw_validation(comparison, 2500).axes[0].get_lines()[0]
    np.testing.assert_allclose(curve.get_xdata(), np.arange(1, 21), rtol=0.01)


def test_a_single_size_and_a_perfect_model_can_be_drawn():
    (comparison,) = compare([make_run(1.0, 0.0), make_run(0.0, 1.0, kernel="gaussian")])
    figure = regbench_figures.draw_sizes(comparison)
    assert all(np.isfinite(panel.get_ylim()).all() for panel in figure.axes)
    for panel in figure.axes:
        assert all(np.isfinite(text.get_position()).all() for text in panel.texts)
