"""The commands that train, evaluate, report and generate, as a person uses them."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compactattn import cli
from compactattn.cli import regbench as regbench_commands
from compactattn.cli import work
from compactattn.cli.work import split_kernels
from compactattn.experiments import in_context
from compactattn.experiments import length_generalisation as length_gen
from compactattn.experiments.runs import read_evaluation
from compactattn.experiments.sweep import Job, finish
from compactattn.models.language_model import LanguageModel
from compactattn.report.runs import read_run
from compactattn.training import checkpoint
from compactattn.training.config import vary
from compactattn.training.records import read_metrics

RESULTS = Path(__file__).parent.parent / "results"
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


@pytest.mark.parametrize("everyone", [True, False], ids=["ctrl-c", "terminated"])
def test_a_sweep_that_is_stopped_saves_every_run_and_the_same_command_goes_on(everyone, tmp_path):
    command = [sys.executable, "-m", "compactattn", "sweep", "length-gen", "--kernels", "gaussian,relumax", "--steps", "400",
               "--samples", "10", "--device", "cpu", "--jobs", "2", "--out", str(tmp_path)]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment)
    folders = [tmp_path / f"mqmtar-{kernel}-0" for kernel in ("gaussian", "relumax")]
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not all(len(read_metrics(folder)) > 1 for folder in folders):
        time.sleep(0.1)
    if everyone:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.terminate()
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + (signal.SIGINT if everyone else signal.SIGTERM)
    assert "the same command goes on" in said
    assert "Traceback" not in said
    stopped = [checkpoint.load(folder).step for folder in folders]
    assert all(0 < step < 400 for step in stopped)


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
    cli.main(["models", "regular"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "," in line]
    assert ["mamba", "4", "382,400"] in rows
    assert len(rows) == 7


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "length-gen", "--kernel", "sparcemax"], "did you mean 'sparsemax'"),
        (["train", "length-gen", "--heads", "5"], "into 5 heads; choose 4 or 8 heads, or a width of 130"),
        (["train", "length-gen", "--steps", "0"], "steps = 0"),
        (["sweep", "length-gen", "--kernels", ","], "name at least one kernel"),
        (["evaluate", "nowhere"], "holds no run"),
        (["report", "nowhere"], "does not exist"),
        (["generate", "nowhere"], "holds no run"),
        (["resume", "nowhere"], "holds no run"),
        (["evaluate", "nowhere", "--device", "abacus"], "device = 'abacus' is unknown"),
        (["evaluate", "nowhere", "--device", "cuda"], "sees no GPU"),
        (["models", "enormous"], "size 'enormous' is unknown; choose one of laptop, recall"),
        (["train", "regbench", "--kernel", "gauss"], "gauss"),
        (["train", "regbench", "--examples", "3"], "examples = 3 do not fill a batch of 32"),
        (["train", "regbench", "--model", "gla", "--width", "32", "--heads", "32"], "into 32 heads with keys half as wide as"),
        (["train", "regbench", "--model", "gla", "--heads", "64"], "choose 32 heads, or a width of 128"),
        (["train", "regbench", "--model", "retnet", "--heads", "64"], "choose 32 heads, or a width of 128"),
        (["train", "regbench", "--model", "retnet", "--width", "12", "--heads", "4"], "into 4 heads of an even width, whose"),
        (["train", "regbench", "--recipe", "nowhere.json"], "name a file, or one of benchmark, repository"),
        (["train", "regbench", "--form", "benchmark"], "form 'benchmark' is for retnet, gla, h3, s4d, mamba"),
        (["train", "regbench", "--model", "mamba", "--layers", "2"], "RegBench's Mamba is one layer"),
        (["train", "regbench", "--model", "mamba", "--matched", "--form", "own"], "and so does --form; leave one out"),
        (["train", "regbench", "--model", "transformer", "--bandwidth-start", "1"], "a transformer learns no bandwidth"),
        (["train", "lm", "--as-released", "plain"], "changes nothing for a mosaic with triweight"),
        (["train", "lm", "--fast-embedding"], "--fast-embedding: a fast embedding makes up for logits that are divided"),
        (["train", "lm", "--start", "former"], "start = 'former' changes nothing beside a plain output"),
        (["train", "length-gen", "--bandwidth-start", "0"], "--bandwidth-start 0 must be above 0 and at most 22,026"),
        (["train", "length-gen", "--start", "unit"], "choose one of published, former"),
        (["train", "regbench", "--form", "own"], "form 'own' is for retnet, gla, h3, s4d, mamba"),
        (["sweep", "regbench", "--models", "lstm"], "model 'lstm' is unknown; choose among mosaic"),
        (["sweep", "regbench", "--models", "gla:sparsemax"], "a gla has no kernel"),
        (["sweep", "regbench", "--search"], "--search is for one model, one number of examples and one seed, but 4, 1 and 1"),
        (["train", "regbench", "--matched", "--layers", "2"], "size of a model, and so does --layers; leave one out"),
        (["train", "regbench", "--matched", "--recipe", "r.json", "--heads", "2"], "and so do --recipe and --heads; leave"),
        (["sweep", "regbench", "--matched", "--recipe", "r.json"], "and so does --recipe; leave one out"),
        (["sweep", "regbench", "--matched", "--search", "--models", "gla"], "and so does --search; leave one out"),
        (["sweep", "regbench", "--models", "gla,mamba", "--recipe", "r.json"], "and gla, mamba are none; leave it out"),
        (["sweep", "regbench", "--models", "gla,mosaic", "--recipe", "nowhere.json"], "cannot read nowhere.json"),
        (["sweep", "regbench", "--models", "mosaic", "--search", "--recipe", "r.json"], "leaves nothing to --recipe"),
        (["sweep", "regbench", "--models", "mosaic", "--search", "--recipe", "repository"], "at the preset's rate"),
        (["sweep", "regbench", "--examples", "many"], "examples 'many' do not read as whole numbers"),
        (["generate", "nowhere", "--temperature", "-1"], "temperature = -1.0"),
        (["generate", "nowhere", "--tokens", "0"], "tokens = 0"),
        (["train", "length-gen", "--as-released", "plain"], "changes nothing"),
        (
            ["train", "length-gen", "--model", "transformer", "--as-released", "efficient", "--kernel", "relumax"],
            "changes nothing",
        ),
    ],
)
def test_what_cannot_be_done_is_told_in_one_sentence(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words in refuse(arguments, capsys)


@pytest.mark.parametrize("command", ["train", "sweep"])
@pytest.mark.parametrize(
    ("change", "words"), [({"layers": 2.5}, "is no recipe"), ({"heads": 3}, "does not divide into 3 heads")]
)
def test_a_recipe_that_cannot_be_is_told_in_one_sentence(command, change, words, tmp_path, capsys):
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"decay": 0.1, "layers": 2, "width": 128, "heads": 8} | change))
    assert words in refuse([command, "regbench", "--recipe", str(path), "--device", "cpu", "--out", str(tmp_path)], capsys)


def test_bad_lengths_and_prompts_are_told_in_one_sentence(run, capsys):
    assert "whole numbers" in refuse(["evaluate", str(run), "--lengths", "64;128", "--device", "cpu"], capsys)
    assert "length" in refuse(["evaluate", str(run), "--lengths", "1", "--device", "cpu"], capsys)
    assert "'x'" in refuse(["generate", str(run), "--prompt", "x", "--device", "cpu"], capsys)


def test_a_report_that_fails_leaves_no_folder_behind(tmp_path, capsys):
    cli.main(["train", "length-gen", *TINY, "--steps", "1", "--no-evaluate", "--out", str(tmp_path / "fresh")])
    for given, words in (("nowhere", "does not exist"), ("fresh", "no run has been evaluated")):
        assert words in refuse(["report", str(tmp_path / given), "--out", str(tmp_path / "report")], capsys)
        assert not (tmp_path / "report").exists()


def test_a_run_that_was_stopped_is_told_so_until_it_has_come_to_its_end(tmp_path, capsys, monkeypatch):
    learn, folder, steps = LanguageModel.loss, tmp_path / "stopped", []

    def stop(self, *batch):
        steps.append(len(steps) + 1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return learn(self, *batch)

    monkeypatch.setattr(LanguageModel, "loss", stop)
    with pytest.raises(SystemExit):
        cli.main(["train", "length-gen", *TINY, "--out", str(folder)])
    assert (steps, read_run(folder).steps) == ([1, 2, 3], 3)
    told = f"{folder} has come to step 3 of 6; it goes on with compactattn resume {folder}"
    assert "first go on with what was stopped" in refuse(["report", str(folder), "--out", str(tmp_path / "r")], capsys)
    test = ["evaluate", str(folder), "--lengths", "16", "--samples", "4", "--device", "cpu"]
    for command in (test, ["generate", str(folder), "--tokens", "3", "--device", "cpu"]):
        cli.main(command)
        assert told in capsys.readouterr().err
    cli.main(["resume", str(folder), "--no-evaluate"])
    cli.main(test)
    assert "has come to step" not in capsys.readouterr().err


def test_a_sweep_tells_models_by_their_whole_names(tmp_path, capsys):
    config = in_context.PRESETS["cpu-quick"]("mosaic", 64)
    kernels = "relumax(r=2, b=1)", "relumax(r=2, b=2)"
    configs = [vary(config, model={"kernel": kernel}) for kernel in kernels]
    regbench_commands.print_sweep([Job(each, tmp_path / str(n), 0) for n, each in enumerate(configs)])
    shown = capsys.readouterr().out
    assert all(f"mosaic:{kernel} " in shown for kernel in kernels)


def test_a_report_that_cannot_be_written_is_told_in_one_sentence(tmp_path, capsys):
    (tmp_path / "file").touch()
    said = refuse(["report", str(RESULTS / "demo"), "--out", str(tmp_path / "file")], capsys)
    assert "cannot write to" in said


def test_a_second_run_in_the_same_folder_is_refused(run, capsys):
    said = refuse(["train", "length-gen", "--kernel", "relumax", *TINY, "--out", str(run)], capsys)
    assert said.endswith("already holds a run, which is complete; choose another folder with --out")


def test_a_damaged_run_is_told_in_one_sentence(run, capsys, tmp_path):
    config = (run / "config.json").read_text()
    damages = {
        "checkpoint.json": "{}",
        "config.json": "[1]",
        "evaluation.jsonl": "{}\n",
        "the config of its checkpoint (model.kernel": config.replace('"relumax"', '"gaussian"'),
        "slots = -5": config.replace('"slots": 64', '"slots": -5'),
        "experiment": config.replace('"length-gen"', '"cooking"'),
        "data.task": config.replace('"mqmtar"', '"sing"'),
    }
    for number, (words, damage) in enumerate(damages.items()):
        copy = tmp_path / str(number)
        shutil.copytree(run, copy)
        (copy / (words if words.endswith(("json", "jsonl")) else "config.json")).write_text(damage)
        assert words.partition(":")[0] in refuse(["evaluate", str(copy), "--lengths", "32", "--samples", "5"], capsys)


def test_learned_positions_reach_to_the_longest_test_and_their_end_is_told_in_one_sentence(tmp_path, capsys):
    command = ["train", "length-gen", "--task", "copy", "--model", "transformer", "--positions", "learned", "--no-evaluate"]
    cli.main([*command, *TINY, "--out", str(tmp_path / "run")])
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"]["longest"] == 48 + 2 + 48 + 1
    said = refuse(["generate", str(tmp_path / "run"), "--prompt", "1 " * 98, "--device", "cpu"], capsys)
    assert said == "compactattn: a prompt of 100 tokens is longer than the 99 this model learned positions for; shorten it"


def test_a_sweep_evaluates_the_finished_model_and_not_an_earlier_one(tmp_path):
    config = vary(
        length_gen.cpu_quick("copy"),
        model={"layers": 1, "width": 16, "heads": 2},
        training={"steps": 6, "batch": 4, "warmup": 1, "device": "cpu"},
    )
    job = Job(config, tmp_path / "run", samples=10, device="cpu")
    finish(job)
    rows = [{**row, "step": 3} for row in read_evaluation(job.folder)]
    (job.folder / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert length_gen.missing(config, job.folder, 10) == [32, 48]
    finish(job)
    assert [row["step"] for row in read_evaluation(job.folder)] == [6, 6]
    assert length_gen.missing(config, job.folder, 20) == [32, 48]


def test_two_names_of_one_kernel_are_trained_once():
    assert split_kernels("sparsemax, epanechnikov,relumax,relumax(r=1, b=1),transformer") == [
        "sparsemax",
        "relumax",
        "transformer",
    ]


# -- RegBench ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def regbench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("regbench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPACTATTN_CACHE", str(folder / "cache"))
        command = [
            "sweep",
            "regbench",
            "--models",
            "mosaic:sparsemax,gla",
            "--examples",
            "64",
            "--epochs",
            "1",
            "--device",
            "cpu",
        ]
        cli.main([*command, "--jobs", "1", "--out", str(folder / "sweep")])
        yield folder / "sweep"


def test_a_sweep_of_regbench_leaves_runs_and_a_report(regbench):
    names = {path.name for path in regbench.iterdir()}
    assert names == {"mosaic-sparsemax-64-0", "gla-64-0", "report"}
    page = (regbench / "report" / "index.html").read_text()
    assert "GLA" in page
    assert 'id="inside"' in page
    assert "3-gram of the context" in page


def test_evaluate_shows_a_model_beside_what_needs_no_training(regbench, capsys):
    cli.main(["evaluate", str(regbench / "gla-64-0"), "--split", "validation", "--device", "cpu"])
    shown = capsys.readouterr().out
    assert "the last of each example" in shown
    assert "3-gram of the context" in shown
    said = refuse(["evaluate", str(regbench / "gla-64-0"), "--lengths", "64"], capsys)
    assert "for length generalisation" in said


def test_generate_goes_on_with_a_language(regbench, capsys):
    run = str(regbench / "gla-64-0")
    cli.main(["generate", run, "--tokens", "6", "--device", "cpu"])
    prompt, model, legal = (line.split() for line in capsys.readouterr().out.splitlines())
    assert set(prompt[1]) <= set("abcdefgh|")
    assert len(model[1]) == 6
    assert set(legal[1]) <= set("+-")
    cli.main(["generate", run, "--tokens", "3", "--prompt", "ab|a", "--device", "cpu"])
    assert "legal" not in capsys.readouterr().out
    assert "'z' in 'abz' is no letter from a to h" in refuse(["generate", run, "--prompt", "abz", "--device", "cpu"], capsys)


def test_help_tells_the_languages_that_each_preset_has(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "regbench", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    published, easier = shown.split("as published, or with cpu-quick, the default, an easier task: ")
    for preset, told in (("paper", published), ("gpu-short", published), ("cpu-quick", easier)):
        languages = in_context.Data.of(in_context.PRESETS[preset]("mosaic", 1000)).make_languages()
        low, high = languages.strings
        assert f"{low} to {high} of up to {languages.string_length[1]} letters" in told
        assert "and {} to {} states".format(*languages.states) in told


@pytest.mark.parametrize("preset", list(in_context.PRESETS))
def test_what_is_said_last_is_whether_the_papers_table_stands_beside_a_preset(preset, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(work, "train_run", lambda *rest, **options: None)
    for module in (work, regbench_commands):
        monkeypatch.setattr(module, "finish_jobs", lambda *rest: {})
    monkeypatch.setattr(work, "write_page", lambda *rest: "page")
    monkeypatch.setattr(regbench_commands, "print_search", lambda *rest: None)
    monkeypatch.chdir(tmp_path)
    for command in ("train regbench --no-evaluate", "sweep regbench", "sweep regbench --search --models gla"):
        cli.main([*command.split(), "--preset", preset, "--device", "cpu"])
        *_, last = capsys.readouterr().out.splitlines()
        easier = last.startswith("Note: the languages of cpu-quick are easier than the paper's") and "--preset paper" in last
        assert easier == (preset == "cpu-quick"), command


def test_the_readmes_sweeps_of_regbench_have_the_papers_languages(tmp_path, monkeypatch):
    text = (RESULTS.parent / "README.md").read_text()
    commands = [shlex.split(line, comments=True)[1:] for line in re.findall(r"^compactattn sweep regbench .*", text, re.M)]
    swept = []
    monkeypatch.setattr(regbench_commands, "finish_sweep", lambda todo, *rest: swept.extend(todo))
    monkeypatch.setattr(
        regbench_commands, "finish_jobs", lambda todo, *rest: swept.extend(todo) or dict.fromkeys(range(len(todo)), "")
    )
    monkeypatch.setattr(regbench_commands, "complain", lambda *rest: None)
    monkeypatch.chdir(tmp_path)
    for command in commands:
        cli.main(command)
    assert len(swept) == 4 * 3 * 3 + 3 + 72
    assert not any(job.config.data["changes"] for job in swept)


def test_models_of_a_mosaics_size_are_trained_beside_those_of_the_benchmark(tmp_path, monkeypatch):
    swept = []
    monkeypatch.setattr(regbench_commands, "finish_sweep", lambda todo, *rest: swept.extend(todo))
    monkeypatch.setattr(work, "train_run", lambda config, folder, **options: swept.append(Job(config, folder, 0)))
    monkeypatch.chdir(tmp_path)
    for size in ("--no-matched", "--matched"):
        cli.main(["sweep", "regbench", "--models", "gla,mosaic", "--preset", "paper", size, "--device", "cpu"])
        cli.main(["train", "regbench", "--model", "gla", "--preset", "paper", size, "--device", "cpu", "--no-evaluate"])
    assert [(job.config.model.layers, job.config.model.heads, job.config.model.inner) for job in swept] == [
        (4, 1, 0), (2, 8, 0), (4, 1, 0), (2, 8, 496), (2, 8, 0), (2, 8, 496)
    ]  # fmt: skip
    names = [job.folder.name for job in swept]
    gla, mosaic, matched = "gla-1000-0", "mosaic-gaussian-1000-0", "gla-matched-1000-0"
    assert names == [gla, mosaic, gla, matched, "mosaic-gaussian-matched-1000-0", matched]


def test_a_rate_that_is_given_falls_to_a_tenth_of_itself(tmp_path, capsys):
    few = ["train", "regbench", "--examples", "64", "--epochs", "1", "--device", "cpu", "--no-evaluate", "--rate", "1e-3"]
    cli.main([*few, "--out", str(tmp_path / "run")])
    training = checkpoint.load_config(tmp_path / "run").training
    assert (training.rate, training.final_rate) == (1e-3, 1e-4)
    assert "64 examples of 6 to 10 strings, 4 to 6 states:" in capsys.readouterr().out


def test_a_search_writes_the_recipe_with_the_lowest_validation_loss(regbench, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(in_context, "GRID", {"decay": (0.1,), "layers": (1,), "width": (8, 16), "heads": (1,)})
    command = ["sweep", "regbench", "--examples", "64", "--epochs", "1", "--device", "cpu"]
    cli.main([*command, "--search", "--models", "mosaic:gaussian", "--jobs", "1", "--out", str(tmp_path / "search")])
    lines = capsys.readouterr().out.splitlines()
    said = next(line for line in lines if line.startswith("The best is in"))
    shown = [line.split() for line in lines if len(line.split()) == 6 and "0.1" in line]
    losses = [float(line[4]) for line in shown]
    assert len(losses) == 2
    assert losses == sorted(losses)
    recipe = json.loads((tmp_path / "search" / "recipe.json").read_text())
    assert recipe == {"decay": 0.1, "layers": 1, "width": int(shown[0][1]), "heads": 1}
    path = tmp_path / "search" / "recipe.json"
    assert said.endswith(f"use it with: compactattn sweep regbench --preset cpu-quick --device cpu --recipe {path}")
    train = ["train", "regbench", "--examples", "64", "--epochs", "1", "--device", "cpu", "--no-evaluate"]
    cli.main([*train, "--recipe", str(tmp_path / "search" / "recipe.json"), "--out", str(tmp_path / "run")])
    assert checkpoint.load_config(tmp_path / "run").model.width == recipe["width"]


def test_a_model_that_is_named_twice_is_trained_once(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(regbench_commands, "finish_sweep", lambda todo, *_: asked.extend(todo))
    for options in (["--models", "mamba,mamba:benchmark,mamba:own"], ["--matched", "--models", "gla,gla:own"]):
        cli.main(["sweep", "regbench", "--examples", "64", "--device", "cpu", "--out", str(tmp_path), *options])
    assert [job.folder.name for job in asked] == ["mamba-64-0", "mamba-own-64-0", "gla-matched-64-0"]


@pytest.mark.parametrize(("recipe", "rate", "decay"), [(None, 3e-3, 0.1), ("benchmark", 5e-4, 0.1), ("repository", 1e-4, 0.01)])
def test_a_recipe_that_is_named_is_applied_whatever_the_preset(recipe, rate, decay):
    config = regbench_commands.configure("mosaic", "gaussian", 64, "cpu-quick", 0, 1, recipe, {}, {"device": "cpu"})
    assert (config.training.rate, config.training.decay) == (rate, decay)
    name = regbench_commands.name_run(config)
    assert name == "-".join(["mosaic-gaussian", *(["repository"] if recipe == "repository" else []), "64-0"])


def test_names_say_what_is_not_published():
    def names(model, **changes):
        given = {"as_released": "", "beta_squared": None, "start": None, **changes}
        kernel = "norm_relu" if model == "mosaic" else "gaussian"
        config = regbench_commands.configure(model, kernel, 64, "cpu-quick", 0, 1, None, given, {"device": "cpu"})
        return regbench_commands.name_run(config).removesuffix("-64-0"), regbench_commands.describe(config).partition(", 2 ")[0]

    assert names("mosaic") == ("mosaic-norm-relu", "mosaic:norm_relu")
    assert names("mosaic", as_released="plain", beta_squared=0.5, start="former") == (
        "mosaic-norm-relu-as-released-plain-bandwidth-0.5-former-start",
        "mosaic:norm_relu (as-released-plain, bandwidth-0.5, former-start)",
    )


def test_a_sweep_tells_the_forms_of_a_model_apart():
    forms = [in_context.paper("mamba", 64, form).model for form in ("benchmark", "own")]
    assert [work.name_model(model, has_kernel=False) for model in forms] == ["mamba", "mamba:own"]
