"""transformers on the CPU: KDA layers of Kimi-Linear and GLM-5-Next models run by this package's kernels.

    report = accelerate(model)          # model.generate() and all the rest as before
    print(report)

A model keeps its modules, their parameters and their names, so it saves and reloads as before; what changes is the
forward pass of its linear attention layers, and what they keep in the cache.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from kda.adapters import torch as kt
from kda.config import KDAConfig
from kda.layer import KDALayer
from kda.quant import QuantizedMatrix
from kda.state import KDAState

# Linear attention modules of transformers, and the name of their family in a KDAConfig.
_FAMILIES = {"KimiLinearDeltaAttention": "kimi_linear", "Glm5NextTextLinearAttention": "glm5_next"}
_EXPERTS = ("KimiLinearExperts", "Glm5NextTextExperts")
_KEPT = ("weights_proj",)  # Linear layers, small ones, whose weight the modelling code looks at itself
_BITS = {"q8g": 8, "q4g": 4}


@dataclass
class Report:
    """What accelerate did. `layers` are the names of the KDA layers, `linears` and `experts` those of the modules whose
    weights were quantised; the bytes are of those weights alone, before and as this package holds them."""

    weight_format: str
    layers: list[str] = field(default_factory=list)
    linears: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0

    def __str__(self) -> str:
        text = f"kda: {len(self.layers)} KDA layers ({self.weight_format})"
        if self.linears or self.experts:
            text += f", {len(self.linears)} linear layers and {len(self.experts)} sets of experts quantised"
        return f"{text}; weights {self.bytes_before / 1e9:.3f} GB -> {self.bytes_after / 1e9:.3f} GB"


def accelerate(model: nn.Module, weight_format: str | None = None, *, quantize_rest: bool = False,
               release_weights: bool = False, rollback_window: int = 64) -> Report:
    """Run the KDA layers of a transformers model on the CPU with this package, in place.

    Parameters
    ----------
    model : KimiLinearForCausalLM, a GLM-5-Next model, or any module that holds their linear attention layers.
    weight_format : of these layers' projections: None (float32), "q8g" or "q4g". The copy is made now; weights that
        change later need another call.
    quantize_rest : also quantise every other torch.nn.Linear, and the experts, in that format. (GLM-5-Next's small
        weights_proj stays.) The state dict then holds codes and scales.
    release_weights : free the original weights of the KDA layers. The model can then be run without gradients and no
        more: not saved, trained or restored.
    rollback_window : tokens that can be dropped from a cache that records its past, as assisted decoding does.

    Without gradients a layer runs in float32 whatever the model's dtype, and each row of a batch, padded on either
    side, gives what it gives alone. Where a gradient is wanted, the projections are torch's and what lies between them
    is kda.adapters.torch, over the live parameters.

    Returns a Report. Raises ValueError for a model without such layers, off the CPU, with an activation other than SiLU
    or an unknown weight_format; then nothing has changed.
    """
    if weight_format not in (None, *_BITS):
        raise ValueError(f"weight_format: expected None, 'q8g' or 'q4g', got {weight_format!r}")
    if quantize_rest and weight_format is None:
        raise ValueError("quantize_rest: needs a weight_format, 'q8g' or 'q4g'")
    found = {name: module for name, module in model.named_modules() if type(module).__name__ in _FAMILIES}
    if not found:
        raise ValueError(f"model: {type(model).__name__} has no KDA layers ({', '.join(_FAMILIES)})")
    report = Report(weight_format or "f32")
    made = {name: _Runner(module, _config(name, module), report.weight_format, rollback_window)
            for name, module in found.items()}
    for name, runner in made.items():
        runner.install(release_weights)
        report.layers.append(name)
        report.bytes_before += runner.bytes_before
        report.bytes_after += runner.layer.nbytes
    if quantize_rest:
        _quantize_rest(model, _BITS[report.weight_format], tuple(f"{name}." for name in found), report)
    if hasattr(model, "_is_stateful"):
        model._is_stateful = False  # the states of these layers can go back, so assisted decoding may run
    return report


def restore(model: nn.Module) -> None:
    """Give the KDA layers of an accelerated model their own forward pass again. Quantised modules stay, and a cache
    that the accelerated layers wrote is not readable by the others."""
    for module in model.modules():
        runner = module.__dict__.get("_kda_runner")
        if runner is not None:
            if runner.released:
                raise ValueError("model: its weights were released; load it again")
            del module.forward, module._kda_runner
    if "_is_stateful" in model.__dict__:
        del model._is_stateful


def _config(name: str, attention: Any) -> KDAConfig:
    """What a linear attention module says about itself."""
    if attention.activation not in ("silu", "swish"):
        raise ValueError(f"{name}: expected the activation 'silu', got {attention.activation!r}")
    parameters = {f"{name}.{key}": p for key, p in attention.named_parameters()}
    for key, p in parameters.items():
        if p.device.type != "cpu":
            raise ValueError(f"{key}: expected a weight on the CPU, got one on {p.device}")
    return KDAConfig(
        model_type=_FAMILIES[type(attention).__name__], hidden_size=attention.hidden_size,
        num_layers=attention.layer_idx + 1, kda_layers=(attention.layer_idx,), num_heads=attention.num_heads,
        num_v_heads=attention.num_heads, head_dim=attention.head_dim, v_head_dim=attention.head_dim,
        conv_size=attention.conv_kernel_size, norm_eps=attention.o_norm.variance_epsilon,
        gate_lower_bound=getattr(attention.forget_gate, "safe_gate_lower_bound", None))


class _Runner:
    """One linear attention module's forward pass."""

    def __init__(self, attention: Any, config: KDAConfig, weight_format: str, window: int) -> None:
        self.attention, self.config, self.window, self.released = attention, config, window, False
        tensors = {name: kt.as_array(p, name) for name, p in attention.named_parameters()}
        self.bytes_before = sum(a.nbytes for a in tensors.values())
        self.layer = KDALayer.from_tensors(config, tensors, "", weight_format)

    def install(self, release: bool) -> None:
        """Put this forward pass in the module's place; `release` frees the module's own weights."""
        self.attention._kda_runner = self
        self.attention.forward = self.forward
        if release:
            self.released = True
            for p in self.attention.parameters():
                p.requires_grad_(False)
                p.data = torch.empty(0, dtype=p.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Runner:
        raise TypeError("an accelerated model cannot be copied; call restore(model) first, and accelerate both")

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None,
                **kwargs: Any) -> Tensor:
        """[B, T, hidden_size] to the same; `cache` moves on in place."""
        cache = kwargs.get("cache_params", cache)  # its older name
        kept = None if cache is None else self._kept(cache, hidden_states.shape[0])
        cu_seqlens = kwargs.get("cu_seqlens")
        if cu_seqlens is not None:
            if kept is not None or attention_mask is not None:
                raise ValueError("cu_seqlens: packed sequences take neither a cache nor an attention mask")
            return self._differentiable(hidden_states, None, None, cu_seqlens)
        if kwargs.get("seq_idx") is not None:
            raise ValueError("seq_idx: expected packed sequences as cu_seqlens")
        if torch.is_grad_enabled() and (hidden_states.requires_grad or any(
                p.requires_grad for p in self.attention.parameters())):
            return self._differentiable(hidden_states, kept, attention_mask)
        x = kt.as_array(hidden_states, "hidden_states")
        state = self.layer.new_state(len(x)) if kept is None else kept.state
        if attention_mask is None:
            return kt.as_tensor(self.layer(x, state))
        mask = kt.as_array(attention_mask, "attention_mask").astype(bool)
        lengths = mask.sum(1)
        before, T = np.arange(x.shape[1]), x.shape[1]
        for side, padded in (("left", before >= T - lengths[:, None]), ("right", before < lengths[:, None])):
            if np.array_equal(mask, padded):
                return kt.as_tensor(self.layer(x, state, lengths, side))
        packed = np.zeros((len(x), int(lengths.max()), x.shape[2]), x.dtype)  # holes, or both sides in one batch
        for row, to, valid in zip(x, packed, mask, strict=True):
            to[:valid.sum()] = row[valid]
        results = self.layer(packed, state, lengths)
        y = np.zeros_like(x)
        for row, result, valid in zip(y, results, mask, strict=True):
            row[valid] = result[:valid.sum()]
        return kt.as_tensor(y)

    def _kept(self, cache: Cache, batch: int) -> KDACacheLayer:
        """This layer's part of the cache, ours from the first call on."""
        layers, index = cache.layers, self.attention.layer_idx
        if index >= len(layers) or not isinstance(layers[index], LinearAttentionCacheLayerMixin):
            raise ValueError(f"cache: no linear attention layer {index}; expected DynamicCache(config=model.config)")
        kept = layers[index]
        if not isinstance(kept, KDACacheLayer):
            kept = layers[index] = KDACacheLayer(self.layer, self.window, kept)
        kept.start(batch)
        return kept

    def _differentiable(self, x: Tensor, kept: KDACacheLayer | None, attention_mask: Tensor | None,
                        cu_seqlens: Tensor | None = None) -> Tensor:
        """The same over the live parameters, with a graph; padded rows are packed."""
        if self.released:
            raise ValueError("hidden_states: a gradient is wanted, and the layer's weights were released; run it under "
                             "torch.no_grad()")
        a, batch, places = self.attention, x.shape[:2], None
        if attention_mask is not None:
            mask = attention_mask.bool()
            places = mask.flatten().nonzero().flatten()
            cu_seqlens = F.pad(mask.sum(1).cumsum(0), (1, 0))
            x = x.flatten(0, 1)[places].unsqueeze(0)
        heads = (a.num_heads, a.head_dim)
        history = S = None
        if kept is not None:
            history, S = kept.history(), kept.recurrent_states[0]
        raw = torch.cat([a.q_proj(x), a.k_proj(x), a.v_proj(x)], dim=-1)
        qkv, history = kt.causal_conv1d(raw, a.conv1d.weight, None, "silu", history, kept is not None, cu_seqlens)
        q, k, v = (part.unflatten(-1, heads) for part in qkv.chunk(3, dim=-1))
        gate = a.forget_gate
        o, S = kt.chunk_kda(
            q, k, v, gate.f_b_proj(gate.f_a_proj(x)).unflatten(-1, heads), a.b_proj(x), gate.A_log, gate.dt_bias,
            initial_state=S, output_final_state=kept is not None, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, lower_bound=self.config.gate_lower_bound, cu_seqlens=cu_seqlens)
        if kept is not None:
            assert history is not None
            assert S is not None
            kept.load(S, history, torch.full((batch[0],), batch[1]) if cu_seqlens is None else torch.diff(cu_seqlens))
        o = kt.rms_norm_gated(o, a.g_b_proj(a.g_a_proj(x)).unflatten(-1, heads), a.o_norm.weight, self.config.norm_eps)
        y = a.o_proj(o.flatten(2).to(x.dtype))
        if places is not None:
            y = y.new_zeros(batch.numel(), y.shape[-1]).index_copy(0, places, y[0]).unflatten(0, batch)
        return y


class KDACacheLayer(LinearAttentionCacheLayerMixin):
    """A cache layer around a KDAState. It can be cropped where the cache records its past, which transformers' own
    linear attention layers cannot, since their states do not go back."""

    is_compileable = False

    def __init__(self, layer: KDALayer, window: int, before: LinearAttentionCacheLayerMixin) -> None:
        """In the place of `before`, whose states are taken over."""
        self.number_of_states = 1
        self.record_past = before.record_past
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.conv_kernel_size = {0: layer.config.conv_size}
        self._layer, self._window = layer, window
        self._state: KDAState | None = None
        if before.has_previous_state[0]:
            S, history = before.recurrent_states[0], before.conv_states[0]
            assert S is not None
            assert history is not None
            self.start(len(S))
            self.load(S, history[:, :, 1 - layer.config.conv_size:], torch.ones(len(S), dtype=torch.int64))

    def __deepcopy__(self, memo: dict[int, Any]) -> KDACacheLayer:
        """An independent state of the same layer, whose weights are not copied."""
        other = copy.copy(self)
        other._state = copy.deepcopy(self._state, memo)
        return other

    # ---- for the layer ----

    @property
    def state(self) -> KDAState:
        """The state; only after `start`."""
        assert self._state is not None
        return self._state

    def start(self, batch: int) -> None:
        """Make the state at the first call; later ones must be of as many rows."""
        if self._state is None:
            self._state = self._layer.new_state(batch, self._window if self.record_past else 0)
        elif self._state.batch != batch:
            raise ValueError(f"cache: holds {self._state.batch} rows, got a batch of {batch}")

    def load(self, S: Tensor, history: Tensor, tokens: Tensor) -> None:
        """Replace the state [B, H, K, V] and the histories [B, 3 D, W - 1]; `tokens` [B] are added to the positions."""
        parts = [kt.as_array(part) for part in history.detach().float().chunk(3, dim=1)]
        self.state.assign(kt.as_array(S.detach().float()), parts[0], parts[1], parts[2],
                          self.state.positions + tokens.numpy())

    def history(self) -> Tensor:
        """The last W - 1 raw inputs of q, k and v, [B, 3 D, W - 1], a copy."""
        return torch.from_numpy(np.concatenate([self.state.conv_q, self.state.conv_k, self.state.conv_v], axis=1))

    # ---- for the cache ----

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """{0: whether any row has taken a token}."""
        return {0: self._state is not None and bool(self._state.positions.any())}

    @property
    def conv_states(self) -> dict[int, Tensor | None]:
        """{0: the last W raw inputs of q, k and v [B, 3 D, W], the oldest as 0}, a copy; None before the first call."""
        return {0: None if self._state is None else F.pad(self.history(), (1, 0))}

    @property
    def recurrent_states(self) -> dict[int, Tensor | None]:
        """{0: S [B, H, K, V]}, a copy; None before the first call."""
        return {0: None if self._state is None else torch.from_numpy(self._state.arrays()[0])}

    @property
    def is_conv_states_initialized(self) -> dict[int, bool]:
        """{0: whether the first call has been}."""
        return {0: self._state is not None}

    @property
    def is_recurrent_states_initialized(self) -> dict[int, bool]:
        """{0: whether the first call has been}."""
        return {0: self._state is not None}

    @property
    def batch_size(self) -> int:
        """Rows B. AttributeError before the first call."""
        if self._state is None:
            raise AttributeError("batch_size: known from the first call on")
        return self._state.batch

    @property
    def is_croppable(self) -> bool:
        """Whether crop can drop tokens: the state has a rollback window."""
        return self._state is not None and self._state.rollback_window > 0

    def activate_past_recording(self) -> None:
        """Let crop drop tokens that are taken from now on."""
        self.record_past = True
        if self._state is not None and not self._state.rollback_window:
            old, self._state = self._state, self._layer.new_state(self._state.batch, self._window)
            self._state.assign(*old.arrays(), old.positions)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last -tokens_to_remove tokens, bit for bit."""
        if tokens_to_remove > 0:
            raise RuntimeError("crop: expected a number <= 0, minus the tokens to remove")
        if tokens_to_remove and not self.is_croppable:
            raise RuntimeError("crop: the layer does not record its past; call activate_past_recording before")
        if tokens_to_remove:
            self.state.rollback(-tokens_to_remove)

    def reset(self) -> None:
        """Back to zeros and position 0, in every row."""
        if self._state is not None:
            self._state.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row beam_idx[i]; beam_idx [B] integers. IndexError for a row that is not there."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order: integers [n], or a mask [B]. IndexError for a row that is not there."""
        if self._state is not None:
            rows = torch.arange(self._state.batch)[indices.cpu()]  # a mask is taken too
            self._state = self._state.select(rows.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, copies side by side: [B] rows become [B * repeats]."""
        if self._state is not None:
            self._state = self._state.select(np.arange(self._state.batch).repeat(repeats).tolist())

    def offload(self) -> None:
        """Nothing: it is on the CPU."""

    def prefetch(self) -> None:
        """Nothing: it is on the CPU."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """RuntimeError: what transformers' own layers would write here, an accelerated one never asks for."""
        raise RuntimeError("this cache was written by kda.adapters.hf and is read by an accelerated model alone")

    update_conv_state = update_recurrent_state = lazy_initialization


# ---- the rest of the model ----

class QuantizedExperts(nn.Module):
    """The experts of a mixture with quantised weights: gate and up [2 I, hidden] and down [hidden, I] of each."""

    def __init__(self, experts: Any, bits: int) -> None:
        super().__init__()
        self.num_experts, self.limit = experts.num_experts, getattr(experts, "swiglu_limit", None)
        self.act_fn = getattr(experts, "act_fn", F.silu)
        self.gate_up, self.down = (nn.ModuleList(
            kt.QuantizedLinear(QuantizedMatrix.quantize(kt.as_array(w), bits)) for w in weights)
            for weights in (experts.gate_up_proj, experts.down_proj))

    @property
    def nbytes(self) -> int:
        """Bytes of all experts' codes and scales."""
        return sum(linear.matrix.nbytes for part in (self.gate_up, self.down) for linear in part)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [tokens, hidden]; the chosen experts and their weights [tokens, k]."""
        y = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert >= self.num_experts:  # stands for none
                continue
            tokens, which = torch.where(top_k_index == expert)
            gate, up = self.gate_up[expert](hidden_states[tokens]).chunk(2, dim=-1)
            if self.limit is not None:
                gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            part = self.down[expert](self.act_fn(gate) * up) * top_k_weights[tokens, which, None]
            y.index_add_(0, tokens, part.to(y.dtype))
        return y


def _quantize_rest(model: nn.Module, bits: int, kda_prefixes: tuple[str, ...], report: Report) -> None:
    for name, module in list(model.named_modules()):
        if name.startswith(kda_prefixes):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        child = name.rpartition(".")[2]
        if type(module) is nn.Linear and child not in _KEPT:
            linear = kt.QuantizedLinear.from_linear(module, bits)
            setattr(parent, child, linear)
            report.linears.append(name)
            report.bytes_after += linear.matrix.nbytes
        elif type(module).__name__ in _EXPERTS:
            experts = QuantizedExperts(module, bits)
            setattr(parent, child, experts)
            report.experts.append(name)
            report.bytes_after += experts.nbytes
        else:
            continue
        report.bytes_before += sum(p.nbytes for p in module.parameters())
