"""The validation loss: against transformers, and the same in training form and ROM form."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import torch
from tiny import MEKI, TINY, split_rows, tiny_config
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from meki_edge import tokens
from meki_edge.model.config import ROM_FORM
from meki_edge.model.decoder import CausalLM, Rows
from meki_edge.model.validation import validation_loss


def digest(model: CausalLM) -> str:
    whole = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        whole.update(name.encode() + tensor.numpy().tobytes())
    return whole.hexdigest()


def random_model(memories: list | None) -> CausalLM:
    model = CausalLM(tiny_config(memories))
    model.reset_parameters(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def test_equals_transformers_and_changes_nothing(tokens_dir: Path) -> None:
    windows = tokens.open_shards(tokens_dir).validation_windows(7, 33)
    model = random_model(None)
    reference = Qwen3ForCausalLM(Qwen3Config(**TINY, tie_word_embeddings=True))
    reference.load_state_dict(model.state_dict())
    batch = torch.from_numpy(windows)
    with torch.no_grad():
        logits = reference(batch[:, :-1]).logits.double()
    expected = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()
    before, done = digest(model), []
    assert abs(validation_loss(model, windows, advance=done.append) - expected) < 1e-5
    assert sum(done) == 7
    assert digest(model) == before


def test_rom_form_equals_training_form(tokens_dir: Path) -> None:
    windows = tokens.open_shards(tokens_dir).validation_windows(7, 33)
    model = random_model(MEKI)
    folded = CausalLM(dataclasses.replace(model.config, memory_form=ROM_FORM))
    folded.load_state_dict(model.state_dict(), strict=False)
    ids = torch.arange(model.config.vocab_size)
    with torch.no_grad():
        embeddings = model.model.embed_tokens(ids)
        memories = [memory for layer in model.model.layers for memory in layer.memories]
        rom = torch.cat([memory.rom_rows(ids, embeddings) for memory in memories], -1)

    def rows_source(batch: Tensor) -> Rows:
        return split_rows(folded, rom[batch])

    before = digest(model)
    trained = validation_loss(model, windows)
    assert abs(validation_loss(folded, windows, rows_source=rows_source) - trained) < 1e-5
    assert digest(model) == before
