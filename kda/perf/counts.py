"""Work and bytes of the delta rule, counted from its definition, and the shapes of the shipped models.

A MAC is one multiply-add; a FLOP is one multiply or one add, so 2 FLOP make a MAC. GB is 10^9 bytes, MiB is
2^20. The counts are those of the recurrence, whatever a kernel does to compute it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

# Floating-point instructions' lanes that the recurrent kernel spends on one state element and token: the
# multiply-adds of S^T k, of S^T q and of the rank-1 update, and the multiplication by the decay.
LANE_OPS_PER_ELEMENT = 4


@dataclass(frozen=True)
class Shape:
    """`layers` KDA layers of HV value heads, each with a float32 state of K x V, served by H query/key heads."""

    name: str
    H: int
    HV: int
    K: int
    V: int
    layers: int = 1

    @property
    def elements(self) -> int:
        """State elements: layers * HV * K * V."""
        return self.layers * self.HV * self.K * self.V

    @property
    def state_bytes(self) -> int:
        """Bytes of the float32 state."""
        return 4 * self.elements

    @property
    def mac(self) -> int:
        """Multiply-adds per token of the delta rule: S^T k, the rank-1 update and S^T q are K * V each."""
        return 3 * self.elements

    @property
    def flop(self) -> int:
        """2 FLOP per MAC, without the decay."""
        return 2 * self.mac

    @property
    def flop_with_decay(self) -> int:
        """flop and the K * V multiplications per head of diag(exp(g)) S."""
        return self.flop + self.elements

    @property
    def traffic_bytes(self) -> int:
        """Bytes per token that a step must move if the state is read once and written once."""
        return 2 * self.state_bytes

    @property
    def lane_ops(self) -> int:
        """Floating-point instruction lanes per token of the recurrent kernel; a multiply-add lane counts as 1."""
        return LANE_OPS_PER_ELEMENT * self.elements


def model_config(name: str) -> dict[str, Any]:
    """A shipped layer configuration under the keys of the model's config.json: kimi_linear_48b or kimi_k3."""
    config: dict[str, Any] = json.loads(files("kda").joinpath("data", f"{name}.json").read_text(encoding="utf-8"))
    return config.get("text_config", config)


def model_shape(name: str, title: str) -> Shape:
    """All KDA layers of a shipped model."""
    kda = model_config(name)["linear_attn_config"]
    heads, dim = kda["num_heads"], kda["head_dim"]
    return Shape(title, heads, heads, dim, dim, len(kda["kda_layers"]))


KIMI_LINEAR = model_shape("kimi_linear_48b", "Kimi-Linear")
KIMI_LINEAR_LAYER = replace(KIMI_LINEAR, layers=1)
K3 = model_shape("kimi_k3", "Kimi K3")
K3_LAYER = replace(K3, layers=1)
