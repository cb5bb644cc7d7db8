"""A small real job for an installed kda, away from its source: python installed.py [ISA]

Layers of Kimi-Linear's form take a prompt in blocks, then token by token, drop tokens, are saved and loaded, and go on;
the outputs must be those of one call. ISA: which one kda must have chosen here.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import kda

chosen = kda.runtime.chosen_isa()
assert chosen == sys.argv[-1] or len(sys.argv) == 1, f"{chosen} was chosen, expected {sys.argv[-1]}"

config = kda.KDAConfig("kimi_linear", hidden_size=256, num_layers=2, kda_layers=(0, 1), num_heads=2, num_v_heads=2,
                       head_dim=128, v_head_dim=128, conv_size=4)
rng = np.random.default_rng(0)
x = rng.standard_normal((1, 44, 256), dtype=np.float32)
tensors = {name: rng.standard_normal(shape, dtype=np.float32) / 16 for name, shape in kda.tensor_shapes(config).items()}


def step(layer, session, start, end):
    """The tokens [start, end) through both layers, and around each of them."""
    y = x[:, start:end]
    for state in session.layers:
        y = y + layer(y, state)
    return y


for weight_format, bound in (("f32", 1e-5), ("q8g", 2e-2)):
    layer = kda.KDALayer.from_tensors(config, tensors, prefix="", weight_format=weight_format,
                                      recurrent_max=16)
    session = kda.Session(config, rollback_window=4)

    parts = [step(layer, session, 0, 30), *(step(layer, session, t, t + 1) for t in range(30, 40))]
    session.rollback(2)
    with tempfile.TemporaryDirectory() as folder:
        session.save(Path(folder, "session"))
        session = kda.Session.load(Path(folder, "session"), config)
    assert session.position == 38
    y = np.concatenate([*parts[:-2], step(layer, session, 38, 44)], axis=1)
    session.reset()
    want = step(layer, session, 0, 44)
    error = float(np.abs(y - want).max() / np.abs(want).max())
    assert error <= bound, f"{weight_format}: {error}"
    print(f"kda {kda.__version__}, {chosen}, {weight_format}: in pieces within {error:.1e} of one call")
