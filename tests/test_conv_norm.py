"""causal_conv1d, causal_conv1d_update and rms_norm_gated."""
import numpy as np
import pytest
from helpers import BF16, relative_error, same_bits

import kda
from kda import _core, reference


def conv_inputs(seed, B, T, D, W, N=None):
    rng = np.random.default_rng(seed)
    x, w, b = rng.standard_normal((B, T, D)), rng.standard_normal((D, W)), rng.standard_normal(D)
    past = rng.standard_normal((B if N is None else N, D, W - 1))
    return {n: a.astype(np.float32) for n, a in [("x", x), ("weight", w), ("bias", b), ("initial_state", past)]}


def test_impulse(isa):
    """Taps 1, 10, 100, 1000: the last tap is the current token."""
    x, w = np.array([1, 0, 0, 0], np.float32).reshape(1, 4, 1), np.array([[1, 10, 100, 1000]], np.float32)
    y, state = kda.causal_conv1d(x, w, activation=None, output_final_state=True, isa=isa)
    assert y.ravel().tolist() == [1000, 100, 10, 1]
    assert state.tolist() == [[[0, 0, 0]]]
    silu, _ = kda.causal_conv1d(x / 1000, w[:, None], activation="silu", isa=isa)
    assert abs(silu[0, 0, 0] - 0.7310586) <= 1e-7


@pytest.mark.parametrize("activation", ["silu", "swish", None])
@pytest.mark.parametrize(("B", "T", "D", "W"), [
    (1, 1, 1, 1), (2, 2, 5, 4), (2, 3, 33, 4), (1, 40, 600, 4), (2, 9, 17, 8)])
def test_conv(isa, B, T, D, W, activation):
    x = conv_inputs(1, B, T, D, W)
    want, want_state = reference.causal_conv1d(**x, activation=activation, output_final_state=True)
    y, state = kda.causal_conv1d(**x, activation=activation, output_final_state=True, isa=isa)
    assert relative_error(y, want) <= 1e-6
    assert np.array_equal(state, want_state)  # raw inputs: copied, not computed


def test_short_prompts_shift_the_history(isa):
    x = conv_inputs(2, 1, 2, 3, 4)
    _, state = kda.causal_conv1d(**x, output_final_state=True, isa=isa)
    assert same_bits(state[:, :, :1].copy(), x["initial_state"][:, :, 2:].copy())
    assert same_bits(state[:, :, 1:].copy(), np.ascontiguousarray(x["x"].swapaxes(1, 2)))


@pytest.mark.parametrize("cut", range(8))
def test_split_anywhere_and_go_on(isa, cut):
    x = conv_inputs(3, 2, 7, 20, 4)
    y, state = kda.causal_conv1d(**x, output_final_state=True, isa=isa)
    y1, middle = kda.causal_conv1d(**x | {"x": x["x"][:, :cut]}, output_final_state=True, isa=isa)
    y2, end = kda.causal_conv1d(**x | {"x": x["x"][:, cut:], "initial_state": middle}, output_final_state=True, isa=isa)
    assert same_bits(np.concatenate([y1, y2], axis=1), y)
    assert same_bits(end, state)


def test_packed_sequences(isa):
    cu = [0, 1, 1, 6, 30]
    x = conv_inputs(4, 1, 30, 21, 4, N=4)
    y, state = kda.causal_conv1d(**x, cu_seqlens=cu, output_final_state=True, isa=isa)
    want, want_state = reference.causal_conv1d(**x, cu_seqlens=cu, output_final_state=True)
    assert relative_error(y, want) <= 1e-6
    assert np.array_equal(state, want_state)
    assert same_bits(state[1], x["initial_state"][1])


@pytest.mark.parametrize("dtype", [np.float16, BF16])
def test_halves(isa, dtype):
    x = conv_inputs(5, 2, 9, 33, 4)
    x["x"] = x["x"].astype(dtype)
    y, state = kda.causal_conv1d(**x, output_final_state=True, isa=isa)
    wide, wide_state = kda.causal_conv1d(**x | {"x": x["x"].astype(np.float32)}, output_final_state=True, isa=isa)
    assert same_bits(y, wide.astype(dtype))
    assert same_bits(state, wide_state)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("form", ["C order", "channels last", "spaced"])
@pytest.mark.parametrize("W", [2, 4, 5])
def test_update(isa, W, form, wide):
    """Token by token: the numbers of the whole, and the caller's own state moves on."""
    x = conv_inputs(6, 2, 6, 20, W)
    want, want_state = reference.causal_conv1d(**x, output_final_state=True)
    past = x["initial_state"]
    if wide:
        past = np.concatenate([np.full((2, 20, 1), 9, np.float32), past], axis=2)
    if form == "channels last":
        state = np.ascontiguousarray(past.swapaxes(1, 2)).swapaxes(1, 2)
    else:
        state = np.full((2, 20, 2 * past.shape[2]), 7, np.float32)[:, :, ::2] if form == "spaced" else past.copy()
        state[:] = past
    for t in range(6):
        y = kda.causal_conv1d_update(x["x"][:, t], state, x["weight"], x["bias"], isa=isa)
        assert relative_error(y, want[:, t]) <= 1e-6
    assert np.array_equal(state[:, :, -(W - 1):], want_state)
    if form == "spaced":
        assert (state.base[:, :, 1::2] == 7).all()


@pytest.mark.parametrize(("B", "D", "W"), [(1, 1, 4), (2, 3, 2), (1, 1, 2), (2, 3, 1), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_update_shifts_a_wide_state_whole(isa, B, D, W, dtype):
    """W columns hold the last W inputs, also where the W - 1 that are read happen to be contiguous."""
    state = np.arange(B * D * W, dtype=np.float32).reshape(B, D, W)
    x = np.full((B, D), 99, dtype)
    want = np.concatenate([state[:, :, 1:], x[:, :, None].astype(np.float32)], axis=2)
    kda.causal_conv1d_update(x, state, np.ones((D, W), np.float32), isa=isa)
    assert same_bits(state, want)


def test_update_is_in_place_or_refused(isa):
    x = conv_inputs(7, 2, 1, 8, 4)
    state = x["initial_state"]
    arguments = {"x": x["x"][:, 0], "weight": x["weight"], "isa": isa}
    locked = state.copy()
    locked.flags.writeable = False
    for bad, error, message in [
            (locked, ValueError, "state: is read-only"),
            (state.astype(np.float64), TypeError, "state: expected a float32 array"),
            (state.tolist(), TypeError, "state: expected a float32 array"),
            (state[:1], ValueError, r"state: expected \[2, 8, 3\]"),
            (np.lib.stride_tricks.as_strided(state, (2, 8, 3), (0, 12, 4)), ValueError,
             "state: is a broadcast or sliding view"),
            (np.lib.stride_tricks.as_strided(state, (2, 8, 3), (32, 4, 4)), ValueError,
             "state: is a broadcast or sliding view")]:
        kept = np.array(bad)
        with pytest.raises(error, match=message):
            kda.causal_conv1d_update(state=bad, **arguments)
        assert np.array_equal(np.array(bad), kept)


def test_the_state_of_an_update_may_not_hold_its_inputs():
    state, w = np.ones((2, 8, 4), np.float32), np.ones((8, 4), np.float32)
    memory = state.reshape(-1)
    for name, x in [("x", {"x": memory[20:36].reshape(2, 8), "weight": w}),
                    ("weight", {"x": np.ones((2, 8), np.float32), "weight": memory[32:].reshape(8, 4)}),
                    ("bias", {"x": np.ones((2, 8), np.float32), "weight": w, "bias": memory[:8]})]:
        with pytest.raises(ValueError, match=f"state: overlaps {name}; pass a separate array"):
            kda.causal_conv1d_update(state=state, **x)
    assert (state == 1).all()
    # a column of it is no contiguous row: it is copied first, and the numbers are those of the copy
    want_state, x = state.copy(), np.full((2, 8), 3, np.float32)
    want = kda.causal_conv1d_update(x, want_state, w)
    state[:, :, 0] = 3
    assert same_bits(kda.causal_conv1d_update(state[:, :, 0], state, w), want)
    assert same_bits(state, want_state)


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"x": np.ones((2, 3), np.float32)}, ValueError, r"x: expected \[B, T, D >= 1\], got \[2, 3\]"),
    ({"x": np.ones((1, 3, 4))}, TypeError, "x: expected float32, float16 or bfloat16, got float64"),
    ({"weight": np.ones((5, 4), np.float32)}, ValueError, r"weight: expected \[4, .*\], got \[5, 4\]"),
    ({"weight": np.ones((4, 9), np.float32)}, ValueError, r"weight: expected \[4, .*\], got \[4, 9\]"),
    ({"weight": None}, TypeError, "weight: expected float32, .*got object"),
    ({"bias": np.ones(5, np.float32)}, ValueError, r"bias: expected 4 values .*, got \[5\]"),
    ({"activation": "relu"}, ValueError, "activation: .*relu"),
    ({"initial_state": np.ones((1, 4, 2), np.float32)}, ValueError, r"initial_state: expected \[1, 4, 3\]"),
    ({"cu_seqlens": [0, 2]}, ValueError, "cu_seqlens: expected to end at T = 3, got 2"),
])
def test_bad_conv_input(change, error, message):
    with pytest.raises(error, match=message):
        kda.causal_conv1d(**conv_inputs(8, 1, 3, 4, 4) | change)


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
@pytest.mark.parametrize("shape", [(5,), (3, 17), (2, 3, 4, 128), (2, 1, 2, 3, 60)])
def test_norm(isa, shape, activation):
    x, gate = np.random.default_rng(9).standard_normal((2, *shape)).astype(np.float32)
    weight = np.random.default_rng(10).standard_normal(shape[-1]).astype(np.float32)
    want = reference.rms_norm_gated(x, gate, weight, activation=activation)
    assert relative_error(kda.rms_norm_gated(x, gate, weight, activation=activation, isa=isa), want) <= 1e-6
    for dtype in (np.float16, BF16):
        a, b = x.astype(dtype), gate.astype(dtype)
        wide = kda.rms_norm_gated(a.astype(np.float32), b.astype(np.float32), weight, activation=activation, isa=isa)
        assert same_bits(kda.rms_norm_gated(a, b, weight, activation=activation, isa=isa), wide.astype(dtype))


def test_norm_by_hand(isa):
    """x = (3, 4): the mean of squares is 12.5; norm first, then weight 2 and sigmoid(0) = 1/2."""
    y = kda.rms_norm_gated(np.array([3, 4], np.float32), np.zeros(2, np.float32), np.full(2, 2, np.float32), 0, isa=isa)
    assert np.abs(y - np.array([3, 4]) / 12.5**0.5).max() <= 1e-7


# ---- where results go ----

@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_out(isa, dtype):
    """The caller's array, in any strides of the outer axes, holds the result and is what is returned."""
    x = conv_inputs(11, 2, 6, 40, 4)
    x["x"] = x["x"].astype(dtype)
    want, _ = kda.causal_conv1d(**x, isa=isa)
    whole = np.full((2, 8, 60), 7, dtype)
    out = whole[:, 7:1:-1, 9:49]
    assert kda.causal_conv1d(**x, out=out, isa=isa)[0] is out
    assert same_bits(out.copy(), want)
    for order in "CF":  # contiguous states, and others
        state, own = (np.array(x["initial_state"], order=order) for _ in range(2))
        step = kda.causal_conv1d_update(x["x"][:, 0], state, x["weight"], isa=isa)
        row = out[:, 0]
        assert kda.causal_conv1d_update(x["x"][:, 0], own, x["weight"], out=row, isa=isa) is row
        assert same_bits(row.copy(), step)
        assert same_bits(own, state)
    assert kda.rms_norm_gated(x["x"], want, x["bias"], out=out, isa=isa) is out
    assert same_bits(out.copy(), kda.rms_norm_gated(x["x"], want, x["bias"], isa=isa))
    out[...] = 7
    assert (whole == 7).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("name", ["x", "gate"])
def test_a_norm_in_place(isa, name, dtype):
    x = dict(zip(("x", "gate"), np.random.default_rng(12).standard_normal((2, 3, 5, 33)).astype(dtype), strict=True))
    weight = np.linspace(-1, 1, 33, dtype=np.float32)
    want = kda.rms_norm_gated(**x, weight=weight, isa=isa)
    assert kda.rms_norm_gated(**x, weight=weight, out=x[name], isa=isa) is x[name]
    assert same_bits(x[name], want)


def test_out_that_cannot_be_written_in_place_is_refused():
    memory = np.ones(4000, np.float32)

    def part(start, *shape):
        return memory[start:start + int(np.prod(shape))].reshape(shape)

    x, w, b = part(0, 1, 10, 8), part(100, 8, 4), part(140, 8)
    past, cu = part(150, 1, 8, 3), memory[200:204].view(np.int64)
    cu[:] = [0, 10]
    before = memory.copy()
    conv = {"x": x, "weight": w, "bias": b, "initial_state": past, "cu_seqlens": cu}
    for name, start in [("x", 40), ("weight", 125), ("bias", 140), ("initial_state", 160), ("cu_seqlens", 203)]:
        with pytest.raises(ValueError, match=f"out: overlaps {name}; pass a separate array"):
            kda.causal_conv1d(**conv, out=part(start, 1, 10, 8))
    step = {"x": x[0], "state": part(300, 10, 8, 3), "weight": w, "bias": b}
    for name, start in [("x", 0), ("weight", 125), ("bias", 140), ("state", 530)]:
        with pytest.raises(ValueError, match=f"out: overlaps {name}; pass a separate array"):
            kda.causal_conv1d_update(**step, out=part(start, 10, 8))
    norm = {"x": x, "gate": part(600, 1, 10, 8), "weight": b}
    for name, start in [("x", 8), ("gate", 599), ("weight", 147)]:
        with pytest.raises(ValueError, match=f"out: overlaps {name}; pass a separate array"):
            kda.rms_norm_gated(**norm, out=part(start, 1, 10, 8))
    with pytest.raises(ValueError, match="out: overlaps weight"):
        kda.rms_norm_gated(b, part(600, 8), b, out=b)
    five = part(1000, 1, 2, 3, 2, 8)
    with pytest.raises(ValueError, match="out: expected a C-contiguous array"):
        kda.rms_norm_gated(five, five, b, out=part(2000, 2, 2, 3, 4, 8)[:1, :, :, ::2])
    for call in (lambda out: kda.causal_conv1d(x, w, out=out), lambda out: kda.rms_norm_gated(x, x, b, out=out)):
        for out, message in [(memory[:80].reshape(1, 8, 10).swapaxes(1, 2), "out: axis 2 has a stride of 40 bytes"),
                             (np.ones((1, 10, 8), np.float16), "out: expected float32 .*, got float16"),
                             (np.broadcast_to(np.float32(1), (1, 10, 8)), "out: is read-only")]:
            with pytest.raises(ValueError, match=message):
                call(out)
    assert same_bits(memory, before)


def test_the_core_refuses_a_norm_without_weight(isa):
    x = np.ones((1, 1, 2, 3), np.float32)
    with pytest.raises(TypeError):
        _core.norm_gated(list(kda.isas()).index(isa), np.empty_like(x), x, x, None, 1e-5, _core.SIGMOID)


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"gate": np.ones((2, 4), np.float32)}, ValueError, r"gate: expected \[2, 3\] \(the shape of x\), got \[2, 4\]"),
    ({"weight": np.ones(4, np.float32)}, ValueError, r"weight: expected 3 values .*, got \[4\]"),
    ({"weight": None}, TypeError, r"weight: expected float32, .*got object"),
    ({"eps": -1.0}, ValueError, "eps: expected a number >= 0, got -1.0"),
    ({"activation": None}, ValueError, "activation: .*None"),
    ({"x": np.ones((2, 3))}, TypeError, r"x: .*got float64 \[2, 3\]"),
])
def test_bad_norm_input(change, error, message):
    x = {"x": np.ones((2, 3), np.float32), "gate": np.ones((2, 3), np.float32), "weight": np.ones(3, np.float32)}
    with pytest.raises(error, match=message):
        kda.rms_norm_gated(**x | change)


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_results_go_into_the_callers_array(isa, dtype, contiguous):
    """out=: the bits of the result, in any strides between rows, and that array is returned."""
    a = conv_inputs(5, 2, 7, 33, 4)
    x, gate = a["x"].astype(dtype), a["x"][:, ::-1].astype(dtype)

    def calls():
        # a state in other strides goes another way through the update
        state = a["initial_state"].copy() if contiguous else np.asfortranarray(a["initial_state"])
        return [
            (x.shape, lambda **out: kda.causal_conv1d(x, a["weight"], isa=isa, **out)[0]),
            (x[:, 0].shape, lambda **out: kda.causal_conv1d_update(x[:, 0], state, a["weight"], isa=isa, **out)),
            (x.shape, lambda **out: kda.rms_norm_gated(x, gate, a["bias"], isa=isa, **out)),
        ]

    for (shape, plain), (_, into) in zip(calls(), calls(), strict=True):
        room = np.full((*shape[:-1], shape[-1] + 3), 77, dtype)
        out = np.full(shape, 77, dtype) if contiguous else room[..., :-3]
        assert into(out=out) is out
        assert same_bits(out.copy(), plain())
        assert (room[..., -3:] == 77).all()


def test_an_update_into_what_it_reads_is_refused(isa):
    a = conv_inputs(6, 2, 1, 9, 4)
    x, state = a["x"][:, 0], a["initial_state"]
    before = state.copy()
    with pytest.raises(ValueError, match="out: overlaps x"):
        kda.causal_conv1d_update(x, state, a["weight"], isa=isa, out=x)
    with pytest.raises(ValueError, match="out: overlaps state"):
        kda.causal_conv1d_update(x, state, a["weight"], isa=isa, out=state.reshape(2, 27)[:, :9])
    assert np.array_equal(state, before)
