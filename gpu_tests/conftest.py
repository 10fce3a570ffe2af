"""Refuses to run without a GPU, and ends with one table: cases, and the worst ratio for each dtype and quantity."""

import math
import os
from collections import Counter, defaultdict

import pytest
import torch

from gpu_tests.settings import GPU, TRIAL

KINDS = ("passed", "failed", "skipped", "error")
QUANTITIES = ("out", "dq", "dk", "dv", "dscale", "dbias", "dalpha")


def pytest_configure(config):
    if not GPU and not TRIAL:
        pytest.exit("make test-gpu needs a GPU that PyTorch can use, and torch.cuda.is_available() is false here", returncode=1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # there are enough processes
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic products ask for, before the first one
    config.addinivalue_line("filterwarnings", "default")  # a remark of the compiler's is no failure
    if TRIAL:
        config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")  # NumPy's, of log2(0) and inf − inf
        _mend_interpreter()


def _mend_interpreter():
    """A scalar is an array of one number there, which NumPy no longer takes for an index."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


@pytest.fixture(autouse=True)
def _alone():
    """The same numbers in every order of the tests, plain products, and no memory kept from the other processes."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    if GPU:
        torch.cuda.empty_cache()


def pytest_terminal_summary(terminalreporter):
    for line in summarise(terminalreporter):
        terminalreporter.write_line(line)


def summarise(terminalreporter):
    """Lines of the table, from what the tests recorded as properties of their reports."""
    reports = [report for kind in KINDS for report in terminalreporter.stats.get(kind, [])]
    found = [(report, dict(getattr(report, "user_properties", ()))) for report in reports]
    groups = [properties["numerics"] for _, properties in found if "numerics" in properties]
    device = torch.cuda.get_device_name() if GPU else "the interpreter"
    counts = ", ".join(f"{len(found)} {kind}" for kind, found in terminalreporter.stats.items() if kind in KINDS)
    yield f"gpu tests on {device}, torch {torch.__version__}: {counts}"
    yield from _numerics(groups)
    for report, properties in found:
        if "note" in properties:
            yield f"  {report.nodeid.partition('::')[2].removeprefix('test_')}: {properties['note']}"


def _numerics(groups):
    if not groups:
        return
    judged, rows, left = (sum(group[key] for group in groups) for key in ("cases", "rows", "left"))
    yield f"random cases: {judged}; rows left out for a tie at an edge: {left} of {rows} ({left / max(rows, 1):.2%})"
    refused = Counter()
    for group in groups:
        refused.update(group["refused"])
    for reason, count in refused.items():
        yield f"refused: {count} cases, because {reason}"
    worst = defaultdict(lambda: (0.0, ""))
    for group in groups:
        for name, (ratio, where) in group["worst"].items():
            key = group["dtype"], name
            worst[key] = max(worst[key], (math.inf if math.isnan(ratio) else ratio, where))
    yield "worst error / what plain PyTorch cannot avoid, see gpu_tests/cases.py (allowed: 2 of the output, 3 of gradients)"
    yield "  " + "".join(f"{name:>12}" for name in ("", *QUANTITIES))
    for dtype in dict.fromkeys(dtype for dtype, _ in worst):
        cells = (f"{worst[dtype, name][0]:.2f}" if (dtype, name) in worst else "–" for name in QUANTITIES)
        yield "  " + "".join(f"{cell:>12}" for cell in (dtype, *cells))
    for ratio, where in sorted(worst.values(), reverse=True)[:3]:
        yield f"  {ratio:.2f}: {where}"
