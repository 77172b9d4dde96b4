"""Atomic writes, locks on folders, the cache folder, digests, and reading of text files, compressed or not.

A file or folder is written inside a hidden temporary folder beside its target, `.NAME.XXXXXXXX.dragoman.tmp/NAME`, and
then renamed. The temporary folder has a new random name (mkdtemp), only its owner can open it, and it is locked while
in use. Therefore no file or link of the user is removed or followed, and two commands that write the same target never
write to the same temporary file.
"""

from __future__ import annotations

import codecs
import fcntl
import gzip
import hashlib
import io
import json
import lzma
import math
import os
import re
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import zstandard

from dragoman.errors import UserError

HEADER_KEY = "dragoman"  # the entry of a safetensors header with our metadata, as JSON
TEMPORARY_SUFFIX = ".dragoman.tmp"
TEMPORARY_NAME = re.compile(r"\..*\.[a-z0-9_]{8}\.dragoman\.tmp", re.DOTALL)
MAX_PREFIX = 40  # characters of the target's name in the name of its temporary folder: at most 255 bytes in all
ABANDONED_SECONDS = 86_400.0  # an unlocked temporary folder of this age was left by a command that was killed
RESUME_ADVICE = "what was saved before is intact: make room or choose another folder, then continue with --resume"
DEFAULT_CACHE = "~/.cache/dragoman"
CACHE_ENTRIES = {  # kind of a cache entry -> pattern of its name
    "token ids": re.compile(r"[0-9a-f]{24}"),
    "tokenizer": re.compile(r"[0-9a-f]{24}-tokenizer"),
    "answers of a teacher": re.compile(r"[0-9a-f]{24}-answers"),
    "model for CTranslate2": re.compile(r"ctranslate2-[0-9a-f]{24}"),
    "compiled kernels": re.compile(r"compiled"),
    "choice of an engine": re.compile(r"engine-[0-9a-f]{24}-.*\.json"),  # written by earlier versions
}


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yield a path that does not exist yet, in a new temporary folder beside `path`; remove that folder at the end."""
    folder = Path(tempfile.mkdtemp(TEMPORARY_SUFFIX, f".{path.name[:MAX_PREFIX]}.", path.parent))
    try:
        with _open_descriptor(folder) as descriptor:
            _lock(descriptor)
            yield folder / path.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def move_into_place(temporary: Path, path: Path) -> None:
    """Flush `temporary`, a file or folder that `temporary_beside` named, to disk and rename it to `path`.

    A folder cannot be renamed over another one, so an old folder is moved aside first. If the new folder then cannot be
    renamed, the old one is moved back.
    """
    umask = os.umask(0)  # the umask can only be read by setting it
    os.umask(umask)
    for file in [*sorted(temporary.rglob("*")), temporary] if temporary.is_dir() else [temporary]:
        if file.is_file():
            file.chmod(0o666 & ~umask)  # some libraries write files that only their owner may read
        _sync(file)
    if temporary.is_dir() and path.is_dir():
        old = Path(tempfile.mkdtemp(dir=temporary.parent)) / "old"  # removed with the temporary folder
        os.rename(path, old)
        try:
            os.rename(temporary, path)
        except OSError:
            try:
                os.rename(old, path)
            except OSError:  # another command has taken the name by now: keep the old folder under a new name
                backup = Path(tempfile.mkdtemp(".old", f"{path.name[:MAX_PREFIX]}.", path.parent))
                os.rename(old, backup)
                raise UserError(f"cannot write {str(path)!r}; what was there before is now {str(backup)!r}") from None
            raise
    else:
        os.replace(temporary, path)
    _sync(path.parent)


@contextmanager
def report_write_errors(path: Path, advice: str = RESUME_ADVICE) -> Iterator[None]:
    """Turn an OSError into a UserError that names `path` and ends with `advice`."""
    try:
        yield
    except OSError as error:
        message = f"cannot write {str(path)!r} ({error.strerror or error})"
        raise UserError(f"{message}; {advice}" if advice else message) from None


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path, then rename the result to `path`. An OSError becomes a UserError.

    Readers see either the old file or the new one. A folder that is replaced is absent for a moment in between.
    """
    target = path.resolve() if path.is_dir() else path  # replace the folder that a link points to, not the link
    with report_write_errors(path), temporary_beside(target) as temporary:
        write(temporary)
        move_into_place(temporary, target)


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def format_json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def create_folder_atomically(folder: Path, *, write: Callable[[Path], object], required_file: str) -> None:
    """Call `write` with a temporary folder, then rename it to `folder`, unless that is complete: has `required_file`.

    If several commands create it at once, the first complete one is kept, since others may already be reading it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder.parent)
    with temporary_beside(folder) as temporary:
        temporary.mkdir()
        write(temporary)
        try:
            temporary.rename(folder)
        except OSError:
            if (folder / required_file).exists():
                return
            with suppress(FileNotFoundError):
                os.rename(folder, Path(tempfile.mkdtemp(dir=temporary.parent)) / "incomplete")
            temporary.rename(folder)


def is_temporary(path: Path) -> bool:
    return bool(TEMPORARY_NAME.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()


def remove_abandoned(folder: Path, *, age: float = ABANDONED_SECONDS) -> None:
    """Remove temporary folders of killed commands: those that are not locked and at least `age` seconds old."""
    for path in filter(is_temporary, folder.iterdir()):
        with suppress(OSError):  # another command may be removing it too
            if time.time() - path.stat().st_mtime >= age:
                remove_unused(path)


def remove_unused(path: Path) -> bool:
    """Remove a folder unless a command uses it; return whether it was removed.

    Commands lock the folders that they use. On a disk without locks, a temporary folder counts as in use until it is
    ABANDONED_SECONDS old.
    """
    with _open_descriptor(path, os.O_DIRECTORY | os.O_NOFOLLOW) as descriptor:
        locked = _lock(descriptor)
        recent = is_temporary(path) and time.time() - os.fstat(descriptor).st_mtime < ABANDONED_SECONDS
        if locked is False or (locked is None and recent):
            return False
        shutil.rmtree(path)
        return True


@contextmanager
def _open_descriptor(path: Path, flags: int = os.O_DIRECTORY) -> Iterator[int]:
    """Yield the file descriptor of a folder (of any file if flags=0). Closing it at the end removes its locks."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Try to lock an open folder: True if locked, False if another process has a lock, None on a disk without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network disks have no locks
        return None
    return True


@contextmanager
def lock_folder(folder: Path, refusal: str) -> Iterator[bool]:
    """Create a folder if needed and lock it; raise UserError(refusal) if another process has locked it.

    Yield whether this call created the folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
        created = True
    except FileExistsError:
        created = False
    with _open_descriptor(folder) as descriptor:
        if _lock(descriptor) is False:
            raise UserError(refusal)
        yield created


@contextmanager
def share_folder(folder: Path) -> Iterator[None]:
    """Create a folder if needed and hold a shared lock on it, so that `remove_unused` does not remove it."""
    folder.mkdir(parents=True, exist_ok=True)
    with _open_descriptor(folder) as descriptor:
        with suppress(OSError):  # some network disks have no locks
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def refuse_special_file(path: Path) -> None:
    """Refuse a pipe, socket or device, since reading it may block forever. A missing file is not refused."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(f"{str(path)!r} is a pipe, socket or device, not a plain file; remove it or restore the file")


def cache_folder(setting: str | Path = DEFAULT_CACHE) -> Path:
    """Return the cache folder for the setting `data.cache` of a recipe.

    The default is the user's cache folder: $XDG_CACHE_HOME/dragoman if that variable is an absolute path, else
    DEFAULT_CACHE.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if str(setting) == DEFAULT_CACHE and os.path.isabs(base):
        return Path(base) / "dragoman"
    if "\0" in str(setting):
        raise UserError(f"data.cache={str(setting)!r} contains a null character; choose another folder")
    try:
        return Path(setting).expanduser()
    except RuntimeError:
        raise UserError(f"data.cache={str(setting)!r}: the home folder (~) is unknown; choose another folder") from None


def cache_entries(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the kind and path of every entry of a cache folder that Dragoman has written. Other files are skipped."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        kind = next((kind for kind, name in CACHE_ENTRIES.items() if name.fullmatch(path.name)), "")
        if kind or is_temporary(path):
            yield kind or "unfinished", path


def digest_bytes(*parts: bytes | memoryview, size: int = 16) -> str:
    """Return the BLAKE2 digest of the concatenated parts: `size` bytes, in hexadecimal."""
    digest = hashlib.blake2b(digest_size=size)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def hash_stably(content: bytes) -> int:
    """Return a 64-bit hash that is the same in every process, unlike hash()."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def digest_file(path: Path) -> str:
    """Return the same digest as `digest_bytes` of the file's content, but read the file in blocks to save memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync(path: Path) -> None:
    with _open_descriptor(path, flags=0) as descriptor:
        os.fsync(descriptor)


WatchPosition = Callable[[Callable[[], int]], None]  # gets a function that returns the bytes read so far
LONGEST_LINE = 64 << 20  # maximum length of a line in bytes; texts for language models have no limit
DECOMPRESSION_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError)


class _FrameReader(io.RawIOBase):
    """The decompressed bytes of a .zst or .xz file of one or more frames (.xz calls them streams).

    Unlike the readers of the libraries, this one raises an error for a truncated file, and for damage after the first
    frame.
    """

    def __init__(self, path: Path, make_decompressor: Callable[[], Any], padding: bytes = b"") -> None:
        self.file = path.open("rb")
        self.make_decompressor, self.padding = make_decompressor, padding  # padding: byte allowed between frames
        self.decompressor = make_decompressor()  # of the current frame
        self.inside_frame = False
        self.pending = memoryview(b"")  # decompressed bytes not returned yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.pending:
            chunk = self.decompressor.unused_data if self.decompressor.eof else b""
            if self.decompressor.eof:
                self.decompressor, self.inside_frame = self.make_decompressor(), False
            chunk = chunk or self.file.read(1 << 16)
            if not self.inside_frame:
                chunk = chunk.lstrip(self.padding) if self.padding else chunk
                if self.padding and not chunk and self.file.peek(1):  # the chunk was padding, and the file goes on
                    continue
            if not chunk:
                if self.inside_frame:
                    raise EOFError
                return 0
            self.inside_frame = True
            self.pending = memoryview(self.decompressor.decompress(chunk))
        size = min(len(buffer), len(self.pending))
        buffer[:size], self.pending = self.pending[:size], self.pending[size:]
        return size

    def close(self) -> None:
        self.file.close()
        super().close()


def read_lines(path: Path, watch: WatchPosition | None = None, *, longest: float = LONGEST_LINE) -> Iterator[str]:
    """Yield the lines of a text file, compressed or not, without their ends and without a byte order mark.

    `watch` is called with a function that returns how many bytes of the file, as it is on disk, have been read.

    lines = list(read_lines(Path("corpus/train.en.xz")))
    """
    try:
        open_file = OPENERS.get(path.suffix.lower(), partial(Path.open, mode="rb"))
        with open_file(path) as stream:
            if watch:
                watch(partial(_bytes_read, stream, path))
            yield from decode_lines(stream, str(path), longest=longest)
    except FileNotFoundError:
        raise UserError(f"there is no file {str(path)!r}") from None
    except IsADirectoryError:
        raise UserError(f"{str(path)!r} is a folder; name a text file") from None
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None


def read_bytes(path: Path) -> bytes:
    """Return the content of a file; an OSError becomes a UserError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None


def decode_lines(stream: Iterable[bytes], name: str, *, longest: float = LONGEST_LINE) -> Iterator[str]:
    """Decode the lines of an open binary file. Refuse a line of more than `longest` bytes. `name` is for messages."""
    number = 0
    if math.isfinite(longest) and hasattr(stream, "readline"):
        # Read at most one byte more than `longest`, since a line may have no end, as in /dev/zero.
        stream = iter(partial(stream.readline, int(longest) + 1), b"")
    try:
        for number, raw in enumerate(stream, 1):  # binary files end their lines at b"\n" alone
            if len(raw) > longest:  # a tokenizer would need a hundred times as much memory
                raise UserError(f"{name} line {number} has more than the {longest / 2**20:g} MiB allowed; split it")
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if line.endswith(b"\n"):
                line = line[:-2] if line.endswith(b"\r\n") else line[:-1]
            elif not line:
                return  # the file has nothing but a byte order mark
            yield line.decode()
    except UnicodeDecodeError:
        raise UserError(f"{name} line {number} is not UTF-8; convert the file, e.g. with iconv -t UTF-8") from None
    except DECOMPRESSION_ERRORS:
        raise UserError(f"{name} is cut short or damaged after line {number}; compress or copy it again") from None


def _bytes_read(stream: Any, path: Path) -> int:
    """Return how many bytes of the file on disk have been read, given the stream opened by OPENERS."""
    if stream.closed:
        return path.stat().st_size
    # The compressed file below the decompressed stream: of gzip `fileobj`, of _FrameReader `raw.file`.
    compressed = getattr(stream, "fileobj", None) or getattr(getattr(stream, "raw", None), "file", None)
    return int((compressed or stream).tell())


OPENERS: dict[str, Callable[[Path], Any]] = {  # by the suffix of a compressed file
    ".gz": gzip.open,
    ".xz": lambda path: io.BufferedReader(_FrameReader(path, lzma.LZMADecompressor, padding=b"\0"), 1 << 16),
    ".zst": lambda path: io.BufferedReader(
        _FrameReader(path, zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj), 1 << 16
    ),  # the default maximum refuses files that were written by zstd --long=31
}
