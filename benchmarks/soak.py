"""Many tokens in one process, for benchmarks/rows.py: whether rows stay right, and memory does not grow."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from decode import build
from decode_soak import resident
from reparam import qwen3_06b

from meki_edge import console
from meki_edge.device import runner
from meki_edge.errors import UserError
from meki_edge.model.config import MemoryPlacement
from meki_edge.rom.reader import RomReader

SOAKS = {"pread": 0, "direct": 0, "mmap": 0, "pread, row cache": 8 << 20}
"""Ways to read, and the bytes of the harness's row cache."""
COMPARED = 500  # tokens at a time


def soak(rom: Path, io: str, cache_bytes: int, ids: np.ndarray) -> dict[str, Any]:
    """Stream the rows of ``ids`` from the harness token by token; compare each, and watch its memory."""
    with tempfile.TemporaryDirectory() as directory, RomReader(rom) as reader:
        text = Path(directory) / "ids.txt"
        text.write_text("\n".join(map(str, ids)))
        command = [runner.find_binary(), "fetch", "--rom", rom, "--ids-file", text, "--io", io, "--batch", "1"]
        command += ["--row-cache-bytes", str(cache_bytes)]
        places = reader.spec.addressing.rows_per_token
        token = np.dtype([("count", "<i8"), ("rows", "<f4", (places, reader.spec.row_dim))])
        wrong, memory = 0, []
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process, console.progress() as bar:
            assert process.stdout is not None
            task = bar.add_task(f"soak, {io}", total=len(ids))
            for start in range(0, len(ids), COMPARED):
                chunk = ids[start : start + COMPARED]
                data = process.stdout.read(len(chunk) * token.itemsize)
                if len(data) < len(chunk) * token.itemsize:
                    raise UserError("the harness stopped early", where=rom, fix="see its message above")
                found = np.frombuffer(data, token)
                rows, counts = reader.fetch(chunk, ids[:start])
                same = (found["rows"].view("<u4") == rows.astype("<f4").view("<u4")).all(axis=(1, 2))
                wrong += int((~same | (found["count"] != counts)).sum())
                memory += [resident(process.pid)] if start + COMPARED < len(ids) else []
                bar.advance(task, len(chunk))
        if process.returncode:
            raise UserError("the harness failed", where=rom, fix="see its message above")
    return {"tokens": len(ids), "wrong_rows": wrong, **_growth(memory)}


def soak_decoding(bundle: Path, io: str, cache_bytes: int, count: int) -> dict[str, Any]:
    """Decode ``count`` tokens in one process (decode_soak.py), and watch its memory."""
    library = runner.find_binary().with_name("libmeki_runner.so")
    if not library.is_file():
        fix = f"build it: cmake --build {library.parent} --target meki_runner"
        raise UserError("libmeki_runner is not built", where=library, fix=fix)
    command = [sys.executable, Path(__file__).with_name("decode_soak.py"), library, runner.find_ort_library(), bundle]
    done = subprocess.run([*command, io, str(cache_bytes), str(count)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError("decoding failed", where=bundle, fix="see the message above")
    return {"tokens": count, **_growth(json.loads(done.stdout))}


def _growth(memory: list[dict[str, int]]) -> dict[str, int]:
    settled = memory[len(memory) // 10 :]
    return {
        "rss_bytes": settled[0]["RssAnon"] + settled[0]["RssFile"],
        "file_bytes": settled[-1]["RssFile"],
        "anonymous_growth_bytes": settled[-1]["RssAnon"] - settled[0]["RssAnon"],
        "file_growth_bytes": settled[-1]["RssFile"] - settled[0]["RssFile"],
    }


def tiny_bundle(scratch: Path) -> Path:
    """One layer whose steps take microseconds, with 16 MB of rows: a page each."""
    memory = MemoryPlacement(kind="meki", layers=(0,), options={"memory_dim": 2048})
    config = replace(
        qwen3_06b(small=True),
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        memories=(memory,),
    )
    return build(scratch, "meki", config, precision="fp16", context_length=512)
