"""A cache on a GPU: a model that reads token by token says what it says of the whole text."""

import pytest
import torch

from compactattn.models.config import ModelConfig
from compactattn.models.language_model import build
from gpu_tests.settings import DEVICE, TRIAL

KERNELS = [
    "gaussian", "topk_softmax(16)", "topk_uniform(16)", "norm_relu", "relumax(r=1)", "relumax(r=2)", "relumax(r=3)",
    "sparsemax", "biweight", "triweight",
]  # fmt: skip
VOCAB, READ, WRITTEN = 97, 20, 12 if TRIAL else 300
SIZE = (
    {"vocab": VOCAB, "layers": 2, "heads": 2, "width": 32, "slots": 16}
    if TRIAL
    else {"vocab": VOCAB, "layers": 2, "width": 768}
)


def read_by_token(model, text):
    """(B, T, V) logits after the first READ tokens, from a cache."""
    logits, cache = model.prefill(text[:, :READ])
    found = [logits]
    for token in text[:, READ:].T:
        logits, cache = model.step(token, cache)
        found.append(logits)
    return torch.stack(found, 1).double()


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kernel", [*KERNELS, "transformer"])
@torch.no_grad()
def test_a_cache_says_what_the_whole_text_says(kernel, half, record_property):
    """In units of how far the whole text is from its own float64, where every token has attended as the cache has it."""
    if kernel == "transformer":
        config = ModelConfig(architecture="transformer", longest=READ + WRITTEN, positions="learned", **SIZE)
    else:
        config = ModelConfig(kernel=kernel, **SIZE)
    model = build(config).to(DEVICE).eval()
    text = torch.randint(0, VOCAB, (3, READ + WRITTEN), device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
        ours, whole = read_by_token(model, text), model(text)[:, READ - 1 :].double()
    exact = model.double()(text)[:, READ - 1 :]
    ratio = float((ours - exact).norm() / ((whole - exact).norm() + 1e-6 * exact.norm()))
    record_property("note", f"errs {ratio:.2f} times as much as the whole text")
    assert ratio <= 2
