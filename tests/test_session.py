"""Session: all layers together, saved, loaded, forked, rewound; files that are refused, and crashes."""
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import python, same_bits
from plain_layer import GVA, K3, NO_HISTORY, TINY, seeded

import kda
from kda import KDAConfig, KDALayer, Session
from kda.state import Row

LAYERS = {}


def layers_of(config):
    """Two layers, made once."""
    if config not in LAYERS:
        LAYERS[config] = [KDALayer.from_tensors(config, seeded(config, i)) for i in range(2)]
    return LAYERS[config]


def forward(session, x):
    for i, state in enumerate(session.layers):
        x = x + layers_of(session.config)[i](x, state)
    return x


def inputs(config, B, T, seed=1):
    return np.random.default_rng(seed).standard_normal((B, T, config.hidden_size), dtype=np.float32)


def same_session(a, b):
    names = ("recurrent", "conv_q", "conv_k", "conv_v")
    return np.array_equal(a.positions, b.positions) and all(
        same_bits(np.ascontiguousarray(getattr(p, n)), np.ascontiguousarray(getattr(q, n)))
        for p, q in zip(a.layers, b.layers, strict=True) for n in names)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [TINY, GVA, K3, NO_HISTORY], ids=lambda c: f"{c.model_type}-{c.hidden_size}")
def test_a_loaded_session_goes_on(tmp_path, config, state_dtype):
    """To the bit the uninterrupted run; and the file is safetensors for anyone."""
    from safetensors.numpy import load_file
    session = Session(config, batch=2, rollback_window=4, state_dtype=state_dtype)
    forward(session, inputs(config, 2, 70))
    forward(session, inputs(config, 2, 3))
    session.rollback([1, 3])
    assert session.positions.tolist() == [72, 70]
    path = tmp_path / "a session.safetensors"
    session.save(path)
    loaded = Session.load(path, config, rollback_window=2)
    assert same_session(loaded, session)
    assert loaded.state_dtype == state_dtype
    with pytest.raises(ValueError, match="can drop 0 to 0"):
        loaded.rollback(1)
    x = inputs(config, 2, 5, seed=3)
    assert same_bits(forward(loaded, x), forward(session, x))
    loaded.rollback(2)
    session.rollback(2)
    assert same_session(loaded, session)
    arrays = load_file(path)
    assert len(arrays) == 4 * len(config.kda_layers)
    assert arrays["layers.0.recurrent"].dtype.name == state_dtype
    assert arrays["layers.0.conv_q"].shape == session.layers[0].conv_q.shape
    assert os.listdir(tmp_path) == ["a session.safetensors"]


def test_layers_and_sizes():
    session = Session(TINY, batch=3)
    assert len(session.layers) == 2
    assert session.position == 0
    assert session.nbytes == 2 * session.layers[0].nbytes
    assert session.layers[1].recurrent.shape == (3, 2, 16, 16)
    with pytest.raises(ValueError, match="no KDA layers"):
        Session(KDAConfig("kimi_linear", 8, 1, (), 1, 1, 8, 8, 4))


def test_forks_selections_reset_and_rollback():
    session = Session(TINY, batch=2, rollback_window=3)
    x = inputs(TINY, 2, 12)
    forward(session, x[:, :5])
    fork = session.fork()
    forward(session, x[:, 5:8])
    assert (session.position, fork.position) == (8, 5)
    session.rollback(3)
    assert same_session(session, fork)
    assert same_bits(forward(session.select([1, 1]), x[[1, 1], 5:7]), forward(fork.select([1, 1]), x[[1, 1], 5:7]))
    session.reset()
    assert same_session(session, Session(TINY, batch=2))


def test_a_fork_is_of_one_moment(monkeypatch):
    """No layer goes on in another thread while others are copied: it would be a session of no moment at all."""
    session = Session(TINY)
    forward(session, inputs(TINY, 1, 3))
    copy_to, refused = Row.copy_to, []

    def meanwhile(row, other):
        for layer, state in zip(layers_of(TINY), session.layers, strict=True):
            with pytest.raises(RuntimeError, match="in use by another call"):
                layer(inputs(TINY, 1, 1), state)
            refused.append(state)
        copy_to(row, other)

    monkeypatch.setattr(Row, "copy_to", meanwhile)
    fork = session.fork()
    assert len(refused) == 4
    assert same_session(fork, session)
    assert fork.position == 3


def test_rollback_is_all_layers_or_none():
    session = Session(TINY, rollback_window=3)
    forward(session, inputs(TINY, 1, 5))
    layers_of(TINY)[0](inputs(TINY, 1, 1), session.layers[0])
    session.layers[1].rollback(2)
    before = [layer.copy() for layer in session.layers]
    with pytest.raises(ValueError, match="layer 1, row 0 can drop 0 to 1 tokens"):
        session.rollback(2)
    assert all(same_bits(a.recurrent, b.recurrent) for a, b in zip(session.layers, before, strict=True))


def test_between_two_layers_there_is_no_position(tmp_path):
    session = Session(TINY)
    layers_of(TINY)[0](inputs(TINY, 1, 2), session.layers[0])
    with pytest.raises(RuntimeError, match="layer 1 is at position 0, layer 0 at 2"):
        session.save(tmp_path / "x")
    with pytest.raises(RuntimeError, match="layer 1 is at position 0"):
        _ = session.position
    assert not os.listdir(tmp_path)


# ---- files that are refused ----

@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(path, bytes) of a session of TINY."""
    session = Session(TINY)
    forward(session, inputs(TINY, 1, 9))
    path = tmp_path_factory.mktemp("saved") / "session"
    session.save(path)
    return path, path.read_bytes()


def test_a_changed_byte_anywhere_is_refused(saved, tmp_path):
    """Every byte of the header, and a sample of the rest."""
    _, good = saved
    rng = np.random.default_rng(0)
    header = 8 + struct.unpack("<Q", good[:8])[0]
    assert header < len(good) / 2
    for at in [*range(header), *rng.integers(header, len(good), 150).tolist(), len(good) - 1]:
        bad = bytearray(good)
        bad[at] ^= int(rng.integers(1, 256))
        (tmp_path / "bad").write_bytes(bad)
        with pytest.raises(ValueError, match="refused: "):
            Session.load(tmp_path / "bad", TINY)


def test_another_length_is_refused(saved, tmp_path):
    _, good = saved
    rng = np.random.default_rng(1)
    for length in [*range(0, 40), *rng.integers(40, len(good), 100).tolist(), len(good) - 1]:
        (tmp_path / "bad").write_bytes(good[:length])
        with pytest.raises(ValueError, match=r"refused: .*truncated|is no saved session|refused: its header"):
            Session.load(tmp_path / "bad", TINY)
    for more in (b"\0", good):
        (tmp_path / "bad").write_bytes(good + more)
        with pytest.raises(ValueError, match="something was appended"):
            Session.load(tmp_path / "bad", TINY)


def rewritten(good, change):
    """The file with its metadata changed and a checksum that fits, as an attacker or another version would write."""
    import hashlib
    length = struct.unpack("<Q", good[:8])[0]
    table = json.loads(good[8:8 + length])
    change(table["__metadata__"], table)
    table["__metadata__"]["sha256"] = "0" * 64
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    whole = struct.pack("<Q", len(text)) + text + good[8 + length:]
    return whole.replace(b"0" * 64, hashlib.sha256(whole).hexdigest().encode(), 1)


def test_other_metadata_is_refused_with_its_reason(saved, tmp_path):
    _, good = saved

    def refused(change, message):
        (tmp_path / "bad").write_bytes(rewritten(good, change))
        with pytest.raises(ValueError, match=message):
            Session.load(tmp_path / "bad", TINY)

    (tmp_path / "same").write_bytes(rewritten(good, lambda about, table: None))
    assert Session.load(tmp_path / "same", TINY).position == 9
    refused(lambda about, table: about.update(version="2"), "expected format 'kda-session' of version '1', got "
                                                            "'kda-session' of version '2'")
    refused(lambda about, table: about.update(format="x"), "got 'x' of version '1'")
    refused(lambda about, table: about.update(format="\ud800" + "x" * 1000), r"got '\\ud800x{20,60}\.\.\.x{20,60}' of")
    refused(lambda about, table: about.update(gate="bounded -5.0"), "gate: expected 'softplus', got 'bounded -5.0'")
    refused(lambda about, table: about.update(layout="V first"), "layout: expected ")
    refused(lambda about, table: about.update(batch="2"), "positions")
    refused(lambda about, table: about.update(batch="x"), "bad batch, positions or state_dtype")
    refused(lambda about, table: about.update(batch="1000000000000"), "bad batch|expected .* bytes")
    refused(lambda about, table: about.update(positions="[-1]"), "bad batch, positions")
    refused(lambda about, table: about.update(positions="[1, 2]"), "bad batch, positions")
    refused(lambda about, table: about.update(positions=f"[{1 << 63}]"), "bad batch, positions")
    refused(lambda about, table: about.update(positions="[" * 200000), "bad batch, positions")
    refused(lambda about, table: about.update(batch=float("inf")), "bad batch, positions")
    refused(lambda about, table: about.update(state_dtype="float16"), "bad batch, positions or state_dtype")
    refused(lambda about, table: about.update(state_dtype="bfloat16"), "expected .* bytes")
    refused(lambda about, table: about.update(extra="1"), "its header was altered")
    refused(lambda about, table: table["layers.0.recurrent"].update(shape=[1, 2, 16, 15]), "its header was altered")
    refused(lambda about, table: table.update(more={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
            "its header was altered")
    (tmp_path / "bad").write_bytes(re.sub(rb'"sha256":"[0-9a-f]{6}', rb'"sha256":"\\ud800', good))
    with pytest.raises(ValueError, match="refused: its header was altered"):
        Session.load(tmp_path / "bad", TINY)


def test_another_model_is_refused(saved):
    path, _ = saved
    for other in (GVA, K3, KDAConfig("kimi_linear", 48, 3, (0, 1), 2, 2, 16, 16, 4),
                  KDAConfig("kimi_linear", 48, 3, (0, 2), 2, 2, 16, 16, 4, gate_lower_bound=-5.0)):
        with pytest.raises(ValueError, match=r"refused: model: expected 'kimi_.*', got 'kimi_linear-"):
            Session.load(path, other)


def test_other_files_are_refused(tmp_path):
    from safetensors.numpy import save_file
    save_file({"x": np.zeros(3, np.float32)}, tmp_path / "x")
    (tmp_path / "text").write_text("a conversation that is long enough")
    (tmp_path / "deep").write_bytes(struct.pack("<Q", 200000) + b"[" * 200000)
    for name in ("x", "text", "deep"):
        with pytest.raises(ValueError, match="refused: its header"):
            Session.load(tmp_path / name, TINY)
    with pytest.raises(FileNotFoundError):
        Session.load(tmp_path / "none", TINY)


# ---- writing ----

def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    session = Session(TINY)
    session.save(tmp_path / "s")
    old = (tmp_path / "s").read_bytes()
    forward(session, inputs(TINY, 1, 2))

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        session.save(tmp_path / "s")
    monkeypatch.undo()
    assert (tmp_path / "s").read_bytes() == old
    assert os.listdir(tmp_path) == ["s"]
    with pytest.raises(FileNotFoundError, match="no folder"):
        session.save(tmp_path / "no folder" / "s")
    assert session.position == 2


@pytest.mark.skipif(os.name == "nt", reason="names, links and modes of POSIX")
def test_names_links_and_permissions(tmp_path):
    """Any name that the system takes; a link is followed; a private file stays private; a directory is no file."""
    session = Session(TINY)
    for name in ("n" * 250, "\N{LATIN SMALL LETTER E WITH ACUTE}" * 120, "a b\n.safetensors", ".hidden"):
        session.save(tmp_path / name)
        assert Session.load(tmp_path / name, TINY).position == 0
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder / "target")
    session.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert os.listdir(folder) == ["target"]
    (folder / "target").chmod(0o600)
    forward(session, inputs(TINY, 1, 2))
    session.save(folder / "target")
    assert (folder / "target").stat().st_mode & 0o777 == 0o600
    assert Session.load(tmp_path / "link", TINY).position == 2
    for path in (folder, ".", "/"):
        with pytest.raises(IsADirectoryError, match="Is a directory"):
            session.save(path)
    assert os.listdir(folder) == ["target"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_killed_while_saving(tmp_path):
    """SIGKILL at any moment: the file loads, at one position or the other of those that were saved."""
    code = """
import sys
import kda
config = kda.KDAConfig("kimi_linear", 64, 4, (0, 1, 2, 3), 8, 8, 64, 64, 4)
session = kda.Session(config)
n = 0
while True:
    n += 1
    for layer in session.layers:
        layer.assign(layer.recurrent + 1, layer.conv_q, layer.conv_k, layer.conv_v, n)
    session.save(sys.argv[1])
    print(n, flush=True)
"""
    config = KDAConfig("kimi_linear", 64, 4, (0, 1, 2, 3), 8, 8, 64, 64, 4)
    path = tmp_path / "session"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    rng = np.random.default_rng(0)
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=env)
        try:
            assert child.stdout.readline()  # the first is there
            time.sleep(rng.uniform(0, 0.05))
        finally:
            child.send_signal(signal.SIGKILL)
            rest = child.communicate()[0].split()
        session = Session.load(path, config)
        assert session.position >= max([1, *map(int, rest)])
        assert (session.layers[3].recurrent == session.position).all()


def test_no_pickle():
    import pickle
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(Session(TINY))


def test_a_fresh_process_goes_on(tmp_path):
    """What another interpreter loads and continues is what this one does."""
    session = Session(TINY)
    forward(session, inputs(TINY, 1, 6))
    session.save(tmp_path / "s")
    x = inputs(TINY, 1, 2, seed=4)
    want = forward(session, x)
    done = python(f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from test_session import *
session = Session.load({str(tmp_path / "s")!r}, TINY)
print(forward(session, inputs(TINY, 1, 2, seed=4)).tobytes().hex())
""", KDA_ISA=next(name for name, runs in kda.isas().items() if runs))
    assert done.stdout.strip() == want.tobytes().hex()
