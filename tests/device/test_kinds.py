"""Every memory kind, alone and mixed, through the harness: the very tokens of the trained model in PyTorch.

Also what the harness fetches for a text, against the golden files and the Python reader.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import IO_MODES, generate, ids_file, rewrite
from tiny import tiny_config, write_checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export.graph import ExportConfig, export
from export.onnx_decoder import OnnxDecoder, cpu_sessions
from meki_edge import tokens
from meki_edge.device import runner
from meki_edge.device.bundle import open_bundle
from meki_edge.device.pack import PackConfig, pack
from meki_edge.device.run import _warm
from meki_edge.errors import UserError
from meki_edge.graph_spec import GraphSpec
from meki_edge.model.checkpoint import load_model
from meki_edge.reparam import ReparamConfig, reparam
from meki_edge.rom.reader import RomReader

GOLDEN = Path(__file__).parents[1] / "golden"
PREFILL_TOKENS = 8


def placed(kind: str, *layers: int, **options: object) -> dict[str, Any]:
    return {"kind": kind, "layers": list(layers), "options": options}


KINDS = {
    "meki": [placed("meki", 0, 1, memory_dim=8)],
    "ple": [placed("ple", 0, 1, memory_dim=8)],
    "stem": [placed("stem", 1)],
    "staple": [placed("staple", 0)],
    "staple of low rank": [placed("staple", 0, 1, rank=6)],
    "mole": [placed("mole", 1, num_experts=3)],
    "l3": [placed("l3", 0, max_entries=8, num_entries=900), placed("l3", 1, max_entries=5, tied=True)],
    "engram": [
        placed("engram", 0, table_size=31, memory_dim=16, num_heads=2),
        placed("engram", 1, table_size=31, memory_dim=9, max_ngram=4, num_heads=1, kernel_size=2),
    ],
}


@pytest.fixture(scope="module")
def text(tokens_dir: Path) -> list[int]:
    return tokens.open_shards(tokens_dir).validation[:400].tolist()


def greedy(checkpoint: Path, prompt: list[int], count: int) -> list[int]:
    """The trained model's own continuation, by a full forward pass for each token."""
    model = load_model(checkpoint)
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def assert_tokens_are_pytorchs(trained: Path, bundle: Path, text: list[int], directory: Path) -> None:
    """Prompts around the chunk length: whole chunks, padded ones, and a last one of a single token."""
    seen = set()
    for length in (1, 2, PREFILL_TOKENS - 1, PREFILL_TOKENS, PREFILL_TOKENS + 1, 3 * PREFILL_TOKENS + 2):
        prompt = text[3 * length : 4 * length]
        generated = generate(bundle, directory, prompt, 12)["generated_tokens"]
        assert generated == greedy(trained, prompt, 12)
        seen.update(generated)
    assert len(seen) > 6, "the model says the same whatever the prompt"


@pytest.mark.usefixtures("binary")
@pytest.mark.parametrize("name", KINDS)
def test_greedy_tokens_are_pytorchs(name: str, tokens_dir: Path, text: list[int], tmp_path: Path) -> None:
    trained, folded, exported, bundle = (tmp_path / stage for stage in ("trained", "folded", "exported", "bundle"))
    write_checkpoint(trained, tiny_config(KINDS[name], num_hidden_layers=2, eos_token_id=0), tokens_dir)
    reparam(trained, tokens_dir, folded, ReparamConfig(table_precision="fp32", proof_windows=1, window_length=32))
    graphs = ExportConfig(context_length=64, prefill_tokens=PREFILL_TOKENS, verify_tokens=20)
    export(folded, tokens_dir, exported, graphs)
    pack(exported, folded, bundle, PackConfig())
    assert_tokens_are_pytorchs(trained, bundle, text, tmp_path)


@pytest.fixture(scope="module")
def mixed_bundle(mixed: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = tmp_path_factory.mktemp("mixed-bundle") / "bundle"
    pack(mixed[2], mixed[1], bundle, PackConfig())
    return bundle


@pytest.mark.usefixtures("binary")
def test_greedy_tokens_of_a_mixed_model(
    mixed: tuple[Path, Path, Path], mixed_bundle: Path, text: list[int], tmp_path: Path
) -> None:
    assert_tokens_are_pytorchs(mixed[0], mixed_bundle, text, tmp_path)


@pytest.mark.usefixtures("binary")
@pytest.mark.parametrize("io", IO_MODES)
def test_bench_of_a_mixed_model(io: str, mixed_bundle: Path, text: list[int], tmp_path: Path) -> None:
    """After a warm-up, another test and a depth, what is sampled is what the NumPy host gets: no state is left over."""
    arguments = ["--bundle", str(mixed_bundle), "--trace-file", ids_file(tmp_path, text), "--depth", "21", "--io", io]
    arguments += ["--prompt-tokens", "40", "--generate-tokens", "15", "--warmup", "1", "--drop-page-cache"]
    report = runner.run_json(["bench", *arguments])
    spec = GraphSpec.from_json(json.loads((mixed_bundle / "graph_spec.json").read_text()), mixed_bundle)
    roms = [RomReader(mixed_bundle / rom.file) for rom in spec.roms]
    host = OnnxDecoder(spec, RomReader(mixed_bundle / spec.embedding.file), roms)
    host.prefill(cpu_sessions(mixed_bundle, spec.prefill), np.array(text[:21]))
    sessions = cpu_sessions(mixed_bundle, spec.decode)
    fed = text[21 : 21 + 15]
    assert report["generated_tokens"] == [int(host.decode(sessions, token).argmax()) for token in fed]
    assert report["rom_bytes_per_token"] == sum(
        rom.spec.addressing.rows_per_token * rom.spec.row_stride for rom in roms
    )
    for step, position in zip(report["tests"][1]["steps"], range(21, 36), strict=True):
        found = [rom.row_ids(np.array(text[position : position + 1]), np.array(text[:position])) for rom in roms]
        distinct = [len(set(ids[0, : counts[0]])) for ids, counts in found]
        assert step["rows_read"] == sum(distinct)
        if io != "direct":
            exact = [
                (count - 1) * rom.spec.row_stride + rom.spec.row_bytes
                if rom.spec.addressing.kind == "ragged"
                else count * rom.spec.row_bytes
                for rom, count in zip(roms, distinct, strict=True)
            ]
            assert step["bytes_read"] == sum(exact)


@pytest.mark.usefixtures("binary")
def test_a_row_cache_changes_no_token(mixed_bundle: Path, text: list[int], tmp_path: Path) -> None:
    """Without the page cache dropped, rows that a step read are hits later; a cache that holds all misses each once."""
    plain = generate(mixed_bundle, tmp_path, text[:40], 60)
    rates = [test["cache_hit_rate"] for test in plain["tests"]]
    assert (plain["row_cache_bytes"], rates) == (0, [0, 0])
    for size, io in ((4000, "pread"), (1 << 20, "direct")):
        cached = generate(mixed_bundle, tmp_path, text[:40], 60, "--row-cache-bytes", str(size), "--io", io)
        assert cached["generated_tokens"] == plain["generated_tokens"] and cached["row_cache_bytes"] == size
        steps = [step for test in cached["tests"] for step in test["steps"]]
        wanted = [step["rows_read"] for test in plain["tests"] for step in test["steps"]]
        assert [step["rows_read"] + step["cache_hits"] for step in steps] == wanted
        assert 0 < cached["tests"][1]["cache_hit_rate"] <= 1
        if size == 1 << 20:
            ids = text[:40] + cached["generated_tokens"][:-1]
            spec = GraphSpec.from_json(json.loads((mixed_bundle / "graph_spec.json").read_text()), mixed_bundle)
            distinct = 0
            for rom in spec.roms:
                with RomReader(mixed_bundle / rom.file) as reader:
                    row_ids, counts = reader.row_ids(np.array(ids))
                distinct += len(set(row_ids[np.arange(row_ids.shape[1]) < counts[:, None]].tolist()))
            assert sum(step["rows_read"] for step in steps) == distinct


@pytest.mark.usefixtures("binary")
@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--row-cache-bytes", "10"], "holds no row of"),
        (["--row-cache-bytes", "100000", "--io", "mmap"], "--row-cache-bytes needs --io pread or direct"),
        (["--row-cache-bytes", "-1"], "--row-cache-bytes takes an integer"),
    ],
)
def test_a_row_cache_that_cannot_be(mixed_bundle: Path, tmp_path: Path, options: list[str], what: str) -> None:
    with pytest.raises(UserError) as caught:
        generate(mixed_bundle, tmp_path, [1, 2, 3], 4, *options)
    assert what in caught.value.what


def edited_metadata(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the header's metadata."""
    contents = path.read_bytes()
    (length,) = struct.unpack_from("<Q", contents)
    header = json.loads(contents[8 : 8 + length])
    edit(header["__metadata__"])
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    path.write_bytes(struct.pack("<Q", len(text)) + text + contents[8 + length :])


SPOILED: list[tuple[str, Callable[[Path], object], str]] = [
    ("swapped", lambda b: (b / "rom_1.safetensors").rename(b / "rom_2.safetensors"), "cannot open the file"),
    ("identity", lambda b: shutil.copy(b / "rom.safetensors", b / "rom_2.safetensors"), "has the addressing identity"),
    ("hashed", lambda b: shutil.copy(b / "rom_1.safetensors", b / "rom_2.safetensors"), "the addressing ngram_hash"),
    (
        "parameters",
        lambda b: edited_metadata(
            b / "rom_2.safetensors", lambda m: m.update(addressing_parameters='{"rows_per_token":7}')
        ),
        "rows_per_token is 7, the offsets say 8",
    ),
    (
        "places",
        lambda b: rewrite(b / "graph_spec.json", lambda s: s["roms"][2].update(rows_per_token=7)),
        "has shape [1,16,8,48], expected [1,16,7,48]",
    ),
    (
        "tokenizer",
        lambda b: edited_metadata(b / "rom_1.safetensors", lambda m: m.update(tokenizer_sha256="other")),
        "another tokenizer",
    ),
]


@pytest.mark.usefixtures("binary")
@pytest.mark.parametrize(("spoil", "what"), [case[1:] for case in SPOILED], ids=[case[0] for case in SPOILED])
def test_a_spoiled_mixed_bundle_is_a_user_error(
    mixed_bundle: Path, tmp_path: Path, spoil: Callable[[Path], object], what: str
) -> None:
    bundle = shutil.copytree(mixed_bundle, tmp_path / "bundle")
    spoil(bundle)
    with pytest.raises(UserError) as caught:
        generate(bundle, tmp_path, [1, 2, 3], 4)
    assert what in caught.value.what


def test_a_warm_run_reads_the_rows_of_its_trace_first(mixed_bundle: Path, tmp_path: Path) -> None:
    """In every file: afterwards they can be read without waiting for the storage."""
    ids = np.array([5, 3, 5, 9, 200])
    bundle = open_bundle(mixed_bundle)
    for rom in bundle.spec.roms:
        with open(mixed_bundle / rom.file, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    _warm(bundle, Path(ids_file(tmp_path, ids.tolist())))
    for rom in bundle.spec.roms:
        with RomReader(mixed_bundle / rom.file) as reader, open(mixed_bundle / rom.file, "rb", buffering=0) as file:
            row_ids, counts = reader.row_ids(ids)
            start = 8 + int.from_bytes(file.read(8), "little")
            for row_id in {int(i) for found, count in zip(row_ids, counts, strict=True) for i in found[:count]}:
                offset = start + row_id * reader.spec.row_stride
                assert os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) == 1


# --- What a text needs ------------------------------------------------------------------------------------


def fetch(binary: Path, rom: Path, ids: list[int], directory: Path, io: str = "pread") -> tuple[np.ndarray, np.ndarray]:
    """Rows ``[T, K, row_dim]`` and counts ``[T]``, as `meki-runner fetch` prints them."""
    command = [binary, "fetch", "--rom", rom, "--ids-file", ids_file(directory, ids), "--io", io]
    printed = subprocess.run(command, capture_output=True, check=True).stdout
    with RomReader(rom) as reader:
        shape = len(ids), reader.spec.addressing.rows_per_token, reader.spec.row_dim
    return np.frombuffer(printed[8 * len(ids) :], "<f4").reshape(shape), np.frombuffer(printed[: 8 * len(ids)], "<i8")


@pytest.mark.parametrize("io", IO_MODES)
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_golden_rows(binary: Path, path: Path, io: str, tmp_path: Path) -> None:
    golden = json.loads(path.read_text())
    words = [[int(word, 16) for word in row.split()] for row in golden["rows"]]
    rows = np.array(words, "<u4").view("<f4")
    for case in golden["cases"]:
        before = len(case["before"])
        values, counts = fetch(binary, GOLDEN / golden["rom"], case["before"] + case["token_ids"], tmp_path, io)
        assert counts[before:].tolist() == [len(row_ids) for row_ids in case["row_ids"]]
        for found, row_ids in zip(values[before:], case["row_ids"], strict=True):
            assert found[: len(row_ids)].tobytes() == rows[row_ids].tobytes()
            assert not found[len(row_ids) :].any()


@pytest.mark.parametrize("io", IO_MODES)
@pytest.mark.parametrize("file", ["rom", "rom_1", "rom_2"])
def test_a_fetch_in_batches_is_that_of_all_at_once(
    binary: Path, mixed_bundle: Path, tmp_path: Path, file: str, io: str
) -> None:
    """Token by token, and in batches that do not divide the text; with a cache of rows where there may be one."""
    rom, ids = mixed_bundle / f"{file}.safetensors", np.random.default_rng(0).integers(30, size=100).tolist()
    with RomReader(rom) as reader:
        expected, counts = reader.fetch(np.array(ids))
    for batch in (1, 7, 1000):
        command = [binary, "fetch", "--rom", rom, "--ids-file", ids_file(tmp_path, ids), "--io", io]
        command += ["--batch", str(batch), *([] if io == "mmap" else ["--row-cache-bytes", "20000"])]
        data = subprocess.run(command, capture_output=True, check=True).stdout
        for start in range(0, len(ids), batch):
            count = min(batch, len(ids) - start)
            size = 4 * expected[0].size * count
            assert np.frombuffer(data[: 8 * count], "<i8").tolist() == counts[start : start + count].tolist()
            assert data[8 * count : 8 * count + size] == expected[start : start + count].astype("<f4").tobytes()
            data = data[8 * count + size :]
        assert not data


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 383), min_size=1, max_size=60), file=st.sampled_from(["", "_1", "_2", "_3"]))
def test_fetch_is_the_python_readers(
    binary: Path, mixed_bundle: Path, tmp_path: Path, ids: list[int], file: str
) -> None:
    rom = mixed_bundle / f"rom{file}.safetensors"
    with RomReader(rom) as reader:
        expected, expected_counts = reader.fetch(np.array(ids))
    values, counts = fetch(binary, rom, ids, tmp_path)
    assert np.array_equal(counts, expected_counts) and values.tobytes() == expected.tobytes()


@pytest.mark.parametrize("file", ["rom", "rom_1", "rom_2"])
def test_an_id_without_rows(binary: Path, mixed_bundle: Path, tmp_path: Path, file: str) -> None:
    command = [binary, "fetch", "--rom", mixed_bundle / f"{file}.safetensors"]
    done = subprocess.run([*command, "--ids-file", ids_file(tmp_path, [0, 384])], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert "token id 384 has no row: the file has rows for 384" in done.stderr
