"""Real text, and tiny models at every stage of the pipeline, shared by all tests."""

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
from pydoc_data.topics import topics
from tiny import MEKI, MIXED, QUICK_CALIBRATION, VOCAB_SIZE, tiny_config, write_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meki_edge import tokens
from meki_edge.manifest import StageOutput


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
def checked_bundle(tmp_path_factory: pytest.TempPathFactory, bundles: dict[str, Path]) -> Path:
    """The bundle ``meki``, whose rows have checksums; do not change it."""
    from meki_edge import files, manifest
    from meki_edge.rom.transcode import transcode

    bundle = shutil.copytree(bundles["meki"], tmp_path_factory.mktemp("checked") / "bundle")
    rom = bundle / "rom.safetensors"
    transcode(bundles["meki"] / rom.name, rom.with_suffix(".new"), "fp32", checksums=True)
    rom.with_suffix(".new").replace(rom)
    described = files.read_json(bundle / manifest.FILE_NAME)
    described["files"][rom.name] |= {"bytes": rom.stat().st_size, "sha256": files.sha256_file(rom)}
    files.write_json(bundle / manifest.FILE_NAME, described)
    return bundle


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
