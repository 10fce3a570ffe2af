"""The shape of the project: imports point one way, the core needs little, and the documents tell the truth."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import report
from benchmarks.experiments import identify
from PIL import Image

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "compactattn"
# a file imports only from what stands above it
LAYERS = [
    "folders", "kernels", "masks", "rows", "dropout", "reference", "derivatives", "native", "fused", "operators", "attention",
    "decoding", "regression", "memory", "mixers", "models", "data", "training", "evaluation", "experiments", "report", "bench",
    "cli", "__main__",
]  # fmt: skip


def layer(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path):
    """Layers of this package that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else names
        if isinstance(node, ast.ImportFrom) and node.module == "compactattn":
            names = [f"compactattn.{alias.name}" for alias in node.names if (SOURCE / f"{alias.name}.py").exists()]
        yield from (name.split(".")[1] for name in names if name.startswith("compactattn."))


@pytest.mark.parametrize("path", [p for p in SOURCE.rglob("*.py") if p.name != "__init__.py"], ids=lambda p: p.name)
def test_a_file_imports_only_from_what_stands_above_it(path):
    own = LAYERS.index(layer(path))
    for name in imports(path):
        assert LAYERS.index(name) <= own, f"{path.name} imports {name}"


def test_importing_the_package_needs_torch_and_nothing_optional():
    code = "import sys, compactattn, compactattn.memory.features; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "compactattn.attention" in modules
    optional = {"compactattn.fused.forward", "tyro", "rich", "matplotlib", "sklearn", "tiktoken", "safetensors", "entmax"}
    assert not optional & set(modules)


def test_training_and_the_data_of_reports_need_neither_terminal_nor_pictures():
    code = "import sys, compactattn.experiments.sweep, compactattn.report.runs, compactattn.report.tables; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "compactattn.training.loop" in modules
    assert not {"tyro", "rich", "matplotlib", "tiktoken", "compactattn.fused.forward"} & set(modules)


def test_every_row_of_the_equations_names_functions_and_tests_that_exist():
    rows = [line for line in (ROOT / "docs/equations.md").read_text().splitlines() if re.match(r"\| (Eqs?\.|Prop|§|Fig)", line)]
    covered = " ".join(row.split("|")[1] for row in rows)
    assert all(re.search(rf"Eq\. {n}\b", covered) for n in (*range(1, 13), 16, 17, 18))
    assert "Proposition 1" in covered
    assert "13–15" in covered
    for row in rows:
        _, _, _, functions, tests, _ = row.split("|")
        names = re.findall(r"`([^`]+)`", functions)
        claims = re.findall(r"`([^`]+)`", tests)
        assert names, row
        assert claims, row
        for name in names:
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(f"compactattn.{module}"), attribute), name
        for claim in claims:
            file, _, test = claim.partition("::")
            assert test, claim
            assert f"def {test}(" in (ROOT / file).read_text(), claim


def test_every_page_with_measured_numbers_is_written_from_the_result_files():
    for path, text in report.pages().items():
        assert path.read_text() == text, f"{path.name} differs from its data; run python -m benchmarks.report"


def test_every_picture_of_results_is_drawn_from_the_result_files():
    linked = re.findall(r"\]\(images/([^)]+)\)", (ROOT / "docs" / "experiments.md").read_text())
    pictures = {path.name: path for path in (ROOT / "docs" / "images").glob("lm-*.png")}
    assert sorted(linked) == sorted(pictures)
    for path in pictures.values():
        noted = Image.open(path).text["Source"]
        assert noted == identify("lm"), f"{path.name} was drawn from other results; run python -m benchmarks.report"
        assert path.stat().st_size < 150_000


@pytest.mark.parametrize("target", ["test-gpu", "bench-gpu"])
def test_a_gpu_is_looked_for_before_anything_is_installed(target, tmp_path):
    plan = subprocess.run(
        ["make", "--no-print-directory", "-n", target, f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    first, *rest = plan.stdout.splitlines()
    assert "nvidia-smi" in first
    assert any("pip install" in line for line in rest)


def test_the_code_in_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    torch.manual_seed(0)
    names: dict = {}
    for block in blocks:
        exec(block, own := {})
        names |= own
    assert 2 < names["readout"].support.float().mean() < 4  # as the text says
    torch.testing.assert_close(names["skipped"].float().mean(1), torch.tensor([32.0, 7.0]), atol=3, rtol=0)
