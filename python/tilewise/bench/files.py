"""Files of results: looked at before hours of measuring, and replaced as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilewise.bench.problem import BadInput


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """A file or folder that cannot be written is said to be the option's fault."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{option}: cannot write {path}: {error.strerror or error}") from None


def check_writable(option: str, path: Path) -> None:
    """Raises where a file could not be written there. Nothing stays behind of the attempt."""

    def refuse(why: str) -> None:
        raise BadInput(f"{option}: cannot write {path}: {why}")

    try:
        nearest = next((x for x in (path, *path.parents) if _is_there(x)), Path("."))
    except (OSError, ValueError) as error:  # a name that no file has
        refuse(getattr(error, "strerror", None) or str(error))
    if nearest.is_symlink() and not nearest.exists():
        refuse(f"{nearest} is a broken link")
    if path.is_dir():
        refuse("it is a folder")
    if nearest != path and not nearest.is_dir():
        refuse(f"{nearest} is not a folder")
    if nearest == path and not path.is_file():
        return  # a device or pipe, which is written to as it is
    folder = nearest if nearest.is_dir() else path.parent
    if nearest == path and not os.access(path, os.W_OK):
        refuse("no permission")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:  # whatever else may be in the way is found out here
            file.write(b"\n")
    except PermissionError:
        refuse(f"no permission in {folder}")
    except OSError as error:
        refuse(f"{error.strerror or error} in {folder}")


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def replace(path: Path, text: str) -> None:
    """Writes a file that is there as it was or as it shall be, whenever the machine stops."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    target = path.resolve()  # behind a link
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)


def append(path: Path, text: str) -> None:
    """Adds to the end, and waits until it is there."""
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
