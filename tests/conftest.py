"""Tiny models and real text, shared by all tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

# Before torch is loaded, and for subprocesses too: on matrices this small a second thread only
# waits, and on a busy machine it waits long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from pydoc_data.topics import topics
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meki_edge import tokens
from meki_edge.manifest import StageOutput
from meki_edge.model.checkpoint import TOKENIZER, WEIGHTS, save_model
from meki_edge.model.config import FILE_NAME, ModelConfig, parse
from meki_edge.model.decoder import CausalLM
from meki_edge.train.initialize import prepare_memories

VOCAB_SIZE = 384
TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}
MEKI = [{"kind": "meki", "layers": [0, 1, 2], "options": {"memory_dim": 12}}]
# Every addressing: rows by identity, a ragged file, and a hashed one for each of two layers.
MIXED = [
    {"kind": "meki", "layers": [0, 2], "options": {"memory_dim": 6}},
    {"kind": "l3", "layers": [1], "options": {"max_entries": 8, "num_entries": 900}},
    {"kind": "engram", "layers": [0, 1], "options": {"table_size": 31, "memory_dim": 16, "num_heads": 2}},
    {"kind": "ple", "layers": [2], "options": {"memory_dim": 4}},
]


QUICK_CALIBRATION = {"samples": 5, "window_length": 40, "gate_windows": 2, "decode_steps": 3}


def tiny_config(memories: list | None = None, **changes: object) -> ModelConfig:
    """A three-layer model; ``memories`` as in ``config.json``."""
    return parse({**TINY, "memories": memories or [], **changes}, "tiny")


def write_checkpoint(directory: Path, config: ModelConfig, tokens_dir: Path, seed: int = 0) -> Path:
    """A checkpoint directory as `meki-edge train` leaves it, with random weights worth testing.

    Every parameter is perturbed, so that no norm gain, α or β is trivially one. Addresses come from
    the training text, as they do in training.
    """
    model = CausalLM(config)
    model.reset_parameters(seed)
    prepare_memories(model, tokens.open_shards(tokens_dir))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    output = StageOutput(directory, stage="train", config={"seed": seed}, inputs={"tokens": tokens_dir})
    save_model(output.partial, model)
    shutil.copyfile(tokens_dir / tokens.TOKENIZER, output.partial / TOKENIZER)
    backbone = sum(parameter.numel() for name, parameter in model.named_parameters() if ".memories." not in name)
    kept = [pair for layer in model.model.layers for memory in layer.memories for pair in memory.ram_parameters()]
    output.finish(
        roles={FILE_NAME: "config", WEIGHTS: "weights", TOKENIZER: "tokenizer"},
        metrics={
            "validation_loss": 6.0,
            "ram_parameters": backbone + sum(parameter.numel() for _, parameter in kept),
        },
    )
    return directory


@pytest.fixture(scope="session")
def tokens_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real prose (the Python reference's topics) as `meki-edge tokenize` leaves it."""
    texts = [topics[name] for name in sorted(topics)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    encoded = [np.array([*tokenizer.encode(text).ids, 0], "<u2") for text in texts]
    directory = tmp_path_factory.mktemp("tokens") / "tokens"
    output = StageOutput(directory, stage=tokens.STAGE, config={}, inputs={})
    tokenizer.save(str(output.partial / tokens.TOKENIZER))
    np.concatenate(encoded[:60]).tofile(output.partial / tokens.TRAIN)
    np.concatenate(encoded[60:]).tofile(output.partial / tokens.VALIDATION)
    output.finish(
        roles={
            tokens.TOKENIZER: "tokenizer",
            tokens.TRAIN: "train_tokens",
            tokens.VALIDATION: "validation_tokens",
        },
        metrics={"token_bytes": 2, "vocab_size": VOCAB_SIZE, "eos_token_id": 0},
    )
    return directory


@pytest.fixture
def dense_checkpoint(tmp_path: Path, tokens_dir: Path) -> Path:
    """A random dense checkpoint."""
    return write_checkpoint(tmp_path / "dense", tiny_config(eos_token_id=0), tokens_dir)


@pytest.fixture
def meki_checkpoint(tmp_path: Path, tokens_dir: Path) -> Path:
    """A random MeKi checkpoint in training form."""
    return write_checkpoint(tmp_path / "meki", tiny_config(MEKI, eos_token_id=0), tokens_dir)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, tokens_dir: Path) -> dict[str, tuple[Path, Path]]:
    """(checkpoint, export) of a dense model and of a folded MeKi model, by the real stages; do not change them."""
    from export.graph import ExportConfig, export
    from meki_edge.reparam import ReparamConfig, reparam

    directory = tmp_path_factory.mktemp("exported")
    training = write_checkpoint(directory / "training", tiny_config(MEKI, eos_token_id=0), tokens_dir)
    folding = ReparamConfig(table_precision="int8", proof_windows=2, window_length=64)
    reparam(training, tokens_dir, directory / "meki", folding)
    write_checkpoint(directory / "dense", tiny_config(eos_token_id=0), tokens_dir)
    made = {}
    for name in ("dense", "meki"):
        config = ExportConfig(context_length=160, prefill_tokens=16, verify_tokens=20)
        export(directory / name, tokens_dir, directory / f"{name}-export", config)
        made[name] = (directory / name, directory / f"{name}-export")
    return made


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory, tokens_dir: Path) -> tuple[Path, Path, Path]:
    """(trained, folded, exported) of a model with every addressing, by the real stages; do not change them."""
    from export.graph import ExportConfig, export
    from meki_edge.reparam import ReparamConfig, reparam

    directory = tmp_path_factory.mktemp("mixed")
    trained, folded, exported = (directory / name for name in ("trained", "folded", "exported"))
    write_checkpoint(trained, tiny_config(MIXED, eos_token_id=0), tokens_dir)
    reparam(trained, tokens_dir, folded, ReparamConfig(table_precision="fp32", proof_windows=2, window_length=64))
    export(folded, tokens_dir, exported, ExportConfig(context_length=160, prefill_tokens=16, verify_tokens=20))
    return trained, folded, exported


@pytest.fixture(scope="session")
def calibrated(
    tmp_path_factory: pytest.TempPathFactory, mixed: tuple[Path, Path, Path], tokens_dir: Path
) -> Path:
    """The mixed model's graphs in w8a16, by the real stage; do not change it."""
    from calibration.config import CalibrateConfig
    from calibration.stage import calibrate

    _, folded, exported = mixed
    out = tmp_path_factory.mktemp("calibrated") / "w8a16"
    calibrate(exported, folded, tokens_dir, out, CalibrateConfig(**QUICK_CALIBRATION))
    return out


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory, exported: dict[str, tuple[Path, Path]]) -> dict[str, Path]:
    """The packed bundles ``dense`` and ``meki``; do not change them."""
    from meki_edge.device.pack import PackConfig, pack

    directory = tmp_path_factory.mktemp("bundles")
    for name, (checkpoint, graphs) in exported.items():
        pack(graphs, checkpoint, directory / name, PackConfig())
    return {name: directory / name for name in exported}


@pytest.fixture(scope="session")
def binary() -> Path:
    """The C++ harness that MEKI_RUNNER names, or as `make runner` builds it: in a moment if nothing changed."""
    if built := os.environ.get("MEKI_RUNNER"):
        return Path(built)
    import nlohmann_json

    root = Path(__file__).parents[1]
    headers = root / "build/ort-headers"
    build = root / "build/runner"
    subprocess.run(["sh", root / "android_runner/fetch_headers.sh", headers], check=True)
    options = ["-DCMAKE_BUILD_TYPE=Release", f"-DMEKI_ORT_HEADERS={headers}"]
    options.append(f"-DMEKI_JSON_INCLUDE={Path(nlohmann_json.__file__).parent / 'include'}")
    subprocess.run(["cmake", "-S", root / "android_runner", "-B", build, *options], check=True)
    subprocess.run(["cmake", "--build", build, "--target", "meki-runner", "-j2"], check=True)
    return build / "meki-runner"
