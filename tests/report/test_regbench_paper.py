"""The paper's Table 1 is whole, and each row belongs to the variant that makes it."""

import re
from pathlib import Path

import pytest

from compactattn.kernels import parse
from compactattn.report.paper import Variant
from compactattn.report.regbench_paper import PUBLISHED_RATES, ROWS, SIZES

PAPER = Path(__file__).parents[3] / "shared" / "paper" / "paper.tex"


def test_the_table_has_the_rows_and_columns_of_the_paper():
    assert [row.name for row in ROWS.values()][:7] == ["RetNet", "H3", "Gla", "S4", "Mamba", "Transformer", "Gaussian"]
    assert len(ROWS) == 16
    for row in ROWS.values():
        assert tuple(row.cells) == SIZES == (1000, 2500, 5000, 10_000, 20_000, 40_000)
        assert all(0 < share < 1 for cell in row.cells.values() for share in cell)


@pytest.mark.parametrize(
    ("variant", "size", "cell"),
    [
        (Variant("retnet", None), 1000, (0.513, 0.674)),
        (Variant("s4d", None), 40_000, (0.825, 0.338)),
        (Variant("mamba", None), 20_000, (0.913, 0.270)),
        (Variant("transformer", parse("softmax"), "learned"), 2500, (0.924, 0.205)),
        (Variant("mosaic", parse("gaussian")), 1000, (0.939, 0.341)),
        (Variant("mosaic", parse("topk_uniform(16)")), 5000, (0.861, 0.272)),
        (Variant("mosaic", parse("relumax(r=2)")), 2500, (0.944, 0.201)),
        (Variant("mosaic", parse("entmax(4/3)")), 5000, (0.948, 0.162)),
    ],
)
def test_some_cells_read_as_printed(variant, size, cell):
    assert ROWS[variant].cells[size] == cell


def read_table(text):
    """The cells of Table 1 by the row's name, from the paper's source."""
    table = text[text.index("Regbench in-context learning benchmark") : text.index(r"\label{tab:icl}")]
    rows = {}
    for line in table.splitlines():
        parts = re.sub(r"\\textbf\{([\d.]+)\}", r"\1", line.strip().removesuffix(r"\\")).split("&")
        if len(parts) == 13 and re.fullmatch(r"[\d.]+", parts[1].strip()):
            numbers = [float(part.strip().removesuffix(r"\\")) for part in parts[1:]]
            name = re.sub(r"\$(.*?)\$", r"\1", parts[0].strip())
            rows[name] = list(zip(numbers[::2], numbers[1::2], strict=True))
    return rows


@pytest.mark.skipif(not PAPER.is_file(), reason="the paper's source is not at hand")
def test_every_cell_is_that_of_the_papers_source():
    printed = read_table(PAPER.read_text(encoding="utf-8"))
    ours = {
        row.name: [(round(100 * cell.accuracy, 1), round(100 * cell.tvd, 1)) for cell in row.cells.values()]
        for row in ROWS.values()
    }
    assert list(printed) == list(ours)
    assert printed == ours


def test_an_architecture_without_attention_has_no_kernel():
    settings = {"architecture": "retnet", "kernel": "sparsemax", "positions": "none", "form": "benchmark"}
    assert Variant.of(settings) == Variant.of(settings | {"kernel": "gaussian"}) == Variant("retnet", None)
    assert not Variant("retnet", None).compact
    assert Variant.of(settings | {"architecture": "transformer"}).compact


def test_every_row_has_a_short_name_of_its_own():
    labels = [variant.label for variant in ROWS]
    assert labels[:6] == ["RetNet", "H3", "GLA", "S4D", "Mamba", "Transformer"]
    assert len(set(labels)) == len(labels)
    assert Variant("transformer", parse("gaussian"), "none").label == "Transformer, no positions"


def test_a_recurrent_model_says_its_form():
    given = {"architecture": "mamba", "kernel": "gaussian"}
    assert Variant.of(given).label == Variant.of(given | {"form": "own"}).label == "Mamba, own form"
    assert Variant.of(given | {"form": "benchmark"}).label == "Mamba"
    assert not Variant.of(given).usual
    mosaic = {"architecture": "mosaic", "kernel": "norm_relu", "form": "own"}
    assert Variant.of(mosaic).label == "normReLU"
    assert Variant.of(mosaic | {"beta_squared": 0.5}).label == "normReLU, β² from 0.5"
    assert Variant.of(mosaic).usual
    assert not Variant.of(mosaic | {"beta_squared": 0.5}).usual


def test_the_rates_of_the_table_and_of_the_repository_are_both_published():
    assert set(PUBLISHED_RATES) == {5e-4, 1e-4}
