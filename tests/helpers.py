"""Inputs, comparisons and subprocesses for the tests."""
import os
import shlex
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings

import kda

ISAS = [name for name, runs_here in kda.isas().items() if runs_here]
BF16 = np.dtype(ml_dtypes.bfloat16)


def normalised(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def make_inputs(seed, B, T, H, HV, K, V, N=None, dtype=np.float32):
    """The plan's inputs: q and k on the unit sphere, v normal, g uniform in (-0.5, 0), beta in (0, 1)."""
    rng = np.random.default_rng(seed)
    x = {
        "q": normalised(rng.standard_normal((B, T, H, K))),
        "k": normalised(rng.standard_normal((B, T, H, K))),
        "v": rng.standard_normal((B, T, HV, V)),
        "g": rng.uniform(-0.5, 0, (B, T, HV, K)),
        "beta": 1 / (1 + np.exp(-rng.standard_normal((B, T, HV)))),
    }
    x = {name: array.astype(dtype) for name, array in x.items()}
    if N is not None:
        x["initial_state"] = rng.standard_normal((N, HV, K, V)).astype(np.float32)
    return x


def widened(x):
    """float16 and bfloat16 arrays as float32; everything else as it is."""
    return {name: a.astype(np.float32) if isinstance(a, np.ndarray) and a.dtype.itemsize == 2 else a
            for name, a in x.items()}


def relative_error(got, want):
    """max|got - want| relative to the largest value of `want`; inf where either is not finite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    if got.size == 0:
        return 0.0
    if not (np.isfinite(got).all() and np.isfinite(want).all()):
        return np.inf
    return float(np.max(np.abs(got - want)) / max(np.max(np.abs(want)), 1e-30))


def same_bits(a, b):
    """Equal shapes and equal bytes: -0.0 is not 0.0, and NaN is the same NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def python(code, *, timeout=120, check=True, **environment):
    """Runs `code` in a new interpreter, which sees the same kda. Returns the finished process.

    Under emulation an interpreter cannot start itself; KDA_TEST_PYTHON is the command that starts one there.
    """
    command = shlex.split(os.environ.get("KDA_TEST_PYTHON", "")) or [sys.executable]
    ours = ("KDA_ISA", "KDA_NUM_THREADS", "OMP_NUM_THREADS")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    env |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | environment
    try:
        done = subprocess.run([*command, "-c", code], env=env, timeout=timeout, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"an emulated interpreter cannot start {command[0]} ({error}); set KDA_TEST_PYTHON")
    if check:
        assert done.returncode == 0, done.stderr
    return done


def search(percent):
    """Settings of a property: its share of the examples of the profile (conftest.py), which has 100 or many more."""
    return settings(max_examples=max(1, settings.default.max_examples * percent // 100))
