"""Decode many tokens in one process, as an app does: through the C API, text after text.

    python benchmarks/decode_soak.py LIBMEKI_RUNNER LIBONNXRUNTIME BUNDLE pread|direct|mmap CACHE_BYTES COUNT

Prints the resident memory of this process after each text, as JSON. A text fills the context: a prompt, then a
step for each token, which samples another. benchmarks/rows.py runs it. `meki-runner bench` would not do: it keeps the
times of every step, so it grows, and it ends with the context.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

import numpy as np

IO = ("pread", "direct", "mmap")
FIELDS = ("RssAnon", "RssFile")
PROMPT_TOKENS = 32


class Options(ctypes.Structure):
    """``meki_options`` of meki_runner.h, as far as they are needed here."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("bundle", ctypes.c_char_p),
        ("ort_library", ctypes.c_char_p),
        ("threads", ctypes.c_int32),
        ("io", ctypes.c_int32),
        ("row_cache_bytes", ctypes.c_uint64),
        ("temperature", ctypes.c_double),
        ("top_k", ctypes.c_uint64),
        ("top_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("compute", ctypes.c_int32),
        ("qnn_library", ctypes.c_char_p),
        ("qnn_provider", ctypes.c_char_p),
    ]


def draw(num_ids: int, count: int) -> np.ndarray:
    """Half of the tokens from everywhere, half from few as text has them, so that a cache has work to do."""
    rng = np.random.default_rng(0)
    anywhere = rng.integers(num_ids, size=count)
    return np.where(rng.random(count) < 0.5, anywhere, rng.zipf(1.2, size=count) % num_ids)


def resident(process: int) -> dict[str, int]:
    """Resident memory of a process in bytes: its own (RssAnon), and pages of files (RssFile)."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {key: int(fields[key].split()[0]) * 1024 for key in FIELDS}


def decode(library: str, options: Options, count: int) -> list[dict[str, int]]:
    """The resident memory after each text of ``count`` tokens."""
    api = ctypes.CDLL(library)
    api.meki_last_error.restype = ctypes.c_char_p
    api.meki_vocab_size.restype = api.meki_context_length.restype = ctypes.c_size_t

    def check(status: int) -> None:
        if status:
            sys.exit(api.meki_last_error().decode())

    runner, following = ctypes.c_void_p(), ctypes.c_uint32()
    check(api.meki_open(ctypes.byref(options), ctypes.byref(runner)))
    length = api.meki_context_length(runner)
    ids = draw(api.meki_vocab_size(runner), count).tolist()
    memory = np.zeros((-(-count // length), len(FIELDS)), np.int64)  # it does not grow either
    for index in range(len(memory)):
        text = ids[index * length : (index + 1) * length]
        prompt = text[:PROMPT_TOKENS]
        array = (ctypes.c_uint32 * len(prompt))(*prompt)
        check(api.meki_reset(runner))
        check(api.meki_prefill(runner, array, ctypes.c_size_t(len(prompt)), ctypes.byref(following)))
        for token in text[PROMPT_TOKENS:]:
            check(api.meki_step(runner, ctypes.c_uint32(token), ctypes.byref(following)))
        memory[index] = list(resident(os.getpid()).values())
    api.meki_close(runner)
    return [dict(zip(FIELDS, row, strict=True)) for row in memory.tolist()]


def main() -> None:
    library, ort_library, bundle, io, cache_bytes, count = sys.argv[1:]
    options = Options()
    ctypes.CDLL(library).meki_default_options(ctypes.byref(options), ctypes.c_size_t(ctypes.sizeof(options)))
    options.bundle, options.ort_library = bundle.encode(), ort_library.encode()
    options.threads, options.io, options.row_cache_bytes = 1, IO.index(io), int(cache_bytes)
    options.temperature, options.top_k = 1.0, 40
    print(json.dumps(decode(library, options, int(count))))


if __name__ == "__main__":
    main()
