"""Atomic replacement of files and folders: at any moment the old one, the new one, or enough on disk to recover.

A folder is written next to its destination as `.<name>.<process>.partial` and renamed when it is complete. A folder
that it replaces is first renamed to `.<name>.<process>.old`. If the process is killed between the two renames,
`recover` restores the old folder. A writer holds a lock on its folder, which the system releases however the process
ends; so leftovers of dead processes can be distinguished from the work of running ones.

The lock is on the open folder itself, not on a path beside it (as with the package filelock): it follows the folder
through its renames and leaves no file behind. Windows has neither locks nor flushes of folders, so runs and saved
agents need Linux or macOS, and say so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: files are refused when they are first needed, see `require_posix`
    fcntl = None  # type: ignore[assignment]

PATIENCE = 2.0
"""Seconds to wait for a running process that is between two renames."""


def lock(descriptor: int, *, wait: bool = False) -> bool:
    """Take the lock of an open file or folder; False if another process holds it."""
    require_posix()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def require_posix() -> None:
    """Raise ImportError on Windows, with the reason and the way out."""
    if fcntl is None:
        raise ImportError(
            "Tailguard's runs and saved agents need Linux or macOS: Windows has no locks of folders "
            "(fcntl) and cannot flush their renames to disk. On Windows, use WSL"
        )


@contextlib.contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """An empty folder beside `place` to write into; it is removed afterwards, unless `put_in_place` has moved it."""
    recover(place)
    partial = _beside(place, "partial")
    partial.mkdir(parents=True)
    try:
        with _held(partial):
            yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def put_in_place(partial: Path, place: Path) -> None:
    """Rename a complete folder into place; an existing one is renamed aside first and removed last."""
    # A folder cannot be renamed onto one that holds files.
    if not (place.exists() and any(place.iterdir())):
        os.rename(partial, place)
        sync_folder(place.parent)
        return
    aside = _beside(place, "old")
    with _held(place):
        os.rename(place, aside)
        try:
            os.rename(partial, place)
        except OSError:
            os.rename(aside, place)
            raise
        sync_folder(place.parent)
        # A partial folder is never restored: a half removed one must not be mistaken for the old folder.
        os.rename(aside, partial)
        shutil.rmtree(partial)


def recover(place: Path) -> None:
    """Restore a folder that a killed process left aside, and remove partial folders of killed processes.

    Folders locked by a running process are not touched; while it is between two renames, this waits for it.
    """
    if not place.parent.is_dir():
        return
    deadline = time.monotonic() + PATIENCE
    while not _recovered(place) and time.monotonic() < deadline:
        time.sleep(0.01)


def _recovered(place: Path) -> bool:
    """Go through the leftovers once; False if the place is empty because a running process is replacing it."""
    waiting = False
    for path, kind in _leftovers(place):
        try:
            with _taken(path) as mine:
                if not mine:
                    waiting |= kind == "old"
                elif kind == "old" and not os.path.lexists(place):
                    os.rename(path, place)
                    sync_folder(place.parent)
                else:
                    shutil.rmtree(path)
        except FileNotFoundError:  # another process was faster
            continue
        except OSError as error:
            # A reader without write permission cannot clean up; the folder in place can be read all the same.
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
    return not waiting or os.path.lexists(place)


def _leftovers(place: Path) -> list[tuple[Path, str]]:
    """Folders that processes have left next to the place, `.old` ones first."""
    name = re.compile(re.escape(f".{place.name}.") + r"\d+\.(partial|old)")
    try:
        leftovers = [(path, match[1]) for path in place.parent.iterdir() if (match := name.fullmatch(path.name))]
    except OSError:
        return []
    return sorted(
        ((path, kind) for path, kind in leftovers if _is_folder(path)), key=lambda one: (one[1] != "old", one[0])
    )


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


@contextlib.contextmanager
def _taken(folder: Path) -> Iterator[bool]:
    """Whether the folder's lock is ours, for as long as it is entered; never where the file system has no locks."""
    require_posix()
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            mine = lock(descriptor)
        except OSError:
            mine = False
        yield mine
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold a folder's lock; it follows the folder through renames."""
    with _taken(folder):
        yield


def read_plain(path: Path) -> bytes:
    """The bytes of a plain file. Raises OSError for a pipe or a device, which may have no end, even behind a link."""
    require_posix()
    # A pipe that nobody writes to would block the opening.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        check_plain(descriptor, path)
        return file.read()


def check_plain(descriptor: int, path: Path) -> None:
    """Raise OSError unless the open file is a plain one."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "not a plain file", str(path))


def replace_synced(path: Path, data: bytes) -> None:
    """Replace a file atomically."""
    partial = _beside(path, "partial")
    try:
        partial.unlink(missing_ok=True)
        write_synced(partial, data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and flush it to disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the folder's entries to disk: a rename is durable only after this."""
    require_posix()
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable_place(path: Path) -> None:
    """Raise OSError, before the work, unless a file of this name can be written."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the folder does not exist", str(path.parent))
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, "cannot write there", str(path.parent))


def _beside(path: Path, kind: str) -> Path:
    # The process id keeps two writers apart.
    return path.with_name(f".{path.name}.{os.getpid()}.{kind}")
