"""results/make.py: the list of runs behind the results, and how they are made."""

import importlib.util
import json
import multiprocessing
import os
import re
import shlex
import signal
import time
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
from tests.experiments.lm_examples import make_corpus, write_stories

from compactattn.training import interrupt
from compactattn.training.loop import Loop

MAKE = Path(__file__).parent.parent / "results" / "make.py"


@pytest.fixture(scope="module")
def make():
    spec = importlib.util.spec_from_file_location("make", MAKE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ask(make, monkeypatch, *arguments):
    """What was asked for, as `main` completes it; states and lines go to the folder of the test."""
    monkeypatch.setattr("sys.argv", ["make.py", "lm", *map(str, arguments)])
    given = make.read_arguments()
    folder = given.data.parent
    given.out, given.state = given.out or folder / "out", given.resume_dir or folder / "state"
    given.out.mkdir(exist_ok=True)
    return given


def list_first(make, given):
    return next(make.list_lm(given))


def test_results_hold_every_row_of_the_paper_and_compare_neighbours_at_one_layer(make, monkeypatch, tmp_path):
    folder = make_corpus(tmp_path / "stories").folder
    given = ask(make, monkeypatch, "--data", folder, "--layers", "1,8", "--steps", "300", "--k", "32")
    (configs,) = make.list_lm(given)
    rows = {layers: [c.model.kernel for c in configs if c.model.layers == layers] for layers in (1, 8)}
    assert sum("topk" in kernel for kernel in rows[1]) == 6
    assert [kernel for kernel in rows[8] if "topk" in kernel] == ["topk_softmax(32)", "topk_uniform(32)"]
    assert len(rows[1]) - 6 == len(rows[8]) - 2 == 9  # eight other kernels, and the transformer
    assert [c.model.architecture for c in configs].count("transformer") == 2
    assert {(c.training.steps, c.training.warmup, c.training.validate_every, c.training.keep) for c in configs} == {
        (300, 30, 15, "last")
    }


def test_regbench_trains_the_rows_that_the_published_code_computes_otherwise(make, monkeypatch):
    def choose(*arguments):
        monkeypatch.setattr("sys.argv", ["make.py", "regbench", "--examples", "1000", *arguments])
        (configs,) = make.list_regbench(make.read_arguments())
        return [(c.model.kernel, c.model.as_released, c.training.rate) for c in configs]

    assert len(choose()) == 16
    assert choose("--as-released", "efficient", "--rate", "1e-4") == [
        ("topk_uniform(16)", "efficient", 1e-4),
        ("norm_relu", "efficient", 1e-4),
        ("relumax(r=1, b=1)", "efficient", 1e-4),
    ]
    assert choose("--as-released", "plain", "--row", "Gaussian", "--row", "Epanechnikov (normReLU)") == [
        ("norm_relu", "plain", 5e-4)
    ]


def test_rows_of_results_are_chosen_by_name_or_kernel(make, monkeypatch, tmp_path):
    def choose(*arguments):
        return list_first(make, ask(make, monkeypatch, "--data", folder, *arguments))

    folder = make_corpus(tmp_path / "stories").folder
    (one,) = choose("--layers", "12", "--row", "4/3-entmax")
    assert (one.model.kernel, one.training.rate) == ("triweight", 1e-3)
    (one,) = choose("--layers", "8", "--row", "uniform kNN, k=16")
    assert one.model.kernel == "topk_uniform(16)"
    both = choose("--layers", "1", "--kernels", "relumax(r=2, b=1),transformer", "--batch", "512")
    assert [(c.model.architecture, c.training.accumulation, c.training.graph) for c in both] == [
        ("mosaic", 16, False),
        ("transformer", 16, False),
    ]
    with pytest.raises(ValueError, match="row 'nothing' is unknown"):
        choose("--row", "nothing")


def test_texts_that_cannot_serve_are_refused_before_results_are_made(make, monkeypatch, tmp_path, capsys):
    folder, text = make_corpus(tmp_path / "stories").folder, write_stories(tmp_path / "wiki.txt")
    (tmp_path / "short.txt").write_text("too short")
    for wrong, words in (
        (f"short={tmp_path / 'short.txt'}", "short.txt: a stream of 10 tokens is too short"),
        (f"simplewiki={folder}", "is the corpus of the runs themselves"),
        (f"validation={text}", "would go by the name 'validation'"),
    ):
        with pytest.raises(ValueError, match=words):
            list_first(make, ask(make, monkeypatch, "--data", folder, "--layers", "1", "--ood", wrong))
    given = ask(make, monkeypatch, "--data", folder, "--layers", "1", "--ood", text)
    list_first(make, given)
    assert given.texts == {"wiki": str(text)}
    with pytest.raises(SystemExit):
        ask(make, monkeypatch, "--data", folder, "--validations", "0")
    assert "'0' must be a whole number of at least 1" in capsys.readouterr().err


def shrink(make, config, **training):
    """The config for a CPU."""
    small = {"batch": 2, "compile": "none", "graph": False, "precision": "fp32", "device": "cpu", "log_every": 1}
    return make.vary(config, model={"width": 16, "heads": 2, "slots": 8}, training=small | training)


def test_a_line_of_results_names_the_corpus_and_no_place_of_a_machine(make, monkeypatch, tmp_path):
    corpus = make_corpus(tmp_path / "stories")
    other = make_corpus(tmp_path / "others", stories=8, seed=3)
    given = ask(make, monkeypatch, "--data", corpus.folder, "--layers", "1", "--steps", "2", "--ood", f"near={other.folder}")
    config = shrink(make, list_first(make, given)[0])
    monkeypatch.setattr(make, "WINDOWS", 3)
    make.make(config, given)
    text = (given.out / "stories-1.jsonl").read_text()
    assert str(tmp_path) not in text
    line = json.loads(text)
    assert line["config"]["data"]["corpus"] == "stories"
    counts = {row["split"]: row["samples"] for row in line["evaluation"]}
    assert set(counts) == {"validation", "near"}
    assert counts["near"] == 3
    assert line["stories"][0]["prompt"] == "Once upon a time"
    assert isinstance(line["stories"][0]["ended"], bool)
    assert line["environment"]["command"].endswith("--data stories --layers 1 --steps 2 --ood near=others")
    assert [run.config for run in make.read_lines(given.out)] == [make.strip_place(config)]
    assert torch.isfinite(torch.tensor(line["validations"][-1][1]))
    assert list(given.state.iterdir()) == []


def test_a_run_that_diverges_has_a_line_and_is_not_done_again(make, monkeypatch, tmp_path, capsys):
    given = ask(make, monkeypatch, "--data", make_corpus(tmp_path / "stories").folder, "--layers", "1", "--steps", "4")
    config = shrink(make, list_first(make, given)[0], rate=1e30, warmup=0, clip=0.0)
    make.make(config, given)
    (run,) = make.read_lines(given.out)
    assert run.config == make.strip_place(config)
    assert re.match(r"diverged at step \d, (loss |a scale of attention)", run.failed)
    assert run.evaluation == []
    assert run.environment["command"]
    assert f"seed 0: {run.failed}" in capsys.readouterr().out


@pytest.fixture
def _free():
    """Runs of the tests that follow are not asked to stop, and hear signals as before."""
    before = {number: signal.getsignal(number) for number in interrupt.SIGNALS}
    yield
    interrupt.stop_when(lambda: False)
    for number, handler in before.items():
        signal.signal(number, handler)


def do_one(make, config, given, deadline=None):
    """What a worker does with one run; the number of failures."""
    queue, failed = Queue(), make.processes.Value("i", 0)
    for item in (config, None):
        queue.put(item)
    make.work(queue, deadline or SimpleNamespace(value=time.time() + 600), failed, given)
    return failed.value


@pytest.mark.usefixtures("_free")
def test_a_run_that_is_stopped_goes_on_in_a_later_call(make, monkeypatch, tmp_path, capsys):
    corpus = make_corpus(tmp_path / "stories").folder
    arguments = "--data", corpus, "--layers", "1", "--steps", "6", "--kernels", "biweight", "--resume-dir", tmp_path / "state"
    given = ask(make, monkeypatch, *arguments)
    config = shrink(make, list_first(make, given)[0])
    deadline = SimpleNamespace(value=time.time() + 600)
    update = Loop.update

    def update_and_stop(self, step, feed):
        deadline.value = time.time() + (600 if step < 3 else -1)
        return update(self, step, feed)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "update", update_and_stop)
        assert do_one(make, config, given, deadline) == 0
    assert "stopped after step 3 of 6; its state is kept" in capsys.readouterr().out
    assert list(given.out.iterdir()) == []
    assert len(list(given.state.iterdir())) == 1
    do_one(make, config, given, deadline)
    assert "no time left" in capsys.readouterr().out
    assert do_one(make, config, given) == 0
    assert list(given.state.iterdir()) == []
    halves = json.loads((given.out / "stories-1.jsonl").read_text())
    given.out, given.resume_dir = tmp_path, None
    assert do_one(make, config, given) == 0
    whole = json.loads((tmp_path / "stories-1.jsonl").read_text())
    assert halves["environment"]["resumed"][0]["step"] == 3
    assert str(tmp_path) not in json.dumps(halves)
    for name in ("config", "steps", "losses", "validations", "evaluation", "stories"):
        assert halves[name] == whole[name], name


@pytest.mark.usefixtures("_free")
def test_a_signal_stops_a_run_and_its_state_is_kept(make, monkeypatch, tmp_path, capsys):
    given = ask(make, monkeypatch, "--data", make_corpus(tmp_path / "stories").folder, "--layers", "1", "--steps", "6")
    deadline, update = SimpleNamespace(value=time.time() + 600), Loop.update

    def update_and_stop(self, step, feed):
        deadline.value *= step < 3  # as the parent does when it hears one
        return update(self, step, feed)

    monkeypatch.setattr(Loop, "update", update_and_stop)
    assert do_one(make, shrink(make, list_first(make, given)[0]), given, deadline) == 0
    assert "stopped after step 3 of 6; its state is kept" in capsys.readouterr().out
    assert list(given.out.iterdir()) == []
    assert len(list(given.state.iterdir())) == 1


@pytest.mark.usefixtures("_free")
def test_a_finished_training_outlives_a_failure_after_it(make, monkeypatch, tmp_path, capsys):
    corpus = make_corpus(tmp_path / "stories").folder
    arguments = "--data", corpus, "--layers", "1", "--steps", "6", "--kernels", "biweight"
    given = ask(make, monkeypatch, *arguments)
    config = shrink(make, list_first(make, given)[0])

    def fail(*_):
        raise OSError("no story")

    with monkeypatch.context() as patch:
        patch.setattr(make, "tell_story", fail)
        assert do_one(make, config, given) == 1
    (kept,) = given.state.iterdir()
    assert f"OSError('no story'); its state is in {kept}" in capsys.readouterr().out
    monkeypatch.setattr(make, "BETWEEN_CHECKPOINTS", 2)
    given = ask(make, monkeypatch, *arguments, "--resume-dir", given.state)
    again = shrink(make, list_first(make, given)[0])
    assert (config.training.checkpoint_every, again.training.checkpoint_every) == (6, 2)
    monkeypatch.setattr(Loop, "update", fail)  # no step is done again
    assert do_one(make, again, given) == 0
    (run,) = make.read_lines(given.out)
    assert make.identify(run.config) == make.identify(config)
    assert len(run.stories) == 1


def write_line(make, config, given, loss=2.0):
    """The line of a run that was never made."""
    row = {"task": "lm", "split": "validation", "samples": 5, "tokens": 100, "loss": loss}
    line = {"config": json.loads(make.strip_place(config).to_json()), "steps": config.training.steps, "evaluation": [row]}
    make.append(line | {"environment": {"command": "make.py"}}, given.out / f"{make.name_part(config)}.jsonl")


def test_deeper_models_take_the_best_k_of_one_layer(make, monkeypatch, tmp_path, capsys):
    folder = make_corpus(tmp_path / "stories").folder
    command = "--data", folder, "--steps", "300", "--seeds", "0,1"
    with pytest.raises(ValueError, match="has no line of the same training there for Gaussian kNN, k=16"):
        list_first(make, ask(make, monkeypatch, *command, "--layers", "8"))
    given = ask(make, monkeypatch, *command, "--layers", "1,8")
    lists = make.list_lm(given)
    first = next(lists)
    assert [c for c in first if c.model.layers == 8 and "topk" in c.model.kernel] == []
    losses = {"topk_softmax(16)": (2.1, 2.2), "topk_softmax(64)": (2.0, 2.4), "topk_uniform(64)": (1.9, 1.9)}
    shallow = [c for c in first if c.model.layers == 1]
    for config in shallow[:-1]:
        write_line(make, config, given, losses.get(config.model.kernel, (2.3, 2.3))[config.seed])
    longer = make.vary(shallow[0], model={"kernel": "topk_uniform(16)"}, training={"steps": 400})
    write_line(make, longer, given, 1.0)  # of another training
    second = next(lists)
    assert [(c.model.layers, c.model.kernel, c.seed) for c in second] == [
        (8, kernel, seed) for seed in (0, 1) for kernel in ("topk_softmax(16)", "topk_uniform(64)")
    ]
    said = capsys.readouterr().out
    assert "Gaussian kNN, k=16 for deeper models: the lowest validation loss at 1 layer (16: 2.1500, 32: 2.3000" in said
    alone = list_first(make, ask(make, monkeypatch, *command, "--layers", "8"))
    assert {c.model.kernel for c in alone if "topk" in c.model.kernel} == {"topk_softmax(16)", "topk_uniform(64)"}


def run_main(make, monkeypatch, tmp_path, fake, *arguments):
    """The status of `main` with a stand-in for the runs, and for each run that it asked for who was asked."""
    notes = tmp_path / "notes"
    notes.unlink(missing_ok=True)

    def note_and_make(config, given):
        with notes.open("a") as file:
            file.write(json.dumps([config.model.kernel, config.model.layers, os.getpid()]) + "\n")
        fake(config, given)

    monkeypatch.setattr(make, "make", note_and_make)
    monkeypatch.setattr(make.processes, "get_context", lambda _: multiprocessing.get_context("fork"))  # seconds faster
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(make.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "state"))
    (tmp_path / "state").mkdir(exist_ok=True)
    monkeypatch.setattr("sys.argv", ["make.py", "lm", "--out", str(tmp_path / "out"), *map(str, arguments)])
    status = make.main()
    return status, [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


@pytest.mark.usefixtures("_free")
def test_a_run_that_fails_takes_no_other_with_it_and_what_is_done_is_not_done_again(make, monkeypatch, tmp_path):
    command = "--data", make_corpus(tmp_path / "stories").folder, "--layers", "1"

    def fake(config, given):
        if config.model.kernel == "biweight":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if config.model.kernel == "triweight":
            raise ValueError("not this one")
        if config.model.kernel == "epanechnikov":
            os._exit(9)  # as where memory runs out
        write_line(make, config, given)

    kernels = "gaussian", "triweight", "relumax", "biweight", "norm_relu", "epanechnikov", "relumax(r=2)"
    status, runs = run_main(make, monkeypatch, tmp_path, fake, *command, "--kernels", ",".join(kernels))
    assert status == 3
    assert len(runs) == 7
    workers = [worker for *_, worker in runs]
    assert [workers.index(worker) for worker in workers] == [0, 0, 0, 0, 4, 4, 6]  # another after each that died
    status, runs = run_main(make, monkeypatch, tmp_path, write_line_of(make), *command, "--kernels", ",".join(kernels))
    assert (status, [kernel for kernel, *_ in runs]) == (0, ["triweight", "biweight", "epanechnikov"])
    assert run_main(make, monkeypatch, tmp_path, fake, *command, "--kernels", ",".join(kernels)) == (0, [])
    assert not (tmp_path / "state").exists()


def write_line_of(make):
    return lambda config, given: write_line(make, config, given)


@pytest.mark.usefixtures("_free")
def test_results_come_in_two_rounds_where_the_second_depends_on_the_first(make, monkeypatch, tmp_path):
    few = {row: name for row, name in make.lm_paper.ROWS.items() if "kNN" in name or name == "Gaussian"}
    monkeypatch.setattr(make.lm_paper, "ROWS", few)
    command = "--data", make_corpus(tmp_path / "stories").folder, "--layers", "1,8"
    status, runs = run_main(make, monkeypatch, tmp_path, write_line_of(make), *command)
    assert (status, [layers for _, layers, _ in runs]) == (0, [1] * 7 + [8] * 3)
    assert [kernel for kernel, *_ in runs[-3:]] == ["gaussian", "topk_softmax(16)", "topk_uniform(16)"]


@pytest.mark.usefixtures("_free")
def test_workers_that_cannot_start_do_not_go_on_for_ever(make, monkeypatch, tmp_path):
    monkeypatch.setattr(make, "work", lambda *_: os._exit(1))
    command = "--data", make_corpus(tmp_path / "stories").folder, "--layers", "1", "--kernels", "biweight,triweight"
    assert run_main(make, monkeypatch, tmp_path, None, *command) == (2, [])


@pytest.mark.usefixtures("_free")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "nothing"], "'nothing' does not exist; name the folder of a prepared corpus, or make one"),
        (["--data", "stories", "--row", "nothing"], "row 'nothing' is unknown; the rows are"),
        (["--data", "stories", "--ood", "nothing"], "--ood: nothing: 'nothing' is neither a prepared corpus nor a text file"),
        (["--data", "stories", "--kernels", "sparcemax"], "did you mean 'sparsemax'"),
    ],
)
def test_what_cannot_be_made_is_told_in_a_sentence_and_leaves_no_folder(make, monkeypatch, tmp_path, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    make_corpus(tmp_path / "stories")
    assert run_main(make, monkeypatch, tmp_path, None, *arguments) == (2, [])
    said = capsys.readouterr()
    assert words in said.err
    assert (said.out, said.err[:9], said.err.count("\n")) == ("", "make.py: ", 1)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("experiment", [["length-gen"], ["regbench"], ["lm", "--data", "nothing"]], ids=lambda given: given[0])
def test_without_a_gpu_no_results_are_made(make, monkeypatch, tmp_path, capsys, experiment):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["make.py", *experiment])
    assert make.main() == 2
    said = capsys.readouterr()
    assert "make.py: this needs a GPU, and torch" in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert list(tmp_path.iterdir()) == []


def test_the_last_name_of_an_absolute_path_stays_in_a_command(make):
    assert make.strip_folders("make.py lm --data /a/b/c --ood x=/d/e,y=f/g --rate 1e-3") == (
        "make.py lm --data c --ood x=e,y=f/g --rate 1e-3"
    )


def test_every_command_of_the_plan_names_runs(make, tmp_path):
    folder = make_corpus(tmp_path / "stories").folder
    found = {}
    for due in make.PLAN:
        given = make.read_arguments(shlex.split(due.command.replace("data/stories", str(folder))))
        given.out = tmp_path
        found[due.title] = [config for configs in given.list(given) for config in configs]
        assert found[due.title], due.title
    kernels, again, path, path_again, mambas, transformer, long, plain, efficient, stories, fast = found.values()
    assert len(kernels) == len(again) == 10
    assert {(c.training.rate, c.training.decay) for c in kernels} == {(5e-4, 0.1)}
    assert {(c.training.rate, c.training.decay) for c in again} == {(1e-4, 0.01)}
    assert [(c.model.kernel, c.model.as_released) for c in path] == [("norm_relu", "plain")]
    assert [(c.model.kernel, c.training.rate) for c in path_again] == [("norm_relu", 1e-4), ("relumax(r=1, b=1)", 1e-4)]
    assert [(c.model.form, c.model.layers) for c in mambas] == [("benchmark", 1)] * 3
    assert [(c.model.attention_dropout, c.training.patience) for c in transformer] == [(0.1, 0)]
    assert [c.training.steps for c in long] == [10_000] * 8
    assert [{c.model.as_released for c in configs} for configs in (plain, efficient)] == [{"plain"}, {"efficient"}]
    assert [{c.training.embedding_rate for c in configs} for configs in (stories, fast)] == [{1.0}, {768**0.5}]
    assert {c.model.start for configs in found.values() for c in configs} == {"published", "unit"}


def test_language_models_take_the_paths_of_the_published_code_too(make, monkeypatch, tmp_path):
    folder = make_corpus(tmp_path / "stories").folder
    given = ask(make, monkeypatch, "--data", folder, "--layers", "1", "--as-released", "plain")
    found = [(config.model.kernel, config.model.as_released) for config in list_first(make, given)]
    assert found == [("norm_relu", "plain"), ("relumax(r=1, b=1)", "plain")]
    deeper = ask(make, monkeypatch, "--data", folder, "--layers", "1,8", "--as-released", "efficient", "--out", given.out)
    assert {config.model.layers for configs in make.list_lm(deeper) for config in configs} == {1, 8}


def test_a_fast_embedding_is_for_the_rows_that_divide_their_logits(make, monkeypatch, tmp_path):
    folder = make_corpus(tmp_path / "stories").folder
    for output, architectures in (("", {"mosaic"}), ("scaled", {"mosaic", "transformer"})):
        given = ask(
            make, monkeypatch, "--data", folder, "--layers", "1", "--fast-embedding", *(["--output", output] if output else [])
        )
        found = list_first(make, given)
        assert {config.model.architecture for config in found} == architectures
        assert {config.training.embedding_rate for config in found} == {768**0.5}


def test_a_run_that_was_stopped_is_made_anew_and_takes_the_place_of_its_line(make, tmp_path):
    line = json.loads((MAKE.parent / "length-gen" / "sort.jsonl").read_text().splitlines()[-1])
    other = json.loads(json.dumps(line))
    other["config"]["seed"] = 9
    stopped = {**line, "steps": 100}
    (tmp_path / "sort.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (other, stopped)))
    (tmp_path / "first-loss.jsonl").write_text("{}\n")
    first, second = make.read_lines(tmp_path)
    assert [make.is_complete(run) for run in (first, second)] == [True, False]
    make.drop_stopped(tmp_path, [first.config])
    assert len(make.read_lines(tmp_path)) == 2
    make.drop_stopped(tmp_path, [first.config, second.config])
    assert [run.config.seed for run in make.read_lines(tmp_path)] == [9]


def test_the_plan_is_printed_without_a_gpu(make, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["make.py", "plan"])
    assert make.main() == 0
    said = capsys.readouterr().out
    assert "1. RegBench from the published start, the benchmark's rate (done)" in said
    assert "MQMTAR and sort for five times as many steps (2 of 8 runs done)" in said
    assert "normalised ReLU by the plain path (0 of 2 runs done, 1 stopped)" in said
    assert all(f"python results/make.py {due.command}" in said and due.prediction in said for due in make.PLAN)


def test_small_runs_go_to_a_file_for_each_table(make, tmp_path):
    given = make.read_arguments(["cpu", "--tables", "start,mamba,norm-relu,output", "--out", str(tmp_path)])
    found = {}
    for configs in make.list_cpu(given):
        found[given.part] = configs
    assert {name: len(configs) for name, configs in found.items()} == {"start": 12, "mamba": 6, "norm-relu": 12, "output": 6}
    assert {c.training.device for configs in found.values() for c in configs} == {"cpu"}
    assert {(c.model.as_released, c.model.beta_squared) for c in found["norm-relu"]} == {
        ("", 0.0), ("", 0.5), ("plain", 0.0), ("efficient", 0.0)
    }  # fmt: skip
    assert given.tables == make.read_arguments(["cpu"]).tables.removeprefix("first-loss,")
    full = make.read_arguments(["cpu", "--tables", "full", "--seeds", "0", "--out", str(tmp_path)])
    ((config,),) = make.list_cpu(full)
    paper = make.in_context.paper("mosaic", 1000)
    assert (config.model, config.training.patience, config.training.steps) == (paper.model, 40, paper.training.steps)
    assert (config.training.rate, config.training.decay, config.training.graph) == (5e-4, 0.1, False)
    with pytest.raises(
        ValueError, match="table 'x' is unknown; choose among first-loss, start, mamba, norm-relu, output, full"
    ):
        list(make.list_cpu(make.read_arguments(["cpu", "--tables", "x"])))


def test_first_losses_are_written_down(make, tmp_path, monkeypatch):
    monkeypatch.setattr(make, "FIRST_SIZES", ((20, 64),))
    given = make.read_arguments(["cpu", "--tables", "first-loss", "--seeds", "0", "--out", str(tmp_path)])
    assert list(make.list_cpu(given)) == []
    assert make.read_lines(tmp_path) == []  # they are no runs, and keep none from being made
    former, published = (json.loads(line) for line in (tmp_path / "first-loss.jsonl").read_text().splitlines())
    assert (former["start"], published["start"]) == ("former", "published")
    assert former["loss"] > 2 * former["log_vocab"]
    assert published["loss"] == pytest.approx(published["log_vocab"], rel=0.02)
