"""The stored float32 results of the kernels of flash-linear-attention 0.6.0."""
from pathlib import Path

import numpy as np
import pytest
from helpers import relative_error

import kda
from kda import reference

FILES = {p.stem: p for folder in (Path(kda.__file__).parent / "data" / "golden", Path(__file__).parent / "golden")
         for p in folder.glob("*.npz") if p.stem != "hf_tiny_kimi_linear"}
NAMES = ["lb5_K128_T1", "lb5_varlen", "softplus_D60_noh0", "softplus_gva_T70"]


def stored(name):
    """(arguments, o, final state) of one file."""
    with np.load(FILES[name]) as file:
        x = dict(file)
    arguments = {n: x[n] for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state") if n in x}
    if not np.isnan(x["lower_bound"]):
        arguments["lower_bound"] = float(x["lower_bound"])
    if x["cu_seqlens"].size:
        arguments["cu_seqlens"] = x["cu_seqlens"]
    arguments |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True,
                  "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": bool(x["neg"])}
    return arguments, x["o_rec"], x["s_rec"]


def test_the_files_are_the_ones_tested():
    assert sorted(FILES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_isa(name, isa):
    arguments, o, state = stored(name)
    got_o, got_state = kda.fused_recurrent_kda(**arguments, isa=isa)
    assert relative_error(got_o, o) <= 2e-6
    assert relative_error(got_state, state) <= 2e-6


@pytest.mark.parametrize("name", NAMES)
def test_the_reference(name):
    arguments, o, state = stored(name)
    got_o, got_state = reference.fused_recurrent_kda(**arguments)
    assert relative_error(got_o, o) <= 2e-6
    assert relative_error(got_state, state) <= 2e-6
