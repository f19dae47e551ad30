"""`meki-edge tokenize`: text to token shards, split by document.

Three passes over the sources, none of which holds more than a batch of documents (and 100 bytes
a document, to know duplicates): scan and split, train a tokenizer on the training documents
(unless one is given), encode. Which split a document falls in depends on its text and the seed
alone, not on the order or the names of the files. Each document is encoded whole and closed by
EOS.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from meki_edge import console, tokens
from meki_edge.config import to_dict
from meki_edge.errors import UserError
from meki_edge.files import require_free_space, storage_errors
from meki_edge.manifest import Manifest, StageOutput
from meki_edge.tokenizer import EOS_TOKEN, NUM_BYTES, TextTokenizer, load, train_bpe
from meki_edge.train.documents import Document, find_files, read_documents

DEFAULT_VOCAB_SIZE = 16_384
BATCH_CHARACTERS = 1 << 22
HASH_RANGE = 1 << 64


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig:
    """Options of `meki-edge tokenize`."""

    vocab_size: int | None = None
    """Size of the tokenizer to train (16,384 unless given); not allowed with a ready tokenizer."""
    validation_fraction: float = 0.05
    """The share of the documents, not of the text, that is held out."""
    text_field: str = "text"
    """The field of a JSONL line that holds its text."""
    eos_token: str | None = None
    """The token that ends a document; default: the tokenizer's usual one, ``<|endoftext|>`` in a new one."""
    seed: int = 0
    """Another seed makes another split."""


@dataclass(kw_only=True)
class Corpus:
    """The distinct documents of some files, and how they split."""

    files: list[Path]
    config: TokenizeConfig
    threshold: int = 0
    """A document whose 64-bit hash is below it is held out."""
    sha256: str = ""
    """Over the digests of all distinct documents, in order."""
    documents: int = 0
    duplicates: int = 0
    empty: int = 0
    source_bytes: int = 0

    def read(self, advance: Callable[[int], None]) -> Iterator[tuple[Document, bool]]:
        """Each distinct document with whether it is held out; ``advance`` is told bytes read.

        Raises:
            UserError: bad text, or the sources changed since they were scanned.
        """
        whole = hashlib.sha256()
        for document, digest in self._distinct(advance):
            whole.update(digest)
            yield document, _hash(digest) < self.threshold
        if whole.hexdigest() != self.sha256:
            raise UserError(
                "the text changed while it was read",
                where=", ".join(str(path) for path in self.files[:3]),
                fix="run the command again when nothing writes to the sources",
            )

    def scan(self, advance: Callable[[int], None]) -> None:
        """First pass: count, and choose the threshold so that neither split is empty."""
        whole = hashlib.sha256()
        lowest, highest = HASH_RANGE, -1
        for document, digest in self._distinct(advance, count=True):
            whole.update(digest)
            lowest, highest = min(lowest, _hash(digest)), max(highest, _hash(digest))
            self.documents += 1
            self.source_bytes += document.source_bytes
        if self.documents < 2:
            raise UserError(
                f"{self.documents} documents are not enough: training and validation need one each",
                where=", ".join(str(path) for path in self.files[:3]),
                fix="give more files, or a JSONL file with one document a line",
            )
        self.sha256 = whole.hexdigest()
        self.threshold = round(self.config.validation_fraction * HASH_RANGE)
        if lowest >= self.threshold:
            console.info("no document fell into the validation split; the one with the lowest hash was moved there")
            self.threshold = lowest + 1
        elif highest < self.threshold:
            console.info("no document fell into the training split; the one with the highest hash was moved there")
            self.threshold = highest

    def _distinct(self, advance: Callable[[int], None], count: bool = False) -> Iterator[tuple[Document, bytes]]:
        seen: set[bytes] = set()
        for path in self.files:
            for document in read_documents(path, self.config.text_field):
                advance(document.source_bytes)
                digest = document.digest(self.config.seed)
                if not document.text.strip():
                    self.empty += count
                elif digest in seen:
                    self.duplicates += count
                else:
                    seen.add(digest)
                    yield document, digest


@dataclass(kw_only=True)
class SplitWriter:
    """One shard file being written, and what went into it."""

    file: BinaryIO
    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0

    def write(self, document: Document, ids: list[int], tokenizer: TextTokenizer) -> None:
        """Append a document and its EOS."""
        array = np.array([*ids, tokenizer.eos_token_id], tokenizer.token_dtype)
        self.file.write(array.tobytes())
        self.tokens += len(array)
        self.documents += 1
        self.text_bytes += len(document.text.encode("utf-8"))


def tokenize(
    sources: list[Path],
    out: Path,
    config: TokenizeConfig,
    *,
    tokenizer: Path | None = None,
    force: bool = False,
) -> Manifest:
    """Write token shards of the documents in ``sources`` to ``out``; see the module's docstring.

    Args:
        sources: text files, JSONL files, or folders of them.
        out: the output directory: ``tokenizer.json``, ``train.bin``, ``validation.bin``.
        config: options.
        tokenizer: a ready ``tokenizer.json``; without it a byte-level BPE is trained.
        force: replace an earlier result.

    Returns:
        The manifest. Its metrics count tokens (EOS included), documents and UTF-8 text bytes
        (``validation_bytes``) of each split, so that a loss can be told in bits per byte.

    Raises:
        UserError: bad options, no text, fewer than two documents, invalid UTF-8 or JSON, or an
            unusable tokenizer.
    """
    _check(config, tokenizer)
    ready = None if tokenizer is None else load(tokenizer, eos_token=config.eos_token)
    files, skipped = find_files(sources)
    if skipped:
        suffixes = ", ".join(sorted({path.suffix or "no suffix" for path in skipped}))
        console.info(f"{len(skipped)} files were passed over because of their suffix ({suffixes})")
    corpus = Corpus(files=files, config=config)
    _with_bar("scan", files, corpus.scan)
    if corpus.duplicates or corpus.empty:
        console.info(f"left out: {corpus.duplicates} exact duplicates, {corpus.empty} empty documents")
    output = StageOutput(
        out,
        stage=tokens.STAGE,
        config={**to_dict(config), "documents_sha256": corpus.sha256},
        inputs={} if tokenizer is None else {"tokenizer": tokenizer},
        tools=("tokenizers",),
        force=force,
    )
    if output.complete is not None:
        return output.complete
    require_free_space(out, corpus.source_bytes, "the token shards")
    path = output.partial / tokens.TOKENIZER
    if tokenizer is None:
        _train_tokenizer(corpus, path)
        ready = load(path, eos_token=config.eos_token)
    else:
        shutil.copyfile(tokenizer, path)
    assert ready is not None
    train, validation = _encode(corpus, ready, output.partial)
    return output.finish(
        roles={
            tokens.TOKENIZER: "tokenizer",
            tokens.TRAIN: "train_tokens",
            tokens.VALIDATION: "validation_tokens",
        },
        metrics={
            "token_bytes": ready.token_dtype.itemsize,
            "vocab_size": ready.vocab_size,
            "eos_token_id": ready.eos_token_id,
            "train_tokens": train.tokens,
            "validation_tokens": validation.tokens,
            "train_documents": train.documents,
            "validation_documents": validation.documents,
            "train_bytes": train.text_bytes,
            "validation_bytes": validation.text_bytes,
            "documents": corpus.documents,
            "duplicate_documents": corpus.duplicates,
            "empty_documents": corpus.empty,
            "files": len(files),
        },
    )


def _train_tokenizer(corpus: Corpus, path: Path) -> None:
    wanted = corpus.config.vocab_size or DEFAULT_VOCAB_SIZE

    def run(advance: Callable[[int], None]) -> None:
        texts = (document.text for document, held_out in corpus.read(advance) if not held_out)
        trained = train_bpe(texts, wanted, corpus.config.eos_token or EOS_TOKEN)
        with storage_errors(path):
            path.write_text(trained.to_str(pretty=True), encoding="utf-8")
        if trained.get_vocab_size() < wanted:
            console.info(f"the text yields only {trained.get_vocab_size()} of the {wanted} tokens asked for")

    _with_bar("train the tokenizer", corpus.files, run)


def _encode(corpus: Corpus, tokenizer: TextTokenizer, directory: Path) -> tuple[SplitWriter, SplitWriter]:
    with (
        storage_errors(directory),
        open(directory / tokens.TRAIN, "wb") as train_file,
        open(directory / tokens.VALIDATION, "wb") as validation_file,
    ):
        writers = SplitWriter(file=train_file), SplitWriter(file=validation_file)

        def run(advance: Callable[[int], None]) -> None:
            for batch in _batches(corpus.read(advance)):
                all_ids = tokenizer.encode_batch([document.text for document, _ in batch])
                for (document, held_out), ids in zip(batch, all_ids, strict=True):
                    writers[held_out].write(document, ids, tokenizer)

        _with_bar("encode", corpus.files, run)
    return writers


def _batches(documents: Iterator[tuple[Document, bool]]) -> Iterator[list[tuple[Document, bool]]]:
    batch: list[tuple[Document, bool]] = []
    characters = 0
    for item in documents:
        batch.append(item)
        characters += len(item[0].text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _with_bar(description: str, files: list[Path], run: Callable[[Callable[[int], None]], None]) -> None:
    """Run a pass over ``files`` under a progress bar that counts kilobytes."""
    total = sum(path.stat().st_size for path in files)
    with console.progress("kB") as bar:
        task = bar.add_task(description, total=total // 1000)
        run(lambda num_bytes: bar.advance(task, num_bytes / 1000))
        bar.update(task, completed=total // 1000)


def _check(config: TokenizeConfig, tokenizer: Path | None) -> None:
    def wrong(name: str, what: str, fix: str) -> UserError:
        return UserError(what, where=f"tokenize: {name}", fix=fix)

    if not 0 < config.validation_fraction < 1:
        raise wrong(
            "validation_fraction",
            f"the validation fraction {config.validation_fraction} is not between 0 and 1",
            "give a share such as 0.05",
        )
    if config.vocab_size is not None:
        if tokenizer is not None:
            raise wrong(
                "vocab_size",
                "a vocabulary size and a ready tokenizer exclude each other",
                "leave one of --vocab-size and --tokenizer out",
            )
        smallest = NUM_BYTES + 1
        if config.vocab_size < smallest:
            raise wrong(
                "vocab_size",
                f"a vocabulary of {config.vocab_size} is too small for a byte-level tokenizer",
                f"give at least {smallest}: the bytes and end-of-text",
            )
    if not -(1 << 63) <= config.seed < 1 << 63:
        raise wrong("seed", f"the seed {config.seed} does not fit 64 bits", "give a smaller seed")


def _hash(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")
