"""What the kernels of some calls need of a GPU that is not there: python compiled_for.py 89 prints the most shared memory.

Tensors on a CPU stand for those on the GPU; everything is compiled and nothing launched.
"""

import sys

import torch
from triton import runtime
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from compactattn import ALiBi, Allowed, Bias, Causal, parse
from compactattn.fused import launch
from compactattn.kernels import encode
from compactattn.masks import resolve

KEYS = 2048  # enough for tiles to be skipped
CALLS = {
    "alibi": (128, torch.bfloat16, ALiBi()),
    "bias": (128, torch.bfloat16, Bias(torch.zeros(1, 1, KEYS, KEYS))),
    "boolean": (80, torch.float16, Allowed(torch.ones(1, 1, KEYS, KEYS, dtype=torch.bool))),
    "wide": (256, torch.bfloat16, Bias(torch.zeros(1, 1, KEYS, KEYS))),
    "exact": (256, torch.float32, ALiBi()),
}


class Absent:
    """A driver of a GPU of some compute capability, as far as compiling asks for it."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_all(capability):
    """{call: {kernel: bytes of shared memory}}"""
    runtime.driver.set_active(Absent(capability))
    run, found = JITFunction.run, {}

    def compile_only(self, *args, warmup, **options):
        compiled = run(self, *args, warmup=True, **options)
        found[self.fn.__name__] = max(found.get(self.fn.__name__, 0), compiled.metadata.shared)
        return compiled

    JITFunction.run = compile_only
    launch.is_hopper, launch.is_roomy = (lambda device: capability >= 90), (lambda device: False)
    code, told = encode(parse("biweight")), {}
    for name, (dim, dtype, mask) in CALLS.items():
        x, scale = torch.empty(1, 1, KEYS, dim, dtype=dtype), torch.ones(1)
        view = resolve(Causal() & mask, (1, 1, KEYS, KEYS), x.device)
        estimate, kept = launch.estimate(x, x, x, scale, view, code, None, False, True)
        wanted = view.bias is not None, True
        launch.estimate_backward(x, x, x, x, scale, view, code, None, wanted, estimate.out, kept)
        told[name] = dict(found)
        found.clear()
    return told


if __name__ == "__main__":
    for name, kernels in compile_all(int(sys.argv[1])).items():
        print(name, *(f"{kernel} {shared}" for kernel, shared in kernels.items()))
