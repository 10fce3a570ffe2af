"""The paper's tables are whole, and each row belongs to the variant that makes it."""

import pytest

from compactattn.kernels import parse
from compactattn.report import paper
from compactattn.report.paper import ALIBI, MAIN, NEIGHBOURS, ROWS, TABLES, Variant, name_kernel


def test_tables_have_the_rows_and_columns_of_the_paper():
    assert [len(table.rows) for table in TABLES] == [11, 4, 3]
    columns = {task: len(lengths) for task, lengths in paper.LENGTHS.items()}
    assert columns == {"mqmtar": 7, "reverse": 2, "sort": 3}
    for table in TABLES:
        for row in table.rows:
            assert set(row.cells) == {(task, length) for task in table.tasks for length in paper.LENGTHS[task]}, row.name


def test_no_mean_is_above_its_maximum():
    for table in TABLES:
        for row in table.rows:
            for cell in row.cells.values():
                assert 0 <= cell.mean <= cell.maximum <= 1


@pytest.mark.parametrize(
    ("kernel", "task", "length", "cell"),
    [
        ("gaussian", "mqmtar", 512, (0.85, 0.97)),
        ("topk_softmax(32)", "sort", 256, (0.01, 0.02)),
        ("topk_uniform(32)", "reverse", 64, (0.42, 0.66)),
        ("norm_relu", "mqmtar", 4096, (0.31, 0.94)),
        ("relumax", "reverse", 96, (0.23, 0.68)),
        ("sparsemax", "mqmtar", 2048, (0.63, 0.84)),
        ("relumax(r=2)", "sort", 256, (0.34, 0.74)),
        ("entmax(1.5)", "mqmtar", 4096, (0.23, 0.42)),
        ("relumax(r=3)", "reverse", 96, (0.29, 0.88)),
        ("entmax(4/3)", "mqmtar", 1024, (0.89, 0.95)),
        ("topk_uniform(16)", "mqmtar", 64, (0.58, 0.71)),
    ],
)
def test_some_cells_read_as_printed(kernel, task, length, cell):
    assert ROWS[Variant("mosaic", parse(kernel))].cells[task, length] == cell


def test_positions_tell_rows_apart():
    assert ROWS[Variant("transformer", parse("softmax"), "alibi")].cells["mqmtar", 512] == (0.09, 0.15)
    assert ROWS[Variant("mosaic", parse("sparsemax"), "alibi")].cells["mqmtar", 512] == (0.85, 1.0)
    assert Variant("transformer", parse("softmax"), "none") not in ROWS


def test_rows_that_stand_in_two_tables_agree():
    shared = [row for table in (NEIGHBOURS, ALIBI) for row in table.rows if row.variant in {r.variant for r in MAIN.rows}]
    assert len(shared) == 4
    for row in shared:
        assert row.cells.items() <= ROWS[row.variant].cells.items()


def test_a_variant_is_known_by_any_name_of_its_kernel():
    one = Variant.of({"architecture": "mosaic", "kernel": "entmax(4/3)", "positions": "none", "as_released": ""})
    assert one == Variant.of({"architecture": "mosaic", "kernel": "triweight"})
    assert ROWS[one].name == "Triweight (4/3-entmax)"


@pytest.mark.parametrize(
    ("kernel", "name"),
    [("epanechnikov", "sparsemax"), ("relumax(r=2)", "2-ReLUmax"), ("relumax(r=2, b=3)", "relumax(r=2, b=3)"),
     ("topk_softmax(16)", "Gaussian kNN, k=16"), ("topk_biweight(8)", "topk_rectified(8, r=2)"), ("rectified(2)", "normReLU^2"),
     ("truncated_gaussian", "truncated_gaussian(b=1)"), ("entmax(1.25)", "entmax(1.25)")],
)  # fmt: skip
def test_kernels_have_the_papers_names_where_it_has_any(kernel, name):
    assert name_kernel(kernel) == name


def test_labels_are_all_different():
    labels = [variant.label for variant in ROWS]
    assert len(set(labels)) == len(labels) == 14
    assert labels[0] == "Transformer, ALiBi"
    assert Variant("mosaic", parse("norm_relu"), "none", "plain").label == "normReLU, plain path"
    assert Variant("transformer", parse("sparsemax"), "learned").label == "Transformer, sparsemax"


def test_the_published_steps_are_examples_over_batch():
    assert {task: recipe.steps for task, recipe in paper.RECIPES.items()} == {
        "mqmtar": 195_312,
        "reverse": 117_187,
        "sort": 156_250,
    }
