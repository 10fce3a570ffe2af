"""Runs the kernels under Triton's interpreter, for these tests alone."""

import importlib
import os
import sys

import pytest
import torch

from compactattn.fused import launch
from compactattn.fused.cut import Blocks, Cut


def reload_triton():
    """Triton decides where a function is defined whether it is interpreted, and torch has imported Triton long ago."""
    for name in ("triton.language.standard", "triton.language"):
        importlib.reload(importlib.import_module(name))
    for name in [name for name in sys.modules if name.startswith("compactattn.fused.")]:
        if name != launch.__name__:
            del sys.modules[name]


def mend_interpreter(change):
    """Does what NumPy no longer does, and once what it does for each function of a kernel and each shape: half of its time."""
    from triton.language import core
    from triton.runtime import interpreter

    patch_tensor, patch, launch_grid = (
        interpreter._patch_lang_tensor, interpreter._patch_lang, interpreter.GridExecutor.__call__
    )  # fmt: skip
    patched = set()  # modules whose operations are the interpreter's since the kernel was launched

    def patch_tensor_too(tensor, scope):
        patch_tensor(tensor, scope)
        # a scalar is an array of one number there, which NumPy no longer takes for an index
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def patch_once(fn):
        if (module := fn.__globals__["__name__"]) in patched:
            return None
        patched.add(module)
        return patch(fn)

    def launch_afresh(self, *args, **kwargs):
        patched.clear()
        launch_grid(self, *args, **kwargs)

    def name_later(self, types, fields=None):
        self.types, self.fields = types, fields or [""] * len(types)

    def name(self):
        return "[" + ",".join(f"{field}:{kind}" for field, kind in zip(self.fields, self.types, strict=True)) + "]"

    change.setattr(interpreter, "_patch_lang_tensor", patch_tensor_too)
    change.setattr(interpreter, "_patch_lang", patch_once)
    change.setattr(interpreter.GridExecutor, "__call__", launch_afresh)
    change.setattr(core.tuple_type, "__init__", name_later)
    change.setattr(core.tuple_type, "name", property(name), raising=False)


@pytest.fixture(scope="module", autouse=True)
def _interpreted():
    if launch.NO_TRITON:
        pytest.skip(launch.NO_TRITON)
    with pytest.MonkeyPatch.context() as change:
        change.setenv("TRITON_INTERPRET", "1")
        mend_interpreter(change)
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
        monkeypatch.setattr(launch, "choose_cut", lambda *_: Cut(*[Blocks(m, n, 4, 1)] * 4))

    return to
