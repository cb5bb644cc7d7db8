"""What is fuzzed: functions of bytes, each with seeds that are made here, and a mutator that knows JSON.

A target gives its bytes to one parser, as a file where that is what the parser reads. It raises where a promise is
broken:

    what is refused    by ValueError, TypeError or OSError, with a message that names the file
    what is accepted   is what an independent reading of the bytes says, and goes round: written and read again, it is
                       the same; what is computed from it works too
    memory             at most LEAST + FACTOR * bytes of input, as Python and numpy allocate it

A crash, a hang or a sanitizer's report is for the runner to see. Those whose input is no file (arguments of the
functions, cu_seqlens, codes) are the properties of tests/test_arguments.py, fed with bytes by hypothesis.
"""
from __future__ import annotations

import contextlib
import copy
import gzip
import hashlib
import json
import os
import tempfile
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import test_arguments
from plain_layer import seeded

import kda
from kda import reference
from kda.perf import compare, dashboard, history, nvme, results
from kda.weights import layer_tensors, read_safetensors, tensor_shapes

LEAST, FACTOR = 4 << 20, 256  # a list of lists takes 90 bytes for each of its own
FOLDER = tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
PATH, OTHER = (Path(FOLDER.name) / name for name in ("input", "other"))


@contextlib.contextmanager
def bounded(size):
    """Fails if what is allocated inside exceeds what an input of so many bytes may cost."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= LEAST + FACTOR * size, f"{peak:,} bytes for an input of {size:,}"


def accepted(call, *arguments, size, names=str(PATH)):
    """call(*arguments), or None if it was refused as promised."""
    with bounded(size):
        try:
            return call(*arguments)
        except (ValueError, TypeError, OSError) as error:
            refusal = error
    assert names in str(refusal), f"a message that does not name {names}: {refusal!r}"
    return None


def safetensors_of(data):
    """The file that an input stands for: after J a header and, behind a NUL, the data, so that a mutator need not keep
    the length before the header right; after anything else the bytes themselves."""
    if data[:1] != b"J":
        return data[1:]
    header, _, body = data[1:].partition(b"\0")
    return len(header).to_bytes(8, "little") + header + body


def as_input(file):
    """The input that stands for a file of safetensors."""
    n = int.from_bytes(file[:8], "little")
    return b"J" + file[8:8 + n] + b"\0" + file[8 + n:]


def tensors_in(file):
    """{name: bytes} of a file that some reader accepted."""
    n = int.from_bytes(file[:8], "little")
    table = json.loads(file[8:8 + n])
    return {name: file[8 + n + about["data_offsets"][0]:8 + n + about["data_offsets"][1]]
            for name, about in table.items() if name != "__metadata__"}


def text(value):
    return json.dumps(value).encode()


# ---- quantised matrices ----

def matrix_file(data):
    file = safetensors_of(data)
    PATH.write_bytes(file)
    m = accepted(kda.QuantizedMatrix.load, PATH, size=len(file))
    if m is None:
        return
    codes, scales = m.codes, m.scales
    assert {"codes": codes.tobytes(), "scales": scales.tobytes()} == tensors_in(file)
    m.save(OTHER)
    again = kda.QuantizedMatrix.load(OTHER, isa="scalar")
    assert (again.shape, again.bits, again.group_size) == (m.shape, m.bits, m.group_size)
    assert again.codes.tobytes() == codes.tobytes()
    assert again.scales.tobytes() == scales.tobytes()
    x = np.linspace(-1, 1, m.shape[1], dtype=np.float32)
    with np.errstate(all="ignore"):
        y, want = m.matmul(x), reference.quantized_matmul(x, codes, scales, m.bits)
    assert test_arguments.near(y, want, 1e-4 * max(1, np.abs(want[np.isfinite(want)]).max(initial=0)))
    assert again.matmul(x).tobytes() == y.tobytes()


def matrix_seeds():
    for bits, group_size, shape in ((8, 32, (3, 40)), (4, 64, (2, 64)), (8, 128, (1, 1))):
        w = np.random.default_rng(bits).standard_normal(shape, dtype=np.float32)
        kda.QuantizedMatrix.quantize(w, bits, group_size).save(PATH)
        yield as_input(PATH.read_bytes())
        yield b"-" + PATH.read_bytes()


# ---- sessions ----

SMALL = kda.KDAConfig("kimi_linear", 4, 2, (0, 1), 1, 1, 2, 2, 2)


def session_file(data):
    """After S the checksum is made right, so that what comes behind it is reached."""
    sealed, data = data[:1] == b"S", data[1:]
    file = safetensors_of(data)
    if sealed:
        n = 8 + int.from_bytes(file[:8], "little")
        at = file.find(b'"sha256":"', 0, n) + len(b'"sha256":"')
        blank = file[:at] + b"0" * 64 + file[at + 64:]
        file = file[:at] + hashlib.sha256(blank).hexdigest().encode() + file[at + 64:]
    PATH.write_bytes(file)
    session = accepted(kda.Session.load, PATH, SMALL, 1, size=len(file))
    if session is None:
        return
    session.save(OTHER)
    assert OTHER.read_bytes() == file
    before = session.positions.tolist()
    for layer in session.layers:
        test_arguments.small_layer(SMALL)(np.ones((session.batch, 1, 4), np.float32), layer)
    assert session.positions.tolist() == [p + 1 for p in before]
    session.rollback(1)
    session.save(OTHER)
    assert OTHER.read_bytes() == file


def session_seeds():
    for dtype, batch in (("float32", 1), ("bfloat16", 2)):
        session = kda.Session(SMALL, batch, state_dtype=dtype)
        for layer in session.layers:
            test_arguments.small_layer(SMALL)(np.ones((batch, 3, 4), np.float32), layer)
        session.save(PATH)
        for mark in (b"S", b"-"):
            yield mark + as_input(PATH.read_bytes())
        yield b"--" + PATH.read_bytes()


# ---- config.json ----

def config_file(data):
    PATH.write_bytes(data)
    config = accepted(kda.KDAConfig.from_hf, PATH, size=len(data))
    if config is None:
        return
    assert kda.KDAConfig.from_hf(json.loads(data)) == config
    full = config.mla.layers if config.mla else ()
    assert sorted(config.kda_layers + full) == list(range(config.num_layers))
    with bounded(len(data)):
        plan = kda.plan(config)
        json.dumps(plan.to_dict(), allow_nan=False)
        assert str(plan)
        assert len(config.dense_layers) + (len(config.moe.layers) if config.moe else 0) == config.num_layers
        tensor_shapes(config)


GLM = {"model_type": "glm5_next", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
       "layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 2, "linear_head_dim": 4,
       "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0, "kv_lora_rank": 4, "q_lora_rank": 4,
       "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4, "vocab_size": 100, "intermediate_size": 16,
       "num_local_experts": 4, "num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"],
       "moe_intermediate_size": 8, "indexer_types": ["full", "shared"], "index_n_heads": 1, "index_head_dim": 4,
       "index_kpool": 2}


def shipped(name):
    return json.loads((Path(kda.__file__).parent / "data" / f"{name}.json").read_text())


def config_seeds():
    yield text(shipped("kimi_linear_48b"))
    yield text(shipped("kimi_k3"))
    yield text(GLM)


# ---- the planner's text ----

def bandwidth_text(data):
    given = data.decode(errors="replace")
    bound = accepted(kda.nvme_ceiling, 1 << 34, given, size=len(data), names="bandwidth")
    if bound is not None:
        assert 1e6 / 2**34 <= float(bound) <= 1e12 / 2**34


def bandwidth_seeds():
    yield from (b"12.78GB/s", b"11.9 GiB/s", b"500MB/s", b"0.5GB/s")


# ---- checkpoints ----

PREFIX = "model.layers.0.self_attn."


def checkpoint(data):
    """After I an index of two shards, of which one holds q_proj, else a file."""
    file = data[1:] if data[:1] == b"I" else safetensors_of(data)
    folder = Path(FOLDER.name) / "checkpoint"
    folder.mkdir(exist_ok=True)
    path = folder / ("model.safetensors.index.json" if data[:1] == b"I" else "file.safetensors")
    shards = {}
    if data[:1] == b"I":
        for name, shard in (("a.safetensors", shard_of(lambda n: "q_proj" in n)),
                            ("b.safetensors", shard_of(lambda n: "q_proj" not in n))):
            (folder / name).write_bytes(shard)
            shards |= tensors_in(shard)
    path.write_bytes(file)
    tensors = accepted(read_safetensors, path, PREFIX, size=len(file) + sum(map(len, shards.values())),
                       names=str(folder))
    if tensors is None:
        return
    inside = shards or tensors_in(file)
    assert all(tensor.tobytes() == inside[name] for name, tensor in tensors.items())
    if not shards:
        assert set(tensors) == {name for name in inside if name.startswith(PREFIX)}
    layer = accepted(layer_tensors, SMALL, tensors, PREFIX, size=len(file), names=PREFIX)
    if layer is not None:
        assert {name: tensor.shape for name, tensor in layer.items()} == tensor_shapes(SMALL)


def shard_of(wanted):
    from safetensors.numpy import save
    return save({name: tensor for name, tensor in seeded(SMALL, prefix=PREFIX).items() if wanted(name)})


def checkpoint_seeds():
    yield as_input(shard_of(lambda name: True))
    yield b"-" + shard_of(lambda name: "A_log" in name)
    names = {PREFIX + name: f"{'a' if 'q_proj' in name else 'b'}.safetensors" for name in tensor_shapes(SMALL)}
    yield b"I" + text({"metadata": {}, "weight_map": names})


# ---- routing traces ----

def trace_file(data):
    """After Z the rest is compressed, so that what is inside is reached."""
    file = gzip.compress(data[1:], 1, mtime=0) if data[:1] == b"Z" else data
    PATH.write_bytes(file)
    trace = accepted(nvme.read_trace, PATH, size=len(data))
    if trace is None:
        return
    lines = (gzip.decompress(file) if file[:2] == b"\x1f\x8b" else file).splitlines()
    assert trace.experts.tolist() == [json.loads(line)["layers"] for line in lines]
    tokens, layers, top_k = trace.experts.shape
    assert trace.per_token == layers * top_k
    accesses = trace.accesses
    assert len(accesses) == tokens * layers * top_k
    different = {(i, e) for token in trace.experts.tolist() for i, layer in enumerate(token) for e in layer}
    assert trace.working_set == len(different)
    for simulate in (nvme.lru_hits, nvme.lfu_hits):
        assert not any(simulate(accesses, 0))
        assert sum(simulate(accesses, len(accesses))) == len(accesses) - len(different)
        nvme.hit_rates(simulate(accesses, 2))


def trace_seeds():
    lines = b"\n".join(text({"layers": [[i, 2], [3, i + 1]]}) for i in range(3))
    yield lines
    yield b"Z" + lines
    yield gzip.compress(lines, mtime=0)


# ---- results and histories ----

MACHINE = {"cpu": "x", "architecture": "x86_64", "cache_bytes": {"L2": 524288}, "cpus": 2, "isa": "avx2", "threads": 2}


def bench_result():
    row = {"kind": "decode", "name": "one layer", "threads": 1, "us_per_token": 40.0,
           "us_per_token_interval": [39.0, 41.0], "us_per_token_min": 38.5, "share_of_inplace": 0.9,
           "share_interval": [0.89, 0.91], "mac_per_token": 3, "flop_per_token": 6, "traffic_bytes_per_token": 8,
           "instructions_per_token": 5, "cpus_taken": 0.1}
    return {"machine": MACHINE, "date": "2026-01-01T00:00:00+00:00", "command": "kda bench",
            "rows": [row, row | {"kind": "limit", "name": "read", "threads": 2}]}


def pytest_result():
    info = {"isa": "avx2", "threads": 1, "tokens": 2, "mac": 3, "relative": {"to": "read", "value": 0.5,
                                                                            "interval": [0.4, 0.6]}}
    return {"machine_info": MACHINE, "datetime": "2026-01-02T00:00:00+00:00",
            "benchmarks": [{"name": "a", "extra_info": info, "stats": {"median": 1e-5, "data": [1e-5, 2e-5, 1.5e-5]}},
                           {"name": "b", "extra_info": {}, "stats": {"median": 1e-5}}]}


def ceiling_result():
    row = {"policy": "LRU", "cache_bytes": 2**30, "hit_rate": 0.5, "serial": 1.0, "overlapped": 2.0,
           "bound_by": "disk", "kda_share_overlapped": 0.1}
    return {"machine": MACHINE, "date": "2026-01-03T00:00:00+00:00",
            "ceilings": [{"name": "FMA", "threads": 1, "median": 3.0, "best": 3.5, "unit": "GFLOP/s"}],
            "disk": [{"pattern": "random", "record_bytes": 4096, "queue_depth": 4, "GB_per_s": 3.0, "bypassed": True,
                      "us_per_read": 80.0}],
            "model": {"model": "m", "expert_format": "q8g", "bytes_per_token": 1000, "compute_s": 0.1, "trace": None,
                      "machine": {"disk": "d", "kda_s": 0.01}, "rows": [row, row | {"policy": "LFU"}]}}


def result_file(data):
    PATH.write_bytes(data)
    run = accepted(results.read, PATH, size=len(data))
    if run is not None:
        same = compare.compare(run, run)
        assert not same.of("slower")
        for form in ("text", "md"):
            assert compare.render(same, form)
        OTHER.write_bytes(text(bench_result()))
        compare.render(compare.compare(results.read(OTHER), run, other_machine=True))
    lines = accepted(history.lines_of, PATH, "c" * 40, size=len(data))
    if lines:
        OTHER.unlink(missing_ok=True)
        added, replaced = history.add(OTHER, lines)
        assert added + replaced == len(lines)
        assert len(history.read(OTHER)) == added
        used(history.read(OTHER))


def history_file(data):
    PATH.write_bytes(data)
    lines = accepted(history.read, PATH, size=len(data))
    if not lines:
        return
    merged = {history.key_of(line): line for line in lines}
    OTHER.unlink(missing_ok=True)
    assert history.add(OTHER, lines) == (len(merged), len(lines) - len(merged))
    assert history.read(OTHER) == list(merged.values())
    used(lines)


def used(lines):
    """What is made of a history: exports, where it has benchmarks, and the page."""
    if any(history.is_benchmark(line) for line in lines):
        for export in history.EXPORTS.values():
            json.dumps(export(history.benchmarks(lines)), allow_nan=False)
    data = json.dumps(dashboard.page_data(lines), allow_nan=False)
    assert "NaN" not in data


def result_seeds():
    yield from map(text, (bench_result(), pytest_result(), ceiling_result()))


def history_seeds():
    for result in (bench_result(), pytest_result(), ceiling_result()):
        PATH.write_bytes(text(result))
        yield b"\n".join(map(text, history.lines_of(PATH, "c" * 40)))


# ---- the table ----

@dataclass(frozen=True)
class Target:
    """one(data) raises where a promise is broken; seeds() are valid inputs."""

    one: Callable[[bytes], object]
    seeds: Callable[[], object]


def no_seeds():
    """Bytes that hypothesis reads as its choices: any will do."""
    for n in (256, 2048, 8192):
        yield bytes(n)
        yield np.random.default_rng(n).bytes(n)


TARGETS = {
    "matrix_file": Target(matrix_file, matrix_seeds),
    "session_file": Target(session_file, session_seeds),
    "config_file": Target(config_file, config_seeds),
    "bandwidth_text": Target(bandwidth_text, bandwidth_seeds),
    "checkpoint": Target(checkpoint, checkpoint_seeds),
    "trace_file": Target(trace_file, trace_seeds),
    "result_file": Target(result_file, result_seeds),
    "history_file": Target(history_file, history_seeds),
    **{name: Target(function.hypothesis.fuzz_one_input, no_seeds)
       for name, function in test_arguments.PROPERTIES.items()},
}


# ---- mutations ----

ODD = [None, True, False, 0, 1, -1, 2, 255, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, 0.5, -0.0, -5.0,
       1e-320, 1e308, float("inf"), float("nan"), "", "0", "1", "é", "\ud800", "\0", "../x", "x" * 300, [], {}, [[]],
       [1, 2], [0.5], ["a"], {"a": 1}, {"__metadata__": {}}]


def place(value, rng):
    """The path to a node of parsed JSON: one near the top is as likely as all those deep in a long list."""
    path = []
    while isinstance(value, dict | list) and value and rng.random() < 0.8:
        path.append(rng.choice(list(value) if isinstance(value, dict) else range(len(value))))
        value = value[path[-1]]
    return path


def altered(value, rng):
    """A copy of parsed JSON in which one node is replaced, removed, doubled, wrapped or moved."""
    value = copy.deepcopy(value)
    path = place(value, rng)
    if not path:
        return rng.choice(ODD)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    key, other = path[-1], value
    for step in place(value, rng):
        other = other[step]
    deed = rng.randrange(6)
    if deed == 0:
        del parent[key]
    elif deed == 1 and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    elif deed == 2:
        parent[key] = [parent[key]]
    elif deed == 3:
        parent[key] = copy.deepcopy(other)
    elif deed == 4 and isinstance(parent[key], int | float) and not isinstance(parent[key], bool):
        number = parent[key]
        parent[key] = rng.choice([number + 1, -number, number * 2, number - 1, number * 10**9])
    else:
        parent[key] = copy.deepcopy(rng.choice(ODD))
    return value


def mutated(data, rng):
    """Another input: the JSON inside altered where there is some, or bytes changed, removed, put in or doubled."""
    start = data.find(b"{")
    if start >= 0 and rng.random() < 0.75:
        head, rest = data[:start], data[start:]
        for separator in (b"\0", b"\n"):  # a header and its data; lines
            parts = rest.split(separator, 1) if separator == b"\0" else rest.split(separator)
            i = 0 if separator == b"\0" else rng.randrange(len(parts))
            try:
                value = json.loads(parts[i])
            except (ValueError, RecursionError):
                continue
            for _ in range(rng.choice([1, 1, 1, 2, 4])):
                value = altered(value, rng)
            try:
                parts[i] = json.dumps(value, separators=(",", ":")).encode()
            except ValueError:  # an integer too long to print
                break
            return head + separator.join(parts)
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 8])):
        at = rng.randrange(len(data) + 1)
        deed = rng.randrange(5)
        if deed == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif deed == 1 and at < len(data):
            data[at] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        elif deed == 2:
            del data[at:at + rng.choice([1, 2, 8, 64, len(data)])]
        elif deed == 3:
            data[at:at] = rng.randbytes(rng.choice([1, 2, 8]))
        else:
            data[at:at] = data[at:at + rng.choice([1, 8, 64])]
    return bytes(data)
