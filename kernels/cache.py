"""The kernels that this user compiled on this machine, named by what they depend on: a new clone takes them from here.

An entry is one archive, DIGEST.zip, of the files that a compilation left. It appears at once or not at all; one that
cannot be read counts as missing. `kernels.build` checks a cubin from here as it checks one that it finds in its output.
"""

import contextlib
import os
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


def default_folder(what: str = "kernels") -> Path:
    """$XDG_CACHE_HOME/jax_dsv4_fmha/kernels, or the same below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jax_dsv4_fmha" / what


@dataclass(frozen=True)
class KernelCache:
    folder: Path
    limit: int = 512 << 20  # bytes of all entries

    def take(self, digest: str, out: Path) -> bool:
        """Puts an entry's files into `out`, in the order in which they were kept; whether there is a readable entry."""
        path = self.folder / f"{digest}.zip"
        try:
            with zipfile.ZipFile(path) as archive:
                files = {Path(name).name: archive.read(name) for name in archive.namelist()}
            os.utime(path)  # it is the newest now
        except Exception:  # a damaged archive raises errors of many types
            return False
        for name, content in files.items():
            (out / name).write_bytes(content)
        return True

    def keep(self, digest: str, files: Iterable[Path]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=self.folder, suffix=".partial")
        with os.fdopen(descriptor, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in files:
                archive.write(path, path.name)
        os.replace(partial, self.folder / f"{digest}.zip")

    def evict(self) -> None:
        evict(self.folder, self.limit)


def evict(folder: Path, limit: int) -> None:
    """Removes the files with the oldest times until the rest has at most `limit` bytes."""
    files: list[tuple[int, int, str]] = []
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process removes some, too
            files.append((path.stat().st_mtime_ns, path.stat().st_size, path.name))
    total = 0
    for _, size, name in sorted(files, reverse=True):
        total += size
        if total > limit:
            (folder / name).unlink(missing_ok=True)
