"""RegBench has its place on the page, alone or beside length generalisation, and in the documents."""

import re

import pytest
from benchmarks import experiments as documents
from regbench_examples import make_all_runs, make_run
from report_examples import make_run as make_length_run
from report_examples import write_lines
from test_page import Elements

from compactattn.report.page import write_report


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    write_report([*make_all_runs(), make_length_run()], out)
    return out


@pytest.fixture(scope="module")
def page(folder):
    return (folder / "index.html").read_text(encoding="utf-8")


def test_both_experiments_share_a_page_that_asks_for_nothing(page):
    elements = Elements(page)
    assert elements.open == []
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"mqmtar", "regbench", "made"} <= set(ids)
    assert "<title>Length generalisation: MQMTAR; In-context learning: RegBench</title>" in page
    assert not re.search(r"https?:|//[a-z]|@import|@font-face", page)


def test_the_section_says_what_was_found_and_where_it_differs_from_the_paper(page):
    section = page[page.index('id="regbench"') : page.index('id="made"')]
    for text in (
        "With 5,000 training examples, ",
        "<h3>Compact kernels against Gaussian attention</h3>",
        "<h3>Beside the paper</h3>",
        "<h3>More than two points from the paper</h3>",
        "<li>Open. Mamba (1,000, 2,500 and 5,000 examples)",
        "<h3>Where this departs from the paper</h3>",
        "not run here: 10,000 examples",
        "<h3>What context is worth</h3>",
    ):
        assert text in section, text
    assert section.count("<figure>") == 4
    assert "RegBench, 2,500 examples" in page[page.index('id="made"') :]


def test_markdown_says_the_same_and_its_figures_lie_beside_it(folder):
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# Length generalisation · In-context learning")
    assert "## RegBench (test split)" in text
    linked = re.findall(r"\]\((figures/regbench[^)]+)\)", text)
    assert len(linked) == 4
    for path in linked:
        assert (folder / path).is_file()
    assert "| *paper* | 51.3 | 67.4 | 50.5 | 63.9 | 81.5 | 33.3 |" in text


def test_other_languages_and_splits_have_sections_of_their_own(tmp_path):
    runs = [make_run(), make_run(changes={"states": "<b>"}), make_run(score={"split": "validation"})]
    page = write_report(runs, tmp_path).read_text()
    sections = re.findall(r'<section id="([^"]+)"', page)
    assert [re.sub("-[0-9a-f]{8}$", "", name) for name in sections if "regbench" in name] == ["regbench", "a-changed-regbench"]
    assert "<b>," not in page
    assert "states of an automaton: &lt;b&gt;" in page
    page = write_report(runs[2:], tmp_path).read_text()  # a split that is not the tabulated one shows where it is alone
    assert 'id="regbench-validation"' in page


def test_runs_without_an_evaluation_are_named(tmp_path):
    page = write_report([make_run(), make_run(source="forgotten", score=None, seed=1, evaluated=False)], tmp_path).read_text()
    assert "Not evaluated, so not shown: forgotten." in page


def test_the_documents_state_that_there_are_no_results_until_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    assert documents.results_section("regbench", 4) == "No results yet."
    (tmp_path / "results" / "regbench").mkdir(parents=True)
    write_lines(tmp_path / "results" / "regbench" / "all.jsonl", [run.to_json() for run in make_all_runs()])
    text = documents.results_section("regbench", 4)
    assert text.startswith("#### RegBench, test split\n\n**With 5,000 training examples, ")
    assert "| **Mamba** | " in text
    assert "##### More than two points from the paper\n\n- Open. Mamba (1,000, 2,500 and 5,000 examples)" in text
    assert "![" not in text
