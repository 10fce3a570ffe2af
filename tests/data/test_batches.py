"""A batch moves as one, and a copy that lands on the CPU is complete."""

import torch

from compactattn.data.batches import Batch


def test_a_batch_moves_as_one_and_keeps_its_parts_in_order():
    parts = [torch.arange(6).view(2, 3), torch.arange(1, 7).view(2, 3), torch.ones(2, 3).bool(), torch.zeros(2, 3).bool()]
    moved = Batch(*parts).to("meta")
    assert [part.device.type for part in moved] == ["meta"] * 4
    assert [part.dtype for part in moved] == [torch.int64, torch.int64, torch.bool, torch.bool]
    stayed = Batch(*parts).to(torch.device("cpu"))
    assert all(torch.equal(part, same) for part, same in zip(stayed, parts, strict=True))
    assert stayed.judged is stayed[3]


def test_a_copy_to_the_cpu_waits_until_it_is_complete():
    class Part:
        def to(self, device, non_blocking):
            return device, non_blocking

    batch = Batch(Part(), Part(), Part(), Part())
    assert set(batch.to("cpu")) == {("cpu", False)}
    assert set(batch.to("cuda")) == {("cuda", True)}
    assert set(batch.to("cuda", non_blocking=False)) == {("cuda", False)}
