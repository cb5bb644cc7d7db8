"""A KDA layer written plainly in float64, and seeded tensors for one: what the tests of the layer compare with."""
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
    """(y, (S, histories of q, k, v [B, D, W - 1])) in float64, from SPEC-shaped tensors: x [B, T, hidden]."""
    c = config
    w = {name: np.asarray(tensors[prefix + name], np.float64).reshape(shape)
         for name, shape in tensor_shapes(c).items()}
    x = np.asarray(x, np.float64)
    B, T = x.shape[:2]
    S, pasts = state if state is not None else (None, [None] * 3)
    rows, histories = [], []
    for name, heads, past in zip("qkv", (c.num_heads, c.num_heads, c.num_v_heads), pasts, strict=True):
        y, history = reference.causal_conv1d(x @ w[f"{name}_proj.weight"].T, w[f"{name}_conv1d.weight"][:, 0], None,
                                             "silu", past, True)
        rows.append(y.reshape(B, T, heads, -1))
        histories.append(history)
    g = (x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T).reshape(B, T, c.num_v_heads, c.head_dim)
    o, S = reference.fused_recurrent_kda(
        *rows, g, x @ w["b_proj.weight"].T, w["A_log"], w["dt_bias"], None, S, True, True, True, True,
        lower_bound=c.gate_lower_bound)
    gate = (x @ w["g_proj.weight"].T if c.full_rank_gate else x @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T)
    o = reference.rms_norm_gated(o, gate.reshape(o.shape), w["o_norm.weight"], c.norm_eps)
    return o.reshape(B, T, -1) @ w["o_proj.weight"].T, (S, histories)
