"""What every test file shares: the ISAs of this machine as a parameter, and the marker for long tests."""
import pytest
from helpers import ISAS

import kda


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: seconds natively, minutes under emulation; -m 'not slow' leaves it out")


@pytest.fixture(params=ISAS)
def isa(request):
    """Each ISA that this machine runs."""
    return request.param


@pytest.fixture
def threads():
    """set_num_threads, undone after the test."""
    before = kda.get_num_threads()
    yield kda.set_num_threads
    kda.set_num_threads(before)
