"""Storage that fails and files that lie, through the harness: a named error, and what Python's reader says."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hostile_files import GOLDEN, NESTED, ids_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meki_edge.device import runner
from meki_edge.errors import UserError
from meki_edge.rom.reader import RomReader
from meki_edge.rom.transcode import transcode


@pytest.fixture(scope="session")
def faulty_io(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library to preload; see faulty_io.c."""
    library = tmp_path_factory.mktemp("faulty") / "faulty_io.so"
    source = Path(__file__).parent / "faulty_io.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def faulty(library: Path, file: str, after: int, mode: str) -> dict[str, str]:
    settings = {"LD_PRELOAD": str(library), "FAULTY_FILE": file, "FAULTY_AFTER": str(after), "FAULTY_MODE": mode}
    return {**os.environ, **settings}


@pytest.mark.parametrize("rom", ["identity_int4", "ragged_static16_checksums", "ngram_hash_fp16"])
def test_reads_that_come_in_pieces(binary: Path, faulty_io: Path, rom: str, tmp_path: Path) -> None:
    """Every byte a read of its own, and every other read interrupted: the same rows."""
    command = [binary, "fetch", "--rom", GOLDEN / f"{rom}.safetensors", "--ids-file", ids_file(tmp_path, [3, 1, 0, 5])]
    expected = subprocess.run(command, capture_output=True, check=True).stdout
    environment = faulty(faulty_io, ".safetensors", 0, "pieces")
    done = subprocess.run(command, capture_output=True, check=True, env=environment)
    assert done.stdout == expected


@pytest.mark.parametrize("io", ["pread", "direct"])
@pytest.mark.parametrize("after", [0, 1, 2, 3])
@pytest.mark.parametrize("rom", ["identity_int4", "ragged_static16_checksums", "ngram_hash_fp16"])
def test_storage_that_fails(binary: Path, faulty_io: Path, rom: str, after: int, io: str, tmp_path: Path) -> None:
    """In the header's length, the header, what the addressing needs, and the rows."""
    path = GOLDEN / f"{rom}.safetensors"
    command = [binary, "fetch", "--rom", path, "--ids-file", ids_file(tmp_path, [3, 1, 0, 5]), "--io", io]
    environment = faulty(faulty_io, ".safetensors", after, "eio")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "Input/output error" in done.stderr and str(path) in done.stderr


@pytest.mark.parametrize("io", ["pread", "direct"])
@pytest.mark.parametrize("after", [3, 10, 40, 150])
def test_storage_that_fails_within_a_batch(
    binary: Path, faulty_io: Path, bundles: dict[str, Path], io: str, after: int, tmp_path: Path
) -> None:
    """Of 200 rows, some of which may be read ahead by then, and the failure met by any thread."""
    path = bundles["meki"] / "rom.safetensors"
    command = [binary, "fetch", "--rom", path, "--ids-file", ids_file(tmp_path, list(range(200))), "--io", io]
    done = subprocess.run(command, capture_output=True, text=True, env=faulty(faulty_io, path.name, after, "eio"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "Input/output error" in done.stderr and str(path) in done.stderr


def test_reads_that_come_late(binary: Path, faulty_io: Path) -> None:
    """Those of a batch overtake one another, and some outlast it: the readers' own tests say the same."""
    subprocess.run(["cmake", "--build", binary.parent, "--target", "test_row_reader", "-j2"], check=True)
    command = [binary.parent / "tests" / "test_row_reader"]
    subprocess.run(command, check=True, env=faulty(faulty_io, ".safetensors", 0, "late"))


@pytest.mark.parametrize("io", ["pread", "direct"])
def test_storage_that_fails_while_the_model_runs(
    binary: Path, faulty_io: Path, bundles: dict[str, Path], io: str, tmp_path: Path
) -> None:
    command = [binary, "generate", "--bundle", bundles["meki"], "--max-new-tokens", "50", "--io", io, "--threads", "1"]
    command += ["--prompt-file", ids_file(tmp_path, [1, 2, 3]), "--ort-library", runner.find_ort_library()]
    environment = faulty(faulty_io, "/rom.safetensors", 20, "eio")
    done = subprocess.run(
        [*command, "--output", tmp_path / "out.json"], capture_output=True, text=True, env=environment, timeout=60
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "Input/output error" in done.stderr and "rom.safetensors" in done.stderr
    assert not (tmp_path / "out.json").exists()


def test_rot_is_found_while_the_model_runs(binary: Path, bundles: dict[str, Path], tmp_path: Path) -> None:
    """With checksums and without, the same tokens; a rotten row ends the run where it is read, if rows are verified."""
    bundle = tmp_path / "bundle"
    shutil.copytree(bundles["meki"], bundle)
    rom = bundle / "rom.safetensors"
    transcode(bundles["meki"] / "rom.safetensors", rom, "fp32", checksums=True)
    command = [binary, "generate", "--bundle", bundle, "--max-new-tokens", "8", "--threads", "1"]
    command += ["--prompt-file", ids_file(tmp_path, [1, 2, 3]), "--ort-library", runner.find_ort_library()]
    command += ["--output", tmp_path / "out.json"]

    def tokens(*options: str) -> list[int]:
        subprocess.run([*command, *options], check=True, timeout=60)
        return json.loads((tmp_path / "out.json").read_text())["generated_tokens"]

    expected = tokens()
    assert tokens("--verify-rows") == expected
    assert tokens("--verify-rows", "--io", "direct", "--row-cache-bytes", "10000") == expected
    with RomReader(rom) as reader, open(rom, "r+b") as file:
        file.seek(4096 + 2 * reader.spec.row_stride + 1)
        file.write(b"\x5a")
    tokens()
    (tmp_path / "out.json").unlink()
    done = subprocess.run([*command, "--verify-rows"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "row 2: the checksum does not match" in done.stderr
    assert not (tmp_path / "out.json").exists()


# --- Files that lie ----------------------------------------------------------------------------------------

GOLDEN_NAMES = sorted(path.stem for path in GOLDEN.glob("*.json"))
LARGE = [2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64]
NUMBERS = st.sampled_from([0, 1, 2, 3, -1, 7, 4096, *LARGE, 1.5, "1", None, [], {}])


@st.composite
def lies(draw: st.DrawFn) -> tuple[str, bytes]:
    """A golden file with something of its header, or a few bytes, changed."""
    name = draw(st.sampled_from(GOLDEN_NAMES))
    contents = (GOLDEN / f"{name}.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", contents)
    header, data = json.loads(contents[8 : 8 + length]), contents[8 + length :]
    for key in NESTED:  # JSON within JSON
        if key in header["__metadata__"]:
            header["__metadata__"][key] = json.loads(header["__metadata__"][key])
    for _ in range(draw(st.integers(0, 2))):
        change(draw, header)
    for key in NESTED:
        value = header.get("__metadata__", {}) if isinstance(header.get("__metadata__"), dict) else {}
        if key in value:
            value[key] = json.dumps(value[key])
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    if draw(st.booleans()):
        place = draw(st.integers(0, len(data) - 1))
        data = data[:place] + bytes([draw(st.integers(0, 255))]) + data[place + 1 :]
    data = data[: len(data) - draw(st.sampled_from([0, 0, 0, 1, 8]))] + b"\0" * draw(st.sampled_from([0, 0, 0, 1, 8]))
    return name, struct.pack("<Q", len(text)) + text + data


def change(draw: st.DrawFn, node: object) -> None:
    """Another value, somewhere below ``node``; a key lost, or one too many."""
    while isinstance(node, dict | list) and node:
        places = sorted(node) if isinstance(node, dict) else range(len(node))
        place = draw(st.sampled_from(list(places)))
        child = node[place]
        if isinstance(child, dict | list) and child and draw(st.integers(0, 5)):
            node = child
            continue
        action = draw(st.integers(0, 9))
        if action == 0 and isinstance(node, dict):
            del node[place]
        elif action == 1 and isinstance(node, dict):
            node["spare"] = child
        elif action == 2 and isinstance(node, list):
            node.append(child)
        else:
            node[place] = draw(NUMBERS)
        return


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lie=lies())
def test_both_readers_take_and_refuse_the_same_files(binary: Path, tmp_path: Path, lie: tuple[str, bytes]) -> None:
    path = tmp_path / "rom.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(lie[1])
    ids = [3, 0, 5]
    done = subprocess.run(
        [binary, "fetch", "--rom", path, "--ids-file", ids_file(tmp_path, ids)], capture_output=True, timeout=60
    )
    try:
        with RomReader(path) as reader:
            values, counts = reader.fetch(np.array(ids))
    except UserError as error:
        assert done.returncode == 1, f"only Python refuses it: {error}"
        assert done.stderr.startswith(b"error: ") and done.stderr.count(b"\n") == 1
    else:
        assert done.returncode == 0, f"only the harness refuses it: {done.stderr.decode()}"
        assert done.stdout == counts.astype("<i8").tobytes() + values.tobytes()
