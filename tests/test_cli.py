"""The command line tells what the library knows, and what the user did wrong."""

import io
import re
import runpy
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import torch

import compactattn
from compactattn import cli, weights
from compactattn.cli import family
from compactattn.kernels import FAMILY, NAMES

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def quick_gallery(monkeypatch):
    """The gallery without the seconds it takes to draw it; tests/report draws it in earnest."""

    def write(directory):
        (directory / "overview.png").touch()
        return [directory / "overview.png"]

    monkeypatch.setattr("compactattn.report.gallery.write_gallery", write)


def read_rows(text: str) -> dict[str, list[str]]:
    """The lines of a table by their first word."""
    return {words[0]: words[1:] for words in map(str.split, text.splitlines()) if words}


# -- start-up ------------------------------------------------------------------------------------


def test_each_layer_imports_only_what_it_needs():
    program = """
import sys
import compactattn
heavy = {"tyro", "rich", "matplotlib", "compactattn.cli", "compactattn.report"} & sys.modules.keys()
assert not heavy, f"compactattn imports {heavy}"
import compactattn.cli
assert "matplotlib" not in sys.modules, "compactattn.cli imports matplotlib"
import compactattn.report.gallery
assert "matplotlib.pyplot" not in sys.modules, "the gallery imports pyplot"
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_module_runs_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compactattn", "--version"])
    runpy.run_module("compactattn", run_name="__main__")
    assert capsys.readouterr().out == f"compactattn {compactattn.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_every_command_and_gives_examples(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 0
    text = capsys.readouterr().out
    for command in (
        "kernels",
        "gallery",
        "show",
        "demo",
        "train",
        "sweep",
        "evaluate",
        "report",
        "generate",
        "resume",
        "models",
        "data",
    ):
        assert f"• {command}" in text
        assert f"  compactattn {command}" in text
    assert 'attend(q, k, v, kernel="biweight")' in text


def test_help_and_readme_name_the_same_text(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    texts = capsys.readouterr().out, (ROOT / "README.md").read_text()
    named = [re.search(r"compactattn evaluate RUN --data (\S+)", text)[1] for text in texts]
    assert named[0] == named[1]


# -- kernels -------------------------------------------------------------------------------------


def test_kernels_in_a_file_has_one_line_for_each_member(capsys):
    cli.main(["kernels"])
    lines = capsys.readouterr().out.splitlines()
    for member in FAMILY:
        (line,) = [line for line in lines if re.match(rf"{member.name}\b", line)]
        assert all(text in line for text in (member.parameters, member.formula, member.paper, *member.aliases))


def test_kernels_fits_80_columns_with_nothing_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    cli.main(["kernels"])
    text = capsys.readouterr().out
    assert max(sum(not unicodedata.combining(c) for c in line) for line in text.splitlines()) <= 80
    assert "…" not in text
    for member in FAMILY:
        assert all(part in text for part in (member.name, member.formula, member.paper, *member.aliases))


def test_kernels_says_profile_and_rule(capsys):
    cli.main(["kernels"])
    rows = read_rows(capsys.readouterr().out)
    assert rows["biweight"][1:3] == ["biweight", "normalising"]
    assert rows["norm_relu"][:2] == ["Epanechnikov", "fixed"]
    assert rows["topk_uniform(k)"][:2] == ["step", "nearest"]
    assert {"t₊^r", "anchored"} < set(rows["relumax(r=1,"])


def test_markdown_is_a_table(capsys):
    cli.main(["kernels", "--markdown"])
    head, rule, *body = capsys.readouterr().out.splitlines()
    assert len(body) == len(FAMILY)
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in (head, rule, *body)}) == 1
    assert set(rule) == {"|", "-", " "}


def test_output_that_cannot_write_symbols_is_still_output(monkeypatch):
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    cli.main(["kernels"])
    ascii_only.seek(0)
    assert "sparsemax" in ascii_only.read()


# -- show and gallery ----------------------------------------------------------------------------


def test_show_shows_the_weights_of_each_kernel(tmp_path, capsys, quick_gallery):
    cli.main(["show", "--out", str(tmp_path / "new")])
    text = capsys.readouterr().out
    rows = read_rows(text)
    cosines = torch.tensor(family.ANGLES, dtype=torch.float64).deg2rad().cos()
    for name, kernel in family._name_examples().items():
        *shown, support, _ = rows[name]
        expected = weights(cosines, kernel, scale=8.0)
        assert int(support) == (expected > 0).sum()
        assert [cell == "·" for cell in shown] == (expected == 0).tolist()
        for cell, w in zip(shown, expected.tolist(), strict=True):
            assert cell in ("·", "<.01") or float(cell) == pytest.approx(w, abs=0.00501)
    assert str(tmp_path / "new" / "overview.png") in text
    assert "compactattn kernels" in text


def test_show_tells_a_small_weight_from_none(tmp_path, capsys, quick_gallery):
    cli.main(["show", "--out", str(tmp_path), "--kernels", "softmax", "sparsemax"])
    rows = read_rows(capsys.readouterr().out)
    assert rows["softmax"][4:7] == ["<.01", "<.01", "6"]
    assert rows["sparsemax"][2:7] == ["·", "·", "·", "·", "2"]


def test_show_reads_the_bandwidth_of_the_fixed_kernel(tmp_path, capsys, quick_gallery):
    cli.main(["show", "--out", str(tmp_path), "--kernels", "norm_relu", "gaussian"])
    rows = read_rows(capsys.readouterr().out)
    h = f"{8**-0.5:.2f}"  # h = 1/√scale
    assert rows["norm_relu"] == ["0.96", "0.04", "·", "·", "·", "·", "2", h]
    assert rows["gaussian"][-1] == h


def test_show_shows_every_kernel_of_the_family_once():
    shown = family._name_examples()
    assert len(set(shown.values())) == len(shown)
    assert {NAMES[name.partition("(")[0]].name for name in shown} >= {m.name for m in FAMILY} - {"rectified", "topk_rectified"}


def test_gallery_prints_what_it_wrote(tmp_path, capsys, quick_gallery):
    cli.main(["gallery", "--out", str(tmp_path / "deep" / "er")])
    (path,) = map(Path, capsys.readouterr().out.splitlines())
    assert path.is_file()


# -- mistakes ------------------------------------------------------------------------------------


def refuse(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says on stderr as it refuses, checked to be one line with status 2."""
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    captured = capsys.readouterr()
    assert exit.value.code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_unknown_kernel_is_one_sentence_with_a_suggestion(tmp_path, capsys):
    said = refuse(["show", "--out", str(tmp_path / "new"), "--kernels", "sparsmax"], capsys)
    assert said.startswith("compactattn: unknown kernel 'sparsmax'; did you mean 'sparsemax'?")
    assert not (tmp_path / "new").exists()


def test_wrong_argument_of_a_kernel_is_one_sentence(capsys):
    assert "relumax takes (r=1, b=1)" in refuse(["show", "--kernels", "relumax(q=2)"], capsys)


@pytest.mark.parametrize("command", ["show", "gallery"])
@pytest.mark.parametrize("below", ["", "below"])
def test_directory_that_cannot_be_written_is_one_sentence(command, below, tmp_path, capsys):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / below
    said = refuse([command, "--out", str(out)], capsys)
    assert f"cannot write to {str(out)!r}" in said
    assert "--out" in said


def test_unknown_command_exits_with_status_2(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["paint"])
    assert exit.value.code == 2
    assert "kernels" in capsys.readouterr().err


def test_a_reader_that_stops_reading_is_no_error():
    program = f"{sys.executable} -m compactattn kernels --markdown | head -1"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("| kernel")
    assert done.stderr == ""
