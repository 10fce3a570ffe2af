"""Runs the kernels under Triton's interpreter, for these tests alone."""

import importlib
import os
import sys

import pytest
import torch

from compactattn.fused import launch


def reload_triton():
    """Triton decides where a function is defined whether it is interpreted, and torch has imported Triton long ago."""
    for name in ("triton.language.standard", "triton.language"):
        importlib.reload(importlib.import_module(name))
    for name in [name for name in sys.modules if name.startswith("compactattn.fused.")]:
        if name != launch.__name__:
            del sys.modules[name]


@pytest.fixture(scope="module", autouse=True)
def _interpreted():
    if launch.NO_TRITON:
        pytest.skip(launch.NO_TRITON)
    from triton.runtime import interpreter

    def patched(tensor, scope):
        patch(tensor, scope)
        # a scalar is an array of one number there, which NumPy no longer takes for an index
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    patch = interpreter._patch_lang_tensor
    with pytest.MonkeyPatch.context() as change:
        change.setenv("TRITON_INTERPRET", "1")
        change.setattr(interpreter, "_patch_lang_tensor", patched)
        reload_triton()
        yield
    if "TRITON_INTERPRET" not in os.environ:
        reload_triton()


@pytest.fixture
def poisoned():
    """Has PyTorch fill what is allocated but not written with NaN, so that reading it shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def cut(monkeypatch):
    """Sets the tiles of all kernels."""

    def to(m, n):
        monkeypatch.setattr(launch, "choose_cut", lambda *_: launch.Cut(*[launch.Blocks(m, n, 4, 1)] * 4))

    return to
