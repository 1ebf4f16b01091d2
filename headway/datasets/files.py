"""Which files a delivery consists of, and their bytes. A distribution's files are read; it is never imported."""

import hashlib
import importlib.metadata
import io
import sysconfig
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from headway.datasets.refusal import DeliveryRefused
from headway.declaration import FolderFiles, PackageFiles
from headway.declaration_text import InterpreterFiles
from headway.errors import HeadwayError


class SourceMissing(HeadwayError):
    """A declared file, folder or distribution is not there."""


@dataclass(frozen=True, slots=True)
class RawFile:
    """One delivered file: its name for messages, and its bytes as they were delivered.

    `named`: the name is part of what is delivered, as that of a text file is, which becomes a row.
    """

    name: str
    data: bytes
    named: bool = False

    def digest(self) -> str:
        """sha256 of the delivered bytes, after the name and a zero byte when that is delivered too; as hex."""
        name = self.name.encode() + b"\0" if self.named else b""
        return hashlib.sha256(name + self.data).hexdigest()

    def content(self) -> bytes:
        """The bytes to parse: those of the single member when the file is a zip archive.

        Raises:
            DeliveryRefused: the archive is damaged or does not hold exactly one member.
        """
        if not self.name.endswith(".zip"):
            return self.data
        try:
            with zipfile.ZipFile(io.BytesIO(self.data)) as archive:
                members = [m for m in archive.infolist() if not m.is_dir()]
                if len(members) != 1:
                    raise DeliveryRefused(self.name, f"holds {len(members)} files", "deliver an archive of one file")
                return archive.read(members[0])
        except zipfile.BadZipFile as error:
            raise DeliveryRefused(self.name, f"is a damaged archive: {error}", "deliver it again") from error


# Installed packages lie below the library's folder and are not part of it; caches hold no source.
_NOT_LIBRARY = ("site-packages", "dist-packages", "__pycache__")


def locate(declared: PackageFiles | FolderFiles | InterpreterFiles, folder: Path) -> list[Path]:
    """The declared files, in a fixed order.

    Raises:
        SourceMissing: the distribution or a file is not there, or a path leaves the pipeline's folder.
    """
    if isinstance(declared, InterpreterFiles):
        return _in_library(declared)
    if isinstance(declared, PackageFiles):
        return _in_distribution(declared)
    return [path for pattern in declared.paths for path in _in_folder(pattern, folder)]


def expand(paths: Sequence[Path]) -> list[Path]:
    """Files for paths that a person gave: a folder stands for the files in it, hidden ones left out.

    Raises:
        SourceMissing: a path does not exist, or a folder is empty.
    """
    found: list[Path] = []
    for path in paths:
        inside = (
            sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith((".", "_")))
            if path.is_dir()
            else [path]
        )
        if not inside or not all(p.is_file() for p in inside):
            raise SourceMissing(f"{path} holds no file" if path.is_dir() else f"no file {path}", "give existing files")
        found += inside
    return found


def read_below(paths: Sequence[Path], root: Path) -> list[RawFile]:
    """The files' bytes, under their paths below a folder, which are delivered with them."""
    return [RawFile(path.relative_to(root).as_posix(), path.read_bytes(), named=True) for path in paths]


def library_root() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read(paths: Sequence[Path]) -> list[RawFile]:
    """The files' bytes, under names that differ."""
    names = [path.name for path in paths]
    return [
        RawFile(path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}", path.read_bytes())
        for path in paths
    ]


def delivery_digest(files: Sequence[RawFile]) -> str:
    """What names the delivered bytes: a file's sha256, or that of the sorted digests of several."""
    digests = sorted(file.digest() for file in files)
    if len(digests) == 1:
        return f"sha256:{digests[0]}"
    return f"sha256:{hashlib.sha256(''.join(digests).encode()).hexdigest()}"


def _in_distribution(declared: PackageFiles) -> list[Path]:
    try:
        distribution = importlib.metadata.distribution(declared.package)
    except importlib.metadata.PackageNotFoundError as error:
        raise SourceMissing(
            f"the distribution {declared.package!r} is not installed", f"pip install {declared.package}"
        ) from error
    listed = {str(file): file for file in distribution.files or ()}
    for path in declared.paths:
        if path not in listed:
            raise SourceMissing(
                f"the distribution {declared.package!r} has no file {path!r}",
                f"it has {sorted(name for name in listed if '/data/' in name)[:20]}",
            )
    return [Path(str(listed[path].locate())) for path in declared.paths]


def _in_library(declared: InterpreterFiles) -> list[Path]:
    """The library's files in order of their paths; with a limit, every so-many-th of them."""
    root = library_root()
    left_out = {*_NOT_LIBRARY, *declared.exclude}
    found: set[Path] = set()
    for pattern in declared.paths:
        _require_inside(pattern, "the library's folder")
        found |= {p for p in root.glob(pattern) if p.is_file() and not left_out & set(p.relative_to(root).parts)}
    if not found:
        raise SourceMissing(
            f"the standard library at {root} has no file that matches {list(declared.paths)}",
            "mend files.paths or files.exclude, or run an interpreter that comes with its sources",
        )
    ordered = sorted(found, key=lambda p: p.relative_to(root).as_posix())
    count = min(declared.limit or len(ordered), len(ordered))
    return [ordered[i * len(ordered) // count] for i in range(count)]


def _require_inside(pattern: str, folder: str) -> None:
    if PurePosixPath(pattern).is_absolute() or ".." in PurePosixPath(pattern).parts:
        raise SourceMissing(f"{pattern!r} leaves {folder}", "declare files below that folder")


def _in_folder(pattern: str, folder: Path) -> list[Path]:
    if PurePosixPath(pattern).is_absolute() or ".." in PurePosixPath(pattern).parts:
        raise SourceMissing(f"{pattern!r} leaves the pipeline's folder", "declare files below the folder of defs.yaml")
    found = sorted(folder.glob(pattern))
    if not found:
        raise SourceMissing(f"no file matches {pattern!r} beside defs.yaml", "deliver the file or mend the path")
    return expand(found)
