"""Output and every gradient of the fused kernels against float64, in units of the error of plain PyTorch."""

import re

import pytest
import torch

from gpu_tests.cases import GROUPS, Case, Group, Layout, cases_of, clear_rows, draw, judge, run
from gpu_tests.settings import EVERY, HALF, length

LIMITS = {"out": 2.0}  # 3 for gradients


def fused(drawn):
    """The fused result, and why it was refused."""
    try:
        return run(drawn, "fused"), ""
    except ValueError as error:
        refusal = re.match(r"backend='fused' is not available for this call: (.*); choose one of", str(error))
        if refusal is None:
            raise
        return None, refusal[1]


def judge_all(cases, dropout=0.0):
    """What the summary prints of these cases; `faults` are those that err too much."""
    found = {"cases": 0, "rows": 0, "left": 0, "refused": {}, "worst": {}, "faults": []}
    for case in cases:
        drawn = draw(case)._replace(dropout=dropout)
        clear = clear_rows(drawn)
        drawn.do[~clear] = 0
        ours, refusal = fused(drawn)
        if ours is None:
            found["refused"][refusal] = found["refused"].get(refusal, 0) + 1
            continue
        found["cases"] += 1
        found["rows"] += clear.numel()
        found["left"] += int((~clear).sum())
        plain, exact = run(drawn, "reference"), run(drawn, "reference", torch.float64)
        for name, ratio in judge(drawn, clear, ours, plain, exact).items():
            found["worst"][name] = max(found["worst"].get(name, (0.0, "")), (ratio, f"{name} of {case}"))
            if not ratio <= LIMITS.get(name, 3.0):  # NaN is a fault too
                found["faults"].append(f"{name} errs {ratio:.2f} times as much as plain PyTorch: {case}")
    return found


@pytest.mark.parametrize("group", GROUPS[::EVERY], ids=str)
def test_errors(group, record_property):
    found = judge_all(cases_of(group))
    record_property("numerics", {"dtype": group.dtype, **found})
    assert not found["faults"], "\n".join(found["faults"])
    if found["cases"] == 0:
        pytest.skip("refused: " + ", ".join(found["refused"]))


LONG = [
    Case(Group(kernel, HALF, Layout(64, 64, 1, 1)), 1, length(2048), length(131_072), "strict", 3.0, 0)
    for kernel in ("biweight", "relumax")
]


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.group.kernel)
def test_long_errors(case, record_property):
    """The last 2,048 queries of one head over 131,072 keys."""
    found = judge_all([case])
    shown = ", ".join(f"{name} {ratio:.2f}" for name, (ratio, _) in found["worst"].items())
    record_property("note", f"{case.keys:,} keys: {shown}; {found['left']} of {found['rows']} rows left out")
    assert found["cases"] == 1, found["refused"]
    assert not found["faults"], "\n".join(found["faults"])


@pytest.mark.parametrize("case", LONG, ids=lambda case: case.group.kernel)
def test_a_long_square_agrees_with_its_last_rows(case):
    """131,072 queries and keys, of which the last 2,048 have a gradient, against those rows alone."""
    rows = draw(case)
    more = case.keys - case.queries
    q, do = (torch.cat((torch.randn_like(x[:, :, :1]).expand(-1, -1, more, -1), x), 2) for x in (rows.inputs["q"], rows.do))
    do[:, :, :more] = 0
    square = run(rows._replace(inputs=rows.inputs | {"q": q}, do=do), "fused")
    for name, want in run(rows, "fused").items():
        got = square[name][:, :, more:] if name in ("out", "dq") else square[name]
        ulps = 16 if name == "dscale" else 0.5  # its parts are as many as there are blocks, and are added in another order
        assert (got.double() - want.double()).norm() <= ulps * torch.finfo(want.dtype).eps * want.double().norm(), name
