"""The table of the words that each head used, on both pages."""

import dataclasses
import re

import pytest
import torch
from report_examples import make_inspection, make_run

from compactattn.memory.inspection import HeadSummary, Summary, Used
from compactattn.report.attended import MOST, describe, format_html, format_markdown, name_word
from compactattn.report.page import write_report

WORDS = ("<b>", "a|b", " fox", "\n", "end")


def make_summary():
    h = torch.tensor([torch.nan, 0.5, 0.5, 0.5, 0.25])
    used = (Used(2, " fox", 0.81), Used(0, "<b>", 0.186), Used(1, "a|b", 0.004))
    heads = [HeadSummary(0, 0, 0.9, 5.0, h, used), HeadSummary(1, 0, 0.25, 3.0, h, used), HeadSummary(1, 1, 0.75, 1.0, h, ())]
    return Summary(WORDS, 4, tuple(heads))


def test_the_table_lists_the_words_of_each_head_of_the_layer():
    rows = format_markdown(make_summary(), 1).splitlines()
    assert rows[2:] == [
        r"| 1 | 25.0 % | 3 | 0.25 | fox@3 0.81, &lt;b>@1 0.19, a\|b@2 <.01 |",
        "| 2 | 75.0 % | 0 | 0.25 | none |",
    ]


def test_the_caption_tells_the_position_and_how_sparse_the_layer_is():
    text = describe(make_summary(), 1)
    assert "layer 2 looked back at from token 5 of 5, “end”" in text
    assert "50.0 % of the layer's weights are zero, and a query uses 2.0 keys" in text


def test_words_are_shaded_by_weight_and_escaped():
    html = format_html(make_summary(), 1)
    assert re.findall(r"--share:([\d.]+)", html) == ["0.900", "0.431", "0.063"]
    assert "<b>" not in html
    assert "&lt;b&gt;<sub>1</sub></span> 0.19" in html
    assert "&lt;.01" in html


def test_what_is_not_listed_is_counted():
    many = tuple(Used(key, "x", 0.1) for key in range(MOST + 2))
    summary = make_summary()
    head = summary.heads[0]._replace(used=many)
    summary = dataclasses.replace(summary, heads=(head,))
    for text in (format_markdown(summary, 0), format_html(summary, 0)):
        assert "and 2 more: 0.20" in text


@pytest.mark.parametrize(("word", "shown"), [(" fox", "fox"), ("\n", "↵"), ("  ", "␣␣"), ("\x00", "�"), ("水", "水"), ("", "")])
def test_a_word_that_does_not_print_has_a_sign(word, shown):
    assert name_word(word) == shown


def test_a_report_shows_the_words_of_an_inspection_that_has_them(tmp_path):
    with_words = dataclasses.replace(make_inspection("sparsemax", 1, heads=2), summary=make_summary())
    page = write_report([make_run()], tmp_path, [with_words, make_inspection("gaussian")]).read_text(encoding="utf-8")
    inside = page[page.index('id="inside"') : page.index('id="made"')]
    assert inside.count('<td class="used">') == 2
    assert "<summary>sparsemax, layer 2</summary>" in inside
    assert "| 2 | 75.0 % | 0 | 0.25 | none |" in (tmp_path / "report.md").read_text(encoding="utf-8")
    without = write_report([make_run()], tmp_path / "without", [make_inspection()]).read_text(encoding="utf-8")
    assert "The tokens that each head used" not in without
