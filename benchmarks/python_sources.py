"""A text of 100 MB or more from the installed Python sources: the same bytes wherever the same files are.

    python benchmarks/python_sources.py FILE [--least 100_000_000] [--from FOLDER ...] [--suffix .py ...] [--digest 4abbdd0a]

It has every .py file (or every file with a given ending) of the standard library and of the installed packages. Each text
comes once, ended by 0x1e, in the order of the SHA-256 of its bytes, so neither paths nor file systems matter, and every part
of the file has something of every package. Files that are empty, are not UTF-8 or contain 0x1e are left out, and so are this
repository's packages (elman*), which change between runs that are to be compared; install nothing else meanwhile. FILE.json
records the bytes, the SHA-256, the number of files and the folders, and the same is printed as one line of JSON. The exit code
is 1 if the text has fewer than --least bytes, or if its SHA-256 does not begin with --digest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

SEPARATOR = b"\x1e"


def folders() -> list[Path]:
    """The standard library, and every folder of packages that this Python imports from."""
    paths = sysconfig.get_paths()
    found = [Path(paths[name]) for name in ("stdlib", "purelib", "platlib")]
    found += [Path(p) for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    return list(dict.fromkeys(p.resolve() for p in found if p.is_dir()))


def sources(where: Iterable[Path], suffixes: Sequence[str] = (".py",)) -> Iterator[bytes]:
    """The bytes of every file below the folders with such an ending. A file below two of the folders comes twice."""
    for folder in where:
        for home, inside, names in os.walk(folder):
            if Path(home) == folder:
                inside[:] = [name for name in inside if not name.startswith("elman")]
            for name in names:
                if name.endswith(tuple(suffixes)):
                    try:
                        text = Path(home, name).read_bytes()
                        text.decode("utf-8")
                    except (
                        OSError,
                        UnicodeDecodeError,
                    ):  # unreadable, or not text: not part of what is described above
                        continue
                    if text and SEPARATOR not in text:
                        yield text


def write(file: Path, where: Sequence[Path], suffixes: Sequence[str] = (".py",)) -> dict[str, Any]:
    """Write the text and FILE.json; return the contents of the latter."""
    texts = {hashlib.sha256(text).digest(): text for text in sources(where, suffixes)}
    whole = hashlib.sha256()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        for digest in sorted(texts):
            out.write(texts[digest] + SEPARATOR)
            whole.update(texts[digest] + SEPARATOR)
    facts = {
        "bytes": file.stat().st_size,
        "sha256": whole.hexdigest(),
        "files": len(texts),
        "python": platform.python_version(),
        "folders": [folder.name for folder in where],
        "order": "SHA-256 of each file's bytes; each text once, ended by 0x1e",
    }
    file.with_name(f"{file.name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--least", type=int, default=100_000_000, help="bytes")
    parser.add_argument("--from", dest="where", type=Path, action="append", help="instead of this Python's folders")
    parser.add_argument("--suffix", action="append", help="an ending of the names to take, instead of .py")
    parser.add_argument("--digest", default="", help="the beginning of the SHA-256 that the text must have")
    given = parser.parse_args(argv)
    facts = write(given.file, given.where or folders(), given.suffix or (".py",))
    print(json.dumps(facts))
    if facts["bytes"] < given.least:
        print(f"{facts['bytes']:,} bytes are less than {given.least:,}: install more packages", file=sys.stderr)
        return 1
    if not facts["sha256"].startswith(given.digest):
        print(f"another text: its SHA-256 is {facts['sha256']}; other packages are installed here", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
