# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=False, freethreading_compatible=True
"""Buffers in, threads out: the one door between Python and the C kernels.

Each function checks that its buffers have the shapes that the kernels will walk, drops the GIL, and
spreads independent items over threads. Nothing numeric happens here. Arguments arrive normalised by
ops.py (native byte order, aligned, last axis contiguous, bfloat16 as its uint16 bits): what fails
here is a bug above, not a user's mistake, so the messages are short.

Nothing here needs the GIL: there are no module globals but constants, a call's buffers and scratch are its own, and
objects that hold buffers are complete when their __cinit__ ends and never change. What threads.c shares is atomic.
"""
from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.exc cimport PyErr_CheckSignals
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from _thread import allocate_lock as _allocate_lock
from time import perf_counter as _clock

from kda._kernels cimport *

# One thread's least share of the work, in state elements touched: about 7 us, a few times what it
# costs to wake a thread.
cdef enum:
    GRAIN = 65536
    BUFFERS = 24
    TOKENS = 1024  # that a quantised matrix takes together: bounds what their codes need
cdef double MOST = 1 << 62  # bytes of scratch

# A call of more work than this is run in parts, between which Python looks for signals: the first of about so much
# work, a few milliseconds, the others of about part_seconds. A call that is one part looks at nothing.
cdef double part_work = 1 << 25
cdef double part_seconds = 0.05

F_GATE = KDA_GATE
F_BOUNDED = KDA_BOUNDED
F_BETA_SIGMOID = KDA_BETA_SIGMOID
F_NEG_EIGVAL = KDA_NEG_EIGVAL
F_BF16 = KDA_BF16_BLOCKS
BLOCK = KDA_BLOCK
CONV_MAX = KDA_CONV_MAX
IDENTITY = KDA_IDENTITY
SIGMOID = KDA_SIGMOID
SILU = KDA_SILU

kda_dispatch_init()


# ---- ISAs and threads ----

def isa_rows():
    """[(name, runs_here, missing CPU feature bits)], best first."""
    here = kda_cpu_features()
    return [(kda_isas[i].kernels.name.decode(), bool(kda_isas[i].runs_here), kda_isas[i].needs & ~here)
            for i in range(kda_isa_count)]


def build_info():
    """{"compiler": its name and version, "flags": what setup.py gave it for every file, before an ISA's own}."""
    return {"compiler": kda_compiler().decode(), "flags": kda_flags().decode()}


def kernel_addresses(int isa):
    """{kernel: address} of one ISA's table, for tests that call kernels through ctypes."""
    cdef const kda_kernels *t = kernels_of(isa)
    return {
        "widen_f16": <size_t>t.widen_f16, "widen_bf16": <size_t>t.widen_bf16,
        "narrow_f16": <size_t>t.narrow_f16, "narrow_bf16": <size_t>t.narrow_bf16,
        "exp": <size_t>t.exp, "sigmoid": <size_t>t.sigmoid, "softplus": <size_t>t.softplus,
        "l2norm": <size_t>t.l2norm,
        "gate_softplus": <size_t>t.gate_softplus, "gate_bounded": <size_t>t.gate_bounded,
        "prepare": <size_t>t.prepare, "step": <size_t>t.step, "settle": <size_t>t.settle, "block": <size_t>t.block,
        "block_bf16": <size_t>t.block_bf16, "step_backward": <size_t>t.step_backward,
        "prepare_backward": <size_t>t.prepare_backward,
        "gate_softplus_backward": <size_t>t.gate_softplus_backward,
        "gate_bounded_backward": <size_t>t.gate_bounded_backward, "conv": <size_t>t.conv,
        "conv_step": <size_t>t.conv_step, "norm_gated": <size_t>t.norm_gated,
        "probe_update": <size_t>t.probe_update, "probe_fma": <size_t>t.probe_fma,
        "probe_read": <size_t>t.probe_read, "probe_idot": <size_t>t.probe_idot,
        "quantize": <size_t>t.quantize, "amax": <size_t>t.amax, "encode": <size_t>t.encode,
        "idot_q8": <size_t>t.idot_q8, "idot_q4": <size_t>t.idot_q4, "dense": <size_t>t.dense,
    }


def threading():
    """"pthreads", "windows" or "serial"."""
    return kda_threading().decode()


def set_thread_limit(int n):
    """n threads at most, KDA_MAX_THREADS if that is less; 1 in a serial build."""
    kda_set_thread_limit(max(1, min(n, KDA_MAX_THREADS)))


def threads_now():
    """Threads that a large call uses now."""
    return kda_thread_limit()


cdef int threads_for(double work) noexcept:
    return <int>max(1.0, min(<double>kda_thread_limit(), work / GRAIN))


cdef const kda_kernels *kernels_of(int isa) except NULL:
    if not 0 <= isa < kda_isa_count or not kda_isas[isa].runs_here:
        raise ValueError("no such ISA on this machine")
    if not kda_permitted(kda_isas[isa].needs):
        raise RuntimeError(f"{kda_isas[isa].kernels.name.decode()}: the operating system does not permit this process "
                           "its instructions")
    return kda_isas[isa].kernels


# ---- what nothing interrupts ----
#
# A signal's handler may raise between any two bytecodes of Python, but not inside a call of these.

cdef class Lock:
    """A lock as a context: held or refused, never waited for. of: a weak reference, for the refusal's message."""
    cdef object acquire, release, of

    def __cinit__(self, of):
        lock = _allocate_lock()
        self.acquire, self.release, self.of = lock.acquire, lock.release, of

    def __enter__(self):
        if not self.acquire(False):
            raise RuntimeError(f"{self.of()!r} is in use by another call; a state serves one call at a time, so give "
                               "each thread its own (copy, Session.fork)")

    def __exit__(self, *error):
        self.release()

    def __reduce__(self):
        raise TypeError("cannot pickle a state, which has a lock; Session.save writes one to a file")


cdef class Locks:
    """All of these Locks, or none."""
    cdef tuple locks

    def __cinit__(self, locks):
        self.locks = tuple(locks)

    def __enter__(self):
        cdef Lock lock
        cdef Py_ssize_t held = 0
        try:
            for lock in self.locks:
                lock.__enter__()
                held += 1
        except BaseException:
            for lock in self.locks[:held]:
                lock.release()
            raise

    def __exit__(self, *error):
        cdef Lock lock
        for lock in self.locks:
            lock.release()


def commit(copies, changes):
    """array[...] = value for each (array, value) of copies, then setattr(*change) for each of changes: what must be
    seen all together. Values have their array's dtype and shape, or are 0."""
    make(copies, changes)


cdef int make(copies, changes) except -1:
    for array, value in copies:
        array[...] = value
    for thing, name, value in changes:
        setattr(thing, name, value)
    return 0


# ---- buffers ----

cdef class _Buffers:
    """The buffers and the scratch memory of one call; released together."""
    cdef Py_buffer views[BUFFERS]
    cdef int count
    cdef void *memory
    cdef void *addresses

    def __cinit__(self):
        self.count = 0
        self.memory = NULL
        self.addresses = NULL

    def __dealloc__(self):
        free(self.memory)
        free(self.addresses)
        for i in range(self.count):
            PyBuffer_Release(&self.views[i])

    cdef float *scratch(self, int threads, Py_ssize_t floats) except NULL:
        """`floats` (a multiple of 16) per thread, on cache lines."""
        cdef double size = 4.0 * threads * floats + 64
        if size < MOST:
            self.memory = malloc(<size_t>threads * <size_t>floats * sizeof(float) + 64)
        if self.memory == NULL:
            raise MemoryError(f"scratch for {threads} threads: {size:.0f} bytes")
        return <float *>(<size_t>self.memory + 63 & ~<size_t>63)

    cdef void **pointers(self, Py_ssize_t n) except NULL:
        self.addresses = malloc(<size_t>n * sizeof(void *))
        if self.addresses == NULL:
            raise MemoryError(f"{n} pointers")
        return <void **>self.addresses

    cdef Py_buffer *get(self, x, bint writable) except NULL:
        cdef Py_buffer *view = &self.views[self.count]
        PyObject_GetBuffer(x, view, PyBUF_STRIDES | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0))
        self.count += 1
        return view

    cdef int tensor(self, kda_tensor *t, x, tuple shape, int inner, bint writable) except -1:
        """x as [batch, token, head, n...], its last `inner` axes contiguous; missing axes have stride 0."""
        cdef Py_buffer *view = self.get(x, writable)
        cdef Py_ssize_t size = view.itemsize, stride, run = size
        cdef Py_ssize_t strides[3]
        cdef int axis, outer = view.ndim - inner
        if view.ndim != len(shape) or outer > 3:
            raise ValueError(f"expected {len(shape)} axes, got {view.ndim}")
        t.dtype = dtype_of(view)
        t.data = view.buf
        for axis in range(view.ndim - 1, -1, -1):
            stride = view.strides[axis]
            if view.shape[axis] != <Py_ssize_t>shape[axis]:
                raise ValueError(f"axis {axis}: expected {shape[axis]}, got {view.shape[axis]}")
            if axis < outer:
                strides[axis] = stride // size
            else:
                if view.shape[axis] > 1 and stride != run:
                    raise ValueError(f"axis {axis} is not contiguous")
                run *= view.shape[axis]
            if <size_t>view.buf % <size_t>size or (view.shape[axis] > 1 and stride % size):
                raise ValueError("unaligned")
        t.batch = strides[0] if outer > 0 else 0
        t.token = strides[1] if outer > 1 else 0
        t.head = strides[2] if outer > 2 else 0
        return 0

    cdef const float *floats(self, x, Py_ssize_t n) except? NULL:
        cdef Py_buffer *view = self.get(x, False)
        if view.ndim != 1 or view.shape[0] != n or dtype_of(view) != KDA_F32 or (n > 1 and view.strides[0] != 4):
            raise ValueError(f"expected {n} contiguous float32")
        return <const float *>view.buf

    cdef const float *optional(self, x, Py_ssize_t n) except? NULL:
        if x is None:
            return NULL
        return self.floats(x, n)


cdef int dtype_of(Py_buffer *view) except -1:
    cdef bytes code = view.format if view.format != NULL else b"B"
    if code == b"f":
        return KDA_F32
    if code == b"e":
        return KDA_F16
    if code == b"H":  # bfloat16 as its bits: numpy cannot export the type itself
        return KDA_BF16
    raise ValueError(f"unexpected buffer format {code!r}")


def apart(tuple outputs, tuple inputs):
    """Whether no address range of the outputs meets another output's or an input's; None is passed over."""
    cdef size_t low[BUFFERS]
    cdef size_t high[BUFFERS]
    cdef Py_buffer view
    cdef Py_ssize_t n = 0, written = 0, i, other
    if len(outputs) + len(inputs) > BUFFERS:
        raise ValueError("too many arrays")
    for i, x in enumerate(outputs + inputs):
        if x is None:
            continue
        PyObject_GetBuffer(x, &view, PyBUF_STRIDES)
        extent(&view, &low[n], &high[n])
        PyBuffer_Release(&view)
        n += 1
        if i < len(outputs):
            written = n
        for other in range(min(n - 1, written)):
            if low[other] < high[n - 1] and low[n - 1] < high[other]:
                return False
    return True


cdef void extent(Py_buffer *view, size_t *low, size_t *high) noexcept:
    """[low, high): the bytes that a buffer may touch; empty for an array without elements."""
    cdef int axis
    cdef Py_ssize_t span
    low[0] = <size_t>view.buf
    high[0] = low[0] + <size_t>view.itemsize
    for axis in range(view.ndim):
        if view.shape[axis] == 0:
            high[0] = low[0] = 0
            return
        span = (view.shape[axis] - 1) * view.strides[axis]
        if span < 0:
            low[0] -= <size_t>-span
        else:
            high[0] += <size_t>span


# ---- operations ----

def set_parts(double work, double seconds):
    """For tests: the work of the first part of a call, and the time of the others; returns what they were."""
    global part_work, part_seconds
    before = part_work, part_seconds
    part_work, part_seconds = work, seconds
    return before


cdef Py_ssize_t first_part(Py_ssize_t n, double work) noexcept:
    """How many of n are part_work of `work`."""
    return n if work <= part_work else max(1, <Py_ssize_t>(n * (part_work / work)))


cdef Py_ssize_t next_part(Py_ssize_t n, double seconds) noexcept:
    """How many take part_seconds, if n took `seconds`."""
    return <Py_ssize_t>min(1e18, max(1.0, n * min(16.0, part_seconds / max(seconds, 1e-9))))


cdef int run(kda_task_fn *task, const void *job, Py_ssize_t items, int threads, double work) except -1:
    """The task for each item. Items are run in parts if `work`, in state elements touched, is long; 0: never.

    Raises what a signal's handler raises, when some items are done and others not begun.
    """
    cdef Py_ssize_t first = 0, part = max(first_part(items, work), <Py_ssize_t>threads)
    while True:
        part = min(part, items - first)
        begun = _clock() if part < items else None
        with nogil:
            kda_parallel_for(task, job, first, part, threads)
        first += part
        if first >= items:
            return 0
        PyErr_CheckSignals()
        part = max(next_part(part, _clock() - begun), <Py_ssize_t>threads)


cdef Py_ssize_t rounded(Py_ssize_t floats) noexcept:
    return (floats + 15) // 16 * 16


cdef const int64_t *sequences(_Buffers buffers, cu_seqlens, Py_ssize_t B, Py_ssize_t T, Py_ssize_t *N) except? NULL:
    """cu_seqlens as [N + 1] offsets into one batch row; None: N = B rows of T tokens."""
    cdef Py_buffer *view
    cdef const int64_t *cu
    cdef Py_ssize_t i
    N[0] = B
    if cu_seqlens is None:
        return NULL
    view = buffers.get(cu_seqlens, False)
    if B != 1 or view.ndim != 1 or view.itemsize != 8 or view.shape[0] < 1 or (
            view.shape[0] > 1 and view.strides[0] != 8):
        raise ValueError("cu_seqlens: expected contiguous int64 and a batch of 1")
    cu = <const int64_t *>view.buf
    N[0] = view.shape[0] - 1
    if cu[0] < 0 or cu[N[0]] > T:
        raise ValueError("cu_seqlens leaves [0, T]")
    for i in range(N[0]):
        if cu[i] > cu[i + 1]:
            raise ValueError("cu_seqlens decreases")
    return cu


cdef int state(_Buffers buffers, kda_tensor *t, x, tuple shape, bint writable) except -1:
    """[N, HV, K, V] float32 with [K, V] contiguous; [N, n, HV, K, V] too."""
    buffers.tensor(t, x, shape, 2, writable)
    if len(shape) == 4:
        t.head, t.token = t.token, 0
    if t.dtype != KDA_F32:
        raise ValueError("a state is float32")
    return 0


cdef int projections(_Buffers buffers, kda_job *job, int isa, o, q, k, v, g, beta, A_log, dt_bias, cu_seqlens,
                     double scale, double lower_bound, double eps, int flags, bint chunked) except -1:
    """What delta and layer share: everything but the states. Sets job.splits to 1."""
    cdef Py_ssize_t B, T, H, K, HV, V, N
    memset(job, 0, sizeof(job[0]))
    job.isa = kernels_of(isa)
    B, T, H, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    if H < 1 or HV < 1 or HV % H or K < 1 or V < 1:
        raise ValueError("bad head counts or sizes")
    buffers.tensor(&job.q, q, (B, T, H, K), 1, False)
    buffers.tensor(&job.k, k, (B, T, H, K), 1, False)
    buffers.tensor(&job.v, v, (B, T, HV, V), 1, False)
    buffers.tensor(&job.g, g, (B, T, HV, K), 1, False)
    buffers.tensor(&job.beta, beta, (B, T, HV), 0, False)
    buffers.tensor(&job.o, o, (B, T, HV, V), 1, True)
    job.cu_seqlens = sequences(buffers, cu_seqlens, B, T, &N)
    job.A_log = buffers.optional(A_log, HV)
    job.dt_bias = buffers.optional(dt_bias, HV * K)
    job.N, job.T, job.H, job.HV, job.K, job.V = N, T, H, HV, K, V
    job.scale, job.lower_bound, job.eps, job.flags = scale, lower_bound, eps, flags
    job.block = KDA_BLOCK if chunked else 1
    job.group = job.splits = 1
    return 0


cdef int run_delta(_Buffers buffers, kda_job *job, int threads, double work) except -1:
    """All tokens, in parts if `work` is long; every sequence is at the same token then, and the states are those after
    it. Raises what a signal's handler raises, with a note of how many tokens are done."""
    # several heads in turn, where there are enough for every thread and their tokens are more than a block
    job.group = 1
    if job.block > 1 and job.s_dtype == KDA_F32:
        job.group = max(1, min(<Py_ssize_t>KDA_GROUP, job.N * job.HV // (4 * threads)))
    cdef Py_ssize_t items = kda_delta_items(job)
    threads = <int>max(1, min(<Py_ssize_t>threads, items))
    job.scratch_floats = rounded(kda_delta_scratch(job))
    job.scratch = buffers.scratch(threads, job.scratch_floats)
    cdef Py_ssize_t tokens = longest(job, job.N, job.T), part = first_part(tokens, work)
    if part >= tokens:
        run(&kda_delta_item, job, items, threads, 0)
        if kda_history_is_shared(job):
            kda_keep_shared_histories(job)
        return 0
    while True:
        job.end = part_end(job, job.start + part)
        begun = _clock()
        run(&kda_delta_item, job, items, threads, 0)
        if job.end >= tokens:
            return 0
        try:
            PyErr_CheckSignals()
        except BaseException as error:
            error.add_note(f"kda: stopped after the first {job.end} tokens of each sequence; "
                           "out and state_out hold the results of these")
            raise
        part = next_part(job.end - job.start, _clock() - begun)
        job.start, job.s_in = job.end, job.s_out


cdef Py_ssize_t part_end(const kda_job *job, Py_ssize_t end) noexcept:
    """The token nearest to `end`, but past job.start, before which a block ends in any case."""
    end = job.start + max(end - job.start + job.block - 1, job.block) // job.block * job.block
    if job.states.data != NULL and end // job.spacing * job.spacing > job.start:
        return end // job.spacing * job.spacing  # from where blocks are counted anew
    return end


def delta(int isa, o, s_out, s_in, q, k, v, g, beta, A_log, dt_bias, cu_seqlens,
          double scale, double lower_bound, double eps, int flags, bint chunked, states, Py_ssize_t spacing,
          pending=None):
    """o [B,T,HV,V] and s_out [N,HV,K,V] from the rest; s_in None starts from zeros, s_in is s_out updates in place.

    pending [N,HV,2K+V] float32, contiguous: the updates that s_in lacks, and after the call those that s_out lacks;
    not with chunked.

    chunked takes KDA_BLOCK tokens together. states [N,n,HV,K,V] or None receives the state after every `spacing`
    tokens of a sequence.
    """
    cdef _Buffers buffers = _Buffers()
    cdef kda_job job
    cdef Py_ssize_t n, heads
    projections(buffers, &job, isa, o, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, scale, lower_bound, eps, flags,
                chunked)
    cdef tuple shape = (job.N, job.HV, job.K, job.V)
    state(buffers, &job.s_out, s_out, shape, True)
    if s_in is not None:
        state(buffers, &job.s_in, s_in, shape, False)
    if states is not None:
        n = states.shape[1]
        state(buffers, &job.states, states, (job.N, n, job.HV, job.K, job.V), True)
        if spacing < 1 or n * spacing < longest(&job, job.N, job.T) // spacing * spacing:
            raise ValueError("states: too few checkpoints")
    job.spacing = spacing
    cdef double work = <double>max(<Py_ssize_t>q.shape[0] * job.T, job.N) * job.HV * job.K * job.V
    cdef int threads = threads_for(work)
    heads = job.N * job.HV
    if pending is not None:
        if chunked:
            raise ValueError("pending: not by blocks")
        job.pending = updates(buffers, pending, (job.N, job.HV, 2 * job.K + job.V))
    elif threads > 1 and heads < threads:  # columns of S are independent: let threads share a head
        job.splits = min((threads + heads - 1) // max(heads, 1), (job.V + 15) // 16)
    run_delta(buffers, &job, threads, work)


cdef float *updates(_Buffers buffers, x, tuple shape) except NULL:
    """[N, HV, 2 K + V] contiguous float32."""
    cdef kda_tensor t
    buffers.tensor(&t, x, shape, 3, True)
    if t.dtype != KDA_F32:
        raise ValueError("an update is float32")
    return <float *>t.data


def settle(int isa, s, pending, copies=(), changes=()):
    """Make the updates of pending [N,HV,2K+V] that s [N,HV,K,V] lacks, in place, and with their end commit's affair."""
    cdef _Buffers buffers = _Buffers()
    cdef kda_job job
    memset(&job, 0, sizeof(job))
    job.isa = kernels_of(isa)
    job.N, job.HV, job.K, job.V = s.shape
    state(buffers, &job.s_out, s, s.shape, True)
    job.pending = updates(buffers, pending, (job.N, job.HV, 2 * job.K + job.V))
    run(&kda_settle_item, &job, job.N * job.HV, threads_for(<double>job.N * job.HV * job.K * job.V), 0)
    make(copies, changes)


cdef class Layer:
    """Everything between a layer's projections, for arrays that stay: q, k, v, g, beta, A_log, dt_bias, scale,
    lower_bound, eps and flags as delta has them, on one batch row of packed sequences. Their buffers are held.

    taps: [width * D] for q, k and v. gate [1,T,HV,V], weight [V]: the gated norm; gate None: o comes without it.
    """
    cdef _Buffers buffers
    cdef kda_job job

    def __cinit__(self, int isa, o, q, k, v, g, beta, A_log, dt_bias, double scale, double lower_bound, double eps,
                  int flags, tuple taps, gate, weight, double norm_eps, int activation):
        cdef _Buffers buffers = _Buffers()
        cdef kda_job *job = &self.job
        cdef Py_ssize_t D_qk, D_v, width
        projections(buffers, job, isa, o, q, k, v, g, beta, A_log, dt_bias, None, scale, lower_bound, eps, flags,
                    False)
        D_qk, D_v = job.H * job.K, job.HV * job.V
        width = taps[0].shape[0] // D_qk
        if job.N != 1 or not 1 <= width <= KDA_CONV_MAX:
            raise ValueError("expected one batch row, and 1 to 8 taps")
        job.conv_width = <int>width
        job.conv_q.taps, job.conv_q.D = buffers.floats(taps[0], width * D_qk), D_qk
        job.conv_k.taps, job.conv_k.D = buffers.floats(taps[1], width * D_qk), D_qk
        job.conv_v.taps, job.conv_v.D = buffers.floats(taps[2], width * D_v), D_v
        job.conv_k.start, job.conv_v.start = (width - 1) * D_qk, 2 * (width - 1) * D_qk
        if gate is not None:
            buffers.tensor(&job.o_gate, gate, (1, job.T, job.HV, job.V), 1, False)
            job.norm_weight = buffers.floats(weight, job.V)
            job.norm_eps, job.norm_activation = norm_eps, activation
        self.buffers = buffers

    def run(self, states_in, states_out, cu_seqlens, bint chunked, pending=None, left=None, changes=()):
        """For each sequence (S [HV,K,V] float32 or bfloat16 as uint16, histories float32 [(width - 1) * (2 * H * K +
        HV * V)]: taps by channels of q, then k, then v). In and out may be the same objects.

        pending, left: for each sequence None, or float32 [HV * (2 K + V)]: the updates that S lacks before the call;
        where those of the last token go, which S lacks after it (not with chunked, and not for an empty sequence).
        The two may be the same. Only with a float32 S.

        changes: as commit's, made with the last kernel's end. All of it is one part: no signal comes between, whatever
        its length.
        """
        cdef _Buffers buffers = _Buffers()
        cdef kda_job job = self.job
        cdef void **pointers
        cdef Py_ssize_t n
        job.cu_seqlens = sequences(buffers, cu_seqlens, 1, job.T, &job.N)
        if job.cu_seqlens == NULL or len(states_in) != job.N or len(states_out) != job.N:
            raise ValueError("expected a state for each sequence of cu_seqlens")
        job.block = KDA_BLOCK if chunked else 1
        pointers = buffers.pointers(6 * job.N + 1)
        job.rows.s_in, job.rows.s_out = pointers, pointers + job.N
        job.rows.past, job.rows.next = <float **>(pointers + 2 * job.N), <float **>(pointers + 3 * job.N)
        job.rows.pending, job.rows.left = <float **>(pointers + 4 * job.N), <float **>(pointers + 5 * job.N)
        job.s_dtype = dtype_code(states_out[0][0]) if job.N else KDA_F32
        for n in range(job.N):
            row_state(&job, n, states_out[n], True)
            if states_in[n] is states_out[n]:
                job.rows.s_in[n], job.rows.past[n] = job.rows.s_out[n], job.rows.next[n]
            else:
                row_state(&job, n, states_in[n], False)
            job.rows.pending[n] = row_updates(&job, None if pending is None else pending[n])
            job.rows.left[n] = row_updates(&job, None if left is None else left[n])
            if job.rows.left[n] != NULL and (chunked or job.cu_seqlens[n] == job.cu_seqlens[n + 1]):
                raise ValueError("no step, no update of it")
        run_delta(buffers, &job, threads_for(<double>max(job.T, job.N) * job.HV * job.K * job.V), 0)
        make((), changes)


cdef int dtype_code(x) except -1:
    cdef Py_buffer view
    PyObject_GetBuffer(x, &view, PyBUF_STRIDES | PyBUF_FORMAT)
    try:
        return dtype_of(&view)
    finally:
        PyBuffer_Release(&view)


cdef void *whole(x, int dtype, Py_ssize_t n, bint writable) except? NULL:
    """The n elements of a C-contiguous array. The buffer is let go: the caller of the call holds the array."""
    cdef Py_buffer view
    PyObject_GetBuffer(x, &view, PyBUF_ND | PyBUF_FORMAT | (PyBUF_WRITABLE if writable else 0))
    try:
        if dtype_of(&view) != dtype or view.len != n * view.itemsize or <size_t>view.buf % <size_t>view.itemsize:
            raise ValueError("bad state array")
        return view.buf
    finally:
        PyBuffer_Release(&view)


cdef int row_state(kda_job *job, Py_ssize_t n, tuple arrays, bint writable) except -1:
    s, h = arrays
    cdef void *at_s = whole(s, job.s_dtype, job.HV * job.K * job.V, writable)
    cdef void *at_h = whole(h, KDA_F32, (job.conv_width - 1) * (2 * job.conv_q.D + job.conv_v.D), writable)
    if job.s_dtype == KDA_F16:
        raise ValueError("a state is float32 or bfloat16")
    if writable:
        job.rows.s_out[n], job.rows.next[n] = at_s, <float *>at_h
    else:
        job.rows.s_in[n], job.rows.past[n] = at_s, <float *>at_h
    return 0


cdef float *row_updates(kda_job *job, x) except? NULL:
    if x is None:
        return NULL
    if job.s_dtype != KDA_F32:
        raise ValueError("only float32 states put updates off")
    return <float *>whole(x, KDA_F32, job.HV * (2 * job.K + job.V), True)


cdef Py_ssize_t longest(const kda_job *job, Py_ssize_t N, Py_ssize_t T) noexcept:
    cdef Py_ssize_t i, most = 0
    if job.cu_seqlens == NULL:
        return T if N else 0
    for i in range(N):
        most = max(most, job.cu_seqlens[i + 1] - job.cu_seqlens[i])
    return most


def delta_backward(int isa, dq, dk, dv, dg, dbeta, da, ds_out, d_o, ds_in, s_in, states, q, k, v, g, beta, A_log,
                   dt_bias, cu_seqlens, double scale, double lower_bound, double eps, int flags, Py_ssize_t spacing):
    """Gradients of `delta`, float32 and per value head: dq, dk, dg [B,T,HV,K], dv [B,T,HV,V], dbeta and da (by A_log,
    each token's share) [B,T,HV], ds_out [N,HV,K,V]. d_o and ds_in (or None) are those by o and the final state;
    states what `delta` gave at this spacing."""
    cdef _Buffers buffers = _Buffers()
    cdef kda_backward_job job
    cdef Py_ssize_t B, T, H, K, HV, V, N, n
    memset(&job, 0, sizeof(job))
    job.forward.isa = kernels_of(isa)
    B, T, H, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    if H < 1 or HV < 1 or HV % H or K < 1 or V < 1:
        raise ValueError("bad head counts or sizes")
    buffers.tensor(&job.forward.q, q, (B, T, H, K), 1, False)
    buffers.tensor(&job.forward.k, k, (B, T, H, K), 1, False)
    buffers.tensor(&job.forward.v, v, (B, T, HV, V), 1, False)
    buffers.tensor(&job.forward.g, g, (B, T, HV, K), 1, False)
    buffers.tensor(&job.forward.beta, beta, (B, T, HV), 0, False)
    buffers.tensor(&job.d_o, d_o, (B, T, HV, V), 1, False)
    job.forward.o = job.d_o  # only asked for ahead, never written
    result(buffers, &job.dq, dq, (B, T, HV, K), 1)
    result(buffers, &job.dk, dk, (B, T, HV, K), 1)
    result(buffers, &job.dg, dg, (B, T, HV, K), 1)
    result(buffers, &job.dv, dv, (B, T, HV, V), 1)
    result(buffers, &job.dbeta, dbeta, (B, T, HV), 0)
    result(buffers, &job.da, da, (B, T, HV), 0)
    job.forward.cu_seqlens = sequences(buffers, cu_seqlens, B, T, &N)
    state(buffers, &job.ds_out, ds_out, (N, HV, K, V), True)
    if ds_in is not None:
        state(buffers, &job.ds_in, ds_in, (N, HV, K, V), False)
    if s_in is not None:
        state(buffers, &job.forward.s_in, s_in, (N, HV, K, V), False)
    n = states.shape[1]
    state(buffers, &job.forward.states, states, (N, n, HV, K, V), False)
    job.forward.A_log = buffers.optional(A_log, HV)
    job.forward.dt_bias = buffers.optional(dt_bias, HV * K)
    job.forward.N, job.forward.T, job.forward.H, job.forward.HV = N, T, H, HV
    job.forward.K, job.forward.V = K, V
    if spacing < 1 or n < (longest(&job.forward, N, T) - 1) // spacing:
        raise ValueError("states: too few checkpoints")
    job.forward.scale, job.forward.lower_bound, job.forward.eps, job.forward.flags = scale, lower_bound, eps, flags
    job.forward.block, job.forward.spacing, job.forward.splits = KDA_BLOCK, spacing, 1
    cdef double work = <double>max(B * T, N) * HV * K * V * 4
    cdef int threads = <int>max(1, min(<Py_ssize_t>threads_for(work), N * HV))
    job.forward.scratch_floats = rounded(kda_backward_scratch(&job.forward))
    job.forward.scratch = buffers.scratch(threads, job.forward.scratch_floats)
    job.end = max((longest(&job.forward, N, T) + spacing - 1) // spacing, 1)
    cdef Py_ssize_t part = first_part(job.end, work)
    while True:
        job.start = max(job.end - part, 0)
        begun = _clock()
        run(&kda_backward_item, &job, N * HV, threads, 0)
        if job.start == 0:
            return
        PyErr_CheckSignals()
        part, job.end = next_part(job.end - job.start, _clock() - begun), job.start


cdef int result(_Buffers buffers, kda_tensor *t, x, tuple shape, int inner) except -1:
    buffers.tensor(t, x, shape, inner, True)
    if t.dtype != KDA_F32:
        raise ValueError("a gradient is float32")
    return 0


def gate(int isa, y, g, A_log, dt_bias, double lower_bound, int flags):
    """y [B,T,HV,K] float32, log decay, from raw g of the same shape."""
    cdef _Buffers buffers = _Buffers()
    cdef kda_job job
    cdef Py_ssize_t B, T, HV, K
    memset(&job, 0, sizeof(job))
    job.isa = kernels_of(isa)
    B, T, HV, K = g.shape
    buffers.tensor(&job.g, g, (B, T, HV, K), 1, False)
    buffers.tensor(&job.o, y, (B, T, HV, K), 1, True)
    if job.o.dtype != KDA_F32:
        raise ValueError("y is float32")
    job.A_log = buffers.optional(A_log, HV)
    job.dt_bias = buffers.optional(dt_bias, HV * K)
    job.N, job.T, job.H, job.HV, job.K, job.V = B, T, HV, HV, K, 1
    job.lower_bound, job.flags = lower_bound, flags
    cdef double work = 8.0 * B * T * HV * K
    run(&kda_gate_item, &job, B * T, threads_for(work), work)


def l2norm(int isa, y, x, double eps):
    """y [B,T,H,K] = x / sqrt(sum(x * x) + eps) over the last axis."""
    cdef _Buffers buffers = _Buffers()
    cdef kda_job job
    cdef Py_ssize_t B, T, H, K
    memset(&job, 0, sizeof(job))
    job.isa = kernels_of(isa)
    B, T, H, K = x.shape
    buffers.tensor(&job.q, x, (B, T, H, K), 1, False)
    buffers.tensor(&job.o, y, (B, T, H, K), 1, True)
    job.N, job.T, job.H, job.HV, job.K, job.V = B, T, H, H, K, 1
    job.eps = eps
    cdef double work = <double>B * T * H * K
    cdef int threads = threads_for(work)
    job.scratch_floats = rounded(K)
    job.scratch = buffers.scratch(threads, job.scratch_floats)
    run(&kda_l2norm_item, &job, B * T, threads, work)


def norm_gated(int isa, y, x, gate, weight, double eps, int activation):
    """y [B,T,H,n] = rmsnorm(x) * weight * activation(gate) over the last axis."""
    cdef _Buffers buffers = _Buffers()
    cdef kda_norm_job job
    cdef Py_ssize_t B, T, H, n
    memset(&job, 0, sizeof(job))
    job.isa = kernels_of(isa)
    B, T, H, n = x.shape
    buffers.tensor(&job.x, x, (B, T, H, n), 1, False)
    buffers.tensor(&job.gate, gate, (B, T, H, n), 1, False)
    buffers.tensor(&job.y, y, (B, T, H, n), 1, True)
    job.weight = buffers.floats(weight, n)
    job.T, job.H, job.n, job.eps, job.activation = T, H, n, eps, activation
    cdef double work = 4.0 * B * T * H * n
    cdef int threads = threads_for(work)
    job.scratch_floats = rounded(3 * n)
    job.scratch = buffers.scratch(threads, job.scratch_floats)
    run(&kda_norm_item, &job, B * T, threads, work)


cdef float *conv_state(_Buffers buffers, x, tuple shape, bint writable,
                       Py_ssize_t *batch, Py_ssize_t *channel, Py_ssize_t *tap) except? NULL:
    cdef kda_tensor t
    if x is None:
        return NULL
    buffers.tensor(&t, x, shape, 0, writable)
    if t.dtype != KDA_F32:
        raise ValueError("a state is float32")
    batch[0], channel[0], tap[0] = t.batch, t.token, t.head
    return <float *>t.data


def conv(int isa, y, s_out, x, s_in, taps, bias, cu_seqlens, int activation, copies=()):
    """y [B,T,D] from x; taps [width * D], tap by tap; states [N,D,width-1] or None, in any strides.

    copies: as commit's, made with the last kernel's end.
    """
    cdef _Buffers buffers = _Buffers()
    cdef kda_conv_job job
    cdef Py_ssize_t B, T, D, N
    memset(&job, 0, sizeof(job))
    job.isa = kernels_of(isa)
    B, T, D = x.shape
    job.width = <int>(taps.shape[0] // D)
    if not 1 <= job.width <= KDA_CONV_MAX:
        raise ValueError("bad kernel width")
    buffers.tensor(&job.x, x, (B, T, D), 1, False)
    buffers.tensor(&job.y, y, (B, T, D), 1, True)
    job.taps = buffers.floats(taps, job.width * D)
    job.bias = buffers.optional(bias, D)
    job.cu_seqlens = sequences(buffers, cu_seqlens, B, T, &N)
    job.N, job.T, job.D, job.activation = N, T, D, activation
    cdef tuple shape = (N, D, job.width - 1)
    job.state_out = conv_state(buffers, s_out, shape, True, &job.out_batch, &job.out_channel, &job.out_tap)
    job.state_in = conv_state(buffers, s_in, shape, False, &job.in_batch, &job.in_channel, &job.in_tap)
    cdef Py_ssize_t items = kda_conv_items(&job)
    cdef double work = 8.0 * B * T * D
    cdef int threads = <int>max(1, min(<Py_ssize_t>threads_for(work), items))
    job.scratch_floats = rounded(kda_conv_scratch(&job))
    job.scratch = buffers.scratch(threads, job.scratch_floats)
    if items >= 16 * threads:
        run(&kda_conv_item, &job, items, threads, work)
        make(copies, ())
        return
    cdef Py_ssize_t part = first_part(T, work)
    while True:  # few items of many tokens
        job.end = min(job.start + part, T)
        begun = _clock()
        run(&kda_conv_item, &job, items, threads, 0)
        if job.end >= T:
            make(copies, ())
            return
        PyErr_CheckSignals()
        part, job.start = next_part(job.end - job.start, _clock() - begun), job.end


def conv_step(int isa, y, state, x, weight, bias, int activation, copies=()):
    """y [B,D] from x, state [B,D,width-1] contiguous, in place; weight [D * width], channel by channel.

    copies: as conv's.
    """
    cdef _Buffers buffers = _Buffers()
    cdef kda_conv_job job
    cdef kda_tensor t
    cdef Py_ssize_t B, D
    memset(&job, 0, sizeof(job))
    job.isa = kernels_of(isa)
    B, D = x.shape
    job.width = <int>(weight.shape[0] // D)
    if not 1 <= job.width <= KDA_CONV_MAX:
        raise ValueError("bad kernel width")
    buffers.tensor(&job.x, x, (B, D), 1, False)
    buffers.tensor(&job.y, y, (B, D), 1, True)
    buffers.tensor(&t, state, (B, D, job.width - 1), 3, True)
    if t.dtype != KDA_F32:
        raise ValueError("a state is float32")
    job.state_out = <float *>t.data
    job.taps = buffers.floats(weight, job.width * D)
    job.bias = buffers.optional(bias, D)
    job.N, job.T, job.D, job.activation = B, 1, D, activation
    cdef Py_ssize_t items = kda_conv_items(&job)
    cdef int threads = <int>max(1, min(<Py_ssize_t>threads_for(8.0 * B * D), items))
    job.scratch_floats = 2 * KDA_CONV_CHANNELS
    job.scratch = buffers.scratch(threads, job.scratch_floats)
    run(&kda_conv_step_item, &job, items, threads, 0)
    make(copies, ())


# ---- group-quantised matrices ----

def matrix_layout(int isa):
    """(lanes, q8_bias, idot_tokens, idot_run) of an ISA: what packed weights depend on, the tokens of a full block, and
    how many codes of each lie together there."""
    cdef const kda_kernels *t = kernels_of(isa)
    return t.lanes, t.q8_bias, t.idot_tokens, t.idot_run


cdef int matrix(_Buffers buffers, kda_matrix *m, int isa, codes, scales, Py_ssize_t N, Py_ssize_t K, Py_ssize_t group,
                int bits, bint writable) except -1:
    """A packed matrix: codes uint8 and scales uint16, one-dimensional and contiguous, of just the right sizes."""
    cdef Py_buffer *view
    if N < 1 or K < 1 or bits not in (4, 8) or group < 8 or group % 8 or group > 512:
        raise ValueError("bad matrix shape, bits or group")
    m.isa, m.N, m.K, m.group, m.bits = kernels_of(isa), N, K, group, bits
    m.groups = (K + group - 1) // group
    view = buffers.get(codes, writable)
    if view.ndim != 1 or view.itemsize != 1 or view.strides[0] != 1 or (
            view.shape[0] != kda_matrix_tiles(m) * kda_matrix_tile_bytes(m)):
        raise ValueError("bad packed codes")
    m.codes = <unsigned char *>view.buf
    view = buffers.get(scales, writable)
    if view.ndim != 1 or view.itemsize != 2 or view.strides[0] != 2 or <size_t>view.buf % 2 or (
            view.shape[0] != kda_matrix_tiles(m) * m.groups * m.isa.lanes):
        raise ValueError("bad packed scales")
    m.scales = <unsigned short *>view.buf
    return 0


def matrix_pack(int isa, codes, scales, canonical_codes, canonical_scales, Py_ssize_t K, Py_ssize_t group, int bits,
                bint unpack):
    """Canonical codes [N, bytes] and scales uint16 [N, groups] into a packed matrix, or back again with `unpack`."""
    cdef _Buffers buffers = _Buffers()
    cdef kda_pack_job job
    cdef Py_buffer *c = buffers.get(canonical_codes, unpack)
    cdef Py_buffer *s = buffers.get(canonical_scales, unpack)
    if c.ndim != 2 or s.ndim != 2 or c.itemsize != 1 or s.itemsize != 2 or c.shape[0] != s.shape[0]:
        raise ValueError("bad canonical arrays")
    matrix(buffers, &job.m, isa, codes, scales, c.shape[0], K, group, bits, not unpack)
    if c.shape[1] != job.m.groups * group * bits // 8 or s.shape[1] != job.m.groups or c.strides[1] != 1 or (
            s.strides[1] != 2 or s.strides[0] % 2 or <size_t>s.buf % 2):
        raise ValueError("bad canonical shapes")
    job.codes, job.scales = <unsigned char *>c.buf, <unsigned short *>s.buf
    job.ld_codes, job.ld_scales = c.strides[0], s.strides[0] // 2
    cdef Py_ssize_t tiles = kda_matrix_tiles(&job.m)
    cdef double work = <double>job.m.N * K
    cdef int threads = <int>min(<Py_ssize_t>threads_for(work), tiles)
    run(&kda_unpack_item if unpack else &kda_pack_item, &job, tiles, threads, work)


def matrix_encode(int isa, codes, scales, bad, w, Py_ssize_t group, int bits):
    """Quantise w [N, K] into a packed matrix. bad int64 [tiles]: -1, or row * groups + group that has no scale."""
    cdef _Buffers buffers = _Buffers()
    cdef kda_encode_job job
    cdef Py_ssize_t N, K
    cdef Py_buffer *view
    N, K = w.shape
    matrix(buffers, &job.m, isa, codes, scales, N, K, group, bits, True)
    buffers.tensor(&job.w, w, (N, K), 1, False)
    view = buffers.get(bad, True)
    cdef Py_ssize_t tiles = kda_matrix_tiles(&job.m)
    if view.ndim != 1 or view.itemsize != 8 or view.shape[0] != tiles or view.strides[0] != 8:
        raise ValueError("bad status array")
    job.bad = <int64_t *>view.buf
    cdef double work = 4.0 * N * K
    cdef int threads = <int>min(<Py_ssize_t>threads_for(work), tiles)
    job.scratch_floats = rounded(kda_encode_scratch(&job.m))
    job.scratch = buffers.scratch(threads, job.scratch_floats)
    run(&kda_encode_item, &job, tiles, threads, work)


cdef class Matrix:
    """A packed matrix whose buffers are held, for its products."""
    cdef _Buffers buffers
    cdef kda_matrix m

    def __cinit__(self, int isa, codes, scales, Py_ssize_t N, Py_ssize_t K, Py_ssize_t group, int bits):
        cdef _Buffers buffers = _Buffers()
        matrix(buffers, &self.m, isa, codes, scales, N, K, group, bits, False)
        self.buffers = buffers

    def multiply(self, y, x):
        """y float32 [T, N] = x [T, K] times the matrix, with x quantised to int8 by token and group."""
        cdef _Buffers buffers = _Buffers()
        cdef kda_idot_job job
        cdef kda_tensor t
        cdef Py_ssize_t T = x.shape[0], N = self.m.N, K = self.m.K, padded
        job.m = self.m
        buffers.tensor(&job.x, x, (T, K), 1, False)
        buffers.tensor(&t, y, (T, N), 1, True)
        if t.dtype != KDA_F32:
            raise ValueError("y is float32")
        job.ld_y = t.batch
        padded = job.m.groups * job.m.group
        cdef double work = <double>min(T, TOKENS) * N * K / 8
        cdef int threads = threads_for(work)
        job.scratch_floats = rounded(kda_idot_scratch(&job.m))
        # the activations of the tokens lie behind the threads' scratch: codes, scales, sums
        cdef Py_ssize_t most = min(T, TOKENS), floats = rounded(most * padded // 4 + 2 * most * job.m.groups)
        job.scratch = buffers.scratch(1, threads * job.scratch_floats + floats)
        job.x_scales = job.scratch + threads * job.scratch_floats
        job.x_sums = <int *>(job.x_scales + most * job.m.groups)
        job.x_codes = <signed char *>(job.x_sums + most * job.m.groups)
        cdef Py_ssize_t start = 0, blocks, chunks = kda_idot_chunks(&job)
        cdef char *x_data = <char *>job.x.data
        cdef Py_ssize_t x_step = job.x.batch * (4 if job.x.dtype == KDA_F32 else 2)
        while start < T:
            if start:
                PyErr_CheckSignals()
            job.T = min(T - start, TOKENS)
            job.x.data, job.y = x_data + start * x_step, <float *>t.data + start * job.ld_y
            blocks = kda_idot_blocks(&job)
            run(&kda_idot_quantize_item, &job, blocks,
                <int>min(<Py_ssize_t>threads_for(job.T * K / 4), max(blocks, 1)), job.T * K / 4)
            run(&kda_idot_item, &job, chunks, <int>min(<Py_ssize_t>threads, chunks), work)
            start += TOKENS


# ---- dense matrices ----

def dense_lanes(int isa):
    """Rows of a panel."""
    return kernels_of(isa).dense_lanes


cdef int panels(_Buffers buffers, kda_dense_job *job, int isa, x, Py_ssize_t N, Py_ssize_t K, bint writable) except -1:
    """A packed matrix: float32, one-dimensional and contiguous, of just the right size."""
    cdef kda_tensor t
    memset(job, 0, sizeof(job[0]))
    if N < 1 or K < 1:
        raise ValueError("bad matrix shape")
    job.isa, job.N, job.K = kernels_of(isa), N, K
    buffers.tensor(&t, x, (kda_dense_panels(job) * job.isa.dense_lanes * K,), 1, writable)
    if t.dtype != KDA_F32:
        raise ValueError("panels are float32")
    job.panels = <float *>t.data
    return 0


def dense_pack(int isa, packed, w, Py_ssize_t N, Py_ssize_t first):
    """Rows w [n, K] of any dtype become rows first .. first + n of a packed matrix of N rows."""
    cdef _Buffers buffers = _Buffers()
    cdef kda_dense_job job
    cdef Py_ssize_t n, K
    n, K = w.shape
    panels(buffers, &job, isa, packed, N, K, True)
    if first < 0 or n > N - first:
        raise ValueError("rows past the matrix")
    buffers.tensor(&job.w, w, (n, K), 1, False)
    job.first, job.rows = first, n
    cdef Py_ssize_t items = kda_dense_panels(&job)
    cdef double work = <double>n * K
    cdef int threads = <int>max(1, min(<Py_ssize_t>threads_for(work), items))
    job.scratch_floats = rounded(K)
    job.scratch = buffers.scratch(threads, job.scratch_floats)
    run(&kda_dense_pack_item, &job, items, threads, work)


cdef class Dense:
    """A packed matrix whose buffer is held, for its products."""
    cdef _Buffers buffers
    cdef kda_dense_job job

    def __cinit__(self, int isa, packed, Py_ssize_t N, Py_ssize_t K):
        cdef _Buffers buffers = _Buffers()
        panels(buffers, &self.job, isa, packed, N, K, False)
        self.buffers = buffers

    def multiply(self, y, x):
        """y [T, N] = x [T, K] times the matrix; float32, rows contiguous."""
        cdef _Buffers buffers = _Buffers()
        cdef kda_dense_job job = self.job
        cdef kda_tensor t_x, t_y
        cdef Py_ssize_t T = x.shape[0]
        buffers.tensor(&t_x, x, (T, job.K), 1, False)
        buffers.tensor(&t_y, y, (T, job.N), 1, True)
        if t_x.dtype != KDA_F32 or t_y.dtype != KDA_F32:
            raise ValueError("x and y are float32")
        if T == 0:
            return
        job.x, job.ld_x, job.y, job.ld_y, job.T = <float *>t_x.data, t_x.batch, <float *>t_y.data, t_y.batch, T
        cdef Py_ssize_t items = kda_dense_chunks(&job)
        cdef double work = <double>T * job.N * job.K / 2
        run(&kda_dense_item, &job, items, <int>max(1, min(<Py_ssize_t>threads_for(work), items)), work)


# ---- ceilings ----

cdef struct probe_job:
    const kda_kernels *isa
    float *s
    Py_ssize_t n
    Py_ssize_t items
    Py_ssize_t passes


cdef void update_item(const void *job_, Py_ssize_t item, int thread) noexcept nogil:
    cdef const probe_job *job = <const probe_job *>job_
    cdef Py_ssize_t start = job.n * item // job.items, end = job.n * (item + 1) // job.items, _i
    for _i in range(job.passes if end > start else 0):
        job.isa.probe_update(job.s + start, 0.99, 0.01, end - start)


cdef void read_item(const void *job_, Py_ssize_t item, int thread) noexcept nogil:
    cdef const probe_job *job = <const probe_job *>job_
    cdef Py_ssize_t start = job.n * item // job.items, end = job.n * (item + 1) // job.items, _i
    for _i in range(job.passes if end > start else 0):
        job.isa.probe_read(job.s + start, end - start)


cdef void fma_item(const void *job_, Py_ssize_t item, int thread) noexcept nogil:
    cdef const probe_job *job = <const probe_job *>job_
    cdef float sink
    job.isa.probe_fma(&sink, job.n)


cdef void idot_item(const void *job_, Py_ssize_t item, int thread) noexcept nogil:
    cdef const probe_job *job = <const probe_job *>job_
    cdef float sink
    job.isa.probe_idot(&sink, job.n)


cdef int passes_over(kda_task_fn *task, int isa, s, Py_ssize_t passes) except -1:
    """Every element of contiguous float32 `passes` times, on the threads that a large call would use.

    Several passes: each thread goes over one part of its own again and again, which stays in its caches if it fits.
    """
    cdef _Buffers buffers = _Buffers()
    cdef kda_tensor t
    cdef probe_job job
    buffers.tensor(&t, s, s.shape, 1, True)
    if t.dtype != KDA_F32:
        raise ValueError("s is float32")
    job.isa, job.s, job.n = kernels_of(isa), <float *>t.data, s.shape[0]
    cdef int threads = threads_for(job.n * passes)
    job.items, job.passes = threads if passes > 1 else 32 * threads, passes
    run(task, &job, job.items, threads, 0)
    return 0


cdef int on_every_thread(kda_task_fn *task, int isa, Py_ssize_t rounds) except -1:
    cdef probe_job job
    job.isa, job.n = kernels_of(isa), rounds
    cdef int threads = threads_for(1 << 60)
    run(task, &job, threads, threads, 0)
    return threads


def probe_update(int isa, s, Py_ssize_t passes=1):
    """s = s * 0.99 + 0.01 in place over contiguous float32, `passes` times."""
    passes_over(&update_item, isa, s, passes)


def probe_read(int isa, s, Py_ssize_t passes=1):
    """Read contiguous float32 `passes` times."""
    passes_over(&read_item, isa, s, passes)


def probe_fma(int isa, Py_ssize_t rounds):
    """`rounds` of register-only multiply-adds on every thread; returns how many were done in all."""
    cdef float sink
    return on_every_thread(&fma_item, isa, rounds) * rounds * kernels_of(isa).probe_fma(&sink, 1)


def probe_idot(int isa, Py_ssize_t rounds):
    """`rounds` of register-only int8 multiply-adds on every thread; returns how many were done in all."""
    cdef float sink
    return on_every_thread(&idot_item, isa, rounds) * rounds * kernels_of(isa).probe_idot(&sink, 1)
