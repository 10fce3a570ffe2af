"""Variants stand in rows and splits in columns, and only runs that have seen as many tokens are compared."""

import dataclasses

import numpy as np
import pytest
from lm_examples import EDGES, make_all_runs, make_failed, make_row, make_run
from regbench_examples import make_run as make_regbench_run

from compactattn.evaluation.loss_by_position import PositionLoss
from compactattn.evaluation.statistics import mean_interval
from compactattn.report import lm_comparison as lm
from compactattn.report import lm_paper, regbench_comparison
from compactattn.report.evaluations import Stretches
from compactattn.report.lm_comparison import compare
from compactattn.report.runs import Cost


def comparison_of(*runs):
    (comparison,) = compare(runs)
    return comparison


def test_rows_stand_in_the_papers_order_and_the_transformer_last():
    comparison = comparison_of(*make_all_runs(depths=(8,), few=False)[::-1])
    assert [line.variant for line in comparison.lines] == list(lm_paper.ROWS)
    assert comparison.lines[-1].label == "Transformer"
    assert comparison.not_run() == []
    assert comparison.splits == ["validation", "simplewiki", "tinystories"]
    assert comparison_of(make_run()).not_run() == [lm_paper.ROWS[v] for v in lm_paper.DRAWN if v != lm_paper.ADAPTIVE[0]]


def test_runs_of_another_depth_corpus_length_batch_or_number_of_steps_are_not_compared():
    others = [{"layers": 8}, {"data": {"corpus": "demo"}}, {"data": {"length": 256}}, {"batch": 32}, {"steps": 1000}]
    found = compare([make_run(**changes) for changes in ({}, *others)])
    assert [len(one.lines) for one in found] == [1] * 6
    assert found[-1].corpus == "demo"
    tokens = {(one.layers, one.steps, one.batch, one.length): one.tokens for one in found}
    assert tokens == {key: steps * batch * length for key in tokens for _, steps, batch, length in [key]}


def test_the_former_start_has_a_comparison_of_its_own_and_it_comes_last():
    found = compare([make_run(start="former"), make_run(layers=8), make_failed(seed=1, start="former"), make_run()])
    assert [one.title.rpartition("), ")[2] for one in found] == ["1 layer", "8 layers", "1 layer, former start"]
    assert [len(one.lines[0].runs) for one in found] == [1, 1, 2]


def test_the_folder_in_which_a_corpus_lies_keeps_no_runs_apart():
    comparison = comparison_of(make_run(data={"folder": "/a"}), make_run(seed=1, data={"folder": "/b"}))
    assert [line.seeds for line in comparison.lines] == [[0, 1]]


def test_the_corpus_stories_is_never_called_babistories():
    comparison = comparison_of(make_run())
    assert comparison.title == "stories (BabiStories substitute), 1 layer"
    assert comparison_of(make_run(layers=8, data={"corpus": "babistories"})).title == "BabiStories, 8 layers"


def test_seeds_become_one_cell_with_an_interval_that_is_not_clipped():
    losses = [2.5, 2.6, 2.55]
    (line,) = comparison_of(*(make_run(loss, seed=seed) for seed, loss in enumerate(losses))).lines
    cell = line.cells["validation"]
    assert (cell.loss.mean, cell.loss.best, cell.loss.seeds) == (pytest.approx(2.55), 2.5, 3)
    assert cell.loss.interval == pytest.approx(mean_interval(losses))
    assert cell.loss.interval[1] > 2.6
    assert cell.perplexity == pytest.approx(np.exp(2.55))
    assert cell.bits.mean == pytest.approx(2.55 / 3.1)
    assert comparison_of(make_run()).lines[0].cells["validation"].loss.interval is None


def test_bits_are_left_out_unless_every_seed_has_them():
    bare = make_run(seed=1, rows=[make_row(bits_per_byte=None)])
    (line,) = comparison_of(make_run(), bare).lines
    assert line.cells["validation"].bits is None


def test_the_same_seed_twice_is_refused():
    with pytest.raises(ValueError) as error:
        compare([make_run(source="a"), make_run(source="b")])
    assert str(error.value) == "a and b are both sparsemax on stories with seed 0; give one of them"


def test_runs_that_differ_in_more_than_the_seed_stay_apart_and_say_how():
    comparison = comparison_of(make_run(), make_run(rate=1e-3), make_run(kernel="gaussian", rate=1e-3))
    assert [line.label for line in comparison.lines] == ["Gaussian", "sparsemax, rate 0.001", "sparsemax, rate 0.005"]


def test_what_seeds_explain_comes_from_every_line_with_several():
    runs = [make_run(2.5 + 0.01 * seed, seed=seed) for seed in range(3)]
    runs += [make_run(2.4, kernel="gaussian"), make_run(2.45, kernel="biweight")]
    comparison = comparison_of(*runs)
    base, biweight = comparison.base("validation"), comparison.rivals("validation")[0]
    assert biweight.label == "1.5-entmax"
    assert comparison.reach("validation", base, biweight) == pytest.approx(4.303 * 0.01 * 2**0.5, rel=1e-3)
    alone = comparison_of(*runs[2:])
    assert alone.reach("validation", alone.lines[0], alone.lines[1]) is None


def test_cost_is_a_mean_over_the_runs_that_noted_it():
    (line,) = comparison_of(make_run(wall=100.0), make_run(seed=1, wall=300.0), make_run(seed=2, wall=0.0)).lines
    assert lm.mean_cost(line) == Cost(200, pytest.approx(1.2 * 2000 * 64 * 512 * (1 / 100 + 1 / 300) / 2), 5 << 30)
    assert lm.mean_cost(comparison_of(make_run(wall=0.0)).lines[0]) == Cost()


def test_a_run_that_diverged_is_a_line_without_a_number():
    failed = make_failed(kernel="biweight")
    comparison = comparison_of(make_run(), failed, make_failed(seed=1))
    sparsemax, biweight = comparison.lines
    assert (biweight.label, biweight.cells, biweight.failure) == ("1.5-entmax", {}, "diverged at step 400, loss nan")
    assert sparsemax.failure == "seed 1 diverged at step 400, loss nan"
    assert (sparsemax.cells["validation"].loss.seeds, len(lm.mean_validations(sparsemax))) == (1, 20)
    assert lm_paper.ROWS[biweight.variant] not in comparison.not_run()
    assert compare([failed]) == []  # nothing to hold it against


def test_validation_curves_are_means_over_seeds_where_all_have_a_point():
    short = make_run(2.7, seed=1)
    short = dataclasses.replace(short, validations=short.validations[:15])
    (line,) = comparison_of(make_run(2.5), short).lines
    curve = lm.mean_validations(line)
    assert [step for step, _ in curve] == list(range(100, 1501, 100))
    assert curve[-1][1] == pytest.approx((line.runs[0].validations[14][1] + line.runs[1].validations[14][1]) / 2)


def test_positions_are_smoothed_over_stretches_as_over_single_positions():
    draws = np.random.default_rng(0)
    whole = PositionLoss(100, 100 * draws.random(128).repeat(4), np.full(512, 100))  # one loss in each stretch
    sums = whole.sums.reshape(-1, 4).sum(1)
    stretches = Stretches(EDGES, (400,) * 128, tuple(sums / 400))
    (line,) = comparison_of(make_run(rows=[make_row(by_position=stretches)])).lines
    smoothed = lm.smooth_positions(line, "validation")
    assert list(smoothed) == list(EDGES[1:])
    np.testing.assert_allclose(list(smoothed.values()), whole.smoothed()[3::4], rtol=1e-12)
    fades = [1, 0.9**4]
    expected = (sums[1] * fades[0] + sums[0] * fades[1]) / (400 * sum(fades))
    assert smoothed[8] == pytest.approx(expected)


def test_positions_are_pooled_over_seeds_by_tokens():
    first, second = Stretches((0, 4, 8), (30, 0), (3.0, None)), Stretches((0, 4, 8), (10, 10), (1.0, 2.0))
    runs = [make_run(seed=seed, rows=[make_row(by_position=one)]) for seed, one in enumerate((first, second))]
    (line,) = comparison_of(*runs).lines
    edges, sums, tokens = lm.pool_positions(line, "validation")
    assert (list(edges), list(sums), list(tokens)) == ([0, 4, 8], [100, 20], [40, 10])
    assert lm.mean_within(line, "validation", 4) == 2.5
    assert lm.mean_within(line, "validation", 8) == pytest.approx(2.4)
    assert lm.mean_within(line, "validation", 3) is None
    assert lm.smooth_positions(line, "simplewiki") == {}


def test_a_seed_with_other_stretches_is_left_out_of_the_pool():
    stretches = Stretches((0, 4, 8), (30, 10), (3.0, 2.0)), Stretches((0, 2, 8), (10, 10), (1.0, 2.0))
    stretches += (Stretches((0, 4, 8), (10, 5), (1.0, 4.0)),)
    runs = [make_run(seed=seed, rows=[make_row(by_position=one)]) for seed, one in enumerate(stretches)]
    (line,) = comparison_of(*runs).lines
    edges, sums, tokens = lm.pool_positions(line, "validation")
    assert (list(edges), list(sums), list(tokens)) == ([0, 4, 8], [100, 40], [40, 15])


def test_each_experiment_compares_its_own_runs():
    runs = [make_run(), make_regbench_run(), make_run(rows=[], source="not evaluated", seed=1)]
    assert [one.lines[0].seeds for one in compare(runs)] == [[0]]
    assert len(regbench_comparison.compare(runs)) == 1
