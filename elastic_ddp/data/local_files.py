"""Lists local files like `find -L`: follows symbolic links, and raises an error for unreadable files and folders."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from fsspec.core import has_magic

from elastic_ddp.errors import DataError

_log = logging.getLogger(__name__)
_Folders = frozenset[tuple[int, int]]
"""Device and inode of each folder on the way to a path. A link to one of them would be a loop."""


def list_local_files(path: str) -> dict[str, os.stat_result]:
    """Returns the files that an absolute path or glob stands for, as in `list_files`, with their status.

    Raises:
        DataError: the link of a data file has no target, or a folder or file cannot be read.
        FileNotFoundError: the path does not exist.
    """
    if has_magic(path) and not os.path.lexists(path):
        parts = PurePosixPath(path).parts
        num_literal = next(number for number, part in enumerate(parts) if has_magic(part))
        root = str(PurePosixPath(*parts[:num_literal]))
        os.lstat(root)
        found = dict(_glob(root, parts[num_literal:]))
    else:
        os.lstat(path)
        found = {path: frozenset()}
    files: dict[str, os.stat_result] = {}
    for name, above in found.items():
        status = _status(name)
        files |= dict(_walk(name, above)) if stat.S_ISDIR(status.st_mode) else {name: status}
    for name, status in files.items():
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{name} is not a regular file. Leave it out of the data set.")
    return files


def is_hidden(name: str) -> bool:
    """Returns whether a search of a folder leaves out this name."""
    return name.startswith((".", "_"))


def matches(name: str, pattern: str) -> bool:
    """Returns whether a name matches one part of a glob. A wildcard does not match a leading `.` or `_`."""
    return fnmatchcase(name, pattern) and (not is_hidden(name) or name[0] == pattern[:1])


def _walk(folder: str, above: _Folders) -> Iterator[tuple[str, os.stat_result]]:
    """Yields the Parquet files below a folder."""
    status = _status(folder)
    here = status.st_dev, status.st_ino
    if here in above:
        return
    for entry in _scan(folder):
        if is_hidden(entry.name) or _leads_nowhere(entry.path):
            continue
        status = _status(entry.path)
        if stat.S_ISDIR(status.st_mode):
            yield from _walk(entry.path, above | {here})
        elif entry.name.endswith(".parquet"):
            yield entry.path, status


def _glob(folder: str, parts: tuple[str, ...], above: _Folders = frozenset()) -> Iterator[tuple[str, _Folders]]:
    """Yields the files and folders below a folder that match the parts of a glob, with the folders above each."""
    part, rest = parts[0], parts[1:]
    status = _status(folder)
    here = status.st_dev, status.st_ino
    if here in above:
        return
    if part == "**":
        yield from _glob(folder, rest or ("*",), above)
        entries = [entry.path for entry in _scan(folder) if not is_hidden(entry.name)]
        rest = parts
    elif has_magic(part):
        entries = [entry.path for entry in _scan(folder) if matches(entry.name, part)]
    else:
        path = f"{folder.rstrip('/')}/{part}"
        entries = [path] if os.path.lexists(path) else []
    for path in entries:
        if not rest:
            yield path, above | {here}
        elif not (has_magic(part) and _leads_nowhere(path)) and stat.S_ISDIR(_status(path).st_mode):
            yield from _glob(path, rest, above | {here})


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise _unreadable(folder, error) from error


def _status(path: str) -> os.stat_result:
    """Returns the status of a file or folder, or of a link's target."""
    try:
        return os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _leads_nowhere(path: str) -> bool:
    """Returns whether a search leaves out a path: a link without a target, and without the name of a data file."""
    if path.endswith(".parquet") or not os.path.islink(path):
        return False
    try:
        os.stat(path)
    except FileNotFoundError:
        _log.warning("%s is left out: it is a symbolic link to %s, which does not exist", path, os.readlink(path))
        return True
    except OSError:
        pass  # reading it raises the error
    return False


def _unreadable(path: str, error: OSError) -> DataError:
    if os.path.islink(path) and error.errno in (errno.ENOENT, errno.ELOOP):
        target = os.readlink(path)
        problem = "does not exist" if error.errno == errno.ENOENT else "leads back to itself"
        return DataError(
            f"{path} is a symbolic link to {target}, which {problem}. Restore the target, or delete the link."
        )
    return DataError(
        f"{path} cannot be read: {error.strerror}. Allow this user to read it, or leave it out of the data set."
    )
