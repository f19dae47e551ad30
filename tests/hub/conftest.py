"""A loopback service a test, and quick ways to reach it. Nothing of our own code is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_lab import Lab
from server import TOKEN, Loopback

from export.graph import ExportConfig, export
from export.hub_ledger import Ledger


@pytest.fixture(scope="session")
def shorter(
    tmp_path_factory: pytest.TempPathFactory, exported: dict[str, tuple[Path, Path]], tokens_dir: Path
) -> tuple[Path, Path]:
    """(checkpoint, export) of the dense model in two parts, with 40 slots of the cache or 24; do not change them."""
    checkpoint, directory = exported["dense"][0], tmp_path_factory.mktemp("shorter") / "short"
    config = ExportConfig(context_length=40, shorter_contexts=(24,), prefill_tokens=16, verify_tokens=20, parts=2)
    export(checkpoint, tokens_dir, directory, config)
    return checkpoint, directory


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """A running loopback service that the client's configuration names."""
    with Loopback() as hub:
        monkeypatch.setenv("QAIHUB_CLIENT_INI", str(hub.write_config(tmp_path / "client.ini")))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("MEKI_EDGE_HUB", str(tmp_path / "ledger"))
        yield Lab(hub, Ledger(tmp_path / "ledger"), tmp_path)


@pytest.fixture
def no_token_in() -> Callable[[Path], None]:
    """Fails if the token is in any file under a directory."""

    def check(directory: Path) -> None:
        for path in directory.rglob("*"):
            if path.is_file():
                assert TOKEN.encode() not in path.read_bytes(), path

    return check
