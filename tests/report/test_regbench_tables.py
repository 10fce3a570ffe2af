"""Table 1 has the paper's layout, with its numbers below ours and a mark where they are far apart."""

import dataclasses

from regbench_examples import make_all_runs, make_run
from test_tables import Cells

from compactattn.kernels import parse
from compactattn.report import regbench_paper, regbench_tables
from compactattn.report.paper import Variant
from compactattn.report.regbench_comparison import compare


def example():
    runs = [make_run(0.94, 0.33, seed=seed, examples=size) for seed in (0, 1) for size in (1000, 2500)]
    return compare([*runs, make_run(0.5, 0.3, architecture="mamba")])[0]


def test_markdown_reads_as_the_paper_does():
    assert regbench_tables.format_markdown(example()).splitlines() == [
        "| Model | 1,000 Acc ↑ | 1,000 TVD ↓ | 2,500 Acc ↑ | 2,500 TVD ↓ |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| **Mamba** | 50.0† | **30.0**† | – | – |",
        "| *paper* | 69.4 | 51.0 | 79.4 | 41.0 |",
        "| **sparsemax** | **94.0**<sup>94.0</sup> | 33.0<sup>33.0</sup> | **94.0**<sup>94.0</sup>"
        " | **33.0**<sup>33.0</sup>◊ |",
        "| *paper* | 94.2 | 32.5 | 94.0 | 19.3 |",
    ]


def test_all_that_show_the_best_of_a_column_are_bold():
    (comparison,) = compare([make_run(0.9402, 0.33), make_run(0.9398, 0.34, kernel="gaussian")])
    assert regbench_tables.format_markdown(comparison).count("| **94.0** |") == 2


def test_the_caption_tells_the_marks_that_occur():
    assert regbench_tables.describe(example()).endswith(" from the paper: ◊ a different recipe, † open.")
    runs = [make_run(0.5, 0.3, architecture="mamba", model={"form": "own"}), make_run(0.5, 0.325, decay=0.3)]
    (comparison,) = compare(runs)
    assert "| **Mamba, own form** | **50.0**‡ | **30.0**‡ |" in regbench_tables.format_markdown(comparison)
    assert "| **sparsemax** | **50.0**◊ | 32.5 |" in regbench_tables.format_markdown(comparison)
    end = " More than 2 points from the paper: ‡ explained by code, ◊ a different recipe."
    assert regbench_tables.describe(comparison).endswith(end)


def test_a_run_that_was_stopped_before_its_end_has_a_mark_of_its_own_and_patience_is_no_such_stop():
    run = make_run(0.5, 0.3, architecture="mamba", patience=10)
    early = dataclasses.replace(run, steps=3100, validations=run.validations[:100])
    patient = make_run(0.94, 0.33, patience=10)
    (ended,) = compare([early, patient])
    assert "§" not in regbench_tables.format_markdown(ended) + regbench_tables.describe(ended)
    assert "Patience ended 1 of 2 runs, which are judged at epoch 97." in regbench_tables.describe(ended)
    (stopped,) = compare([dataclasses.replace(early, validations=run.validations[:30]), patient])
    assert "| **Mamba** | 50.0§ | **30.0**§ |" in regbench_tables.format_markdown(stopped)
    assert regbench_tables.format_html(stopped).count('<span class="gap">§</span>') == 2
    assert regbench_tables.describe(stopped).endswith("§ of a run that was stopped before its end, as told below.")
    assert "Patience" not in regbench_tables.describe(stopped)


def test_only_the_cell_of_the_run_that_was_stopped_is_marked():
    stopped = dataclasses.replace(make_run(0.94, 0.33, examples=2500), steps=1000)
    (comparison,) = compare([make_run(0.94, 0.33), stopped])
    line = "| **sparsemax** | 94.0 | 33.0 | 94.0§ | 33.0◊§ |"
    assert line in regbench_tables.format_markdown(comparison).splitlines()
    own = dataclasses.replace(make_run(0.5, 0.3, architecture="mamba", model={"form": "own"}), steps=1000)
    assert "50.0‡§" in regbench_tables.format_markdown(compare([own])[0])


def test_the_caption_states_seeds_epochs_and_samples():
    text = regbench_tables.describe(example())
    assert "Ours: 1 to 2 seeds, at most 200 epochs, 500 samples. The paper: at most 200 epochs, 1,000 samples" in text
    (alone,) = compare([make_run(changes={"states": 5})])
    assert "The paper" not in regbench_tables.describe(alone)
    assert "1 seed," in regbench_tables.describe(alone)


def test_html_has_two_cells_for_every_row_and_size():
    (comparison,) = compare(make_all_runs())
    rows = Cells(regbench_tables.format_html(comparison)).rows
    assert rows[:2] == [["Model", "1,000", "2,500", "5,000"], ["Acc ↑", "TVD ↓"] * 3]
    assert [len(row) for row in rows[2:]] == [7] * 16
    assert rows[2 + 3][0] == "S4DS4"
    assert rows[2 + 4][1].endswith("†69.4")
    papers = regbench_paper.ROWS[Variant("mosaic", parse("sparsemax"))].cells[5000]
    assert rows[2 + 11][5].endswith(f"{100 * papers.accuracy:.1f}")


def test_without_the_papers_numbers_there_is_no_second_line():
    (alone,) = compare([make_run(changes={"states": 5})])
    assert "*paper*" not in regbench_tables.format_markdown(alone)
    assert "<small>" not in regbench_tables.format_html(alone)
