"""The fuzz targets on their seeds and on a fixed sequence of mutations; and that a broken promise is noticed."""
import random

import pytest
import targets
from targets import TARGETS, mutated

import kda

FILES = [name for name in TARGETS if name not in targets.test_arguments.PROPERTIES]


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs(name):
    rng = random.Random(4)
    seeds = list(TARGETS[name].seeds())
    for data in seeds + [mutated(rng.choice(seeds), rng) for _ in range(100 if name in FILES else 20)]:
        TARGETS[name].one(data)


@pytest.mark.parametrize("name", FILES)
def test_seeds_are_accepted(name, monkeypatch):
    """So that what comes behind the parser is reached at all."""
    results, accepted = [], targets.accepted
    monkeypatch.setattr(targets, "accepted", lambda *a, **k: results.append(accepted(*a, **k)) or results[-1])
    for data in TARGETS[name].seeds():
        results.clear()
        TARGETS[name].one(data)
        assert any(result is not None for result in results)


@pytest.mark.parametrize("fault", [KeyError("shape"), ValueError("wrong shape"), None])
def test_a_broken_promise_is_noticed(monkeypatch, fault):
    """An exception of another kind, a message that names no file, another result."""
    seed = next(TARGETS["matrix_file"].seeds())
    load = kda.QuantizedMatrix.load

    def broken(path, isa=None):
        if fault:
            raise fault
        m = load(path, isa=isa)
        return kda.QuantizedMatrix.from_codes(m.codes, m.scales * 2, m.shape, m.bits, m.group_size)

    monkeypatch.setattr(kda.QuantizedMatrix, "load", broken)
    with pytest.raises((AssertionError, KeyError)):
        TARGETS["matrix_file"].one(seed)


def test_memory_is_bounded(monkeypatch):
    """A parser that believes a small file's large number."""
    monkeypatch.setattr(kda.QuantizedMatrix, "load", lambda path: bytearray(1 << 26))
    with pytest.raises(AssertionError, match=r"67,\d+,\d+ bytes for an input of"):
        TARGETS["matrix_file"].one(next(TARGETS["matrix_file"].seeds()))
