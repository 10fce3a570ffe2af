"""The commands that train, evaluate, report and generate, as a person uses them."""

import json

import pytest

from compactattn import cli

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--steps", "6", "--batch", "8", "--device", "cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    cli.main(["train", "length-gen", "--kernel", "relumax", *TINY, "--no-evaluate", "--out", str(folder)])
    return folder


def refuse(arguments, capsys):
    """What the command says on stderr as it refuses: one line, status 2, no traceback."""
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("compactattn: ")
    return said


def test_a_run_folder_holds_what_the_design_says(run):
    assert {"config.json", "environment.json", "metrics.jsonl", "checkpoint.json"} <= {path.name for path in run.iterdir()}
    assert json.loads((run / "config.json").read_text())["model"]["kernel"] == "relumax"


def test_evaluate_prints_a_line_for_each_length(run, capsys):
    cli.main(["evaluate", str(run), "--lengths", "32,64", "--samples", "20", "--mode", "free-running", "--device", "cpu"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "free-running" in line]
    assert [row[0] for row in rows] == ["32", "64"]
    assert [row[3] for row in rows] == ["20", "20"]


def test_generate_answers_a_prompt_and_shows_what_was_expected(run, capsys):
    cli.main(["generate", str(run), "--tokens", "5", "--prompt", "7 4 [1] 9 3 [0] [2] 7 4", "--device", "cpu"])
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if " " in line)
    assert lines["prompt"] == "<bos> 7 4 [1] 9 3 [0] [2] 7 4 <sep>"
    assert lines["expected"] == "[2] 9 3 <eos>"
    assert 1 <= len(lines["model"].split()) <= 5


def test_generate_takes_a_prompt_of_the_test_set_by_itself(run, capsys):
    cli.main(["generate", str(run), "--tokens", "2", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("prompt    <bos> ")


def test_report_writes_a_page_with_a_look_inside(run, tmp_path, capsys):
    cli.main(["evaluate", str(run), "--lengths", "32,64", "--samples", "20", "--device", "cpu"])
    cli.main(["report", str(run), "--out", str(tmp_path), "--device", "cpu"])
    page = (tmp_path / "index.html").read_text()
    assert "1-ReLUmax" in page
    assert 'id="inside"' in page
    assert str(tmp_path / "index.html") in capsys.readouterr().out


def test_sweep_trains_what_is_missing_and_nothing_twice(tmp_path, capsys):
    command = ["sweep", "length-gen", "--task", "copy", "--kernels", "gaussian,relumax(r=2, b=1)", "--steps", "2",
               "--samples", "10", "--device", "cpu", "--jobs", "2", "--out", str(tmp_path)]  # fmt: skip
    cli.main(command)
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith(" copy-")]
    assert rows == ["copy-gaussian-0", "copy-relumax-r-2-b-1-0"]
    assert (tmp_path / "report" / "index.html").exists()
    made = {path: path.stat().st_mtime_ns for row in rows for path in (tmp_path / row).iterdir()}
    cli.main([*command, "--jobs", "1"])
    assert made == {path: path.stat().st_mtime_ns for path in made}


def test_sweep_into_a_folder_of_other_runs_names_what_differs(run, capsys):
    command = ["sweep", "length-gen", "--kernels", "relumax", "--steps", "5", "--device", "cpu", "--jobs", "1"]
    (run.parent / "mqmtar-relumax-0").symlink_to(run)
    said = refuse([*command, "--out", str(run.parent)], capsys)
    assert "model.layers: 1 → 2" in said
    assert "training.steps: 6 → 5" in said
    said = refuse([*command[:-1], "2", "--out", str(run.parent)], capsys)  # in a process of its own
    assert "training.steps: 6 → 5" in said


def test_resume_of_a_finished_run_changes_nothing(run, capsys):
    before = (run / "metrics.jsonl").read_bytes()
    cli.main(["resume", str(run), "--no-evaluate"])
    assert (run / "metrics.jsonl").read_bytes() == before


def test_models_lists_sizes_with_their_parameters(capsys):
    cli.main(["models"])
    assert "12,722,400" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "length-gen", "--kernel", "sparcemax"], "did you mean 'sparsemax'"),
        (["train", "length-gen", "--heads", "5"], "does not divide into 5 heads"),
        (["train", "length-gen", "--steps", "0"], "steps = 0"),
        (["sweep", "length-gen", "--kernels", ","], "name at least one kernel"),
        (["evaluate", "nowhere"], "holds no run"),
        (["report", "nowhere"], "does not exist"),
        (["generate", "nowhere"], "holds no run"),
        (["resume", "nowhere"], "holds no run"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_sentence(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in refuse(arguments, capsys)


def test_bad_lengths_and_prompts_are_told_in_one_sentence(run, capsys):
    assert "whole numbers" in refuse(["evaluate", str(run), "--lengths", "64;128", "--device", "cpu"], capsys)
    assert "length" in refuse(["evaluate", str(run), "--lengths", "1", "--device", "cpu"], capsys)
    assert "'x'" in refuse(["generate", str(run), "--prompt", "x", "--device", "cpu"], capsys)


def test_a_second_run_in_the_same_folder_is_refused(run, capsys):
    said = refuse(["train", "length-gen", "--kernel", "relumax", *TINY, "--out", str(run)], capsys)
    assert "already holds a run" in said


def test_a_damaged_run_is_told_in_one_sentence(run, capsys, tmp_path):
    import shutil

    for name, damage in {"checkpoint.json": b"{}", "config.json": b"[1]"}.items():
        copy = tmp_path / name
        shutil.copytree(run, copy)
        (copy / name).write_bytes(damage)
        assert name in refuse(["evaluate", str(copy), "--device", "cpu"], capsys)
