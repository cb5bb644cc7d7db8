"""fused_kda_layer: everything between a layer's projections in one pass, against the same functions one by one."""

import numpy as np
import pytest
from helpers import BF16, relative_error, same_bits

import kda
from kda import ops, reference

#        B, T, H, HV, K, V, W
SHAPES = [(2, 37, 2, 2, 32, 16, 4), (1, 1, 2, 4, 60, 33, 4), (1, 2, 1, 1, 128, 128, 4), (2, 65, 3, 3, 16, 24, 3),
          (1, 20, 1, 2, 8, 8, 1), (3, 3, 2, 6, 17, 5, 8), (2, 0, 1, 2, 8, 8, 4)]


def bits(x):
    """bfloat16 as the core takes it."""
    return x.view(np.uint16) if x.dtype == BF16 else x


class Layer:
    """Raw projections, parameters and states of one layer."""

    def __init__(self, B, T, H, HV, K, V, W, dtype=np.float32):
        rng = np.random.default_rng(T + V)

        def normal(*shape):
            return rng.standard_normal(shape).astype(np.float32)

        self.projections = [x.astype(dtype) for x in (
            normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V), normal(B, T, HV, K), normal(B, T, HV),
            normal(B, T, HV, V))]
        self.weights = [normal(H * K, W), normal(H * K, W), normal(HV * V, W)]
        self.histories = [normal(B, W - 1, H * K), normal(B, W - 1, H * K), normal(B, W - 1, HV * V)]
        self.state, self.norm_weight = normal(B, HV, K, V), normal(V)
        self.A_log, self.dt_bias = normal(HV), normal(HV * K)

    def run(self, isa, lower_bound, chunked, cu_seqlens=None, in_place=True, dtype=np.float32, **options):
        """(o, state, histories) of the fused kernel; this layer's own arrays stay as they are."""
        B, T = self.projections[0].shape[:2]
        N = len(self.state)
        cu = np.arange(B + 1, dtype=np.int64) * T if cu_seqlens is None else cu_seqlens
        packed = [x.reshape(1, B * T, *x.shape[2:]) for x in self.projections]
        *qkv, g, beta, gate = (x.view(np.uint16) if x.dtype == BF16 else x for x in packed)
        before = [(bits(self.state[n].astype(dtype)), np.concatenate([h[n].ravel() for h in self.histories]))
                  for n in range(N)]
        after = before if in_place else [(np.empty_like(s), np.empty_like(h)) for s, h in before]
        out = np.empty(qkv[2].shape, qkv[2].dtype)
        taps = tuple(np.ascontiguousarray(w.T).ravel() for w in self.weights)
        fused = ops.fused_kda_layer(out, *qkv, g, beta, gate, taps, self.norm_weight, self.A_log, self.dt_bias,
                                    lower_bound, isa=isa, **options)
        fused.run(before, after, cu, chunked)
        state = np.array([s for s, _ in after]).reshape(self.state.shape).view(dtype)
        cuts = np.cumsum([h[0].size for h in self.histories])[:-1]
        histories = [np.array(h).reshape(mine.shape) for h, mine in zip(
            zip(*(np.split(h, cuts) for _, h in after), strict=True), self.histories, strict=True)]
        return out.reshape(self.projections[2].shape), state, histories

    def plain(self, lower_bound, cu_seqlens=None, allow_neg_eigval=False):
        """The same in float64, function by function."""
        *qkv, g, beta, gate = (x.astype(np.float64) for x in self.projections)
        rows, histories = [], []
        for x, w, h in zip(qkv, self.weights, self.histories, strict=True):
            channels = x.reshape(*x.shape[:2], len(w))
            y, final = reference.causal_conv1d(channels, w, None, "silu", h.transpose(0, 2, 1), True, cu_seqlens)
            rows.append(y.reshape(x.shape))
            histories.append(final.transpose(0, 2, 1))
        o, state = reference.fused_recurrent_kda(
            *rows, g, beta, self.A_log, self.dt_bias, None, self.state, True, True, True, True, allow_neg_eigval,
            lower_bound, cu_seqlens=cu_seqlens)
        return reference.rms_norm_gated(o, gate, self.norm_weight), state, histories


@pytest.fixture(params=[1, 2])
def team(request):
    before = kda.get_num_threads()
    kda.set_num_threads(request.param)
    yield request.param
    kda.set_num_threads(before)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_functions_one_by_one(isa, shape, lower_bound, chunked, team):
    layer = Layer(*shape)
    o, state, histories = layer.run(isa, lower_bound, chunked)
    want_o, want_state, want_histories = layer.plain(lower_bound)
    assert relative_error(o, want_o) <= 4e-6
    assert relative_error(state, want_state) <= 2e-6
    for got, want in zip(histories, want_histories, strict=True):
        assert np.array_equal(got, want)  # raw inputs: kept, not computed


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_states_may_move_to_other_memory(isa, shape, chunked, dtype, team):
    """In place and from one buffer to another: the same bits, and what was read stays."""
    here, there = Layer(*shape), Layer(*shape)
    o, state, histories = here.run(isa, None, chunked, dtype=dtype)
    o2, state2, histories2 = there.run(isa, None, chunked, dtype=dtype, in_place=False)
    assert same_bits(o, o2)
    assert same_bits(state, state2)
    assert all(same_bits(a, b) for a, b in zip(histories, histories2, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_bfloat16_state_is_rounded_once_a_call(isa, shape):
    """Its products are those of the widened state, and what is kept is the float32 result to nearest even."""
    layer, wide = Layer(*shape), Layer(*shape)
    wide.state = layer.state.astype(BF16).astype(np.float32)
    o, state, _ = layer.run(isa, -5.0, True, dtype=BF16)
    want_o, want_state, _ = wide.run(isa, -5.0, True)
    assert same_bits(o, want_o)
    assert same_bits(state, want_state.astype(BF16))


def test_packed_sequences_have_their_own_histories(isa):
    layer = Layer(1, 30, 2, 4, 16, 8, 4)
    cu = np.array([0, 2, 2, 30], np.int64)
    rng = np.random.default_rng(0)
    layer.histories = [rng.standard_normal((3, *h.shape[1:])).astype(np.float32) for h in layer.histories]
    layer.state = rng.standard_normal((3, *layer.state.shape[1:])).astype(np.float32)
    for chunked in (False, True):
        o, state, histories = layer.run(isa, None, chunked, cu_seqlens=cu, allow_neg_eigval=True)
        want_o, want_state, want_histories = layer.plain(None, cu, allow_neg_eigval=True)
        assert relative_error(o, want_o) <= 4e-6
        assert relative_error(state, want_state) <= 2e-6
        assert all(np.array_equal(a, b) for a, b in zip(histories, want_histories, strict=True))
        assert same_bits(state[1], layer.state[1])  # the empty one


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 16, 33])
def test_a_cut_does_not_show(isa, cut):
    """Prefill of some tokens, then the others one by one: histories and all."""
    whole = Layer(1, 37, 2, 2, 32, 16, 4)
    o, state, histories = whole.run(isa, -5.0, True)
    part = Layer(1, 37, 2, 2, 32, 16, 4)
    pieces = []
    for start, end in [(0, cut), *((t, t + 1) for t in range(cut, 37))]:
        part.projections = [x[:, start:end] for x in whole.projections]
        piece, part.state, part.histories = part.run(isa, -5.0, chunked=end - start > 1)
        pieces.append(piece)
    assert relative_error(np.concatenate(pieces, axis=1), o) <= 2e-6
    assert relative_error(part.state, state) <= 2e-6
    assert all(np.array_equal(a, b) for a, b in zip(part.histories, histories, strict=True))


def test_16_bit_projections_are_computed_in_float32(isa):
    layer = Layer(1, 21, 1, 2, 16, 24, 4, np.float16)
    o, state, histories = layer.run(isa, None, True)
    wide = Layer(1, 21, 1, 2, 16, 24, 4)
    wide.projections = [x.astype(np.float32) for x in layer.projections]
    wide_o, wide_state, wide_histories = wide.run(isa, None, True)
    assert o.dtype == np.float16
    assert np.array_equal(o, wide_o.astype(np.float16))
    assert np.array_equal(state, wide_state)
    assert all(np.array_equal(a, b) for a, b in zip(histories, wide_histories, strict=True))
