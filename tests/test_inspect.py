"""`compactattn inspect`, as a person uses it."""

import io
import re
import shutil

import pytest
import torch
from rich.console import Console
from tests.report.report_examples import make_run

from compactattn import cli
from compactattn.cli.inspection import shade_words
from compactattn.cli.work import inspect_runs
from compactattn.experiments.registry import experiment_of
from compactattn.experiments.runs import open_run
from compactattn.memory.inspection import Used, summarise
from compactattn.report.page import write_report
from compactattn.report.runs import read_run

TINY = ["--layers", "2", "--width", "16", "--heads", "2", "--device", "cpu", "--no-evaluate"]
PROMPT = "7 4 [1] 9 3 [0] [2] 7 4"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPACTATTN_CACHE", str(folder / "cache"))
        recall = ["train", "length-gen", *TINY, "--steps", "2", "--batch", "8"]
        cli.main([*recall, "--kernel", "relumax", "--out", str(folder / "recall")])
        cli.main([*recall, "--model", "transformer", "--positions", "learned", "--out", str(folder / "transformer")])
        regbench = ["train", "regbench", *TINY, "--examples", "64", "--epochs", "1"]
        cli.main([*regbench, "--kernel", "sparsemax", "--out", str(folder / "regbench")])
        cli.main([*regbench, "--model", "gla", "--out", str(folder / "gla")])
        yield folder


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")


def inspect(run, capsys, *arguments):
    cli.main(["inspect", str(run), "--device", "cpu", *arguments])
    return capsys.readouterr().out


def refuse(run, capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        cli.main(["inspect", str(run), "--device", "cpu", *arguments])
    assert exit.value.code == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    return said.removeprefix("compactattn: ")


def test_the_words_shown_are_those_with_weight(runs, capsys):
    shown = inspect(runs / "recall", capsys, "--text", PROMPT, "--layer", "2", "--head", "1", "--position", "9")
    assert "Layer 2: what '7', token 9 of 11, looked back at" in shown
    trained = open_run(runs / "recall", "cpu")
    tokens, words = experiment_of(trained.config).read(trained.config, PROMPT)
    assert words == ["<bos>", *PROMPT.split(), "<sep>"]
    with torch.inference_mode():
        w = trained.model.inspect(torch.tensor([tokens]))[1].weights[0, 0, 8]
    expected = [f"{words[key]}@{key + 1}" for key in w.argsort(descending=True, stable=True).tolist() if w[key] != 0]
    row = shown.splitlines()[-1].split()
    assert row[0] == "1"
    assert [word for word in row if "@" in word] == expected
    assert int(row[2]) == len(expected)


def test_by_default_the_last_word_and_the_last_layer_of_the_first_test_sequence_are_shown(runs, capsys):
    shown = inspect(runs / "recall", capsys)
    trained = open_run(runs / "recall", "cpu")
    tokens, words = experiment_of(trained.config).example(trained.config)
    assert f"Layer 2: what {words[-1]!r}, token {len(tokens)} of {len(tokens)}," in shown
    layers, heads = shown.split("Layer 2")
    assert [line.split()[0] for line in layers.splitlines()[2:] if line.strip()] == ["1", "2"]
    assert [line.split()[0] for line in heads.splitlines()[4:]] == ["1", "2"]
    assert "h here" in heads


def test_what_follows_the_separator_can_be_shown(runs, capsys):
    assert "what '9', token 13 of 13" in inspect(runs / "recall", capsys, "--prompt", f"{PROMPT} <sep> [2] 9")


def test_strings_of_a_language_are_read_letter_by_letter(runs, capsys):
    assert "Layer 2: what '|', token 4 of 6" in inspect(runs / "regbench", capsys, "--text", "caf|ch", "--position", "4")
    assert "token" in inspect(runs / "regbench", capsys)


def test_a_first_word_with_nothing_to_see_has_no_bandwidth_in_either_table(runs, capsys):
    shown = inspect(runs / "regbench", capsys, "--text", "c")
    assert "nan" not in shown
    assert shown.count("–") == 2 + 2  # of two layers and two heads


def test_a_transformer_has_no_bandwidth_to_show(runs, capsys):
    shown = inspect(runs / "transformer", capsys, "--text", PROMPT)
    assert "keys here" in shown
    assert "h here" not in shown
    assert "h, median" not in shown
    assert "<sep>@11" in shown  # a transformer sees the word itself


def test_what_cannot_be_shown_is_told_in_one_sentence(runs, capsys):
    recall = runs / "recall"
    for option, number, words in (
        ("layer", "3", "layer = 3 is not there: the layers are numbered from 1 to 2"),
        ("head", "0", "head = 0 is not there: the heads are numbered from 1 to 2"),
        ("position", "12", "position = 12 is not there: the tokens are numbered from 1 to 11"),
    ):
        assert refuse(recall, capsys, "--text", PROMPT, f"--{option}", number) == words
    assert "'x'" in refuse(recall, capsys, "--text", "x")
    assert "'z' in 'az' is no letter" in refuse(runs / "regbench", capsys, "--text", "az")
    said = refuse(runs / "transformer", capsys, "--text", "1 " * 5000)
    assert re.search(r"a sequence of 5\d+ tokens is longer than the \d+ this model learned positions for; shorten it", said)
    assert refuse(runs / "gla", capsys) == "GLA keeps a state and attends to nothing; only attention can be inspected"
    assert "holds no run" in refuse(runs / "nowhere", capsys)


def test_in_a_terminal_a_heavier_word_stands_on_a_darker_ground():
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=200, _environ={})
    used = (Used(4, "fox", 1.0), Used(0, "[red]", 0.04), Used(2, "a", 0.001))
    terminal.print(shade_words(used, 2))
    shown = terminal.file.getvalue()
    assert "48;2;0;103;168m fox@5 " in shown  # white on the full colour
    assert "48;2;204;225;238m [red]@1 " in shown  # a fifth of the way to it, and not read as markup
    assert "a@3" not in shown
    assert "and 1 more: <.01" in shown


def test_a_report_names_the_runs_that_it_looks_into_and_those_it_does_not(runs, tmp_path):
    twin = shutil.copytree(runs / "recall", tmp_path / "twin")
    inspections, missing, notes = inspect_runs([runs, twin], "cpu")
    assert [(one.run, one.subject) for one in inspections] == [
        (str(runs / "recall"), "mqmtar"),
        (str(runs / "regbench"), "RegBench, 64 examples"),
    ]
    assert missing == []
    shown, others = notes
    assert shown == f"Of each kernel one run is shown; not shown: {twin}."
    assert others.endswith(f"; not shown: {runs / 'gla'}, {runs / 'transformer'}.")
    page = write_report([make_run()], tmp_path / "report", inspections, notes).read_text(encoding="utf-8")
    assert f"on the first test example of the run: 1-ReLUmax, {runs / 'recall'}, trained on mqmtar; sparsemax, " in page
    assert all(note in page for note in notes)


# -- kept for the report -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["recall", "transformer"])
def test_a_text_that_is_kept_comes_into_the_report_with_every_layer(name, runs, tmp_path, capsys):
    run = shutil.copytree(runs / name, tmp_path / "my run")
    shown = inspect(run, capsys, "--text", PROMPT, "--save")
    assert f"Kept in {run / 'inspections.jsonl'} for: compactattn report '{run}' --out report" in shown
    cli.main(["evaluate", str(run), "--lengths", "32", "--samples", "5", "--device", "cpu"])
    cli.main(["report", str(run), "--out", str(tmp_path / "page"), "--device", "cpu"])
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    markdown = (tmp_path / "page" / "report.md").read_text(encoding="utf-8")
    for told in (page, markdown):
        assert f"“{PROMPT}”" in told
        assert ("h, median" in told) == (name == "recall")
        assert ("keys used and bandwidth, for every head" in told) == (name == "recall")
    assert page.count('<td class="used strip">') == 2 * 2  # layers and heads
    for layer in (1, 2):
        assert f"layer {layer}: the weights of every head" in page
        assert (tmp_path / "page" / "figures" / f"text-1-layer-{layer}.png").is_file()


def test_what_is_kept_reads_back_as_what_the_model_attends_to(runs, tmp_path, capsys):
    run = shutil.copytree(runs / "recall", tmp_path / "run")
    inspect(run, capsys, "--text", PROMPT, "--save", "--position", "9")
    (kept,) = read_run(run).inspected
    trained = open_run(run, "cpu")
    tokens, words = experiment_of(trained.config).read(trained.config, PROMPT)
    with torch.inference_mode():
        looks = trained.model.inspect(torch.tensor([tokens]))
    assert (kept.text, kept.words, kept.step, kept.summary.position) == (PROMPT, tuple(words), 2, 8)
    expected = summarise(looks, words, 8)
    for layer, look in enumerate(looks):
        w = torch.from_numpy(kept.weights[layer])
        assert torch.equal(w == 0, look.weights[0] == 0)
        torch.testing.assert_close(w, look.weights[0].double(), rtol=1e-3, atol=0)  # four digits are kept
        h = torch.stack([head.bandwidth for head in kept.summary.of(layer)])
        torch.testing.assert_close(
            h, look.readout.bandwidth[0].masked_fill(look.legal[0] == 0, torch.nan), rtol=1e-3, atol=0, equal_nan=True
        )
    assert [head[:4] for head in kept.summary.heads] == [head[:4] for head in expected.heads]
    assert [[u.position for u in head.used] for head in kept.summary.heads] == [
        [u.position for u in head.used] for head in expected.heads
    ]


def test_a_text_that_is_kept_again_takes_the_place_of_the_older_one(runs, tmp_path, capsys):
    run = shutil.copytree(runs / "regbench", tmp_path / "run")
    for text, position in (("caf|ch", "2"), ("ab|a", "3"), ("caf|ch", "5")):
        inspect(run, capsys, "--text", text, "--position", position, "--save")
    assert [(one.text, one.summary.position) for one in read_run(run).inspected] == [("ab|a", 2), ("caf|ch", 4)]
    inspect(run, capsys, "--text", "ha")
    assert len(read_run(run).inspected) == 2
    (run / "inspections.jsonl").write_text("[1]\n")
    assert "is malformed" in refuse(run, capsys, "--text", "ha", "--save")


def test_a_text_too_long_for_a_page_or_for_a_look_is_told_in_one_sentence(runs, capsys):
    said = refuse(runs / "regbench", capsys, "--text", "a" * 257, "--save")
    assert said == "a text of 257 tokens is too long to be kept for the report (at most 256); shorten it"
    assert not (runs / "regbench" / "inspections.jsonl").exists()
    said = refuse(runs / "regbench", capsys, "--text", "a" * 4097)
    assert said == "a text of 4,097 tokens is too long to be inspected (at most 4,096); shorten it"
