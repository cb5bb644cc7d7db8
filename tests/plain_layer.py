"""Configs of small layers, seeded tensors for them, and their float64 results."""
import numpy as np

from kda import reference
from kda.config import KDAConfig
from kda.weights import tensor_shapes

TINY = KDAConfig("kimi_linear", 48, 3, (0, 2), 2, 2, 16, 16, 4)
GVA = KDAConfig("kimi_linear", 40, 2, (0, 1), 2, 4, 24, 8, 3)
K3 = KDAConfig("kimi_k3", 56, 2, (0,), 3, 3, 16, 24, 4, gate_lower_bound=-5.0, full_rank_gate=True)
NO_HISTORY = KDAConfig("glm5_next", 32, 1, (0,), 2, 2, 8, 8, 1, gate_lower_bound=-5.0)
CONFIGS = [TINY, GVA, K3, NO_HISTORY]
KIMI = KDAConfig("kimi_linear", 2304, 27, tuple(i for i in range(27) if i not in (3, 7, 11, 15, 19, 23, 26)), 32, 32,
                 128, 128, 4)


def seeded(config, seed=0, prefix="model.layers.0.self_attn."):
    """Tensors of one layer under their checkpoint's names, of the sizes that trained ones have."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        w = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("_proj.weight"):
            w *= shape[1]**-0.5
        elif "conv1d" in name:
            w *= 0.5
        elif name == "A_log":
            w = np.log(rng.uniform(1, 16, shape)).astype(np.float32)
        elif name == "dt_bias":
            w -= 4
        else:
            w = 1 + 0.1 * w
        tensors[prefix + name] = w
    return tensors


def plain_layer(config, tensors, x, state=None, prefix="model.layers.0.self_attn."):
    """reference.kda_layer for a config and a checkpoint's tensors."""
    shapes = tensor_shapes(config)
    return reference.kda_layer(x, {name: np.reshape(tensors[prefix + name], shapes[name]) for name in shapes},
                               config.num_heads, config.num_v_heads, config.gate_lower_bound, config.norm_eps, state)
