"""Kimi Delta Attention on CPUs: the functions of fla.ops.kda over numpy arrays."""

from kda.config import KDAConfig
from kda.layer import KDALayer
from kda.ops import (
    causal_conv1d,
    causal_conv1d_update,
    chunk_kda,
    fused_kda_gate,
    fused_recurrent_kda,
    l2norm,
    no_updates,
    rms_norm_gated,
    settle,
)
from kda.plan import nvme_ceiling, plan
from kda.quant import QuantizedMatrix
from kda.runtime import get_num_threads, isas, set_num_threads, show_runtime
from kda.session import Session
from kda.state import KDAState
from kda.weights import tensor_shapes

__version__ = "0.1.0"

__all__ = [
    "KDAConfig",
    "KDALayer",
    "KDAState",
    "QuantizedMatrix",
    "Session",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_kda",
    "fused_kda_gate",
    "fused_recurrent_kda",
    "get_num_threads",
    "isas",
    "l2norm",
    "no_updates",
    "nvme_ceiling",
    "plan",
    "rms_norm_gated",
    "set_num_threads",
    "settle",
    "show_runtime",
    "tensor_shapes",
]
