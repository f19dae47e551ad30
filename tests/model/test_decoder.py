"""The backbone against `transformers`, decoding with a cache, and the dense twin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import MEKI, TINY, tiny_config
from transformers import Qwen3Config, Qwen3ForCausalLM

from meki_edge.errors import UserError
from meki_edge.model.checkpoint import Checkpoint, load_model
from meki_edge.model.decoder import CausalLM
from meki_edge.model.kv_cache import CachedAttention

IDS = torch.randint(0, TINY["vocab_size"], (2, 50), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def theirs(request: pytest.FixtureRequest) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**TINY, tie_word_embeddings=request.param)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # no gain stays one
    return model


@pytest.mark.parametrize("shard", ["50GB", "30KB"])
def test_a_transformers_checkpoint_gives_its_logits(theirs: Qwen3ForCausalLM, shard: str, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "30KB")
    ours = load_model(tmp_path)
    torch.testing.assert_close(ours(IDS), theirs(IDS).logits, atol=1e-4, rtol=0)


def test_cached_decode_equals_full_forward() -> None:
    model = CausalLM(tiny_config(MEKI))
    model.reset_parameters(1)
    full = model(IDS[:1])
    cache = CachedAttention(model.config, context_length=64)
    pieces = []
    for start, stop in ((0, 17), (17, 18), (18, 19), (19, 50)):
        pieces.append(model(IDS[:1, start:stop], cache))
        cache.advance(stop - start)
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, atol=1e-5, rtol=0)


def test_the_dense_twin_starts_from_the_same_backbone() -> None:
    dense, meki = CausalLM(tiny_config()), CausalLM(tiny_config(MEKI))
    dense.reset_parameters(7)
    meki.reset_parameters(7)
    with_memory = meki.state_dict()
    for name, tensor in dense.state_dict().items():
        assert torch.equal(tensor, with_memory[name]), name


def test_layers_of_a_memory_start_differently() -> None:
    model = CausalLM(tiny_config(MEKI))
    model.reset_parameters(7)
    first, second = (layer.memories[0].table for layer in model.model.layers[:2])
    assert not torch.equal(first, second)


def test_weights_that_do_not_fit_are_named(theirs: Qwen3ForCausalLM, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"intermediate_size": 80', '"intermediate_size": 81'))
    with pytest.raises(UserError, match=r"mlp.down_proj.weight' has shape \(32, 80\), config.json asks for \(32, 81\)"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    with pytest.raises(UserError, match="'model.layers.3.input_layernorm.weight' is missing"):
        Checkpoint(tmp_path)


def test_a_truncated_checkpoint_is_an_error(theirs: Qwen3ForCausalLM, tmp_path: Path) -> None:
    theirs.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="but the file has"):
        Checkpoint(tmp_path)
