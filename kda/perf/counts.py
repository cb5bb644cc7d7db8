"""The shapes of the shipped models, which the benchmarks run."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from typing import Any

from kda.config import KDAConfig
from kda.plan import Shape as Shape
from kda.plan import delta_rule


def model_config(name: str) -> dict[str, Any]:
    """A shipped layer configuration under the keys of the model's config.json: kimi_linear_48b or kimi_k3."""
    config: dict[str, Any] = json.loads(files("kda").joinpath("data", f"{name}.json").read_text(encoding="utf-8"))
    return config.get("text_config", config)


def model_shape(name: str, title: str) -> Shape:
    """All KDA layers of a shipped model."""
    return delta_rule(KDAConfig.from_hf(model_config(name)), title)


KIMI_LINEAR_CONFIG = KDAConfig.from_hf(model_config("kimi_linear_48b"))
KIMI_LINEAR = model_shape("kimi_linear_48b", "Kimi-Linear")
KIMI_LINEAR_LAYER = replace(KIMI_LINEAR, layers=1)
K3 = model_shape("kimi_k3", "Kimi K3")
K3_LAYER = replace(K3, layers=1)
