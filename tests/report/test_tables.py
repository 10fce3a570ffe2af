"""Tables have the paper's layout, with its numbers below ours."""

import re
from html.parser import HTMLParser

from report_examples import make_all_runs, make_run

from compactattn.report import tables
from compactattn.report.comparison import compare


def example():
    runs = [make_run({64: share, 128: 0.5}, seed=seed) for seed, share in enumerate([0.9, 1.0])]
    (comparison,) = compare([*runs, make_run({64: 0.99, 256: 0.25}, kernel="gaussian")])
    return comparison


def test_markdown_reads_as_the_paper_does():
    assert tables.format_markdown(example()).splitlines() == [
        "| Kernel | 1× (64) | 2× (128) | 4× (256) | 8× (512) | 16× (1,024) | 32× (2,048) | 64× (4,096) |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| **Gaussian** (1 seed) | **0.99**<sup>0.99</sup> | – | **0.25**<sup>0.25</sup> | – | – | – | – |",
        "| *paper* | 0.99<sup>1.00</sup> | 0.96<sup>1.00</sup> | 0.93<sup>0.99</sup> | 0.85<sup>0.97</sup>"
        " | 0.64<sup>0.81</sup> | 0.14<sup>0.20</sup> | 0.00<sup>0.00</sup> |",
        "| **sparsemax** (2 seeds) | 0.95<sup>1.00</sup> | **0.50**<sup>0.50</sup> | – | – | – | – | – |",
        "| *paper* | 1.00<sup>1.00</sup> | 1.00<sup>1.00</sup> | 1.00<sup>1.00</sup> | 0.98<sup>1.00</sup>"
        " | 0.86<sup>0.98</sup> | 0.63<sup>0.84</sup> | 0.31<sup>0.51</sup> |",
    ]


def test_all_that_show_the_best_of_a_column_are_bold_but_zeros():
    (comparison,) = compare([make_run({64: 0.992, 128: 0.004}), make_run({64: 0.991, 128: 0.0}, kernel="gaussian")])
    text = tables.format_markdown(comparison)
    assert text.count("| **0.99**<sup>0.99</sup> | 0.00<sup>0.00</sup> |") == 2


def test_a_row_tells_its_seeds_only_where_rows_differ_in_them():
    assert [tables.count_seeds(example(), line) for line in example().lines] == [" (1 seed)", " (2 seeds)"]
    assert "<small>Epanechnikov (sparsemax) (2 seeds)</small>" in tables.format_html(example())
    (same,) = compare([make_run(), make_run(kernel="gaussian")])
    assert "seed)" not in tables.format_html(same) + tables.format_markdown(same)


def test_the_caption_states_seeds_steps_and_samples():
    text = tables.describe(example())
    assert "1 to 2 seeds, 2,000 training steps, 1,000 samples for each length" in text
    assert "The paper: 3 seeds, 195,312 steps, 1,000 samples." in text
    (alone,) = compare([make_run(data={"symbols": 8})])
    assert "The paper" not in tables.describe(alone)


def test_the_caption_counts_the_seeds_of_each_cell():
    (comparison,) = compare([make_run({64: 1}, seed=0), make_run({64: 1, 128: 0.5}, seed=1), make_run({64: 1}, seed=2)])
    assert "Ours: 1 to 3 seeds," in tables.describe(comparison)


class Cells(HTMLParser):
    """The rows of a table, each a list of the texts of its cells."""

    def __init__(self, text):
        super().__init__()
        self.rows = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows:
            self.rows[-1][-1] += data


def test_html_has_a_cell_for_every_row_and_length():
    comparison = compare(make_all_runs(seeds=2))[0]
    rows = Cells(tables.format_html(comparison)).rows
    assert [len(row) for row in rows] == [8] * 12
    assert rows[0] == ["Kernel", "1×64", "2×128", "4×256", "8×512", "16×1,024", "32×2,048", "64×4,096"]
    assert rows[7][0] == "sparsemaxEpanechnikov (sparsemax)"
    assert re.fullmatch(r"\d\.\d\d\d\.\d\d0\.630\.84", rows[7][6])


def test_missing_cells_are_dashes():
    rows = Cells(tables.format_html(example())).rows
    assert rows[1][2] == "–0.961.00"
    assert rows[2][3] == "–1.001.00"


def test_names_are_escaped():
    (comparison,) = compare([make_run(task="mqmtar")])
    text = tables.format_html(comparison, lambda line: 'red"><script>')
    assert "<script>" not in text
