"""KDALayer and KDAState: against a plain float64 layer and a stored model; padding, pools, rollback, errors."""
import copy
import itertools
import json
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers import relative_error, same_bits
from plain_layer import CONFIGS, GVA, K3, KIMI, NO_HISTORY, TINY, plain_layer, seeded

import kda
import kda.layer as layer_module
from kda import KDAConfig, KDALayer, KDAState
from kda.weights import tensor_shapes

PREFIX = "model.layers.0.self_attn."
GOLDEN = Path(__file__).parent / "golden" / "hf_tiny_kimi_linear.npz"
each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.model_type}-{c.hidden_size}")


def inputs(config, B, T, seed=1):
    return np.random.default_rng(seed).standard_normal((B, T, config.hidden_size), dtype=np.float32)


def same_state(a, b):
    """The rows' recurrent states and histories, to the bit, and their positions."""
    return (all(same_bits(np.ascontiguousarray(getattr(a, n)), np.ascontiguousarray(getattr(b, n)))
                for n in ("recurrent", "conv_q", "conv_k", "conv_v")) and np.array_equal(a.positions, b.positions))


@pytest.fixture(params=[1, 2])
def team(request):
    before = kda.get_num_threads()
    kda.set_num_threads(request.param)
    yield request.param
    kda.set_num_threads(before)


# ---- the numbers ----

@each_config
@pytest.mark.parametrize("T", [1, 5, 64, 65, 130])
def test_against_the_plain_layer(isa, config, T, team):
    tensors = seeded(config)
    layer = KDALayer.from_tensors(config, tensors, isa=isa)
    state = layer.new_state(batch=2)
    x = inputs(config, 2, T)
    want, (S, histories) = plain_layer(config, tensors, x)
    assert relative_error(layer(x, state), want) <= 4e-6
    assert relative_error(state.recurrent, S) <= 4e-6
    for got, history in zip((state.conv_q, state.conv_k, state.conv_v), histories, strict=True):
        assert relative_error(got, history) <= 2e-6
    assert state.position == T
    more = inputs(config, 2, 3, seed=2)
    want, _ = plain_layer(config, tensors, more, (S, histories))
    assert relative_error(layer(more, state), want) <= 4e-6


def rms(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def mlp(w, x, prefix, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = (w[f"{prefix}{name}.weight"] for name in names)
    z = x @ gate.T
    return (z / (1 + np.exp(-z)) * (x @ up.T)) @ down.T


def experts(w, x, prefix):
    """The mixture of experts of the stored model: 8, of which 2, and a shared one."""
    score = 1 / (1 + np.exp(-(x @ w[prefix + "gate.weight"].T)))
    top = np.argsort(-(score + w[prefix + "gate.e_score_correction_bias"]), -1, kind="stable")[..., :2]
    weight = np.take_along_axis(score, top, -1)
    weight = weight / (weight.sum(-1, keepdims=True) + 1e-20) * 2.446
    y = mlp(w, x, prefix + "shared_experts.")
    for e in range(8):
        y = y + (weight * (top == e)).sum(-1, keepdims=True) * mlp(w, x, f"{prefix}experts.{e}.", ("w1", "w3", "w2"))
    return y


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("i", [0, 1, 2])
def test_the_stored_kimi_linear(isa, i, one_by_one):
    """Hidden states of transformers' model, layer by layer: ours for attention, float64 around it."""
    with np.load(GOLDEN) as file:
        stored = dict(file)
    weights = {name[2:]: a for name, a in stored.items() if name.startswith("w/")}
    w = {name: a.astype(np.float64) for name, a in weights.items()}
    config = KDAConfig("kimi_linear", 64, 4, (0, 1, 2), 4, 4, 16, 16, 4)
    prefix = f"model.layers.{i}."
    layer = KDALayer.from_tensors(config, weights, prefix + "self_attn.", isa=isa)
    h = stored[f"h/{i}"].astype(np.float64)
    x = rms(h, w[prefix + "input_layernorm.weight"]).astype(np.float32)
    state = layer.new_state(batch=2)
    if one_by_one:
        y = np.concatenate([layer(x[:, t:t + 1], state) for t in range(x.shape[1])], axis=1)
    else:
        y = layer(x, state)
    h = h + y
    x = rms(h, w[prefix + "post_attention_layernorm.weight"])
    h = h + (mlp(w, x, prefix + "mlp.") if i == 0 else experts(w, x, prefix + "block_sparse_moe."))
    assert relative_error(h, stored[f"h/{i + 1}"]) <= 2e-6


def errors_of_formats(config, T):
    """Relative RMS error of f32 against float64, and of q8g and q4g against f32."""
    tensors, x = seeded(config), inputs(config, 1, T)
    want, _ = plain_layer(config, tensors, x)
    y = {}
    for weight_format in ("f32", "q8g", "q4g"):
        layer = KDALayer.from_tensors(config, tensors, weight_format=weight_format)
        y[weight_format] = layer(x, layer.new_state()).astype(np.float64)
    assert relative_error(y["f32"], want) <= 2e-6

    def rms_error(a, b):
        return np.sqrt(np.mean((a - b)**2) / np.mean(b**2))

    return rms_error(y["q8g"], y["f32"]), rms_error(y["q4g"], y["f32"])


def test_a_real_kimi_linear_layer():
    """Hidden 2304, 32 heads: q8g within 2.5 % of f32 in relative RMS for Gaussian weights, q4g within 30 %."""
    q8, q4 = errors_of_formats(KIMI, 66)
    assert 0.002 < q8 < 0.025
    assert 0.05 < q4 < 0.30


@pytest.mark.slow
def test_a_real_k3_layer():
    config = KDAConfig("kimi_k3", 7168, 1, (0,), 96, 96, 128, 128, 4, gate_lower_bound=-5.0, full_rank_gate=True)
    q8, q4 = errors_of_formats(config, 3)
    assert 0.002 < q8 < 0.025
    assert 0.05 < q4 < 0.30


def test_16_bit_inputs_are_computed_in_float32(isa):
    layer = KDALayer.from_tensors(TINY, seeded(TINY), isa=isa)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        for B in (1, 2):
            x = inputs(TINY, B, 5).astype(dtype)
            y = layer(x, layer.new_state(B))
            assert y.dtype == dtype
            assert same_bits(y, layer(x.astype(np.float32), layer.new_state(B)).astype(dtype))


def test_any_strides_and_byte_order():
    layer = KDALayer.from_tensors(TINY, seeded(TINY))
    x = inputs(TINY, 2, 6)
    want = layer(x, layer.new_state(2))
    wide = np.zeros((2, 12, 2 * TINY.hidden_size), np.float32)
    wide[:, ::2, ::2] = x
    fortran = np.asfortranarray(x)
    swapped = x.astype(">f4")
    for odd in (wide[:, ::2, ::2], fortran, swapped):
        assert same_bits(layer(odd, layer.new_state(2)), want)
        assert same_bits(layer(odd[:1], layer.new_state(1)), want[:1])


@pytest.mark.parametrize("T", [100, 400])
def test_x_may_be_a_view_of_the_state(T):
    """Read before it is overwritten, however many passes there are."""
    layer = KDALayer.from_tensors(TINY, seeded(TINY))
    state = layer.new_state()
    layer(inputs(TINY, 1, 5), state)
    x = np.lib.stride_tricks.as_strided(state.recurrent, (1, T, TINY.hidden_size), (0, 4, 8))
    twin = state.copy()
    want = layer(x.copy(), twin)
    assert same_bits(layer(x, state), want)
    assert same_state(state, twin)


# ---- cuts ----

@pytest.mark.parametrize("cuts", [[64, 137], [65, 136], [1, 2, 3, 4, 191], [0, 1, 200], [200, 1], [2] + [1] * 199,
                                  [3, 198]], ids=str)
def test_cuts_do_not_show(isa, cuts):
    """T = 201 in pieces: float32 weights within 2e-6, states included."""
    layer = KDALayer.from_tensors(TINY, seeded(TINY), isa=isa)
    x = inputs(TINY, 1, 201)
    state, parts = layer.new_state(), layer.new_state()
    want = layer(x, state)
    ends = np.cumsum([0, *cuts])
    got = np.concatenate([layer(x[:, a:b], parts) for a, b in itertools.pairwise(ends)], axis=1)
    assert relative_error(got, want) <= 2e-6
    assert relative_error(parts.recurrent, state.recurrent) <= 2e-6
    assert same_bits(np.array(parts.conv_v), np.array(state.conv_v))
    assert parts.position == 201


def test_recurrent_max_moves_the_switch():
    x = inputs(TINY, 1, 40)
    y = {}
    for most in (0, 39, 40, 64):
        layer = KDALayer.from_tensors(TINY, seeded(TINY), recurrent_max=most)
        y[most] = layer(x, layer.new_state())
    assert same_bits(y[0], y[39])  # in blocks
    assert same_bits(y[40], y[64])  # token by token
    assert not same_bits(y[0], y[64])
    assert relative_error(y[0], y[64]) <= 2e-6


# ---- padding and pools ----

@each_config
@pytest.mark.parametrize("weight_format", ["f32", "q8g"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_rows_equal_their_solo_runs(isa, config, side, weight_format, team):
    """Lengths on both sides of every boundary, garbage in the padding; outputs, states and histories to the bit."""
    layer = KDALayer.from_tensors(config, seeded(config), weight_format=weight_format, isa=isa)
    lengths = [300, 0, 1, 2, 64, 65, 257, 300, 16]
    B, T = len(lengths), max(lengths)
    x = inputs(config, B, T)
    for b, n in enumerate(lengths):
        x[b, n:] = np.nan
        if side == "left":
            x[b] = np.roll(x[b], T - n, axis=0)
    state = layer.new_state(B)
    y = layer(x, state, lengths, side)
    assert np.array_equal(state.positions, lengths)
    for b, n in enumerate(lengths):
        valid = slice(0, n) if side == "right" else slice(T - n, T)
        solo = layer.new_state()
        assert same_bits(y[b, valid], layer(x[b:b + 1, valid], solo)[0])
        assert not np.delete(y[b], np.r_[valid], axis=0).any()
        assert same_state(state.select([b]), solo)


def test_decoding_several_sessions_in_one_call(isa, team):
    """States of different histories and sizes, each where it is."""
    layer = KDALayer.from_tensors(GVA, seeded(GVA), isa=isa)
    states = [layer.new_state(), layer.new_state(batch=2), layer.new_state(rollback_window=4)]
    solo = [layer.new_state() for _ in range(4)]
    for b, n in enumerate([7, 3, 3, 70]):
        x = inputs(GVA, 1, n, seed=b)
        layer(x, solo[b])
    layer(inputs(GVA, 1, 7, 0), states[0])
    layer(np.concatenate([inputs(GVA, 1, 3, b) for b in (1, 2)]), states[1])
    layer(inputs(GVA, 1, 70, 3), states[2])
    where = states[0].recurrent.ctypes.data
    for step in range(3):
        x = inputs(GVA, 4, 2, seed=10 + step)
        y = layer(x, states)
        assert same_bits(y, np.concatenate([layer(x[b:b + 1], solo[b]) for b in range(4)]))
    assert states[0].recurrent.ctypes.data == where
    assert same_state(states[0], solo[0])
    assert same_state(states[1].select([1]), solo[2])
    states[2].rollback(4)
    assert states[2].position == 72


# ---- going back ----

def steps_of(layer, state, x, sizes):
    """The outputs of consecutive calls of these sizes."""
    ends = np.cumsum([0, *sizes])
    return [layer(x[:, a:b], state) for a, b in itertools.pairwise(ends)]


@each_config
@pytest.mark.parametrize("weight_format", ["f32", "q4g"])
@pytest.mark.parametrize("window", [1, 3, 8, 20])
def test_rollback_is_as_if_never_taken(isa, config, window, weight_format):
    """After calls of any sizes, n up to the window: to the bit the run that ended n tokens earlier."""
    layer = KDALayer.from_tensors(config, seeded(config), weight_format=weight_format, isa=isa, recurrent_max=6)
    for sizes in ([1] * 12, [4, 4, 4], [2, 9, 1], [7], [30, 1], [1, 30], [300, 2], [5, 64]):
        x = inputs(config, 1, sum(sizes) + 3)
        for n in sorted({0, 1, 2, window // 2, window - 1, window} & set(range(min(window, sum(sizes)) + 1))):
            state = layer.new_state(rollback_window=window)
            steps_of(layer, state, x, sizes)
            state.rollback(n)
            taken, left = [], sum(sizes) - n
            for size in sizes:  # the same calls, the last ones shorter
                taken.append(min(size, left))
                left -= taken[-1]
            twin = layer.new_state()
            steps_of(layer, twin, x, [t for t in taken if t])
            assert same_state(state, twin), (sizes, n)
            at = state.position
            assert same_bits(layer(x[:, at:at + 3], state), layer(x[:, at:at + 3], twin))
            assert same_state(state, twin), (sizes, n)


def test_rollback_again_and_again(isa):
    """Drafts accepted and refused at random, as speculative decoding does, against a run of the accepted tokens."""
    layer = KDALayer.from_tensors(K3, seeded(K3), isa=isa)
    rng = np.random.default_rng(5)
    for window in (4, 9):
        x = inputs(K3, 1, 150)
        state, twin = layer.new_state(rollback_window=window), layer.new_state()
        at = 0
        while at < 120:
            n = int(rng.integers(1, window + 1))
            layer(x[:, at:at + n], state)
            drop = int(rng.integers(0, n + 1))
            state.rollback(drop)
            if n > drop:
                layer(x[:, at:at + n - drop], twin)
            at += n - drop
            assert same_state(state, twin)


def test_rows_go_back_alone(isa):
    layer = KDALayer.from_tensors(TINY, seeded(TINY), isa=isa)
    x = inputs(TINY, 3, 40)
    state = layer.new_state(batch=3, rollback_window=6)
    layer(x[:, :20], state)
    layer(x[:, 20:26], state, lengths=[6, 2, 0])
    for t in (26, 27):
        layer(x[:, t:t + 1], state)
    assert state.positions.tolist() == [28, 24, 22]
    state.rollback([1, 4, 6])
    assert state.positions.tolist() == [27, 20, 16]
    for b, calls in enumerate([[(0, 20), (20, 26), (26, 27)], [(0, 20)], [(0, 16)]]):
        solo = layer.new_state()
        for start, end in calls:
            layer(x[b:b + 1, start:end], solo)
        row = state.select([b])
        assert same_state(row, solo)
    forked = state.copy()
    assert same_bits(layer(x[:, 30:33], state), layer(x[:, 30:33], forked))
    state.rollback(2)
    forked.rollback(2)
    assert same_state(state, forked)


@pytest.mark.parametrize("sizes", [[5, 2, 1, 1, 3], [4], [1] * 12])
def test_a_call_that_fails_leaves_a_state_that_goes_back(sizes, monkeypatch):
    """As one does that runs out of memory: what can still be dropped is dropped to the bit, and the state goes on."""
    layer = KDALayer.from_tensors(TINY, seeded(TINY))
    x = inputs(TINY, 1, 20)

    class Failing:
        def run(self, *arguments):
            raise MemoryError

    def failing_views(scratch, n):
        views = layer_module._Views(layer, scratch, n)
        views.fused = Failing()
        return views

    for failures in (1, 2, 3):
        state = layer.new_state(rollback_window=6)
        steps_of(layer, state, x, sizes)
        with monkeypatch.context() as patch:
            patch.setattr(layer, "_views", failing_views)
            for n in (7, 5, 130)[:failures]:
                with pytest.raises(MemoryError):
                    layer(inputs(TINY, 1, n), state)
        end, most = sum(sizes), state.rows[0].depth
        for n in range(most + 1):
            back, twin = state.copy(), layer.new_state()
            back.rollback(n)
            left = end - n
            for size in sizes:
                layer(x[:, twin.position:twin.position + min(size, left)], twin)
                left -= min(size, left)
            assert same_state(back, twin)
        layer(x[:, end:end + 2], state)
        state.rollback(2)
        assert state.position == end


def test_no_further_than_the_window():
    layer = KDALayer.from_tensors(TINY, seeded(TINY))
    state = layer.new_state(batch=2, rollback_window=4)
    with pytest.raises(ValueError, match=r"row 0 can drop 0 to 0 tokens \(position 0, rollback_window 4\), got 1"):
        state.rollback(1)
    x = inputs(TINY, 2, 9)
    steps_of(layer, state, x, [1] * 7)
    before = state.copy()
    for n in (5, [1, 5], -1):
        with pytest.raises(ValueError, match="can drop 0 to 4 tokens"):
            state.rollback(n)
    with pytest.raises(TypeError, match="expected an int"):
        state.rollback(1.0)
    with pytest.raises(ValueError, match=r"expected an int or \[2\] ints, got \[3\]"):
        state.rollback([1, 1, 1])
    assert same_state(state, before)
    state.rollback(3)
    with pytest.raises(ValueError, match="can drop 0 to 1 tokens"):
        state.rollback(2)  # what has been dropped counts against the window
    layer(x[:, 4:6], state)
    state.rollback(3)
    assert state.position == 3
    plain = layer.new_state(2)
    layer(x[:, :2], plain)
    with pytest.raises(ValueError, match="rollback_window 0"):
        plain.rollback(1)


def test_a_window_costs_snapshots_not_copies():
    """Three buffers, the update that each may lack, and raw projections of at most two windows and the last call."""
    layer = KDALayer.from_tensors(TINY, seeded(TINY))
    plain, state = layer.new_state(), layer.new_state(rollback_window=8)
    assert state.nbytes == 3 * plain.nbytes
    token = 4 * (3 * 32 + 2 + 32)
    updates = 4 * 2 * (16 + 16 + 16)
    most = 0
    for t in range(64):
        layer(inputs(TINY, 1, 1, t), state)
        most = max(most, state.nbytes - 3 * plain.nbytes - 3 * updates)
    assert 8 * token <= most <= 17 * token


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_long_recurrent_call_keeps_a_window_of_tokens(state_dtype):
    """recurrent_max may be large: what is kept does not grow with it."""
    layer = KDALayer.from_tensors(TINY, seeded(TINY), recurrent_max=10**9)
    state, twin = (layer.new_state(rollback_window=w, state_dtype=state_dtype) for w in (8, 0))
    buffers = state.nbytes
    x = inputs(TINY, 1, 900)
    layer(x, state)
    unit = 16 if state_dtype == "float32" else 128
    assert state.nbytes - buffers <= (8 + unit) * 4 * (3 * 32 + 2 + 32)
    state.rollback(8)
    layer(x[:, :892], twin)
    assert same_state(state, twin)


# ---- states ----

def test_views_are_the_state():
    layer = KDALayer.from_tensors(GVA, seeded(GVA))
    state = layer.new_state(batch=2)
    assert state.recurrent.shape == (2, 4, 24, 8)
    assert (state.conv_q.shape, state.conv_v.shape) == ((2, 48, 2), (2, 32, 2))
    layer(inputs(GVA, 2, 5), state)
    twin = layer.new_state(batch=2)
    twin.recurrent[...] = state.recurrent
    twin.conv_q[...], twin.conv_k[...], twin.conv_v[...] = state.conv_q, state.conv_k, state.conv_v
    x = inputs(GVA, 2, 2, seed=9)
    assert same_bits(layer(x, twin), layer(x, state))
    locked = layer.new_state(rollback_window=2)
    with pytest.raises(ValueError, match="read-only"):
        locked.recurrent[...] = 1


@pytest.mark.parametrize("window", [0, 3])
def test_updates_are_left_and_nobody_sees_it(isa, team, window):
    """A state that is decoded with, beside one whose S was shown before, where every update is made at once."""
    layer = KDALayer.from_tensors(TINY, seeded(TINY), isa=isa)
    state, plain = layer.new_state(2, rollback_window=window), layer.new_state(2)
    assert not plain.recurrent.any()
    x = inputs(TINY, 2, 90)

    def both(start, end):
        assert same_bits(layer(x[:, start:end], state), layer(x[:, start:end], plain))

    def left(a):
        return [row.lacks[row.slot] is not None for row in a.rows]

    for t in range(5):
        both(t, t + 1)
        assert left(state) == [True, True]
        assert left(plain) == [False, False]
    both(5, 8)
    twin = state.copy()  # settles
    assert same_state(twin, plain)
    both(8, 9)
    assert left(state) == [True, True]
    shown = plain.recurrent, plain.conv_q, plain.conv_k, plain.conv_v
    assert all(same_bits(a, np.ascontiguousarray(b)) for a, b in zip(state.arrays(), shown, strict=True))
    both(9, 10)
    assert same_state(state.select([1]), plain.select([1]))
    both(10, 11)
    if window:
        kept = layer.new_state(2)
        layer(x[:, :11], kept)
        both(11, 13)
        state.rollback(2)
        assert same_state(state, kept)
        for a in (state, kept):
            layer(x[:, 11:12], a)
        assert left(state) == [True, True]
        both_long = layer(x[:, 12:85], state), layer(x[:, 12:85], kept)
        assert same_bits(*both_long)
        assert same_state(state, kept)
    else:
        both(11, 85)  # in blocks, after an update that was left
        assert left(state) == [False, False]
        both(85, 86)
        assert left(state) == [True, True]
        assert same_state(state, plain)  # shown
        both(86, 87)
        assert left(state) == [False, False]


def test_updates_left_by_another_isa():
    """A state that two layers share keeps to the bits of the one whose token it was."""
    layers = [KDALayer.from_tensors(TINY, seeded(TINY), isa=name) for name in ("scalar", None)]
    state, plain = layers[0].new_state(), layers[0].new_state()
    assert not plain.recurrent.any()
    for t in range(6):
        x = inputs(TINY, 1, 1, t)
        assert same_bits(layers[t % 2](x, state), layers[t % 2](x, plain))
    assert same_state(state, plain)


def test_assign_takes_a_state_from_elsewhere():
    layer = KDALayer.from_tensors(TINY, seeded(TINY))
    state = layer.new_state(batch=2, rollback_window=3)
    layer(inputs(TINY, 2, 5), state)
    wide = [np.concatenate([np.full((2, 32, 1), np.nan, np.float32), c], axis=2)
            for c in (state.conv_q, state.conv_k, state.conv_v)]
    twin = layer.new_state(batch=2, rollback_window=3)
    layer(inputs(TINY, 2, 1), twin)
    twin.assign(state.recurrent, *wide, positions=5)
    assert same_state(twin, state)
    with pytest.raises(ValueError, match="can drop 0 to 0"):
        twin.rollback(1)
    with pytest.raises(ValueError, match=r"conv_k: expected \[2, 32, 3\], got \[2, 31, 3\]"):
        twin.assign(state.recurrent, state.conv_q, state.conv_k[:, 1:], state.conv_v, 5)
    for bad in (np.full((2, 2, 16, 16), "x", object), np.zeros((2, 2, 16, 16), complex), None):
        with pytest.raises(TypeError, match=r"recurrent: expected floats \[2, 2, 16, 16\], got "):
            twin.assign(bad, state.conv_q, state.conv_k, state.conv_v, 5)
    assert same_state(twin, state)
    with pytest.raises(ValueError, match=r"conv_q: expected \[1, 16, 0\], got \[1, 5, 0\]"):
        KDAState(NO_HISTORY).assign(np.zeros((1, 2, 8, 8)), *[np.zeros((1, 5, 0))] * 3, 0)


@pytest.mark.parametrize("window", [0, 3])
def test_assign_takes_views_of_the_state_itself(window):
    """Rows in another order, at another position: nothing is read after it was overwritten."""
    layer = KDALayer.from_tensors(TINY, seeded(TINY))
    state = layer.new_state(batch=2, rollback_window=window)
    layer(inputs(TINY, 2, 5), state)
    want = state.select([1, 0])
    state.assign(state.recurrent[::-1], state.conv_q[::-1], state.conv_k[::-1], state.conv_v[::-1], 5)
    assert state.recurrent.any()
    assert same_state(state, want)


def test_copies_are_apart_and_go_on_alike():
    layer = KDALayer.from_tensors(TINY, seeded(TINY))
    state = layer.new_state(batch=2, rollback_window=4)
    x = inputs(TINY, 2, 12)
    steps_of(layer, state, x, [3, 1, 1, 2])
    twin, other = state.copy(), copy.deepcopy(state)
    assert same_state(twin, state)
    layer(x[:, 7:9], state)
    assert same_state(twin, other)
    layer(x[:, 7:9], twin)
    assert same_state(twin, state)
    twin.rollback(4)
    state.rollback(4)
    assert same_state(twin, state)
    assert not same_state(other, state)
    swapped = other.select([1, 0, 1])
    assert same_bits(swapped.recurrent, other.recurrent[[1, 0, 1]])
    assert swapped.batch == 3
    for rows in ([2], [-4], []):
        with pytest.raises(IndexError, match=r"rows: expected one or more of the rows 0 to 1, got "):
            state.select(rows)


def test_reset():
    layer = KDALayer.from_tensors(TINY, seeded(TINY))
    x = inputs(TINY, 1, 4)
    state = layer.new_state(rollback_window=2)
    want = layer(x, state)
    layer(x, state)
    state.reset()
    assert state.position == 0
    with pytest.raises(ValueError, match="can drop 0 to 0"):
        state.rollback(1)
    assert same_bits(layer(x, state), want)


def test_bfloat16_states_drift_as_documented(isa):
    """Half the memory of S. 400 tokens one by one stay within 0.5 % of the float32 state's outputs in relative RMS with
    Kimi-Linear's gate; a bounded gate forgets less, and gathers errors."""
    layer = KDALayer.from_tensors(TINY, seeded(TINY), isa=isa)
    state, half = layer.new_state(), layer.new_state(state_dtype="bfloat16")
    assert half.recurrent.dtype == ml_dtypes.bfloat16
    assert half.recurrent.nbytes * 2 == state.recurrent.nbytes

    def drift(layer):
        x = inputs(layer.config, 1, 400)
        want, got = (np.concatenate(steps_of(layer, layer.new_state(state_dtype=dtype), x, [1] * 400), axis=1)
                     for dtype in ("float32", "bfloat16"))
        return [np.sqrt(np.mean((got - want)[:, part]**2) / np.mean(want[:, part]**2))
                for part in (slice(0, 100), slice(300, 400))]

    first, last = drift(layer)
    assert 0.001 < first < 0.005
    assert 0.001 < last < 0.005
    slow = KDAConfig("glm5_next", 64, 1, (0,), 2, 2, 64, 64, 4, gate_lower_bound=-5.0)
    first, last = drift(KDALayer.from_tensors(slow, seeded(slow, 1), isa=isa))
    assert 0.001 < first < last < 0.02
    x = inputs(TINY, 1, 9)
    rolled = layer.new_state(rollback_window=5, state_dtype="bfloat16")
    twin = layer.new_state(state_dtype="bfloat16")
    steps_of(layer, rolled, x, [1] * 9)
    rolled.rollback(4)
    steps_of(layer, twin, x, [1] * 5)
    assert same_bits(np.array(rolled.recurrent), np.array(twin.recurrent))


@pytest.mark.parametrize("recurrent_max", [64, 1000])
def test_bfloat16_rows_equal_their_solo_runs_and_go_back(isa, recurrent_max):
    """Where S is rounded depends on the row's own call: not on its neighbours, nor on how a rollback takes it again."""
    layer = KDALayer.from_tensors(TINY, seeded(TINY), isa=isa, recurrent_max=recurrent_max)
    for lengths in ([50, 50, 50], [100, 1, 60, 300], [127, 129, 257]):
        B, T = len(lengths), max(lengths)
        x = inputs(TINY, B, T)
        state = layer.new_state(B, rollback_window=150, state_dtype="bfloat16")
        y = layer(x, state, lengths)
        back = [min(n, 140) for n in lengths]
        before = state.copy()
        state.rollback(back)
        for b, n in enumerate(lengths):
            for left, got in ((n, before), (n - back[b], state)):
                solo = layer.new_state(state_dtype="bfloat16")
                want = layer(x[b:b + 1, :left], solo)
                assert same_state(got.select([b]), solo), (lengths, b, left)
                assert left < n or same_bits(y[b:b + 1, :n], want)


def test_one_state_serves_one_call_at_a_time():
    """From two threads: a clear error for one, and the state is that of the calls that went through."""
    layer = KDALayer.from_tensors(TINY, seeded(TINY))
    state, x = layer.new_state(), inputs(TINY, 1, 1)
    with state.lock:
        for call in (lambda: layer(x, state), lambda: layer(x, [state]), state.copy, state.reset,
                     lambda: state.rollback(0)):
            with pytest.raises(RuntimeError, match="in use by another call; a state serves one call at a time"):
                call()
    done, refused = [], []

    def work():
        for _ in range(200):
            try:
                layer(x, state)
                done.append(1)
            except RuntimeError:
                refused.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) + len(refused) == 800
    twin = layer.new_state()
    for _ in done:
        layer(x, twin)
    assert same_state(state, twin)


def test_layers_of_one_shape_do_not_mix_their_parameters():
    """They share scratch, and kernels bound to it must not share weights."""
    layers = [KDALayer.from_tensors(TINY, seeded(TINY, seed)) for seed in (0, 1)]
    x = inputs(TINY, 1, 3)
    want = [plain_layer(TINY, seeded(TINY, seed), x)[0] for seed in (0, 1)]
    for _ in range(2):
        for layer, y in zip(layers, want, strict=True):
            assert relative_error(layer(x, layer.new_state()), y) <= 4e-6


def test_threads_with_states_of_their_own():
    layer = KDALayer.from_tensors(TINY, seeded(TINY))
    x = inputs(TINY, 1, 50)
    want = layer(x, layer.new_state())
    wrong = []

    def work():
        for _ in range(20):
            state = layer.new_state()
            got = np.concatenate([layer(x[:, :47], state), *(layer(x[:, t:t + 1], state) for t in range(47, 50))], 1)
            if relative_error(got, want) > 2e-6:
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- what is refused ----

def test_bad_calls_change_nothing():
    layer = KDALayer.from_tensors(TINY, seeded(TINY))
    state = layer.new_state(batch=2)
    x = inputs(TINY, 2, 4)
    layer(x, state)
    before = state.copy()
    other = KDAState(K3)
    cases = [
        (TypeError, r"x: expected float32, float16 or bfloat16, got float64 \[2, 4, 48\]", (x.astype(float), state)),
        (ValueError, r"x: expected \[B >= 1, T, 48\], got \[2, 4, 47\]", (x[:, :, :47], state)),
        (ValueError, "state: 2 rows, expected one for each of the 1 rows of x", (x[:1], state)),
        (TypeError, "state: expected a KDAState or a sequence of them, got ndarray", (x, [state.recurrent])),
        (TypeError, "state: expected a KDAState or a sequence of them, got NoneType", (x, None)),
        (ValueError, "padding_side: expected 'right' or 'left', got 'middle'",
         (x[:1], layer.new_state(), None, "middle")),
        (ValueError, "state: is of model kimi_k3-", (x[:1], other)),
        (ValueError, r"states\[1\] is in the list twice", (np.concatenate([x, x]), [state, state])),
        (ValueError, r"states\[1\] is bfloat16, states\[0\] float32",
         (np.concatenate([x, x]), [state, layer.new_state(2, state_dtype="bfloat16")])),
        (ValueError, r"lengths: expected \[2\] from 0 to T = 4, got \[5, 1\]", (x, state, [5, 1])),
        (ValueError, r"lengths: expected \[2\] from 0 to T = 4, got \[1\]", (x, state, [1])),
        (TypeError, r"lengths: expected integers \[2\], got float64", (x, state, [1.0, 2.0])),
        (ValueError, "padding_side: expected 'right' or 'left', got 'middle'", (x, state, [1, 2], "middle")),
    ]
    for error, message, arguments in cases:
        with pytest.raises(error, match=message):
            layer(*arguments)
        assert same_state(state, before)
    with pytest.raises(ValueError, match="state_dtype: expected 'float32' or 'bfloat16', got 'float16'"):
        layer.new_state(state_dtype="float16")
    with pytest.raises(ValueError, match="batch: expected an int >= 1, got 0"):
        layer.new_state(batch=0)
    with pytest.raises(TypeError, match=r"rollback_window: expected an int >= 0, got 1.5"):
        layer.new_state(rollback_window=1.5)


def test_no_tokens():
    layer = KDALayer.from_tensors(TINY, seeded(TINY))
    state = layer.new_state(batch=2, rollback_window=3)
    layer(inputs(TINY, 2, 3), state)
    before = state.copy()
    assert layer(inputs(TINY, 2, 0), state).shape == (2, 0, 48)
    assert not layer(inputs(TINY, 2, 4), state, lengths=[0, 0]).any()
    assert same_state(state, before)
    assert layer(inputs(TINY, 1, 0), layer.new_state()).shape == (1, 0, 48)


# ---- tensors ----

def test_wrong_tensors_are_all_named():
    tensors = seeded(TINY)
    del tensors[PREFIX + "b_proj.weight"]
    tensors[PREFIX + "g_proj.weight"] = np.zeros((32, 48), np.float32)
    tensors[PREFIX + "o_norm.weight"] = np.zeros(17, np.float32)
    tensors[PREFIX + "k_conv1d.weight"] = np.zeros((32, 3), np.float32)
    with pytest.raises(ValueError, match="tensors of a KDA layer of kimi_linear") as caught:
        KDALayer.from_tensors(TINY, tensors)
    for part in (f"missing {PREFIX}b_proj.weight, expected [2, 48]", f"surplus {PREFIX}g_proj.weight, [32, 48]",
                 f"{PREFIX}o_norm.weight: expected [16], got float32 [17]",
                 f"{PREFIX}k_conv1d.weight: expected [32, 4] or [32, 1, 4], got float32 [32, 3]"):
        assert part in str(caught.value)
    wide = seeded(TINY) | {PREFIX + "q_proj.weight": np.zeros((32, 48))}
    with pytest.raises(TypeError, match=r"q_proj.weight: expected float32, float16 or bfloat16, got float64"):
        KDALayer.from_tensors(TINY, wide)
    with pytest.raises(ValueError, match="weight_format: expected one of 'f32', 'q8g', 'q4g', got 'q5'"):
        KDALayer.from_tensors(TINY, seeded(TINY), weight_format="q5")
    with pytest.raises(ValueError, match=r"missing other.q_proj.weight"):
        KDALayer.from_tensors(TINY, seeded(TINY), prefix="other.")
    with pytest.raises(ValueError, match="recurrent_max: expected an int >= 0, got -1"):
        KDALayer.from_tensors(TINY, seeded(TINY), recurrent_max=-1)
    infinite = seeded(TINY)
    infinite[PREFIX + "b_proj.weight"][1, 3] = np.inf
    with pytest.raises(ValueError, match=r"b_proj.weight: w: row 1, group 0 .* expected finite weights"):
        KDALayer.from_tensors(TINY, infinite, weight_format="q8g")
    nine = KDAConfig("kimi_linear", 48, 3, (0, 2), 2, 2, 16, 16, 9)
    with pytest.raises(ValueError, match="config: conv_size: expected 1 to 8, got 9"):
        KDALayer.from_tensors(nine, seeded(nine))


@pytest.mark.parametrize("config", [TINY, NO_HISTORY], ids=["W4", "W1"])
@pytest.mark.parametrize("weight_format", ["f32", "q8g"])
def test_tensors_are_not_kept(config, weight_format):
    """Whatever their form: read-only, of the other byte order, in any strides; and written to afterwards."""
    x = inputs(config, 1, 3)
    tensors = seeded(config)
    layer = KDALayer.from_tensors(config, tensors, weight_format=weight_format)
    want = layer(x, layer.new_state())
    for form in (lambda w: w.astype(">f4"), lambda w: np.repeat(w, 2, axis=-1)[..., ::2],
                 lambda w: np.array(w, order="F")):
        odd = {name: form(w) for name, w in tensors.items()}
        for w in odd.values():
            w.flags.writeable = False
        other = KDALayer.from_tensors(config, odd, weight_format=weight_format)
        assert same_bits(other(x, other.new_state()), want)
    for w in tensors.values():
        w[...] = 7
    assert same_bits(layer(x, layer.new_state()), want)


def test_forms_that_checkpoints_have():
    """A_log as [1, 1, H, 1] or padded with zeros to 128; conv weights [D, W]; 16-bit weights; transformers' names."""
    x = inputs(K3, 1, 5)

    def run(tensors):
        layer = KDALayer.from_tensors(K3, tensors)
        return layer(x, layer.new_state())

    plain = seeded(K3)
    want = run(plain)
    A_log = plain[PREFIX + "A_log"]
    assert same_bits(run(plain | {PREFIX + "A_log": A_log.reshape(1, 1, 3, 1)}), want)
    padded = np.concatenate([A_log, np.zeros(125, np.float32)])
    assert same_bits(run(plain | {PREFIX + "A_log": padded}), want)
    for bad in (padded[:127], padded + 1, A_log[:2], np.zeros((3, 3), np.float32)):
        with pytest.raises(ValueError, match=r"A_log: expected \[3\], got"):
            run(plain | {PREFIX + "A_log": bad})
    flat = {name: w[:, 0] if "conv1d" in name else w for name, w in plain.items()}
    assert same_bits(run(flat), want)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        half = {name: w.astype(dtype) for name, w in plain.items()}
        assert same_bits(run(half), run({name: w.astype(np.float32) for name, w in half.items()}))
    inside = {}
    for name, w in plain.items():
        part = name[len(PREFIX):]
        if "conv1d" not in part:
            gathered = part in ("A_log", "dt_bias") or part.startswith("f_")
            inside[PREFIX + ("forget_gate." if gathered else "") + part] = w
    inside[PREFIX + "conv1d.weight"] = np.concatenate([plain[f"{PREFIX}{c}_conv1d.weight"] for c in "qkv"])
    assert same_bits(run(inside), want)


@pytest.mark.parametrize("weight_format", ["f32", "q8g", "q4g"])
def test_the_weights_take_what_the_planner_says(weight_format):
    """To the byte, where no rows need padding to whole tiles: the matrices, the convolutions, the small vectors."""
    parts = [c for c in kda.plan(KIMI, weight_format=weight_format).components if c.name.startswith("KDA")]
    layer = KDALayer.from_tensors(KIMI, seeded(KIMI), weight_format=weight_format)
    assert 20 * layer.nbytes == sum(c.bytes for c in parts)
    assert 20 * layer.new_state().nbytes == kda.plan(KIMI).kda_state_bytes + kda.plan(KIMI).conv_state_bytes


def test_from_safetensors(tmp_path):
    """One file, a directory, an index with shards: the layer of the tensors."""

    from safetensors.numpy import save_file
    tensors = {name: w.astype(ml_dtypes.bfloat16) for name, w in seeded(TINY).items()}
    x = inputs(TINY, 1, 5)
    layer = KDALayer.from_tensors(TINY, tensors)
    want = layer(x, layer.new_state())

    def run(path):
        layer = KDALayer.from_safetensors(TINY, path)
        return layer(x, layer.new_state())

    other = {"model.norm.weight": np.ones(48, np.float32)}
    save_file(tensors | other, tmp_path / "model.safetensors")
    assert same_bits(run(tmp_path / "model.safetensors"), want)
    assert same_bits(run(tmp_path), want)
    shards = tmp_path / "shards"
    shards.mkdir()
    names = sorted(tensors)
    halves = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, mine in halves.items():
        save_file({n: tensors[n] for n in mine} | ({"model.norm.weight": other["model.norm.weight"]}
                                                  if file[0] == "a" else {}), shards / file)
    index = {"weight_map": {n: file for file, mine in halves.items() for n in mine} | {"model.norm.weight": "c"}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same_bits(run(shards), want)
    assert same_bits(run(shards / "model.safetensors.index.json"), want)
    (shards / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"b.safetensors: no such file, though"):
        run(shards)
    with pytest.raises(FileNotFoundError, match=r"no such file; expected a .safetensors file"):
        run(tmp_path / "nothing")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"cut.safetensors: is not a complete safetensors file"):
        run(tmp_path / "cut.safetensors")
    for text in ("[]", "[" * 200000, json.dumps({"weight_map": {PREFIX + "A_log": 5}})):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=r"bad\.json: is no index of safetensors"):
            run(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text(json.dumps({"weight_map": {PREFIX + "A_log": "shards"}}))
    with pytest.raises(FileNotFoundError, match=r"shards: no such file, though bad\.json names it"):
        run(tmp_path / "bad.json")
    save_file({PREFIX + "A_log": np.zeros(2, ml_dtypes.float8_e4m3fn)}, tmp_path / "float8.safetensors")
    with pytest.raises(TypeError, match=r"float8.safetensors: .*A_log: expected float32, .*, got F8_E4M3"):
        run(tmp_path / "float8.safetensors")


def test_tensor_names_are_the_checkpoints():
    assert tensor_shapes(KIMI) == {
        "q_proj.weight": (4096, 2304), "k_proj.weight": (4096, 2304), "v_proj.weight": (4096, 2304),
        "q_conv1d.weight": (4096, 1, 4), "k_conv1d.weight": (4096, 1, 4), "v_conv1d.weight": (4096, 1, 4),
        "A_log": (32,), "dt_bias": (4096,), "f_a_proj.weight": (128, 2304), "f_b_proj.weight": (4096, 128),
        "b_proj.weight": (32, 2304), "g_a_proj.weight": (128, 2304), "g_b_proj.weight": (4096, 128),
        "o_norm.weight": (128,), "o_proj.weight": (2304, 4096)}
    assert tensor_shapes(K3)["g_proj.weight"] == (72, 56)
    assert "g_a_proj.weight" not in tensor_shapes(K3)
    assert tensor_shapes(NO_HISTORY)["q_conv1d.weight"] == (16, 1, 1)


def test_positions_that_int64_could_not_count_on_from():
    state = kda.KDAState(TINY)
    arrays = (state.recurrent, state.conv_q, state.conv_k, state.conv_v)
    for positions in (2**53 + 1, 2**63, np.array([2**64 - 1], np.uint64)):
        with pytest.raises(ValueError, match="positions: expected at most 9007199254740992"):
            state.assign(*arrays, positions=positions)
    state.assign(*arrays, positions=2**53)
    assert state.positions.tolist() == [2**53]


def test_rows_are_integers():
    with pytest.raises(TypeError, match=r"rows: expected integers, got \[0.5\]"):
        kda.KDAState(TINY).select([0.5])
    with pytest.raises(TypeError, match="rows: expected integers, got None"):
        kda.KDAState(TINY).select(None)


@pytest.mark.parametrize("file", ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors"])
def test_an_index_does_not_reach_out_of_its_folder(tmp_path, file):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"model.layers.0.self_attn.A_log": file}}))
    with pytest.raises(ValueError, match=r"is no index of safetensors .*A_log: expected a file beside the index, got"):
        KDALayer.from_safetensors(TINY, path)
