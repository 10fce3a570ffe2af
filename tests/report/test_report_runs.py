"""Runs read back as they were written, from folders and from compact lines, and malformed ones say what is wrong."""

import json

import pytest
from report_examples import make_run, write_folder, write_lines

from compactattn.experiments.runs import read_evaluation
from compactattn.report.runs import Cost, export, load, load_results, read_run, thin


def test_a_run_folder_reads_back_as_the_run(tmp_path):
    run = make_run(seed=3)
    assert read_run(write_folder(run, tmp_path / "anything")) == run


def test_the_precision_of_an_evaluation_is_read_where_it_was_noted(tmp_path):
    row = {"task": "mqmtar", "length": 64, "mode": "teacher-forced", "samples": 10, "exact": 5}
    folder = write_folder(make_run(), tmp_path / "run")
    write_lines(folder / "evaluation.jsonl", [row, row | {"precision": "bf16"}])
    assert [row.precision for row in read_run(folder).evaluation] == ["", "bf16"]


def test_nothing_is_read_out_of_a_folders_name(tmp_path):
    folder = write_folder(make_run(kernel="gaussian", seed=5), tmp_path / "sparsemax-seed-0-mqmtar")
    run = read_run(folder)
    assert (run.variant.label, run.config.seed) == ("Gaussian", 5)


def test_a_compact_line_holds_what_the_folder_held(tmp_path):
    run = make_run(seed=3)
    line = export(write_folder(run, tmp_path / "run"))
    write_lines(tmp_path / "results.jsonl", [line, line])
    first, second = load_results(tmp_path / "results.jsonl")
    assert first == second
    assert (first.config, first.environment, first.steps, first.cost) == (run.config, run.environment, 2000, run.cost)
    assert first.evaluation == run.evaluation
    assert len(first.losses) == 200
    assert first.losses[-1][0] == run.losses[-1][0]
    assert len(json.dumps(line)) < 10_000


def test_load_takes_folders_files_and_folders_of_either(tmp_path):
    write_folder(make_run(seed=0), tmp_path / "sweep" / "a")
    write_folder(make_run(seed=1), tmp_path / "sweep" / "b")
    (tmp_path / "sweep" / "empty").mkdir()
    (tmp_path / "results" / "length-gen").mkdir(parents=True)
    write_lines(tmp_path / "results" / "length-gen" / "sort.jsonl", [make_run(seed=2, task="sort").to_json()])
    runs = load([tmp_path / "sweep", tmp_path / "results", str(tmp_path / "sweep" / "a")])
    assert [run.config.seed for run in runs] == [0, 1, 2, 0]


def test_a_run_that_was_not_evaluated_or_timed_is_still_a_run(tmp_path):
    folder = write_folder(make_run(), tmp_path / "run")
    for name in ("evaluation.jsonl", "timing.jsonl", "environment.json", "metrics.jsonl"):
        (folder / name).unlink()
    run = read_run(folder)
    assert (run.evaluation, run.cost, run.environment, run.losses, run.steps) == ([], Cost(), {}, [], 0)


def test_the_first_stretch_of_each_start_is_left_out_of_the_speed(tmp_path):
    folder = write_folder(make_run(), tmp_path / "run")
    rows = [(10, 1), (20, 60), (30, 40), (40, 2), (50, 50), (60, 3)]  # resumed after steps 30 and 55; compiles are slow
    write_lines(folder / "timing.jsonl", [{"step": step, "seconds": 2.0, "tokens_per_second": speed} for step, speed in rows])
    resumed = {"resumed": [{"step": 30}, {"step": 55}]}
    (folder / "environment.json").write_text(json.dumps(resumed))
    assert read_run(folder).cost == Cost(12.0, 50, 0)
    write_lines(folder / "timing.jsonl", [{"step": 10, "seconds": 2.0, "tokens_per_second": 7}])
    assert read_run(folder).cost == Cost(2.0, 0.0, 0)


def test_a_line_that_a_killed_run_cut_short_is_left_out(tmp_path):
    folder = write_folder(make_run(), tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2010, "lo')
    assert read_run(folder).steps == 2000


def test_validation_lines_and_losses_that_are_no_number_are_not_points(tmp_path):
    folder = write_folder(make_run(losses=[(10, 3.0)]), tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "validation": {"exact": 0.5}}\n{"step": 20, "loss": null}\n')
    assert read_run(folder).losses == [(10, 3.0)]


MALFORMED = [
    ("config.json", "{", "config.json: not JSON: "),
    ("config.json", '{"experiment": "x"}', "config.json: seed is missing; it has no default, so write it down"),
    ("environment.json", "[]", "environment.json: a dictionary is expected, not list"),
    ("metrics.jsonl", "7\n", "metrics.jsonl line 1: a dictionary is expected, not int"),
    ("metrics.jsonl", '{"loss": 1}\n', 'metrics.jsonl line 1: a step and a loss are expected, got {"loss": 1}'),
    ("timing.jsonl", '{"seconds": "long"}\n', 'timing.jsonl line 1: seconds = "long" must be a number'),
    ("timing.jsonl", '{"peak_bytes": [1]}\n', "timing.jsonl line 1: peak_bytes = [1] must be a number"),
    ("evaluation.jsonl", '\n{"task": "sort"}\n', "evaluation.jsonl line 2: length is missing from an evaluation"),
    ("evaluation.jsonl", "{]\n", "evaluation.jsonl line 1: not JSON: "),
    (
        "evaluation.jsonl",
        '{"task": "sort", "length": 64, "mode": "m", "samples": 10, "exact": 11}\n',
        "evaluation.jsonl line 1: exact = 11 of samples = 10 is no share of right answers",
    ),
    (
        "evaluation.jsonl",
        '{"task": "sort", "length": 64, "mode": "m", "samples": 10, "exact": 0.5}\n',
        "evaluation.jsonl line 1: exact = 0.5 must be a whole number",
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), MALFORMED, ids=[message[:40] for *_, message in MALFORMED])
def test_a_malformed_file_is_named_with_what_is_wrong(tmp_path, name, content, message):
    folder = write_folder(make_run(), tmp_path / "run")
    (folder / name).write_text(content)
    with pytest.raises(ValueError) as error:
        read_run(folder)
    assert str(error.value).startswith(f"{folder}/{message}")
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    folder = write_folder(make_run(), tmp_path / "run")
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"config\.json: 'utf-8' codec can't decode"):
        read_run(folder)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"steps": 1}, "line 1: config is missing; a line of results holds config, environment, steps, evaluation"),
        (make_run().to_json() | {"evaluation": 3}, "line 1: evaluation must be a list of lines, and environment a dictionary"),
        (make_run().to_json() | {"evaluation": [3]}, "line 1: an evaluation is a dictionary, not int"),
        (make_run().to_json() | {"steps": "many"}, "line 1: invalid literal for int() with base 10: 'many'"),
    ],
)
def test_a_malformed_line_of_results_is_named(tmp_path, line, message):
    write_lines(tmp_path / "results.jsonl", [line])
    with pytest.raises(ValueError) as error:
        load([tmp_path / "results.jsonl"])
    assert str(error.value) == f"{tmp_path / 'results.jsonl'} {message}"


def test_what_is_no_run_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "inner"):
        folder.mkdir(exist_ok=True)
        write_lines(folder / "x.jsonl", [{"text": "a document"}])
    for paths, message in (
        ([tmp_path / "gone"], f"{tmp_path / 'gone'} does not exist; name a run folder or a file of results"),
        (
            [tmp_path],
            f"there is no run in {tmp_path}: it has no config.json, and holds no folders of runs or files of results",
        ),
        ([], "no runs were given; name run folders or files of results, as in results/length-gen/mqmtar.jsonl"),
    ):
        with pytest.raises(ValueError) as error:
            load(paths)
        assert str(error.value) == message


def test_thinning_keeps_the_last_step_and_the_mean():
    points = [(step, float(step)) for step in range(1, 1001)]
    thinned = thin(points, 7)
    assert len(thinned) == 7
    assert thinned[-1][0] == 1000
    assert thinned[0] == (143, 72.0)
    assert thin(points[:5], 7) == points[:5]
    assert thin([], 7) == []


def test_only_a_newline_ends_a_line_of_json(tmp_path):
    folder = write_folder(make_run(), tmp_path / "run")
    line = export(folder) | {"stories": [{"prompt": "one\u2028two\x85three", "text": "\u2029"}]}
    (tmp_path / "results.jsonl").write_text(json.dumps(line, ensure_ascii=False) + "\n", encoding="utf-8")
    (run,) = load_results(tmp_path / "results.jsonl")
    assert run.stories[0].prompt == "one\u2028two\x85three"
    rows = [json.loads(text) for text in (folder / "evaluation.jsonl").read_text().splitlines()]
    text = "".join(json.dumps(row | {"step": 5, "note": "\u2028"}, ensure_ascii=False) + "\n" for row in rows)
    (folder / "evaluation.jsonl").write_text(text, encoding="utf-8")
    assert len(read_evaluation(folder)) == len(rows) > 0
