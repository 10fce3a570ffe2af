"""Seeds are put together only where nothing else differs, and the paper's numbers beside ours only where they belong."""

import dataclasses

import pytest
from report_examples import make_all_runs, make_run

from compactattn.report.comparison import compare
from compactattn.report.evaluations import Evaluated
from compactattn.report.paper import MAIN


def labels(comparison):
    return [line.label for line in comparison.lines]


def test_seeds_of_one_variant_become_one_line():
    (comparison,) = compare([make_run({64: share}, seed=seed) for seed, share in enumerate([0.9, 0.95, 0.7])])
    (line,) = comparison.lines
    summary = line.cells[64]
    assert (line.seeds, summary.seeds) == ([0, 1, 2], 3)
    assert summary.mean == pytest.approx(0.85)
    assert summary.maximum == 0.95


def test_two_names_of_one_kernel_are_one_line():
    (comparison,) = compare([make_run(kernel="entmax(4/3)", seed=0), make_run(kernel="triweight", seed=1)])
    assert labels(comparison) == ["4/3-entmax"]


def test_runs_that_differ_in_more_than_the_seed_stay_apart_and_say_how():
    (comparison,) = compare(
        [make_run(seed=0), make_run(seed=1, steps=4000), make_run(seed=0, width=256), make_run(kernel="gaussian")]
    )
    assert labels(comparison) == [
        "Gaussian", "sparsemax, width 256, steps 2000", "sparsemax, width 512, steps 2000", "sparsemax, width 512, steps 4000",
    ]  # fmt: skip


def test_what_moves_no_number_keeps_no_runs_apart():
    run = make_run(seed=1)
    training = dataclasses.replace(run.config.training, device="cpu", log_every=7, accumulation=2)
    other = dataclasses.replace(run, config=dataclasses.replace(run.config, training=training, seed=0))
    (comparison,) = compare([run, other])
    assert [line.seeds for line in comparison.lines] == [[0, 1]]


@pytest.mark.parametrize("change", [{"keep": "last"}, {"precision": "bf16"}])
def test_what_moves_a_number_keeps_runs_apart(change):
    run = make_run(seed=1)
    training = dataclasses.replace(run.config.training, **change)
    other = dataclasses.replace(run, config=dataclasses.replace(run.config, training=training, seed=0))
    (comparison,) = compare([run, other])
    assert sorted(line.seeds for line in comparison.lines) == [[0], [1]]


def test_the_same_seed_twice_is_refused():
    with pytest.raises(ValueError) as error:
        compare([make_run(source="a"), make_run(source="b")])
    assert str(error.value) == "a and b are both sparsemax on mqmtar with seed 0; give one of them"


def test_rows_and_columns_stand_in_the_papers_order():
    comparisons = compare(make_all_runs(seeds=1)[::-1])
    assert [comparison.task for comparison in comparisons] == ["mqmtar", "reverse", "sort"]
    for comparison in comparisons:
        assert [line.variant for line in comparison.lines] == [row.variant for row in MAIN.rows]
        assert comparison.not_run() == []
    assert [comparisons[1].factor(n) for n in comparisons[1].lengths] == ["1×", "1.5×"]


def test_the_papers_cell_is_that_of_the_variant():
    (comparison,) = compare([make_run(kernel="epanechnikov")])
    (line,) = comparison.lines
    assert comparison.papers_cell(line, 2048) == (0.63, 0.84)
    assert comparison.lengths == [64, 128, 256, 512, 1024, 2048, 4096]
    assert len(comparison.not_run()) == 10


def test_another_task_of_the_same_name_has_no_numbers_of_the_paper_beside_it():
    small = make_run(data={"symbols": 32})
    (comparison,) = compare([small])
    assert comparison.changed == {"symbols": (256, 32)}
    assert not comparison.published
    assert comparison.papers_cell(comparison.lines[0], 64) is None
    assert comparison.lengths == [64, 128, 256]
    assert [c.published for c in compare([small, make_run()])] == [True, False]


def test_the_former_start_has_a_comparison_of_its_own_and_it_comes_last():
    sort = {"task": "sort", "kernel": "gaussian"}
    diverged = dataclasses.replace(make_run({}, seed=1, start="former"), failed="diverged")
    small = make_run(task="sort", data={"symbols": 8})
    found = compare([make_run(start="former"), diverged, make_run(**sort, start="former"), small, make_run(**sort), make_run()])
    assert [one.title for one in found] == ["MQMTAR", "Sort", "Sort", "MQMTAR, former start", "Sort, former start"]
    assert [one.former for one in found] == [False, False, False, True, True]
    assert [(len(one.lines), len(one.failed)) for one in found] == [(1, 0), (1, 0), (1, 0), (1, 1), (1, 0)]
    assert found[3].subject == "MQMTAR"  # in sentences


def test_data_of_an_inner_dictionary_counts_too():
    (comparison,) = compare([make_run(data={"settings": {"queries": 2}})])
    assert comparison.changed == {"queries": (4, 2)}


def test_the_paper_answers_teacher_forced_only():
    run = make_run()
    free = [dataclasses.replace(row, mode="free-running") for row in run.evaluation]
    forced, other = compare([dataclasses.replace(run, evaluation=[*free, *run.evaluation])])
    assert (forced.mode, forced.beside_paper) == ("teacher-forced", True)
    assert (other.mode, other.beside_paper, other.published) == ("free-running", False, True)


def test_the_latest_step_counts_and_of_one_step_the_last_line():
    run = make_run()
    rows = [
        Evaluated("mqmtar", 64, "teacher-forced", 100, exact, step=step) for exact, step in [(10, 2), (90, 5), (80, 5), (20, 3)]
    ]
    (comparison,) = compare([dataclasses.replace(run, evaluation=rows)])
    assert comparison.lines[0].cells[64].mean == 0.8


def replace_steps(run, *steps, done=None):
    rows = [dataclasses.replace(row, step=step) for row, step in zip(run.evaluation, steps, strict=True)]
    return dataclasses.replace(run, evaluation=rows, steps=run.steps if done is None else done)


def test_the_steps_of_a_line_are_those_evaluated_else_those_logged():
    run = make_run({64: 1, 128: 0.5})
    for changed, steps, label in [
        (replace_steps(run, 2000, 2000), (2000, 2000), "sparsemax"),
        (replace_steps(run, 1000, 1000), (1000, 1000), "sparsemax, at step 1,000"),
        (replace_steps(run, 1000, 2000), (1000, 2000), "sparsemax, at step 1,000 to 2,000"),
        (replace_steps(run, 0, 0, done=1200), (1200, 1200), "sparsemax"),
        (replace_steps(run, 1500, 1500, done=0), (1500, 1500), "sparsemax"),
        (replace_steps(run, 0, 0, done=0), (0, 0), "sparsemax"),
    ]:
        (comparison,) = compare([changed])
        (line,) = comparison.lines
        assert (line.steps, line.label) == (steps, label)


def test_runs_without_an_evaluation_make_no_comparison():
    assert compare([make_run({})]) == []
