"""The processes of a run. `torchrun` starts them; without it there is one.

Gradients are summed in one flat all-reduce after the last micro-batch instead of by DistributedDataParallel:
the loss is a method that DDP does not wrap, the sums are divided by a count that only the whole batch knows,
and at the sizes of these experiments (about 100 MB of gradients) there is little to hide behind the backward pass.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from compactattn.training.config import RunError


@dataclass(frozen=True)
class Group:
    """This process among those of the run."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and talks to the person."""
        return self.rank == 0

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by its sum over all processes."""
        if self.size > 1:
            _flat(tensors, dist.all_reduce)

    def share_(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by that of the leading process."""
        if self.size > 1:
            _flat(tensors, lambda flat: dist.broadcast(flat, src=0))


def _flat(tensors: Sequence[Tensor], operation) -> None:  # type: ignore[no-untyped-def]
    for _, alike in groupby(sorted(tensors, key=lambda tensor: str(tensor.dtype)), key=lambda tensor: tensor.dtype):
        members = list(alike)
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in members])
        operation(flat)
        for tensor, part in zip(members, flat.split([tensor.numel() for tensor in members]), strict=True):
            tensor.detach().copy_(part.view_as(tensor))


def leads() -> bool:
    """Whether this process is the one of its run that writes files, as `torchrun` numbers them."""
    return int(os.environ.get("RANK", "0")) == 0


def choose_device(name: str) -> torch.device:
    """The device a config asks for: "auto" is this process's GPU where there is one, otherwise the CPU."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise RunError(f"device = {name!r} is unknown; choose 'auto', 'cpu', 'cuda' or, for one of several, 'cuda:1'")
    available = torch.cuda.is_available()
    if name.startswith("cuda") and not available:
        raise RunError(f"device = {name!r} is asked for, but torch {torch.__version__} sees no GPU; use device='cpu' or 'auto'")
    if name == "cpu" or not available:
        return torch.device("cpu")
    index = int(name.partition(":")[2] or os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.cuda.device_count():
        raise RunError(
            f"GPU {index} is asked for, but torch sees {torch.cuda.device_count()}; start no more processes than GPUs"
        )
    return torch.device("cuda", index)


@contextmanager
def join(name: str) -> Iterator[Group]:
    """This process's place among those of the run, on the device of that name; joined at the start and left at the end."""
    device = choose_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not dist.is_initialized():
        yield Group(device)
        return
    own = not dist.is_initialized()
    if own:
        on_gpu = device.type == "cuda"
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        yield Group(device, dist.get_rank(), dist.get_world_size())
    finally:
        if own:
            dist.destroy_process_group()
