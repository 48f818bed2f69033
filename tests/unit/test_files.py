"""Files are written whole or not at all, and read within bounds."""

from __future__ import annotations

import ast
import os
import re
import stat
from pathlib import Path

import pytest

from specserve.files import read_small, replacing, write_whole

PACKAGE = Path(__file__).parents[2] / "specserve"


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    """The new text takes the place of the old one, and no other file is left in the folder."""
    path = tmp_path / "a.json"
    write_whole(path, "old")
    write_whole(path, "néw")
    assert path.read_text(encoding="utf-8") == "néw"
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_half_way_changes_nothing(tmp_path: Path) -> None:
    """An exception while writing keeps the old file and leaves no other."""
    path = tmp_path / "a.json"
    path.write_text("old")

    def write_half() -> None:
        with replacing(path) as out:
            out.write("half")
            out.flush()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_no_link_is_followed(tmp_path: Path) -> None:
    """A link in the place of the file is replaced; the file it points to keeps its text."""
    other = tmp_path / "other"
    other.write_text("theirs")
    for name in ("up.json", "up.tmp", "up.json.tmp", "up.new"):
        (tmp_path / name).symlink_to(other)
    write_whole(tmp_path / "up.json", "ours")
    assert other.read_text() == "theirs"
    assert not (tmp_path / "up.json").is_symlink()


def test_the_umask_decides_who_may_read(tmp_path: Path) -> None:
    """A written file has the mode that an ordinary one would get."""
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_a_small_file_is_read(tmp_path: Path) -> None:
    """Text comes back as it is, also through a link, as Kubernetes mounts secrets."""
    (tmp_path / "key").write_text("secret\r\n", encoding="utf-8", newline="")
    (tmp_path / "link").symlink_to("key")
    assert read_small(tmp_path / "link") == "secret\r\n"


def test_a_file_at_the_limit_is_read_and_a_larger_one_is_not(tmp_path: Path) -> None:
    """The limit counts bytes."""
    (tmp_path / "a").write_bytes(b"x" * 10)
    assert read_small(tmp_path / "a", limit=10) == "x" * 10
    with pytest.raises(OSError, match="has more than 9 bytes"):
        read_small(tmp_path / "a", limit=9)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["device", "pipe", "folder"])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    """An endless device, a pipe that nobody writes to and a folder are errors at once."""
    path = tmp_path / kind
    if kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(OSError, match=re.compile("not a regular file|is a directory", re.I)):
        read_small(path)


def renames(source: str) -> list[int]:
    """Lines that rename a file or open a temporary one: calls of rename, and of replace with one
    argument (the one of strings has two), mkstemp and NamedTemporaryFile."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        is_file_replace = name == "replace" and len(node.args) == 1 and not node.keywords
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func) == "os.replace":
            is_file_replace = True
        if is_file_replace or name in ("rename", "renames", "mkstemp", "NamedTemporaryFile"):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "line",
    [
        "os.replace(a, b)",
        "os.rename(a, b)",
        "half.replace(path)",
        "half.rename(path)",
        "tempfile.mkstemp()",
        "NamedTemporaryFile(dir=folder)",
    ],
)
def test_a_planted_rename_is_found(line: str) -> None:
    """Each way to write through a neighbour is seen; replacing text or fields is none."""
    assert renames(f"text.replace('a', 'b')\nreplace(row, a=1)\n{line}\n") == [3]


def test_nobody_else_writes_through_a_neighbour() -> None:
    """One module writes a file under another name and renames it, and the download of models,
    which goes on with what is there."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if renames(path.read_text())
    }
    assert found == {"files.py", "checkpoint/pull.py"}
