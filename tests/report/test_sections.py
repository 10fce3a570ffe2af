"""A section for each comparison, with a name of its own; one of the former start says so above its table."""

import dataclasses

import pytest
from benchmarks import experiments as documents
from lm_examples import make_run as make_lm_run
from regbench_examples import make_run as make_regbench_run
from report_examples import make_run, write_lines

from compactattn.report.lines import FORMER_START
from compactattn.report.page import write_report
from compactattn.report.sections import Grid, Sentences, make_sections, name_task
from compactattn.training.config import vary


def make_former(run):
    return dataclasses.replace(run, config=vary(run.config, model={"start": "former"}))


@pytest.fixture(scope="module")
def runs():
    published = [make_run(), make_regbench_run(), make_lm_run()]
    return [*map(make_former, published), *published]


def test_both_starts_have_names_of_their_own_for_links_pictures_and_tasks(runs):
    sections = make_sections(runs)
    names = [section.name for section in sections]
    starts = [("mqmtar", "mqmtar-former-start"), ("regbench", "regbench-former-start")]
    assert names == [name for pair in (*starts, ("lm-stories-1", "lm-stories-1-former-start")) for name in pair]
    for found in (
        [picture.name for section in sections for picture in section.pictures],
        [name_task(section, section.lines[0].runs[0]) for section in sections],
        [section.link for section in sections],
        [section.title for section in sections],
    ):
        assert len(set(found)) == len(found)
    assert name_task(sections[3], sections[3].lines[0].runs[0]) == "RegBench, former start, 1,000 examples"


def test_two_layouts_of_one_task_have_names_of_their_own():
    sections = make_sections([make_run(), make_run(data={"layout": "published"})])
    assert [section.name for section in sections] == ["mqmtar", "mqmtar-1"]


def test_the_sentence_stands_right_above_the_table_of_the_former_start_alone(runs):
    for section in make_sections(runs):
        said = [at for at, part in enumerate(section.parts) if part == Sentences([FORMER_START])]
        table = next(at for at, part in enumerate(section.parts) if isinstance(part, Grid))
        assert said == ([table - 1] if section.title.endswith("former start") else [])


def test_every_rendering_has_the_sentence_once_for_each_such_table(runs, tmp_path, monkeypatch):
    page = write_report(runs, tmp_path / "out")
    for text in (page.read_text(), (tmp_path / "out" / "report.md").read_text()):
        assert text.replace("&#x27;", "'").count(FORMER_START) == 3
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    (tmp_path / "results" / "regbench").mkdir(parents=True)
    write_lines(tmp_path / "results" / "regbench" / "all.jsonl", [run.to_json() for run in runs[1::3]])
    for titled in (True, False):
        text = documents.results_section("regbench", 4, titled)
        assert text.count(FORMER_START) == 1
        assert f"{FORMER_START}\n\nAccuracy (positions" in text
