"""The tensors of a KDA layer: their names and shapes in a checkpoint, and reading them from safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kda.config import KDAConfig
from kda.files import Safetensors
from kda.ops import _F32, Array, _array, _check_dtype, _described, _packed

if TYPE_CHECKING:
    from pathlib import Path

# transformers' modules gather some tensors of the checkpoints under other names.
_ALSO = {name: f"forget_gate.{name}" for name in ("A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight")}
_CONVS = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
_PADDED_HEADS = 128  # K3 stores A_log with zeros up to a multiple of this


def tensor_shapes(config: KDAConfig) -> dict[str, tuple[int, ...]]:
    """Name (behind the prefix) and shape of each tensor of one KDA layer. Convolutions as [D, 1, W], A_log as [HV]."""
    hidden, rank, W = config.hidden_size, config.head_dim, config.conv_size
    qk, v = config.num_heads * config.head_dim, config.num_v_heads * config.v_head_dim
    decay = config.num_v_heads * config.head_dim
    gate: dict[str, tuple[int, ...]] = ({"g_proj.weight": (v, hidden)} if config.full_rank_gate else
                                        {"g_a_proj.weight": (rank, hidden), "g_b_proj.weight": (v, rank)})
    return {
        "q_proj.weight": (qk, hidden), "k_proj.weight": (qk, hidden), "v_proj.weight": (v, hidden),
        "q_conv1d.weight": (qk, 1, W), "k_conv1d.weight": (qk, 1, W), "v_conv1d.weight": (v, 1, W),
        "A_log": (config.num_v_heads,), "dt_bias": (decay,),
        "f_a_proj.weight": (rank, hidden), "f_b_proj.weight": (decay, rank),
        "b_proj.weight": (config.num_v_heads, hidden), **gate,
        "o_norm.weight": (config.v_head_dim,), "o_proj.weight": (hidden, v),
    }


def layer_tensors(config: KDAConfig, tensors: Mapping[str, Any], prefix: str) -> dict[str, Array]:
    """The tensors of the layer at `prefix`, by the names of tensor_shapes, in those shapes; small ones as float32.

    Raises ValueError that names every missing, surplus and misshapen tensor with what was expected; TypeError for a
    dtype that is not float32, float16 or bfloat16.
    """
    want = tensor_shapes(config)
    here = {name[len(prefix):]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    for name, other in _ALSO.items():
        if other in here and name not in here:
            here[name] = here.pop(other)
    if "conv1d.weight" in here and not any(name in here for name in _CONVS):
        here |= _split_conv(_array(f"{prefix}conv1d.weight", here.pop("conv1d.weight")), want, prefix)
    faults = [f"missing {prefix}{name}, expected {list(shape)}" for name, shape in want.items() if name not in here]
    faults += [f"surplus {prefix}{name}, {list(np.shape(here[name]))}" for name in here if name not in want]
    result = {}
    for name, shape in want.items():
        if name not in here:
            continue
        x = _array(prefix + name, here[name])
        _check_dtype(prefix + name, x)
        if not name.endswith("_proj.weight"):
            x = _packed(x, _F32)  # a handful of values
        got = _reshaped(name, x, shape)
        if got is None:
            expected = f"[{shape[0]}, {shape[2]}] or {list(shape)}" if name in _CONVS else list(shape)
            faults.append(f"{prefix}{name}: expected {expected}, got {_described(x)}")
        else:
            result[name] = got
    if faults:
        raise ValueError(f"tensors of a KDA layer of {config.model_type}: " + "; ".join(faults))
    return result


def _reshaped(name: str, x: Array, shape: tuple[int, ...]) -> Array | None:
    """x in the shape wanted, or None where it has another."""
    if name == "A_log":
        heads = shape[0]
        padded = -(-heads // _PADDED_HEADS) * _PADDED_HEADS
        flat = x.reshape(-1)
        if max(x.shape, default=1) != x.size:  # one axis of heads, the others 1
            return None
        if flat.size == heads:
            return flat
        return flat[:heads].copy() if flat.size == padded and not flat[heads:].any() else None
    if name in _CONVS and x.shape == (shape[0], shape[2]):
        return x.reshape(shape)
    return x if x.shape == shape else None


def _split_conv(weight: Array, want: Mapping[str, tuple[int, ...]], prefix: str) -> dict[str, Array]:
    """transformers' one convolution over q, k and v as three."""
    sizes = [want[name][0] for name in _CONVS]
    if weight.ndim < 2 or weight.shape[0] != sum(sizes):
        raise ValueError(f"{prefix}conv1d.weight: expected [{sum(sizes)}, 1, {want[_CONVS[0]][2]}], "
                         f"got {list(weight.shape)}")
    return dict(zip(_CONVS, np.split(weight, np.cumsum(sizes)[:-1]), strict=True))


def read_safetensors(path: str | os.PathLike[str], prefix: str) -> dict[str, Array]:
    """The tensors whose names start with `prefix`: from one file, from a *.index.json and its shards, or from a
    directory that holds model.safetensors.index.json or model.safetensors.

    Raises FileNotFoundError, ValueError for files that are no safetensors or lack a tensor the index promises, and
    TypeError for dtypes that numpy does not have.
    """
    from pathlib import Path

    from safetensors import SafetensorError

    path = Path(path)
    if path.is_dir():
        index, single = path / "model.safetensors.index.json", path / "model.safetensors"
        path = index if index.exists() else single
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; expected a .safetensors file, its .index.json, or a directory "
                                "with model.safetensors or model.safetensors.index.json")
    shards: dict[Path, list[str] | None] = {path: None}
    if path.suffix == ".json":
        try:
            names = json.loads(path.read_text())["weight_map"]
            shards = {}
            for name, file in names.items():
                if name.startswith(prefix):
                    if Path(file).is_absolute() or ".." in Path(file).parts:
                        raise ValueError(f"{name}: expected a file beside the index, got {file!r}")
                    wanted = shards.setdefault(path.parent / file, [])
                    assert wanted is not None
                    wanted.append(name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}: is no index of safetensors (weight_map of names to files): {error}") from error
    tensors = {}
    for file, wanted in shards.items():
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file, though {path.name} names it")
        try:
            with Safetensors(file) as opened:
                for name in opened.names if wanted is None else wanted:
                    if name.startswith(prefix):
                        tensors[name] = opened.read(name)
        except TypeError as error:  # float8 and smaller
            raise TypeError(f"{file}: {name}: expected float32, float16 or bfloat16, got {opened.about(name)[0]}; "
                            "convert the checkpoint first") from error
        except (SafetensorError, ValueError, KeyError) as error:
            raise ValueError(f"{file}: is not a complete safetensors file, or lacks a tensor: {error}") from error
    return tensors
