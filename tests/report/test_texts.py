"""Texts that runs were inspected on, as the page shows them; read from lines that are made up."""

import dataclasses
import re

import pytest
from report_examples import make_run

from compactattn.report import attended
from compactattn.report.inspected import read_inspected
from compactattn.report.page import write_report
from compactattn.report.sections import Fold, list_pictures
from compactattn.report.texts import show_texts

WORDS = ["The", " <fox>", " $2", "."]


def make_head(bandwidth=True):
    h = {"bandwidth": [None, 0.5, 0.75, 1.25]} if bandwidth else {}
    return {"zeros": 0.5, "support": 1.0, **h, "used": [[], [[0, 1.0]], [[0, 0.25], [1, 0.75]], [[1, 1.0]]]}


def make_line(layers=2, heads=4, **changes):
    layers = [[make_head()] * heads] * layers if isinstance(layers, int) else layers
    line = {"text": "The <fox> $2.", "words": WORDS, "position": 3, "step": 7, "layers": layers}
    return {**line, **changes}


def inspected(line, **config):
    return dataclasses.replace(make_run(**config), inspected=[read_inspected(line, "somewhere")])


def test_every_layer_has_its_maps_its_words_and_its_sparsity(tmp_path):
    page = write_report([inspected(make_line())], tmp_path).read_text(encoding="utf-8")
    inside = page[page.index('id="inside"') : page.index('id="made"')]
    assert "<h3>“The &lt;fox&gt; $2.”</h3>" in inside
    assert "<details>" not in inside
    assert inside.count("<figure>") == 1 + 2
    assert inside.count('<td class="used strip">') == 2 * 4
    assert inside.count('<td style="--share:0.500">50.0 %</td><td>1.0</td><td>0.75</td>') == 2  # of a layer
    names = sorted(path.name for path in (tmp_path / "figures").glob("text-*.svg"))
    assert names == ["text-1-heads.svg", "text-1-layer-1.svg", "text-1-layer-2.svg"]
    markdown = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "figures/text-1-layer-2.png" in markdown
    assert "| 2 | 50.0 % | 1.0 | 0.75 |" in markdown


def test_the_layers_of_a_deep_model_are_folded_away_each_with_all_that_it_has(tmp_path):
    run = inspected(make_line(layers=3))
    folds = [part for part in show_texts([run]) if isinstance(part, Fold)]
    assert [fold.title for fold in folds] == [f"Layer {n}: 50.0 % zero weights, 1.0 keys a query" for n in (1, 2, 3)]
    assert [len(list_pictures([fold])) for fold in folds] == [1, 1, 1]
    page = write_report([run], tmp_path).read_text(encoding="utf-8")
    assert all(page.count(f"<summary>{fold.title}</summary><figure>") == 1 for fold in folds)
    assert (tmp_path / "figures" / "text-1-layer-3.png").is_file()
    assert "figures/text-1-layer-3.png" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_where_the_bandwidth_has_no_meaning_none_is_shown(tmp_path):
    run = inspected(make_line(layers=[[make_head(bandwidth=False)] * 2]), architecture="transformer", positions="alibi")
    page = write_report([run], tmp_path).read_text(encoding="utf-8")
    inside = page[page.index('id="inside"') : page.index('id="made"')]
    assert "keys used, for every head" in inside
    assert not re.search("bandwidth|h here|h, median", inside)


def test_a_strip_marks_the_words_with_weight_and_no_others():
    summary = read_inspected(make_line(position=2), "somewhere").summary
    strip = attended.format_strips(summary, 1)
    row = re.findall(r'<td class="used strip">(.*?)</td>', strip)[0]
    marked = re.findall(r'<span style="--share:([\d.]+)" title="[^"]*">(.*?)</span>', row)
    assert marked == [("0.500", "The"), ("0.866", " &lt;fox&gt;")]
    assert row.endswith("<i><u> $2</u>.</i>")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["<bos>", "1", "31"], "<i>&lt;bos&gt; 1 <u>31</u> </i>"),
        (["c", "|", "a"], "<i>c|<u>a</u></i>"),
        (["a", " b", "c"], "<i>a b<u>c</u></i>"),
    ],
)
def test_words_that_bring_no_spaces_of_their_own_are_kept_apart(words, shown):
    head = {"zeros": 1.0, "support": 0.0, "used": [[], [], []]}
    summary = read_inspected(make_line(words=words, position=2, layers=[[head]]), "somewhere").summary
    assert f'<td class="used strip">{shown}</td>' in attended.format_strips(summary, 0)


@pytest.mark.parametrize(
    "damage",
    [
        {"words": WORDS[:3]},
        {"position": 9},
        {"layers": [[{**make_head(), "used": [[], [], [], [[4, 1.0]]]}]]},
        {"layers": [[{**make_head(), "bandwidth": [0.5]}]]},
        {"layers": [[{"used": [[]] * 4}]]},
        {"layers": 3},
    ],
    ids=str,
)
def test_a_malformed_line_is_told_with_its_file(damage):
    with pytest.raises(ValueError, match=r"^runs/a/inspections.jsonl line 2: no inspection can be read \("):
        read_inspected({**make_line(), **damage}, "runs/a/inspections.jsonl line 2")
