"""Atomic writes, locks on folders, digests and the cache directory: one implementation each.

A file or folder is written inside a hidden temporary folder beside its target, `.NAME.XXXXXXXX.dragoman.tmp/NAME`, and
then renamed. The temporary folder is created under a name that did not exist (mkdtemp), only its owner can open it, and
it is locked while in use. So nothing of the user's is removed or followed, and two commands that write the same target
never share a file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dragoman.types import UserError

SUFFIX = ".dragoman.tmp"
TEMPORARY = re.compile(r"\..*\.[a-z0-9_]{8}\.dragoman\.tmp", re.DOTALL)
KEPT_OF_NAME = 40  # characters of the target's name in a temporary name, which may have 255 bytes
ABANDONED = 86_400.0  # seconds after which an unlocked temporary folder belongs to a command that was killed
CACHE = "~/.cache/dragoman"
CACHE_ENTRIES = {  # what an entry of the cache holds: its name
    "token ids": re.compile(r"[0-9a-f]{24}"),
    "tokenizer": re.compile(r"[0-9a-f]{24}-tokenizer"),
    "answers of a teacher": re.compile(r"[0-9a-f]{24}-answers"),
    "model for CTranslate2": re.compile(r"ctranslate2-[0-9a-f]{24}"),
    "compiled kernels": re.compile(r"compiled"),
    "choice of an engine": re.compile(r"engine-[0-9a-f]{24}-.*\.json"),  # of earlier versions
}


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yield a path that does not exist yet, in a new temporary folder beside `path`; remove both at the end."""
    holder = Path(tempfile.mkdtemp(SUFFIX, f".{path.name[:KEPT_OF_NAME]}.", path.parent))
    handle = os.open(holder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(handle)
        yield holder / path.name
    finally:
        os.close(handle)
        shutil.rmtree(holder, ignore_errors=True)


def move_into_place(made: Path, path: Path) -> None:
    """Rename what `temporary_beside` gave room to, once all of it is on disk. A folder replaces a folder.

    A folder cannot be renamed over another one, so the old folder is moved aside first; if the new one then cannot be
    renamed, the old one is moved back.
    """
    for file in [*sorted(made.rglob("*")), made] if made.is_dir() else [made]:
        if file.is_file():
            file.chmod(0o666 & ~_read_umask())  # some writers make files that only their owner may read
        _sync(file)
    if made.is_dir() and path.is_dir():
        aside = Path(tempfile.mkdtemp(dir=made.parent)) / "old"  # removed with the temporary folder
        os.rename(path, aside)
        try:
            os.rename(made, path)
        except OSError:
            _move_back(aside, path)
            raise
    else:
        os.replace(made, path)
    _sync(path.parent)


def _move_back(aside: Path, path: Path) -> None:
    """Give a folder its name back; where that is taken by now, give it a similar name, so that it is not lost."""
    try:
        os.rename(aside, path)
    except OSError:
        kept = Path(tempfile.mkdtemp(".old", f"{path.name[:KEPT_OF_NAME]}.", path.parent))
        os.rename(aside, kept)
        raise UserError(f"cannot write {str(path)!r}; what was there before is now {str(kept)!r}") from None


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file or folder, then rename it to `path`.

    Readers of a file see the old one or the new one; a folder that is replaced is absent for a moment in between.
    """
    path = path.resolve() if path.is_dir() else path  # a link to a folder stays a link
    with temporary_beside(path) as made:
        write(made)
        move_into_place(made, path)


def keep_folder(folder: Path, last: str, write: Callable[[Path], None]) -> None:
    """Make a folder of a cache once: it is complete or absent, and complete if it has the file `last`.

    Of several commands that make the same folder at once, the first wins: others may be reading it already.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent)
    with temporary_beside(folder) as made:
        made.mkdir()
        write(made)
        try:
            made.rename(folder)
        except OSError:
            if (folder / last).exists():
                return
            with suppress(FileNotFoundError):
                os.rename(folder, Path(tempfile.mkdtemp(dir=made.parent)) / "incomplete")
            made.rename(folder)


def is_temporary(path: Path) -> bool:
    """Whether a path is a temporary folder that `temporary_beside` made."""
    return bool(TEMPORARY.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()


def sweep(folder: Path, *, age: float = ABANDONED) -> None:
    """Remove temporary folders of commands that were killed: those that nobody has locked and that are this old."""
    for path in filter(is_temporary, folder.iterdir()):
        with suppress(OSError):  # another command sweeps too
            if time.time() - path.stat().st_mtime >= age:
                remove_unused(path)


def remove_unused(path: Path) -> bool:
    """Remove a folder unless a command works in it; return whether it was removed.

    Commands lock the folders that they work in. Where the disk has no locks, a temporary folder counts as in use for a
    day after it was made.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        locked = _lock(handle)
        recent = is_temporary(path) and time.time() - os.fstat(handle).st_mtime < ABANDONED
        if locked is False or (locked is None and recent):
            return False
        shutil.rmtree(path)
        return True
    finally:
        os.close(handle)


def _lock(handle: int) -> bool | None:
    """Lock an open folder. Return False where another process has locked it, None where the disk has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network disks have none
        return None
    return True


@contextmanager
def lock_folder(folder: Path, refusal: str) -> Iterator[bool]:
    """Hold a lock on a folder, which is made if it is not there; raise UserError(refusal) if another process has it.

    Yield whether this call made the folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
        made = True
    except FileExistsError:
        made = False
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _lock(handle) is False:
            raise UserError(refusal)
        yield made
    finally:
        os.close(handle)


@contextmanager
def share_folder(folder: Path) -> Iterator[None]:
    """Mark a folder, which is made if it is not there, as in use; several processes may use it at once."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network disks have no locks
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def check_plain(path: Path) -> None:
    """Refuse a pipe, socket or device: reading one may wait for ever. What is not there is not refused."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(f"{str(path)!r} is a pipe, socket or device, not a plain file; remove it or restore the file")


def cache_folder(setting: str | Path = CACHE) -> Path:
    """Return the folder that caches go to: `data.cache` of a recipe, by default that of the user."""
    if "\0" in str(setting):
        raise UserError(f"data.cache={str(setting)!r} holds a null character; name another folder")
    try:
        return Path(setting).expanduser()
    except RuntimeError:
        raise UserError(
            f"data.cache={str(setting)!r}: the home folder that ~ stands for is unknown; name another folder"
        ) from None


def cache_entries(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield what Dragoman made in a cache folder: what each entry holds, and its path. Nothing else is yielded."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        kind = next((kind for kind, name in CACHE_ENTRIES.items() if name.fullmatch(path.name)), "")
        if kind or is_temporary(path):
            yield kind or "unfinished", path


def digest_bytes(content: bytes) -> str:
    """Return a digest of 32 hexadecimal characters."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def digest_file(path: Path) -> str:
    """Return the digest of a file's bytes, without holding all of them."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
