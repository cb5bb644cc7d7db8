"""What every test file shares: the ISAs of this machine as a parameter, the marker for long tests, and how long
hypothesis looks: `--hypothesis-profile nightly` tries other inputs each time, fifty times as many."""
import pytest
from helpers import ISAS
from hypothesis import HealthCheck, settings

import kda

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]  # machines are emulated, or busy
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=100, suppress_health_check=CHECKS)
settings.register_profile("nightly", deadline=None, derandomize=False, max_examples=5000, print_blob=True,
                          suppress_health_check=CHECKS)
settings.load_profile("quick")  # --hypothesis-profile comes after this


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
