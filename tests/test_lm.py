"""The commands of language modelling, as a person uses them."""

import html
import itertools
import json
import re
import types

import pytest
from tests.experiments.lm_examples import make_corpus, write_stories

from compactattn import cli
from compactattn.cli import lm as commands
from compactattn.cli import work
from compactattn.cli.work import warn_of_preset
from compactattn.data import corpus as corpora
from compactattn.data import grammar, preparation
from compactattn.data.corpus import Corpus
from compactattn.data.tokenizers import Bytes
from compactattn.experiments.runs import open_run, read_evaluation
from compactattn.models.generation import TextStream
from compactattn.training import checkpoint
from compactattn.training.config import vary
from compactattn.training.records import read_metrics

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--length", "24", "--batch", "4", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpora") / "stories").folder


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    cli.main(["train", "lm", "--data", str(corpus), *TINY, "--steps", "6", "--no-evaluate", "--out", str(folder)])
    return folder


def refuse(capsys, *arguments):
    """What the command says on stderr as it refuses: one line, status 2, no traceback."""
    with pytest.raises(SystemExit) as exit:
        cli.main([str(argument) for argument in arguments])
    assert exit.value.code == 2
    (said,) = capsys.readouterr().err.strip().splitlines()[-1:]
    return said.removeprefix("compactattn: ")


def test_with_no_data_the_built_in_stories_are_prepared_and_said_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COMPACTATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(commands, "DEMO_STORIES", 30)
    monkeypatch.chdir(tmp_path)
    cli.main(["train", "lm", *TINY, "--steps", "10", "--kernel", "relumax(r=2)"])
    said = capsys.readouterr().out
    assert "No --data: 30 built-in stories go to" in said
    assert re.search(
        r"mosaic:relumax\(r=2\), 1 layer, width 16, plain output, windows of 24 tokens \(bytes\) of demo-stories: [\d,]+ param",
        said,
    )
    folder = tmp_path / "runs/lm/demo-stories-mosaic-relumax-r-2-1-0"
    assert checkpoint.load_config(folder).training.warmup == 1
    assert [row["split"] for row in read_evaluation(folder)] == ["validation"]
    assert "bits per byte" in said
    assert re.search(r"step 10, loss [\d.]+, last validation of at most 64 windows: loss [\d.]+, best at step 10", said)
    held_out = Corpus.open(checkpoint.load_config(folder).data["folder"]).validation[:60].tolist()
    (prompt,) = re.findall(r"\n      compactattn generate \S+ --prompt '(.+)'\n      compactattn inspect runs/lm/demo", said)
    assert Bytes().decode(held_out).startswith(prompt)
    assert [line["step"] for line in read_metrics(folder) if "validation" in line] == [10]
    cli.main(["train", "lm", *TINY, "--steps", "2", "--seed", "1", "--no-evaluate"])
    assert "No --data: the built-in stories in" in capsys.readouterr().out


def test_a_number_that_cannot_be_is_refused_before_stories_are_prepared(monkeypatch, capsys):
    monkeypatch.setattr(commands, "prepare_demo", lambda: pytest.fail("stories were prepared"))
    assert refuse(capsys, "train", "lm", "--steps", 0) == "steps = 0 must be at least 1"


@pytest.mark.parametrize("module", [preparation, grammar])
def test_built_in_stories_of_another_version_are_made_anew_and_the_old_ones_stay(module, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COMPACTATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(commands, "DEMO_STORIES", 30)
    first = commands.open_corpus(None)
    with monkeypatch.context() as patch:
        patch.setattr(module, "VERSION", 99)
        patch.setattr(commands, "VERSION", preparation.VERSION)
        patch.setattr(corpora, "VERSION", preparation.VERSION)
        second = commands.open_corpus(None)
        said = capsys.readouterr().out.splitlines()
        assert [line.startswith("No --data: 30 built-in stories go to") for line in said] == [True, True]
        assert (second.meta["version"], second.meta["sources"][0]["grammar"]) == (preparation.VERSION, grammar.VERSION)
        assert second.folder.name == first.folder.name == "demo-stories"
    again = commands.open_corpus(None)
    assert (again.folder, again.meta) == (first.folder, first.meta)


@pytest.mark.parametrize(
    ("given", "kernel"),
    [
        ([], "triweight"),
        (["--model", "transformer"], "gaussian"),
        (["--model", "transformer", "--kernel", "triweight"], "triweight"),
        (["--kernel", "gaussian"], "gaussian"),
    ],
)
def test_a_transformer_is_gaussian_unless_a_kernel_is_given(given, kernel, corpus, monkeypatch):
    trained = []
    monkeypatch.setattr(commands, "train_and_show", lambda config, *_, **__: trained.append(config))
    cli.main(["train", "lm", "--data", str(corpus), *TINY, *given])
    assert [config.model.kernel for config in trained] == [kernel]


@pytest.mark.parametrize(
    ("given", "scaled", "said", "name"),
    [
        ([], False, "width 16, plain output, windows", "mosaic-triweight-1-0"),
        (["--output", "plain"], False, "width 16, plain output, windows", "mosaic-triweight-plain-1-0"),
        (["--output", "scaled"], True, "width 16, windows", "mosaic-triweight-scaled-1-0"),
        (["--preset", "gpu-short"], True, "width 16, windows", "mosaic-triweight-1-0"),
        (["--model", "transformer"], False, "width 16, windows", "transformer-gaussian-1-0"),
        (["--model", "transformer", "--output", "scaled"], True, "width 16, scaled output, windows", "gaussian-scaled-1-0"),
    ],
)
def test_the_output_layer_is_the_presets_unless_given_and_is_told_first(given, scaled, said, name, corpus, monkeypatch):
    trained = []
    monkeypatch.setattr(commands, "train_and_show", lambda config, folder, *_, **__: trained.append((config, folder)))
    cli.main(["train", "lm", "--data", str(corpus), *TINY, *given])
    ((config, folder),) = trained
    assert config.model.scales_output == scaled
    assert f"1 layer, {said} of 24 tokens" in commands.describe(config)
    assert folder.name.endswith(name)


def test_what_was_asked_for_takes_the_place_of_the_presets_own(corpus):
    opened = Corpus.open(corpus)

    def configure(preset="gpu-short", model="mosaic", kernel="gaussian", layers=None, length=None, given=None, **training):
        return commands.configure(opened, preset, model, kernel, layers, 3, length, given or {}, {"device": "cpu", **training})

    usual = configure()
    assert (usual.seed, usual.model.layers, usual.training.graph, usual.training.compile) == (3, 8, False, "none")
    other = configure(layers=12, length=64, steps=500, rate=2e-3, given={"dropout": 0.0, "width": None})
    assert (other.model.layers, other.model.dropout, other.model.width) == (12, 0.0, 768)
    assert (other.training.steps, other.training.warmup, other.training.rate) == (500, 50, 2e-3)
    assert (other.training.final_rate, other.data["length"]) == (5e-5, 64)
    assert configure(model="transformer", length=64).model.longest == 64
    assert configure(kernel=" Relumax(r=2)").model.kernel == "relumax(r=2)"
    assert configure("paper", length=64).training.accumulation == 16
    assert configure("paper", length=64, batch=100, accumulation=2).training.accumulation == 2


@pytest.mark.parametrize(
    ("batch", "processes", "parts"),
    [
        (512, 1, 16),
        (512, 8, 2),
        (32, 1, 1),
        (33, 1, 3),
        (100, 1, 4),
        (100, 2, 2),
        (48, 2, 1),
        (37, 1, 37),
        (1, 1, 1),
        (1, 2, 1),
    ],
)
def test_a_micro_batch_holds_at_most_32_windows_and_no_fewer_than_it_must(batch, processes, parts, corpus, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    for preset in ("gpu-short", "paper"):
        given = {"device": "cpu", "batch": batch}
        config = commands.configure(Corpus.open(corpus), preset, "mosaic", "gaussian", 1, 0, 64, {}, given)
        assert (config.training.batch, config.training.accumulation) == (batch, parts)


def test_a_preset_for_a_gpu_on_a_cpu_says_that_it_takes_long(capsys):
    for preset, device in (("cpu-quick", "cpu"), ("gpu-short", "cuda"), ("gpu-short", "cpu")):
        assert not capsys.readouterr().out
        warn_of_preset(preset, device)
    assert "preset gpu-short is made for a GPU" in capsys.readouterr().out


def test_a_graph_is_recorded_where_there_is_one_micro_batch(corpus, monkeypatch):
    monkeypatch.setattr(commands, "fit_to_machine", lambda config, device: config)

    def configure(**training):
        return commands.configure(Corpus.open(corpus), "gpu-short", "mosaic", "gaussian", 1, 0, 64, {}, training).training.graph

    assert configure()
    assert not configure(batch=64)
    assert not configure(accumulation=2)
    assert configure(batch=64, accumulation=1)
    assert not configure(graph=False)
    assert configure(batch=64, graph=True)  # which training then refuses, with a sentence


def test_evaluate_shows_the_loss_and_its_curve(run, tmp_path, capsys):
    text = write_stories(tmp_path / "wiki.txt")
    cli.main(["evaluate", str(run), "--data", str(text), "--by-position", "--samples", "9", "--device", "cpu"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (row,) = (row for row in read_evaluation(run) if row["split"] == "wiki")
    shown = next(line for line in lines if line[:1] == ["wiki"])
    assert shown[1:] == [f"{row['loss']:.4f}", f"{row['perplexity']:.2f}", f"{row['bits_per_byte']:.4f}", "216", "9"]
    curve = [line for line in lines if line and "●" in line[-1]]
    assert [line[0] for line in curve] == [f"{start}–{start + 1}" for start in range(1, 24, 2)]
    losses = row["by_position"]["loss"]
    assert [float(line[1]) for line in curve] == pytest.approx(
        [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)], abs=6e-4
    )
    assert {len(line[-1]) for line in curve} >= {1, 41}  # the lowest and the highest
    cli.main(["evaluate", str(run), "--device", "cpu"])
    said = capsys.readouterr().out
    assert "●" not in said
    assert "held out" not in said


def test_evaluate_on_the_corpus_of_the_run_says_that_only_the_held_out_documents_count(run, corpus, capsys):
    cli.main(["evaluate", str(run), "--data", str(corpus), "--device", "cpu"])
    said = capsys.readouterr().out
    assert f"{corpus} is the corpus of the run, which is judged on the documents that were held out." in said
    assert said.splitlines()[2].split()[0] == "validation"


def test_generate_streams_a_story_and_keeps_it_on_request(run, capsys):
    command = ["generate", str(run), "--prompt", "Once upon", "--tokens", "7", "--seed", "4", "--no-stop", "--device", "cpu"]
    cli.main([*command, "--top-k", "5", "--save"])
    said = capsys.readouterr()
    assert said.out.startswith("Once upon")
    assert re.fullmatch(r"7 tokens in [\d.]+ s, \d+ tokens/s\n", said.err)
    (line,) = map(json.loads, (run / "stories.jsonl").read_text().splitlines())
    assert (
        line.items() >= {"prompt": "Once upon", "temperature": 0.8, "top_k": 5, "top_p": 1.0, "min_p": 0.0, "seed": 4}.items()
    )
    assert line["step"] == open_run(run, "cpu").step
    assert said.out == "Once upon" + line["text"].translate(commands.HARMLESS) + "\n"
    cli.main([*command, "--top-k", "5"])
    assert capsys.readouterr().out == said.out
    assert len((run / "stories.jsonl").read_text().splitlines()) == 1


def test_several_prompts_are_answered_together(run, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("A fox\n\nThe end\n")
    command = ["generate", str(run), "--tokens", "4", "--temperature", "0", "--no-stop", "--device", "cpu"]
    cli.main([*command, "--prompt", "Once", "--prompts-file", str(tmp_path / "prompts.txt")])
    parts = re.split(r"\[\d/3\]\n", capsys.readouterr().out)[1:]
    assert [part[:3] for part in parts] == ["Onc", "A f", "The"]
    cli.main([*command, "--prompt", "A fox"])
    assert capsys.readouterr().out == parts[1].removesuffix("\n")
    refused = refuse(capsys, *command, "--prompt", "Once", "--samples", "2")
    assert refused.startswith("temperature = 0 draws nothing, so that all 2 samples would be the same text; choose another")
    cli.main([*command, "--temperature", "1", "--prompt", "Once", "--prompt", "A fox", "--samples", "2"])
    parts = re.split(r"\[\d/4\]\n", capsys.readouterr().out)[1:]
    assert [part[:3] for part in parts] == ["Onc", "Onc", "A f", "A f"]


def test_each_story_that_is_kept_tells_its_row(run, monkeypatch):
    kept = []
    monkeypatch.setattr(commands, "save_stories", lambda folder, lines: kept.extend(lines))
    cli.main(["generate", str(run), "--tokens", "3", "--samples", "2", "--save", "--device", "cpu"])
    assert [line["row"] for line in kept] == [0, 1]


def test_control_characters_do_not_reach_the_terminal(run, monkeypatch, capsys):
    wild = "a\x1b[2Jb\n\tc\x7f\x9b"
    monkeypatch.setattr(commands.Teller, "stream", lambda self, prompt, wish: TextStream(iter(wild.encode()), Bytes()))
    cli.main(["generate", str(run), "--prompt", "x", "--device", "cpu"])
    assert capsys.readouterr().out == "xa\ufffd[2Jb\n\tc\ufffd\ufffd\n"


def test_inspect_shows_tokens_as_text(run, capsys):
    cli.main(["inspect", str(run), "--text", "a fox", "--device", "cpu"])
    shown = capsys.readouterr().out
    assert "what 'x', token 5 of 5" in shown
    assert re.search(r"[afo]@\d", shown)
    cli.main(["inspect", str(run), "--device", "cpu"])
    assert "of 24, looked back" in capsys.readouterr().out


def test_a_report_does_without_a_corpus_that_has_moved(tmp_path, capsys):
    corpus, folder, out = make_corpus(tmp_path / "stories").folder, tmp_path / "run", tmp_path / "report"
    cli.main(["train", "lm", "--data", str(corpus), *TINY, "--steps", "2", "--out", str(folder)])
    corpus.rename(tmp_path / "elsewhere")
    capsys.readouterr()
    cli.main(["report", str(folder), "--out", str(out), "--device", "cpu"])
    why = f"{folder}: the corpus 'stories' is no longer in {str(corpus)!r}; put it back"
    assert f"compactattn: attention from inside is left out for {why}" in capsys.readouterr().err
    for name in ("index.html", "report.md"):
        assert f"Left out is {why}" in html.unescape((out / name).read_text())
    assert "What context is worth" in (out / "index.html").read_text()


def test_a_sweep_trains_each_kernel_once_and_leaves_a_report(corpus, tmp_path, monkeypatch, capsys):
    tiny = commands.language_modelling.cpu_quick

    def smaller(*given, **more):
        return vary(tiny(*given, **{**more, "length": 24}), model={"width": 16, "heads": 2}, training={"batch": 4})

    monkeypatch.setitem(commands.language_modelling.PRESETS, "cpu-quick", smaller)
    text, out = write_stories(tmp_path / "book.txt"), tmp_path / "out"
    command = ["sweep", "lm", "--data", str(corpus), "--kernels", "gaussian,triweight,entmax43,transformer", "--layers", "1"]
    command += ["--steps", "4", "--samples", "5", "--jobs", "1", "--device", "cpu", "--out", str(out)]
    for wrong, words in (
        (corpus, "is the corpus of the runs themselves"),
        (f"validation={text}", "would go by the name 'validation'"),
        (f"{text},book={text}", "would go by the name 'book'"),
        ("nowhere", "--ood nowhere: 'nowhere' is neither a prepared corpus nor a text file"),
    ):
        assert words in refuse(capsys, *command, "--ood", wrong)
    assert not out.exists()
    cli.main([*command, "--ood", f"far={text},{text}"])
    names = [f"stories-{name}-1-0" for name in ("mosaic-gaussian", "mosaic-triweight", "transformer-gaussian")]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(" stories-")] == names
    assert {path.name for path in out.iterdir()} == {*names, "report"}
    page = (out / "report" / "index.html").read_text()
    assert "4/3-entmax" in page
    assert "What context is worth" in page
    for name in names:
        losses = {row["split"]: row["loss"] for row in read_evaluation(out / name)}
        assert set(losses) == {"validation", "book", "far"}
        assert losses["book"] == losses["far"]
        shown = next(line.split() for line in lines if line.startswith(f" {name}"))
        assert shown[-2:] == [f"{losses['far']:.4f}"] * 2
        assert f"{losses['far']:.3f}" in page


def test_a_sweep_tells_every_half_minute_how_far_it_is_where_there_is_no_terminal(corpus, tmp_path, monkeypatch, capsys):
    now = itertools.count(0, 20)

    def finish_all(todo, jobs, watch):
        for done in (1, 2, 3, 4):
            watch([done, 0])
        return {}

    monkeypatch.setattr(work, "finish_all", finish_all)
    monkeypatch.setattr(work, "time", types.SimpleNamespace(monotonic=lambda: next(now)))
    config = commands.configure(Corpus.open(corpus), "cpu-quick", "mosaic", "gaussian", 1, 0, 24, {}, {"device": "cpu"})
    work.finish_jobs([work.Job(config, tmp_path / name, 5, "cpu", None) for name in "ab"], 2)
    assert capsys.readouterr().out.splitlines() == ["a 2/1000  b 0/1000", "a 4/1000  b 0/1000"]


def test_a_sweep_goes_on_after_a_run_that_diverges_and_does_not_try_it_again(corpus, tmp_path, monkeypatch, capsys):
    tiny = commands.language_modelling.cpu_quick

    def smaller(corpus, model, kernel, **more):
        config = tiny(corpus, model, kernel, **{**more, "length": 24})
        training = {"batch": 4, "validate_every": 0, "rate": 1e30 if kernel == "sparsemax" else 1e-3}
        return vary(config, model={"width": 16, "heads": 2}, training=training)

    monkeypatch.setitem(commands.language_modelling.PRESETS, "cpu-quick", smaller)
    command = ["sweep", "lm", "--data", str(corpus), "--kernels", "sparsemax,triweight", "--layers", "1", "--steps", "3"]
    command += ["--samples", "5", "--device", "cpu", "--out", str(tmp_path)]
    failed, sound, times = tmp_path / "stories-mosaic-sparsemax-1-0", "stories-mosaic-triweight-1-0", []
    for jobs in ("1", "2"):
        with pytest.raises(SystemExit) as exit:
            cli.main([*command, "--jobs", jobs])
        assert exit.value.code == 2
        said, told = capsys.readouterr()
        rows = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line.startswith(" stories-")}
        assert rows[failed.name] == ["–"] * 4
        assert float(rows[sound][0]) > 0
        assert "compactattn: 1 of 2 runs diverged" in told
        assert str(failed) in told.splitlines()[-1]
        times.append((failed / "environment.json").stat().st_mtime_ns)  # written whenever training starts
        monkeypatch.setattr(work, "write_page", lambda *given: "the page is written once: that takes seconds")
    assert times[0] == times[1]
    assert "diverged at step 2, a scale of attention" in (tmp_path / "report" / "report.md").read_text()


def test_resume_goes_on_with_the_same_text(run, capsys):
    before = (run / "metrics.jsonl").read_bytes()
    (run / "evaluation.jsonl").unlink(missing_ok=True)
    cli.main(["resume", str(run)])
    assert (run / "metrics.jsonl").read_bytes() == before
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{run} is complete at step 6: there is nothing left to train"
    assert said[-5].split()[0] == "validation"
    assert said[-3] == f"Next: compactattn report {run} --out report"
    cli.main(["resume", str(run)])  # now it has been tested too
    assert capsys.readouterr().out.splitlines() == said[:1]


def test_resume_says_what_train_says(corpus, tmp_path, monkeypatch, capsys):
    command = ["train", "lm", "--data", str(corpus), *TINY, "--steps", "6", "--out"]
    cli.main([*command, str(tmp_path / "whole")])
    whole = capsys.readouterr().out.replace("whole", "halves").splitlines()
    with monkeypatch.context() as patch:
        patch.setattr("compactattn.training.loop.Loop.keep", lambda self, step: setattr(self, "stop", step == 3))
        with pytest.raises(SystemExit):
            cli.main([*command, str(tmp_path / "halves")])
    capsys.readouterr()
    cli.main(["resume", str(tmp_path / "halves")])
    halves = capsys.readouterr().out.splitlines()
    seconds = [number for number, line in enumerate(whole) if re.search(r", \d+ s", line)]
    assert [line for n, line in enumerate(halves) if n not in seconds] == [
        line for n, line in enumerate(whole) if n not in seconds
    ]
    assert "parameters" in halves[0]
    assert "Next: " in "".join(halves)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--device cuda", "device = 'cuda' is asked for, but torch"),
        ("--graph True", "graph = true needs a GPU, one process and one micro-batch, not cpu"),
        ("--tensorboard", "TensorBoard is asked for but not installed"),
        ("--out {file}", "file' (it is a file); choose another directory with --out"),
        ("--out {file}/run", "file is a file); choose another directory with --out"),
        ("--out {run}", "already holds a run of another config ("),
    ],
)
@pytest.mark.parametrize("experiment", ["lm", "length-gen", "regbench"])
def test_what_cannot_be_trained_here_is_refused_before_a_word_is_said(
    experiment, options, words, run, corpus, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("compactattn.training.progress.importlib.util.find_spec", lambda name: None)
    given = options.format(file=tmp_path / "file", run=run).split()
    with pytest.raises(SystemExit) as exit:
        cli.main(["train", experiment, *(["--data", str(corpus), "--length", "24"] if experiment == "lm" else []), *given])
    assert exit.value.code == 2
    said = capsys.readouterr()
    assert words in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_sweep_on_a_gpu_that_is_not_there_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPACTATTN_CACHE", str(tmp_path / "cache"))
    for experiment in ("lm", "length-gen", "regbench"):
        assert "sees no GPU" in refuse(capsys, "sweep", experiment, "--device", "cuda")
    assert "sees no GPU" in refuse(capsys, "train", "lm", "--device", "cuda")
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_told_in_a_sentence(run, corpus, tmp_path, capsys):
    train = ["train", "lm", "--data", corpus, *TINY, "--out", tmp_path / "out"]
    assert "is no prepared corpus: it has no meta.json" in refuse(capsys, "train", "lm", "--data", tmp_path)
    assert "a window of 99999" in refuse(capsys, *train, "--length", "99999")
    assert "did you mean 'triweight'" in refuse(capsys, *train, "--kernel", "triwait")
    assert "layers = 0 must be at least 1" in refuse(capsys, *train, "--layers", "0")
    assert not (tmp_path / "out").exists()
    empty = tmp_path / "empty.txt"
    empty.touch()
    said = refuse(capsys, "train", "lm", "--data", empty)
    assert said.endswith(f"is a file, not a prepared corpus; prepare it: compactattn data text {empty} --out data/empty")
    assert "there is no document in" in refuse(capsys, "evaluate", run, "--data", empty, "--device", "cpu")
    for where in ("nowhere", "nowhere.txt"):
        said = refuse(capsys, "evaluate", run, "--data", where, "--device", "cpu")
        assert "neither a prepared corpus nor a text file" in said
        assert said.endswith("compactattn data text nowhere.txt --tokenizer bytes --out data/nowhere")
    assert "samples = 0" in refuse(capsys, "evaluate", run, "--samples", "0", "--device", "cpu")
    said = refuse(capsys, "evaluate", run, "--lengths", "64")
    assert said == f"--lengths is for length generalisation, and {run} is a run of language modelling"
    assert "top_p = 0.0 must be above 0" in refuse(capsys, "generate", run, "--top-p", "0")
    assert "none': there is no such file" in refuse(capsys, "generate", run, "--prompts-file", tmp_path / "none")
    (tmp_path / "latin").write_bytes(b"a\n\xe9t\xe9\n")
    assert "is not UTF-8 text: byte 0xe9 in line 2" in refuse(capsys, "generate", run, "--prompts-file", tmp_path / "latin")
    for command, option in (("generate", "--prompt"), ("inspect", "--text")):
        said = refuse(capsys, command, run, option, "a\n\udce9t\udce9", "--device", "cpu")  # as Python reads such bytes
        assert said.startswith(f"{option} is not UTF-8 text: byte 0xe9 in line 2; convert it, as in: {option} ")
    for seed in ("99999999999999999999", "-1"):
        said = refuse(capsys, "generate", run, "--seed", seed, "--device", "cpu")
        assert said == f"seed = {seed} must be at least 0 and less than 2^63"
    assert "there is no prompt in" in refuse(capsys, "generate", run, "--prompts-file", empty)


def test_what_is_for_stories_alone_is_refused_elsewhere(tmp_path, capsys):
    small = ["--layers", "1", "--width", "16", "--heads", "2", "--steps", "1", "--batch", "4", "--device", "cpu"]
    cli.main(["train", "length-gen", *small, "--no-evaluate", "--out", str(tmp_path / "recall")])
    for option in ("--save", "--no-stop"):
        assert "are for language modelling, not for length generalisation" in refuse(
            capsys, "generate", tmp_path / "recall", option, "--device", "cpu"
        )
    said = refuse(capsys, "evaluate", tmp_path / "recall", "--data", "x")
    assert said.startswith("--data is for language modelling, and ")


def test_a_prompt_longer_than_the_learned_positions_is_told_in_a_sentence(corpus, tmp_path, capsys):
    command = ["train", "lm", "--data", str(corpus), *TINY, "--model", "transformer", "--kernel", "gaussian", "--no-evaluate"]
    cli.main([*command, "--steps", "2", "--out", str(tmp_path / "run")])
    said = refuse(capsys, "generate", tmp_path / "run", "--prompt", "a" * 30, "--device", "cpu")
    assert said == "a prompt of 30 tokens is longer than the 24 this model learned positions for; shorten it"
    cli.main(["generate", str(tmp_path / "run"), "--prompt", "a" * 20, "--tokens", "9", "--no-stop", "--device", "cpu"])
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "5 of 9 tokens: this model learned positions for 24, prompt included"
    cli.main(["generate", str(tmp_path / "run"), "--prompt", "a" * 20, "--tokens", "5", "--no-stop", "--device", "cpu"])
    assert "learned positions" not in capsys.readouterr().err
