"""The edge of the command line: what it prints can be typed, and what it refuses is told in one sentence."""

import re
import shlex

import pytest
from tests.experiments.lm_examples import make_corpus

from compactattn import cli
from compactattn.cli import lm

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--batch", "4", "--device", "cpu"]


def refuse(capsys, *arguments):
    """What the command says on stderr as it refuses: one line, status 2, nothing on stdout."""
    with pytest.raises(SystemExit) as exit:
        cli.main([str(argument) for argument in arguments])
    assert exit.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.strip().splitlines()
    assert line.startswith("compactattn: ")
    return line.removeprefix("compactattn: ")


# -- commands that are printed -------------------------------------------------------------------


def test_a_printed_command_can_be_typed_also_where_a_folder_has_spaces(tmp_path, capsys):
    corpus = make_corpus(tmp_path / "my stories").folder
    folder = tmp_path / "my run"
    train = ["train", "lm", "--data", str(corpus), *TINY, "--length", "24", "--out", str(folder)]
    cli.main([*train, "--steps", "4"])
    said = capsys.readouterr().out
    printed = [shlex.split(line) for line in re.findall(r"compactattn (\w+ .*)", said)]
    assert [words[:2] for words in printed] == [[name, str(folder)] for name in ("report", "generate", "inspect")]
    said = refuse(capsys, "evaluate", folder, "--data", "a book", "--device", "cpu")
    assert said.endswith("compactattn data text 'a book.txt' --tokenizer bytes --out 'data/a book'")
    (folder / "metrics.jsonl").unlink()
    (folder / "checkpoint.json").unlink()
    said = refuse(capsys, *train, "--steps", "4")
    assert f"go on with that one: compactattn resume '{folder}';" in said
    text = tmp_path / "one story.txt"
    text.write_text("Once upon a time.")
    said = refuse(capsys, "train", "lm", "--data", text)
    assert said.endswith(f"compactattn data text '{text}' --out 'data/one story'")


# -- paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_a_corpus_that_is_not_there_is_told_from_a_folder_without_one(command, tmp_path, capsys):
    nowhere = tmp_path / "no where"
    said = refuse(capsys, command, "lm", "--data", nowhere)
    assert said == (
        f"'{nowhere}' does not exist; name the folder of a prepared corpus, or make one, as in:"
        f" compactattn data demo-stories --out '{nowhere}'"
    )
    assert "is no prepared corpus: it has no meta.json" in refuse(capsys, command, "lm", "--data", tmp_path)


# -- options that two commands share -------------------------------------------------------------


def test_a_sweep_of_language_models_takes_the_output_layer_that_training_takes(tmp_path, monkeypatch):
    swept = []
    monkeypatch.setattr(lm, "finish_sweep", lambda todo, *rest: swept.extend(todo))
    corpus = make_corpus(tmp_path / "stories").folder
    command = ["sweep", "lm", "--data", str(corpus), "--kernels", "gaussian,transformer", "--device", "cpu"]
    cli.main([*command, "--output", "plain", "--out", str(tmp_path / "out")])
    assert [job.config.model.output for job in swept] == ["plain", "plain"]
    assert [job.folder.name for job in swept] == ["stories-mosaic-gaussian-plain-2-0", "stories-transformer-gaussian-plain-2-0"]
    cli.main([*command, "--out", str(tmp_path / "out")])
    assert [job.config.model.output for job in swept[2:]] == ["plain", ""]  # of cpu-quick


# -- words that an option does not know ----------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train regbench --model nosuch", "--model 'nosuch' is unknown; choose one of mosaic, transformer, s4d, h3, gla"),
        ("train regbench --model=nosuch", "--model 'nosuch' is unknown; choose one of mosaic, transformer, s4d, h3, gla"),
        ("train lm --model gla", "--model 'gla' is unknown; choose one of mosaic, transformer"),
        ("train lm --data plane --output plane", "'plane' is unknown; choose one of scaled, plain"),
        ("train length-gen --task sing", "--task 'sing' is unknown; choose one of mqmtar, sort, reverse, copy"),
        ("train length-gen --as-released x", "--as-released 'x' is unknown; choose one of efficient, plain"),
        ("train length-gen --precision fp8", "--precision 'fp8' is unknown; choose one of fp32, bf16"),
        ("sweep length-gen --preset gpu", "--preset 'gpu' is unknown; choose one of cpu-quick, gpu-short, paper"),
        ("sweep regbench --models nosuch", "model 'nosuch' is unknown; choose among mosaic, transformer"),
        ("evaluate RUN --mode forced", "--mode 'forced' is unknown; choose one of teacher-forced, free-running"),
        ("data text FILE --tokenizer words", "--tokenizer 'words' is unknown; choose one of gpt2, bytes"),
    ],
)
def test_a_word_that_an_option_does_not_know_is_told_in_one_sentence(command, words, capsys):
    assert refuse(capsys, *command.split()).startswith(words)


def test_help_still_names_the_words_that_an_option_knows(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "regbench", "--help"])
    shown = capsys.readouterr().out
    assert "--model {mosaic,transformer,s4d,h3,gla,retnet,mamba}" in shown
    assert "--preset {cpu-quick,gpu-short,paper}" in shown


# -- prompts -------------------------------------------------------------------------------------


def test_a_prompt_longer_than_allowed_is_refused_before_anything_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COMPACTATTN_CACHE", str(tmp_path / "cache"))
    corpus, story = make_corpus(tmp_path / "stories").folder, tmp_path / "story"
    cli.main(
        ["train", "lm", "--data", str(corpus), *TINY, "--length", "24", "--steps", "2", "--no-evaluate", "--out", str(story)]
    )
    ask = ["generate", story, "--tokens", "2", "--device", "cpu", "--save"]
    capsys.readouterr()
    most = 64 * 24
    said = refuse(capsys, *ask, "--prompt", "Once", "--prompt", "a" * (most + 1))
    assert said == (
        "prompt 2 of 2 has 1,537 tokens, and this model takes at most 1,536, 64 times the 24 it was trained on;"
        " shorten it, or allow it with --longest-prompt 1537"
    )
    assert not (story / "stories.jsonl").exists()
    said = refuse(capsys, *ask, "--prompt", "Once", "--longest-prompt", "3")
    assert said.startswith("the prompt has 4 tokens, and this model takes at most 3; shorten it, or allow it with")
    assert refuse(capsys, *ask, "--longest-prompt", "0") == "longest_prompt = 0 must be at least 1"
    for prompt, more in (("a" * most, []), ("a" * (most + 1), ["--longest-prompt", str(most + 1)])):
        cli.main([str(word) for word in (*ask, "--prompt", prompt, *more)])
        assert capsys.readouterr().out.startswith(prompt)


def test_a_longest_prompt_holds_for_learned_positions_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COMPACTATTN_CACHE", str(tmp_path / "cache"))
    size = ["--layers", "1", "--width", "16", "--heads", "2", "--device", "cpu", "--no-evaluate"]
    few = ["--model", "transformer", "--examples", "32", "--epochs", "1"]
    cli.main(["train", "regbench", *size, *few, "--out", str(tmp_path / "run")])
    capsys.readouterr()
    ask = ["generate", tmp_path / "run", "--tokens", "1", "--device", "cpu", "--prompt", "ab|a"]
    assert "this model takes at most 3; shorten it" in refuse(capsys, *ask, "--longest-prompt", "3")


@pytest.mark.parametrize(("experiment", "prompt"), [("length-gen", "7 4 [1] 9 3 [0] [2] 7 4"), ("regbench", "ab|a")])
def test_every_experiment_has_a_longest_prompt(experiment, prompt, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COMPACTATTN_CACHE", str(tmp_path / "cache"))
    few = {"length-gen": ["--steps", "1", "--batch", "4"], "regbench": ["--examples", "32", "--epochs", "1"]}[experiment]
    size = ["--layers", "1", "--width", "16", "--heads", "2", "--device", "cpu", "--no-evaluate"]
    cli.main(["train", experiment, *size, *few, "--out", str(tmp_path / "run")])
    capsys.readouterr()
    ask = ["generate", tmp_path / "run", "--tokens", "1", "--device", "cpu"]
    assert "this model takes at most 3; shorten it" in refuse(capsys, *ask, "--prompt", prompt, "--longest-prompt", "3")
    filler = "|" * 8257 if experiment == "regbench" else prompt.replace("[2]", "1 2 [1] 3 4 [0] " * 700 + "[2]")
    assert ", 64 times the " in refuse(capsys, *ask, "--prompt", filler)
