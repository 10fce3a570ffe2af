import signal

import pytest
import torch


def pytest_configure():
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what it runs in the background like that
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
