"""Variants stand in rows and numbers of examples in columns, and a gap to the paper is open unless it is explained."""

import dataclasses

import pytest
from regbench_examples import make_all_runs, make_run, make_score
from report_examples import make_run as make_length_run

from compactattn.evaluation.statistics import t_interval
from compactattn.experiments import in_context
from compactattn.report import comparison as length_generalisation
from compactattn.report import regbench_paper
from compactattn.report.regbench_comparison import compare, count_epochs
from compactattn.report.regbench_finding import list_departures
from compactattn.training.config import vary


def comparison_of(*runs):
    (comparison,) = compare(runs)
    return comparison


def labels(comparison):
    return [line.label for line in comparison.lines]


def test_rows_and_columns_stand_in_the_papers_order():
    comparison = comparison_of(*make_all_runs()[::-1])
    assert [line.variant for line in comparison.lines] == list(regbench_paper.ROWS)
    assert comparison.sizes == [1000, 2500, 5000]
    assert comparison.not_run() == ["10,000 examples", "20,000 examples", "40,000 examples"]
    assert {tuple(line.cells) for line in comparison.lines} == {(1000, 2500, 5000)}


def test_seeds_become_one_cell_with_the_best_of_each_measure():
    runs = [make_run(accuracy, tvd, seed=seed) for seed, (accuracy, tvd) in enumerate([(0.9, 0.3), (0.92, 0.4), (0.94, 0.2)])]
    (line,) = comparison_of(*runs).lines
    accuracy, tvd = line.cells[1000]
    assert (accuracy.mean, tvd.mean) == (pytest.approx(0.92), pytest.approx(0.3))
    assert (accuracy.best, tvd.best, accuracy.seeds) == (0.94, 0.2, 3)
    assert accuracy.interval == pytest.approx(t_interval([0.9, 0.92, 0.94]))


def test_one_seed_has_no_interval():
    (line,) = comparison_of(make_run()).lines
    assert line.cells[1000].accuracy.interval is None


def test_the_same_epochs_over_more_examples_are_the_same_line():
    comparison = comparison_of(*(make_run(examples=size) for size in (1000, 2500, 5000)))
    assert labels(comparison) == ["sparsemax"]
    assert list(comparison.lines[0].cells) == [1000, 2500, 5000]


def test_patience_keeps_no_runs_apart():
    assert labels(comparison_of(make_run(patience=40), make_run(examples=2500, patience=20))) == ["sparsemax"]


@pytest.mark.parametrize("patience", [(20, 40), (40, 0)])
def test_of_two_runs_that_differ_in_patience_alone_the_more_patient_one_counts(patience):
    short, long = (make_run(accuracy, patience=own) for accuracy, own in zip((0.5, 0.8), patience, strict=True))
    for runs in ((short, long), (long, short)):
        comparison = comparison_of(*runs, make_run(0.6, patience=5, seed=1))
        (line,) = comparison.lines
        assert [row.accuracy for row in line.rows[1000]] == pytest.approx([0.8, 0.6])
    with pytest.raises(ValueError, match="give one of them"):
        compare([short, short])


def test_of_two_runs_that_differ_in_patience_the_one_that_has_done_the_most_steps_counts():
    finished = make_run(0.8, patience=20)
    for steps, counts in ((finished.steps // 2, 0.8), (finished.steps, 0.5)):  # stopped at half, or come to its end too
        patient = dataclasses.replace(make_run(0.5, patience=0), steps=steps)
        cut = dataclasses.replace(finished, steps=finished.steps - 31)
        for runs in ((cut, patient), (patient, cut)):
            (line,) = comparison_of(*runs, make_run(0.6, seed=1)).lines
            assert [row.accuracy for row in line.rows[1000]] == pytest.approx([counts, 0.6])
    with pytest.raises(ValueError, match="give one of them"):
        compare([finished, dataclasses.replace(finished, steps=finished.steps // 2)])


def test_what_the_published_code_computes_stands_beside_the_papers_number():
    run = make_run(kernel="norm_relu")
    comparison = comparison_of(dataclasses.replace(run, config=vary(run.config, model={"as_released": "efficient"})))
    (line,) = comparison.lines
    assert line.label == "normReLU, efficient path"
    assert comparison.papers_cell(line, 1000) == regbench_paper.Cell(0.843, 0.436)


def test_a_model_of_a_mosaics_size_has_a_line_of_its_own_and_no_number_of_the_paper_beside_it():
    own = make_run(0.82, 0.31, architecture="gla", kernel="gaussian")
    matched = dataclasses.replace(own, config=vary(own.config, model={"inner": 496}))
    comparison = comparison_of(own, matched)
    assert labels(comparison) == ["GLA, inner 0", "GLA, inner 496"]
    assert [bool(comparison.papers_cell(line, 1000)) for line in comparison.lines] == [True, False]
    assert "Gla" not in comparison.not_run()
    assert "Gla" in comparison_of(matched).not_run()
    note = "of another size than the benchmark's, with no number of the paper beside them: GLA, inner 496"
    assert note in list_departures(comparison)
    assert not any("another size" in note for note in list_departures(comparison_of(own)))


def test_runs_that_differ_in_more_than_the_seed_stay_apart_and_say_how():
    comparison = comparison_of(
        make_run(), make_run(examples=2500, epochs=100), make_run(rate=1e-4), make_run(kernel="gaussian")
    )
    assert labels(comparison) == [
        "Gaussian",
        "sparsemax, rate 0.0001, epochs 200",
        "sparsemax, rate 0.0005, epochs 100",
        "sparsemax, rate 0.0005, epochs 200",
    ]


def test_a_tenth_of_few_steps_rounded_down_is_still_a_tenth():
    runs = [make_run(examples=examples, epochs=8) for examples in (100, 200)]  # 25 and 50 steps
    assert [run.config.training.warmup for run in runs] == [2, 5]
    assert labels(comparison_of(*runs)) == ["sparsemax"]
    assert labels(comparison_of(make_run(warmup=625), make_run(warmup=1250, seed=1))) == [
        "sparsemax, warm-up share 0.1",
        "sparsemax, warm-up share 0.2",
    ]


def test_the_main_size_is_the_largest_that_most_lines_have():
    runs = [make_run(), make_run(examples=2500), make_run(examples=5000)]
    assert comparison_of(*runs).main_size == 5000
    more = [make_run(kernel="gaussian", examples=size) for size in (1000, 2500)]
    assert comparison_of(*runs, *more).main_size == 2500
    released = make_run(kernel="norm_relu")
    released = dataclasses.replace(released, config=vary(released.config, model={"as_released": "efficient"}))
    assert comparison_of(*runs, released).main_size == 5000  # what the code computes otherwise does not count


def test_the_kernel_of_an_architecture_without_attention_keeps_no_runs_apart():
    comparison = comparison_of(
        make_run(architecture="gla", kernel="sparsemax"), make_run(architecture="gla", kernel="gaussian", seed=1)
    )
    assert [(line.label, line.seeds) for line in comparison.lines] == [("GLA", [0, 1])]


def test_the_same_seed_twice_is_refused():
    with pytest.raises(ValueError) as error:
        compare([make_run(source="a"), make_run(examples=2500), make_run(source="b")])
    message = "a and b are both sparsemax on 1,000 examples of RegBench with seed 0; give one of them"
    assert str(error.value) == message


def test_other_languages_and_other_splits_are_other_comparisons_without_the_papers_numbers():
    first, second = compare([make_run(changes={"states": 5}), make_run(), make_run(score={"split": "valid"})])
    assert [c.published for c in (first, second)] == [True, False]
    assert (first.split, second.changes) == ("test", {"states": 5})
    (alone,) = compare([make_run(score={"split": "valid"})])  # shown only where there is no test split
    assert alone.split == "valid"
    assert second.papers_cell(second.lines[0], 1000) is alone.papers_cell(alone.lines[0], 1000) is None
    assert second.not_run() == []


def test_a_gap_of_more_than_two_points_has_the_status_of_the_runs_behind_its_own_cell():
    recipe = {"rate": 1e-4, "final_rate": 1e-5, "decay": 0.01}
    stopped = dataclasses.replace(make_run(0.5, 0.193, examples=2500, **recipe), steps=1000)
    runs = make_run(0.942 - 0.0201, 0.325 + 0.02, **recipe), stopped, make_run(0.963, 0.5, kernel="gaussian", **recipe)
    comparison = comparison_of(*runs)
    assert [(gap.line.label, gap.size, gap.measure, gap.status.kind) for gap in comparison.gaps] == [
        ("Gaussian", 1000, "accuracy", "open"),
        ("Gaussian", 1000, "tvd", "open"),
        ("sparsemax", 1000, "accuracy", "open"),
        ("sparsemax", 2500, "accuracy", "steps"),
    ]


def test_the_two_named_recipes_are_two_comparisons():
    repository = make_run(rate=1e-4, final_rate=1e-5, decay=0.01)
    first, second, former = compare([make_run(model={"start": "former"}), repository, make_run()])
    assert [c.title for c in (first, second, former)] == [
        "RegBench", "RegBench, the repository's recipe", "RegBench, former start"
    ]  # fmt: skip
    assert [len(c.lines) for c in (first, second, former)] == [1, 1, 1]
    assert len({c.name for c in (first, second, former)}) == 3


def test_our_own_form_stands_in_the_papers_order_beside_its_number_and_apart_from_the_benchmarks():
    own = make_run(0.5, 0.6, architecture="gla", model={"form": "own"})
    comparison = comparison_of(make_run(), make_run(0.51, 0.6, architecture="gla"), own)
    assert labels(comparison) == ["GLA", "GLA, own form", "sparsemax"]
    assert [comparison.papers_row(line).name for line in comparison.lines[:2]] == ["Gla", "Gla"]
    assert "Gla" not in comparison_of(own).not_run()


def test_the_former_start_has_a_comparison_of_its_own_and_it_comes_last():
    former, changed = {"model": {"start": "former"}}, {"changes": {"states": 5}}
    diverged = dataclasses.replace(make_run(evaluated=False, seed=1), failed="diverged")
    runs = [make_run(**former), make_run(architecture="gla"), make_run(), diverged, make_run(**changed)]
    found = compare(runs)
    assert [one.title for one in found] == ["RegBench", "a changed RegBench", "RegBench, former start"]
    # a model that starts the same either way stands beside both
    assert [labels(one) for one in found] == [["GLA", "sparsemax"], ["sparsemax"], ["GLA", "sparsemax"]]
    assert [len(one.failed) for one in found] == [1, 0, 0]
    unit = make_run(architecture="mamba")  # the benchmark's own start
    assert unit.config.model.start == "unit"
    assert not comparison_of(unit).former
    valid = compare([make_run(score={"split": "valid"}), make_run(**former)])  # each start has its own test split
    assert [(one.split, one.former) for one in valid] == [("valid", False), ("test", True)]


def test_the_best_is_the_highest_accuracy_and_the_lowest_tvd():
    comparison = comparison_of(make_run(0.9, 0.3), make_run(0.8, 0.2, kernel="gaussian"))
    assert comparison.best(1000, "accuracy").label == "sparsemax"
    assert comparison.best(1000, "tvd").label == "Gaussian"


@pytest.mark.parametrize("preset", list(in_context.PRESETS))
def test_runs_of_one_preset_share_a_line_whatever_their_number_of_examples(preset):
    runs = []
    for examples in (1000, 2500, 5000):
        config = dataclasses.replace(in_context.PRESETS[preset]("gla", examples), data={"examples": examples, "changes": {}})
        runs.append(dataclasses.replace(make_run(examples=examples), config=config))
    (line,) = comparison_of(*runs).lines
    assert (line.label, list(line.cells)) == ("GLA", [1000, 2500, 5000])
    assert {round(count_epochs(run, run.config.training.steps)) for run in runs} <= {20, 100, 200}


def test_each_experiment_compares_its_own_runs():
    runs = [make_run(), make_length_run(), dataclasses.replace(make_run(), evaluation=[])]
    assert [c.title for c in compare(runs)] == ["RegBench"]
    assert [c.title for c in length_generalisation.compare(runs)] == ["MQMTAR"]


def test_a_later_evaluation_replaces_an_earlier_one():
    rows = [make_score(0.5, 0.6, step=100), make_score(0.9, 0.3, step=200)]
    (line,) = comparison_of(dataclasses.replace(make_run(), evaluation=rows)).lines
    assert line.cells[1000].accuracy.mean == 0.9


def test_runs_of_other_experiments_say_nothing_of_the_start():
    baseline = make_run(architecture="gla")
    other = make_length_run({64: 0.5}, start="former")
    (comparison,) = compare([baseline, other])
    assert (comparison.title, labels(comparison)) == ("RegBench", ["GLA"])
