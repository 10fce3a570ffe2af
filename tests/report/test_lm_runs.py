"""Lines of language modelling and stories read back as they were, and malformed ones say what is wrong in a sentence."""

import json

import pytest
from lm_examples import make_failed, make_row, make_run, plain, write_lm_folder
from report_examples import make_run as make_length_run
from report_examples import write_folder, write_lines

from compactattn.report.evaluations import Story, Stretches, read_evaluation, read_story
from compactattn.report.runs import export, load_results, read_run

LEAST = {"task": "lm", "split": "validation", "samples": 10, "tokens": 5120, "loss": 2.5}
STRETCHES = {"edges": [0, 4, 8], "tokens": [40, 0], "loss": [2.5, None]}


def read(row):
    return read_evaluation("lm", row, "here")


def test_a_line_reads_back_as_it_was():
    row = make_row(2.5)
    assert read(plain(row) | {"seed": 0, "unknown": [1]}) == row


def test_only_the_loss_and_what_it_is_of_are_needed():
    row = read(LEAST)
    assert (row.loss, row.bits_per_byte, row.by_position, row.tokenizer) == (2.5, None, None, "")


def test_a_stretch_without_a_token_has_no_loss():
    assert read(LEAST | {"by_position": STRETCHES}).by_position == Stretches((0, 4, 8), (40, 0), (2.5, None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": None}, "loss is missing from an evaluation"),
        ({"loss": -1}, "loss = -1.0 must be a finite number of at least 0"),
        ({"loss": float("nan")}, "loss = nan must be a finite number of at least 0"),
        ({"tokens": 0}, "tokens = 0 must be at least 1"),
        ({"split": 3}, "split = 3 must be text"),
        ({"perplexity": 7.0}, "perplexity = 7.0 is not e to the power of loss = 2.5"),
        ({"bits_per_byte": float("inf")}, "bits_per_byte = inf must be a finite number of at least 0"),
        ({"by_position": STRETCHES | {"loss": [2.5, "x"]}}, 'by_position.loss[1] = "x" must be a number'),
        ({"by_position": STRETCHES | {"edges": [0, 8, 8]}}, "the edges of by_position must rise, but are [0, 8, 8]"),
        (
            {"by_position": STRETCHES | {"loss": [None, None]}},
            "by_position has loss None over 40 tokens; a stretch has a loss where it has tokens",
        ),
        (
            {"by_position": STRETCHES | {"tokens": [40]}},
            "by_position has 3 edges, 1 tokens and 2 loss; n stretches need n of each and n + 1 edges",
        ),
    ],
)
def test_a_malformed_line_is_refused(change, message):
    with pytest.raises(ValueError) as error:
        read(LEAST | change)
    assert str(error.value) == f"here: {message}"


def test_a_malformed_story_is_refused():
    assert read_story({"prompt": "a", "text": "ab", "temperature": 1}, "here") == Story("a", "ab", 1.0)
    for row, message in (
        (3, "here: a story is a dictionary, not int"),
        ({"prompt": "a"}, "here: text is missing from a story"),
        ({"prompt": "a", "text": "b", "top_k": 0.5}, "here: top_k = 0.5 must be a whole number"),
        ({"prompt": "a", "text": "b", "ended": 1}, "here: ended = 1 must be true or false"),
    ):
        with pytest.raises(ValueError) as error:
            read_story(row, "here")
        assert str(error.value) == message


def test_a_run_folder_reads_back_with_its_validations_and_stories(tmp_path):
    run = make_run(seed=3)
    assert len(run.stories) == 1
    assert read_run(write_lm_folder(run, tmp_path / "run")) == run


def test_a_run_without_stories_is_a_run(tmp_path):
    folder = write_lm_folder(make_run(stories=False), tmp_path / "run")
    assert not (folder / "stories.jsonl").exists()
    assert read_run(folder).stories == []
    assert "stories" not in export(folder)


def test_a_compact_line_keeps_stories_and_positions(tmp_path):
    run = make_run(seed=3)
    line = export(write_lm_folder(run, tmp_path / "run"))
    write_lines(tmp_path / "results.jsonl", [line])
    (back,) = load_results(tmp_path / "results.jsonl")
    assert (back.config, back.evaluation, back.stories) == (run.config, run.evaluation, run.stories)
    write_lines(tmp_path / "results.jsonl", [line | {"stories": 3}])
    with pytest.raises(ValueError, match=r"results\.jsonl line 1: stories must be a list of what the model wrote"):
        load_results(tmp_path / "results.jsonl")


def test_a_run_that_diverged_says_so_in_its_folder_and_in_its_line(tmp_path):
    run = make_failed()
    folder = write_lm_folder(run, tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 400, "failed": run.failed}) + "\n")
    assert read_run(folder) == run
    write_lines(tmp_path / "results.jsonl", [export(folder)])
    (back,) = load_results(tmp_path / "results.jsonl")
    assert (back.config, back.failed, back.steps, back.evaluation) == (run.config, run.failed, 390, [])
    write_lines(tmp_path / "results.jsonl", [export(folder) | {"failed": 3}])
    with pytest.raises(ValueError, match="line 1: failed = 3 must be text"):
        load_results(tmp_path / "results.jsonl")


def test_a_compact_line_tells_what_training_took(tmp_path):
    line = export(write_lm_folder(make_run(wall=600.0), tmp_path / "run"))
    assert {name: line[name] for name in ("parameters", "tokens", "wall_seconds", "tokens_per_second", "peak_bytes")} == {
        "parameters": 45_677_652, "tokens": 2000 * 64 * 512, "wall_seconds": 600.0, "tokens_per_second": 131072,
        "peak_bytes": 5 << 30,
    }  # fmt: skip


def test_a_malformed_line_of_stories_names_its_file(tmp_path):
    folder = write_folder(make_length_run(), tmp_path / "run")
    write_lines(folder / "stories.jsonl", [{"prompt": "a", "text": "b"}, {"text": "b"}])
    with pytest.raises(ValueError) as error:
        read_run(folder)
    assert str(error.value) == f"{folder / 'stories.jsonl'} line 2: prompt is missing from a story"
