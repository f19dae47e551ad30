"""`meki-edge generate`: text in, text out, through the harness and a bundle's tokenizer."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from meki_edge.device import runner
from meki_edge.device.bundle import Bundle, open_bundle
from meki_edge.errors import UserError

BROKEN = "\ufffd"  # what a decoder puts in the place of bytes that are no character (yet)

DEFAULT_NEW_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Options of `meki-edge generate`."""

    max_new_tokens: int | None = None
    """Stop after this many tokens, if the end-of-text token has not come before. None: 128, or as
    many as the context has room for."""
    temperature: float = 0.0
    """0 takes the likeliest token; higher spreads the choice."""
    top_k: int = 0
    """Choose among the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability."""
    seed: int = 0
    """Of the random choice."""
    threads: int | None = 2
    """Threads of the graph; None takes one a core."""
    io: str = "pread"
    """How rows are read: pread, direct or mmap."""
    verify_rows: bool = False
    """Compare every row that is read with its checksum; the ROM files need them."""


class Detokenizer:
    """Text from token ids as they come; a character is held back until all its bytes are there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._emitted = 0
        self._boundary = 0

    def push(self, token: int) -> str:
        """The text that ``token`` completes, possibly none."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        whole = text.rstrip(BROKEN)
        piece = whole[self._emitted :]
        self._emitted += len(piece)
        if text == whole:
            # Keep the ids since the last boundary as context (some decoders treat the first token
            # of a text specially) and forget the rest, so that a step does not slow down with length.
            self._ids = self._ids[self._boundary :]
            self._emitted = len(self._tokenizer.decode(self._ids))
            self._boundary = len(self._ids)
        return piece


def generate(
    bundle: Path,
    prompt: str,
    config: GenerateConfig,
    on_text: Callable[[str], None],
    *,
    run_json: Callable[..., dict[str, Any]] = runner.run_json,
) -> dict[str, Any]:
    """Continue ``prompt``; ``on_text`` gets the text piece by piece as it is sampled.

    ``run_json`` runs the harness: on this machine, or on a phone (:class:`PhoneRunner`). An empty
    prompt starts from the end-of-text token, which separates documents in training.

    Returns:
        ``text``, ``stop`` ("eos" or "length"), counts of tokens, tokens/s of prompt and
        generation, row I/O and stall a generated token, how many of those waited for rows, whether
        rows were checked, load time, peak RSS.

    Raises:
        UserError: the bundle is not whole, the context is too short, or the harness fails.
    """
    opened = open_bundle(bundle)
    tokenizer = _tokenizer(opened)
    eos = opened.spec.eos_token_id
    ids = _encode(tokenizer, prompt)
    if not ids and eos is None:
        raise UserError("the prompt is empty and the model has no end-of-text token", where=bundle, fix="give a prompt")
    ids = ids or [eos]
    config = _fitting(opened, len(ids), config)

    detokenizer = Detokenizer(tokenizer)
    pieces: list[str] = []

    def on_token(token: int) -> None:
        if piece := "" if token == eos else detokenizer.push(token):
            pieces.append(piece)
            on_text(piece)

    with tempfile.TemporaryDirectory() as directory:
        prompt_file = Path(directory) / "prompt.txt"
        prompt_file.write_text(" ".join(map(str, ids)))
        report = run_json(_arguments(bundle, prompt_file, eos, config), on_token=on_token)
    return {"text": "".join(pieces), **_statistics(report, eos)}


def _tokenizer(opened: Bundle) -> Tokenizer:
    """The bundle's tokenizer, as its file has it: special tokens in a prompt mean what they say."""
    tokenizer = Tokenizer.from_file(os.fspath(opened.tokenizer))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:  # bytes that are no text reach Python as lone surrogates
        raise UserError("the prompt is not valid UTF-8", where="prompt", fix="give text, in a UTF-8 locale") from None
    return tokenizer.encode(prompt, add_special_tokens=False).ids


def _fitting(opened: Bundle, prompt_tokens: int, config: GenerateConfig) -> GenerateConfig:
    """``config`` with a number of new tokens that fits the context."""
    room = opened.spec.context_length - prompt_tokens
    if config.max_new_tokens is None and room > 0:
        return dataclasses.replace(config, max_new_tokens=min(DEFAULT_NEW_TOKENS, room))
    wanted = DEFAULT_NEW_TOKENS if config.max_new_tokens is None else config.max_new_tokens
    if wanted < 1:
        raise UserError(f"max_new_tokens is {wanted}", where="--max-new-tokens", fix="give 1 or more")
    if wanted > room:
        lower = f", lower --max-new-tokens to {room}," if room > 0 else ""
        raise UserError(
            f"a prompt of {prompt_tokens} tokens and {wanted} new ones "
            f"do not fit the context of {opened.spec.context_length}",
            where=opened.directory,
            fix=f"shorten the prompt{lower} or export with a larger --context-length",
        )
    return config


def _arguments(bundle: Path, prompt_file: Path, eos: int | None, config: GenerateConfig) -> list[str]:
    arguments = ["generate", "--bundle", str(bundle), "--prompt-file", str(prompt_file), "--stream"]
    for flag in ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "io"):
        arguments += [f"--{flag.replace('_', '-')}", str(getattr(config, flag))]
    arguments += ["--threads", str(os.cpu_count() if config.threads is None else config.threads)]
    arguments += ["--verify-rows"] if config.verify_rows else []
    return arguments + ([] if eos is None else ["--stop-token", str(eos)])


def _statistics(report: dict[str, Any], eos: int | None) -> dict[str, Any]:
    prompt, generated = report["tests"]
    tokens = report["generated_tokens"]

    def speed(test: dict[str, Any]) -> float | None:
        return 1e6 * test["num_tokens"] / test["elapsed_us"] if test["num_tokens"] else None

    def per_token(key: str) -> float | None:
        steps = generated["steps"]
        return sum(step[key] for step in steps) / len(steps) if steps else None

    return {
        "stop": "eos" if tokens and tokens[-1] == eos else "length",
        "prompt_tokens": len(report["prompt_tokens"]),
        "generated_tokens": len(tokens),
        "prompt_tokens_per_s": speed(prompt),
        "generate_tokens_per_s": speed(generated),
        "io_us_per_token": per_token("io_us"),
        "stall_us_per_token": per_token("stall_us"),
        "deadlines_missed": generated["deadlines_missed"],
        "verify_rows": report["verify_rows"],
        "load_us": report["load_us"],
        "peak_rss_bytes": report["peak_rss_bytes"],
    }
