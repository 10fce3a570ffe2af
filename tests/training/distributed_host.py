"""One process of a run of several, started by torchrun: the run breaks once and is resumed.

torchrun … distributed_host.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import training_stand_in
from training_stand_in import Failing, Numbers, Tiny

from compactattn.training.distributed import join, leads
from compactattn.training.loop import train

CONFIG = training_stand_in.config(accumulation=2, batch=16, log_every=1)


def main(folder):
    torch.set_num_threads(1)
    with join("cpu") as group:  # one rendezvous for both parts
        assert (group.size, group.leads) == (2, leads())
        seed = 0 if group.leads else 7  # the weights must come from the leading process

        def part(stream, resume):
            return train(CONFIG, Tiny(0.0, seed=seed, dtype=torch.float64), stream, folder, resume=resume, show_progress=False)

        with pytest.raises(RuntimeError, match="the machine broke"):  # in both at step 9, before anything is sent
            part(Failing(8 * 16), False)
        part(Numbers(), True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
