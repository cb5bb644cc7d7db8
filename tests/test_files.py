"""Files: a disk that fills, a file that is cut or in the way; the old one stays whole, and nothing else is left."""
import errno
import os
import stat
import sys

import numpy as np
import pytest
from helpers import python, same_bits
from plain_layer import TINY, seeded

from kda import KDALayer, QuantizedMatrix, Session, files, weights

HERE = os.path.dirname(__file__)
POSIX = pytest.mark.skipif(os.name == "nt", reason="names and limits of POSIX")


def matrix(factor=1.0):
    return QuantizedMatrix.quantize(factor * np.arange(1, 40 * 300 + 1, dtype=np.float32).reshape(40, 300))


def session(tokens):
    taken = Session(TINY)
    x = np.linspace(-1, 1, tokens * TINY.hidden_size, dtype=np.float32).reshape(1, tokens, -1)
    for i, state in enumerate(taken.layers):
        KDALayer.from_tensors(TINY, seeded(TINY, i))(x, state)
    return taken


SAVED = {"session": (session(3), session(9)), "matrix": (matrix(), matrix(2))}  # what is there, what is to replace it


@pytest.fixture(params=SAVED)
def pair(request):
    return SAVED[request.param]


def load(path):
    """The contents of either, as bytes."""
    try:
        return QuantizedMatrix.load(path).codes.tobytes()
    except ValueError:
        return Session.load(path, TINY).layers[1].recurrent.tobytes()


# ---- writing ----

@pytest.mark.parametrize("step", ["write", "flush", "fsync", "replace", "interrupt"])
def test_a_write_that_fails_leaves_the_old_file(pair, step, tmp_path, monkeypatch):
    old, new = pair
    path = tmp_path / "kept"
    old.save(path)
    before = path.read_bytes()
    error = KeyboardInterrupt if step == "interrupt" else OSError

    def fail(*_):
        raise KeyboardInterrupt if step == "interrupt" else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Failing:
        def __init__(self, path, mode):
            self.file = open(path, mode)  # noqa: SIM115 - closed by __exit__

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def __getattr__(self, name):
            return fail if name == step or (step == "interrupt" and name == "write") else getattr(self.file, name)

    if step in ("fsync", "replace"):
        monkeypatch.setattr(os, step, fail)
    else:
        monkeypatch.setattr(files, "open", Failing, raising=False)
    for target in (path, tmp_path / "new"):
        with pytest.raises(error):
            new.save(target)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["kept"]
    assert path.read_bytes() == before
    new.save(path)
    assert path.read_bytes() != before


def test_what_is_written_reaches_the_disk_before_its_name(pair, tmp_path, monkeypatch):
    """The file's fsync comes before the rename, the folder's after it: a power cut leaves one file or the other."""
    done, fsync, replace = [], os.fsync, os.replace

    def logged_fsync(handle):
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else f"file of {os.fstat(handle).st_size} bytes")
        fsync(handle)

    def logged_replace(source, target):
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)
    pair[0].save(tmp_path / "x")
    assert done == [f"file of {(tmp_path / 'x').stat().st_size} bytes", "rename", *["folder"] * (os.name != "nt")]


@POSIX
def test_a_disk_that_fills(tmp_path):
    """The system's own refusal, in the middle of a file: RLIMIT_FSIZE, as a full disk gives ENOSPC."""
    done = python(f"""
import os, resource, signal, sys
sys.path.insert(0, {HERE!r})
from test_files import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for name, (old, new) in SAVED.items():
    path = {str(tmp_path)!r} + "/" + name
    old.save(path)
    before = open(path, "rb").read()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 1, resource.RLIM_INFINITY))
    try:
        new.save(path)
    except OSError as error:
        print(name, error.errno == errno.EFBIG, open(path, "rb").read() == before)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
""")
    assert done.stdout.split() == ["session", "True", "True", "matrix", "True", "True"]
    assert sorted(os.listdir(tmp_path)) == ["matrix", "session"]


def test_a_full_disk_for_real(pair, tmp_path):
    """A file system of 256 KiB, where this user may mount one."""
    old, new = pair
    disk = tmp_path / "disk"
    disk.mkdir()
    if sys.platform != "linux" or os.system(f"mount -t tmpfs -o size=256k none '{disk}' 2>/dev/null"):
        pytest.skip("may not mount here; test_a_disk_that_fills is the same through a limit")
    try:
        path = disk / "kept"
        old.save(path)
        before = path.read_bytes()
        filler = 262144 - len(before) - len(before) // 2
        (disk / "filler").write_bytes(bytes(filler // 4096 * 4096))
        with pytest.raises(OSError, match="No space left on device"):
            new.save(path)
        assert path.read_bytes() == before
        assert sorted(os.listdir(disk)) == ["filler", "kept"]
        os.system(f"mount -o remount,ro '{disk}'")
        with pytest.raises(OSError, match="Read-only file system"):
            new.save(path)
        assert path.read_bytes() == before
        assert load(path)
    finally:
        os.system(f"umount '{disk}'")


def test_a_folder_that_may_not_be_written(pair, tmp_path, monkeypatch):
    old, new = pair
    path = tmp_path / "kept"
    old.save(path)
    before = path.read_bytes()

    def refuse(path, mode="r", **_):  # permissions do not bind root
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(files, "open", refuse, raising=False)
    with pytest.raises(PermissionError, match="Permission denied"):
        new.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["kept"]
    with pytest.raises(FileNotFoundError):
        new.save(tmp_path / "no folder" / "x")
    with pytest.raises(NotADirectoryError):
        new.save(path / "x")


@POSIX
def test_what_is_no_file_is_not_replaced(pair, tmp_path):
    """A device or a pipe would be gone after a rename; a directory cannot be written, nor read."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match="expected the name of a file, not of a device, pipe or socket"):
            pair[0].save(tmp_path / name)
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        pair[0].save(tmp_path / "folder")
    for read in (lambda path: Session.load(path, TINY), QuantizedMatrix.load):
        with pytest.raises(IsADirectoryError, match="Is a directory"):
            read(tmp_path / "folder")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe"]


@POSIX
def test_links_and_permissions(pair, tmp_path):
    old, new = pair
    old.save(tmp_path / "file")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    new.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    assert load(tmp_path / "file") != b""


# ---- reading ----

def cut_while_read(monkeypatch, path, read):
    """read(path), with the file cut to a half once it is open and its header read."""
    whole, cut = path.read_bytes(), []
    empty = np.empty

    def cutting(*arguments, **options):
        if not cut:
            cut.append(True)
            os.truncate(path, len(whole) // 2)
        return empty(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", cutting)
        with pytest.raises(ValueError, match=r"ends in the middle of it|became shorter while it was read"):
            read(path)
    assert cut
    path.write_bytes(whole)


def test_a_file_that_is_cut_while_it_is_read(tmp_path, monkeypatch):
    """It is not mapped: an error, not the end of the program (SIGBUS)."""
    from safetensors.numpy import save_file
    old, _ = SAVED["matrix"]
    old.save(tmp_path / "matrix")
    cut_while_read(monkeypatch, tmp_path / "matrix", QuantizedMatrix.load)
    assert same_bits(QuantizedMatrix.load(tmp_path / "matrix").codes, old.codes)
    save_file(seeded(TINY), tmp_path / "model.safetensors")
    cut_while_read(monkeypatch, tmp_path / "model.safetensors", lambda path: weights.read_safetensors(path, ""))
    taken = weights.read_safetensors(tmp_path / "model.safetensors", "")
    assert all(same_bits(taken[name], tensor) for name, tensor in seeded(TINY).items())
    SAVED["session"][0].save(tmp_path / "session")
    cut_while_read(monkeypatch, tmp_path / "session", lambda path: Session.load(path, TINY))


@POSIX
def test_a_file_that_is_removed_while_it_is_read(tmp_path, monkeypatch):
    old, _ = SAVED["matrix"]
    old.save(tmp_path / "matrix")
    read = files.Safetensors.read

    def removing(self, *arguments):
        (tmp_path / "matrix").unlink(missing_ok=True)
        return read(self, *arguments)

    monkeypatch.setattr(files.Safetensors, "read", removing)
    assert same_bits(QuantizedMatrix.load(tmp_path / "matrix").codes, old.codes)
    assert not os.listdir(tmp_path)


def test_every_dtype_and_shape_is_read_as_the_library_does(tmp_path):
    import ml_dtypes
    from safetensors.numpy import load_file, save_file
    rng = np.random.default_rng(0)
    tensors = {"bf16": rng.standard_normal((3, 4)).astype(ml_dtypes.bfloat16), "scalar": np.array(2.5, np.float32),
               "none": np.empty((0, 5), np.float32), "bool": rng.random(7) < 0.5}
    for kind in ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]:
        tensors[kind] = rng.integers(0, 100, (5, 2, 3)).astype(kind)
    save_file(tensors, tmp_path / "x", metadata={"a": "b"})
    with files.Safetensors(tmp_path / "x") as file:
        assert file.metadata == {"a": "b"}
        assert sorted(file.names) == sorted(tensors)
        for name, want in load_file(tmp_path / "x").items():
            assert same_bits(file.read(name), want)
            assert list(want.shape) == file.about(name)[1]
            if want.ndim == 3:
                assert same_bits(file.read(name, 1, 4), want[1:4])
        with pytest.raises(KeyError):
            file.read("other")
