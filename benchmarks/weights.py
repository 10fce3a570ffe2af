"""Weights on a CPU against the `entmax` package: error against float64, then time, forward + backward.

python -m benchmarks.weights
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import entmax
import torch
from torch import Tensor

from benchmarks.common import append, environment, spread, time_in_turns
from compactattn import parse, weights

SHAPE = (8, 8, 256, 256)
Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Pair:
    """One mechanism: our kernel, the peer's function, the peer's float64 truth, and the goal for ours / peer."""

    kernel: str
    peer: str
    theirs: Call
    truth: Call
    goal: float


PAIRS = (
    Pair("sparsemax", "sparsemax", entmax.sparsemax, entmax.sparsemax, 0.25),
    Pair("entmax15", "entmax15", entmax.entmax15, entmax.entmax15, 0.25),
    *(
        Pair(
            f"entmax({alpha})",
            f"entmax_bisect({alpha})",
            lambda s, alpha=alpha: entmax.entmax_bisect(s, alpha),  # type: ignore[misc]
            lambda s, alpha=alpha: entmax.entmax_bisect(s, alpha, n_iter=100),  # type: ignore[misc]
            0.1,
        )
        for alpha in (1.1, 1.33, 1.75, 1.95)
    ),
)


def both_ways(call: Call, scores: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """(weights, gradient of the scores)."""
    scores = scores.detach().requires_grad_()
    out = call(scores)
    out.backward(gradient)
    assert scores.grad is not None
    return out.detach(), scores.grad


def error(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())


def measure(pair: Pair) -> dict[str, object]:
    torch.manual_seed(0)
    scores, gradient = torch.randn(SHAPE), torch.randn(SHAPE)
    kernel = parse(pair.kernel)

    def ours(s: Tensor) -> Tensor:
        return weights(s, kernel)

    truth, truth_gradient = both_ways(pair.truth, scores.double(), gradient.double())
    errors = {}
    for name, call in (("ours", ours), ("peer", pair.theirs)):
        out, got = both_ways(call, scores, gradient)
        errors[f"{name}_error"] = f"{error(out, truth):.2e}"
        errors[f"{name}_gradient_error"] = f"{error(got, truth_gradient):.2e}"
    times = time_in_turns(
        {
            "ours": lambda: both_ways(ours, scores, gradient),
            "peer": lambda: both_ways(pair.theirs, scores, gradient),
            "softmax": lambda: both_ways(lambda s: torch.softmax(s, -1), scores, gradient),
        }
    )
    columns = {f"{name}_{key}": value for name, taken in times.items() for key, value in spread(taken).items()}
    ratio = columns["ours_median_ms"] / columns["peer_median_ms"]
    shape = "x".join(map(str, SHAPE))
    return {
        "kernel": pair.kernel,
        "peer": pair.peer,
        "shape": shape,
        "dtype": "float32",
        "ratio": round(ratio, 3),
        "goal": pair.goal,
        **columns,
        **errors,
    }


def main() -> None:
    rows = []
    for pair in PAIRS:
        row = measure(pair)
        rows.append(row | environment())
        print(
            f"{row['kernel']:>14}  {row['ours_median_ms']:7.1f} ms   {row['peer']:>20} {row['peer_median_ms']:7.1f} ms   "
            f"ratio {row['ratio']:.3f} (goal {row['goal']})   errors {row['ours_error']} / {row['peer_error']}, "
            f"gradient {row['ours_gradient_error']} / {row['peer_gradient_error']}",
            flush=True,
        )
    print("rows added to", append("cpu_weights", rows))


if __name__ == "__main__":
    main()
