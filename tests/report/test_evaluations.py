"""Each experiment has its own kind of evaluation, and a malformed one says what is wrong in a sentence."""

import dataclasses
import json

import pytest
from regbench_examples import make_run, make_score
from report_examples import make_run as make_length_run
from report_examples import write_folder, write_lines

from compactattn.report.evaluations import Bins, Evaluated, Part, Scored, read_evaluation
from compactattn.report.runs import export, load, load_results, read_run

LEAST = {"task": "regbench", "split": "test", "examples": 1000, "samples": 500, "positions": 10, "right": 9, "tvd": 0.25}
BINS = {"edges": [0, 32, 64], "positions": [10, 0], "right": [7, 0], "tvd": [0.5, 0]}


def read(row):
    return read_evaluation("regbench", row, "here")


def plain(row):
    return json.loads(json.dumps(dataclasses.asdict(row)))


def test_a_line_of_regbench_reads_back_as_it_was():
    row = make_score(0.94, 0.33)
    assert read(plain(row) | {"seed": 0, "unknown": [1]}) == row
    assert row.accuracy == pytest.approx(0.94)


def test_only_the_tabulated_numbers_are_needed():
    row = read(LEAST)
    assert (row.accuracy, row.tvd, row.last, row.inside, row.by_position) == (0.9, 0.25, None, None, None)


def test_parts_and_bins_without_a_position_are_allowed():
    row = read(LEAST | {"last": {"positions": 0, "right": 0}, "by_position": BINS})
    assert row.last == Part(0, 0, 0.0)
    assert row.by_position == Bins((0, 32, 64), (10, 0), (7, 0), (0.5, 0.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"right": None}, "right is missing from an evaluation"),
        ({"right": 11}, "right = 11 of positions = 10 is no share of right answers"),
        ({"right": True}, "right = true must be a whole number"),
        ({"split": 3}, "split = 3 must be text"),
        ({"tvd": 33.1}, "tvd = 33.1 must be between 0 and 1"),
        ({"tvd": float("nan")}, "tvd = nan must be between 0 and 1"),
        ({"samples": 0}, "samples = 0 must be at least 1"),
        ({"inside": [1]}, "inside = [1] must be a dictionary"),
        ({"inside": {"right": 1}}, "inside.positions is missing from an evaluation"),
        ({"last": {"positions": 1, "right": 2}}, "right = 2 of positions = 1 is no share of right answers"),
        ({"by_position": BINS | {"edges": 3}}, "by_position.edges = 3 must be a list"),
        ({"by_position": BINS | {"right": [7, 0.5]}}, "by_position.right[1] = 0.5 must be a whole number"),
        ({"by_position": BINS | {"edges": [0, 64, 32]}}, "the edges of by_position must rise, but are [0, 64, 32]"),
        (
            {"by_position": BINS | {"edges": [0, 32]}},
            "by_position has 2 edges, 2 positions, 2 right and 2 tvd; n bins need n of each and n + 1 edges",
        ),
    ],
)
def test_a_malformed_line_is_refused(change, message):
    with pytest.raises(ValueError) as error:
        read(LEAST | change)
    assert str(error.value) == f"here: {message}"


def test_the_experiment_decides_how_a_line_is_read():
    row = {"task": "mqmtar", "length": 64, "mode": "teacher-forced", "samples": 10, "exact": 5}
    assert isinstance(read_evaluation("length-gen", row, "here"), Evaluated)
    assert isinstance(read(LEAST), Scored)
    for experiment, message in (
        ("regbench", "here: split is missing from an evaluation"),
        ("poems", "here: experiment 'poems' is unknown; a report knows length-gen, regbench, lm"),
    ):
        with pytest.raises(ValueError) as error:
            read_evaluation(experiment, row, "here")
        assert str(error.value) == message


def write_regbench_folder(run, folder):
    """The run folder that would read back as this run of RegBench."""
    write_folder(dataclasses.replace(run, evaluation=[]), folder)
    write_lines(folder / "evaluation.jsonl", [plain(row) | {"seed": run.config.seed} for row in run.evaluation])
    with (folder / "metrics.jsonl").open("a") as file:
        for step, loss in run.validations:
            file.write(json.dumps({"step": step, "validation": {"loss": loss, "accuracy": 0.5}}) + "\n")
    return folder


def test_a_run_folder_of_regbench_reads_back_with_its_validations(tmp_path):
    run = make_run(seed=3, epochs=10)
    assert len(run.validations) == 10
    assert read_run(write_regbench_folder(run, tmp_path / "run")) == run


def test_compact_lines_of_both_experiments_lie_in_one_file(tmp_path):
    run, other = make_run(seed=3), make_length_run()
    line = export(write_regbench_folder(run, tmp_path / "run"))
    write_lines(tmp_path / "results.jsonl", [line, other.to_json()])
    first, second = load_results(tmp_path / "results.jsonl")
    assert (first.config, first.evaluation, second.evaluation) == (run.config, run.evaluation, other.evaluation)
    assert [step for step, _ in first.validations] == [step for step, _ in run.validations]
    assert "validations" not in other.to_json()
    assert load([tmp_path / "results.jsonl"]) == [first, second]


def test_of_two_evaluations_of_a_split_the_latest_counts():
    rows = [make_score(0.5, 0.5, step=200), make_score(0.9, 0.3, step=300), make_score(0.8, 0.4, split="valid")]
    run = dataclasses.replace(make_run(), evaluation=rows)
    assert [(row.split, row.accuracy) for row in run.latest] == [("test", 0.9), ("valid", 0.8)]
