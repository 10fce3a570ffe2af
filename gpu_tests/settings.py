"""Where the tests run and how much of them. The environment can shrink them to a trial without a GPU:

TRITON_INTERPRET=1 GPU_TEST_EVERY=20 GPU_TEST_LONGEST=40 GPU_TEST_REPEATS=2 python -m pytest gpu_tests
"""

import os

import pytest
import torch

GPU = torch.cuda.is_available()
TRIAL = not GPU and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if GPU else "cpu"
EVERY = int(os.environ.get("GPU_TEST_EVERY", "1"))  # of the groups of random cases, one in so many
HALF = "bfloat16" if GPU else "float16"  # the interpreter knows no bf16
LONGEST = int(os.environ.get("GPU_TEST_LONGEST", "4097"))  # of the random lengths
REPEATS = int(os.environ.get("GPU_TEST_REPEATS", "1000"))
needs_gpu = pytest.mark.skipif(not GPU, reason="a trial without a GPU")


def length(full: int) -> int:
    """A length, shortened in a trial."""
    return min(full, LONGEST) if TRIAL else full
