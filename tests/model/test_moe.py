"""The mixture of experts: `transformers`, gradients, the graphs, the harness's bundle, and its errors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from tiny import MEKI, TINY, tiny_config, write_checkpoint
from torch.nn import functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from export.graph import ExportConfig, export
from export.onnx_decoder import OnnxDecoder, cpu_sessions
from export.qnn_local import CompileConfig, compile_local, qnn_available
from meki_edge import manifest
from meki_edge.device import runner
from meki_edge.device.pack import PackConfig, pack
from meki_edge.errors import UserError
from meki_edge.graph_spec import GraphSpec
from meki_edge.model.checkpoint import Checkpoint, load_model, save_model
from meki_edge.model.config import parse, to_json
from meki_edge.model.decoder import CausalLM
from meki_edge.model.moe import MixtureOfExperts
from meki_edge.reparam import ReparamConfig, reparam
from meki_edge.rom.reader import RomReader
from meki_edge.tokens import open_shards
from meki_edge.train import presets
from meki_edge.train.config import TrainConfig
from meki_edge.train.loop import train

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}
IDS = torch.randint(0, TINY["vocab_size"], (2, 50), generator=torch.Generator().manual_seed(0))


def random_moe(**changes: object) -> MixtureOfExperts:
    layer = MixtureOfExperts(tiny_config(**{**MOE, **changes}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return layer


def each_token(layer: MixtureOfExperts, hidden: torch.Tensor, chosen_experts: int, *, normalize: bool) -> torch.Tensor:
    """What the layer computes, token by token and expert by expert, ``hidden`` ``[N, d]``."""
    rows = []
    for x in hidden:
        shares = (layer.gate.weight @ x).softmax(0)
        best = sorted(range(len(shares)), key=lambda e: -shares[e].item())[:chosen_experts]
        scale = sum(shares[e] for e in best) if normalize else 1.0
        row = torch.zeros_like(x)
        for e in best:
            gate, up = (layer.experts.gate_up_proj[e] @ x).chunk(2)
            row = row + shares[e] / scale * (layer.experts.down_proj[e] @ (gate * gate.sigmoid() * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_transformers_checkpoint_gives_its_logits(tied: bool, normalize: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {**TINY, **MOE, "norm_topk_prob": normalize, "tie_word_embeddings": tied}
    theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert "num_local_experts" in (tmp_path / "theirs/config.json").read_text()
    ours = load_model(tmp_path / "theirs")
    torch.testing.assert_close(ours(IDS), theirs(IDS).logits, atol=1e-4, rtol=0)
    (tmp_path / "ours").mkdir()
    save_model(tmp_path / "ours", ours)
    back = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(back(IDS).logits, theirs(IDS).logits)
    assert torch.equal(load_model(tmp_path / "ours")(IDS), ours(IDS))


def test_a_slice_of_a_published_tensor(tmp_path: Path) -> None:
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY, **MOE)).save_pretrained(tmp_path)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    with Checkpoint(tmp_path) as checkpoint:
        assert name in checkpoint.names and checkpoint.shape(name) == (4, 80, 32)
        assert not [found for found in checkpoint.names if ".experts.0." in found]
        assert torch.equal(checkpoint.read(name, slice(1, 3)), checkpoint.read(name)[1:3])
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"moe_intermediate_size": 40', '"moe_intermediate_size": 41'))
    what = r"experts.0.down_proj.weight' has shape \(32, 40\), config.json asks for \(32, 41\)"
    with pytest.raises(UserError, match=what):
        Checkpoint(tmp_path)


def test_a_published_config_parses() -> None:
    """The fields of Qwen3-30B-A3B's, as its hub has them."""
    published = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    model = parse(published, "published")
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in CausalLM(model).parameters())
    assert round(count / 1e9, 1) == 30.5
    assert parse(to_json(model), "again") == model
    for name, value in (("decoder_sparse_step", 2), ("mlp_only_layers", [0])):
        with pytest.raises(UserError, match=f"{name} = .* is not supported"):
            parse({**published, name: value}, "published")
    del published["num_experts"]
    with pytest.raises(UserError, match="num_experts missing from a config.json of model_type 'qwen3_moe'"):
        parse(published, "published")


def test_config_json_says_so_only_with_experts() -> None:
    dense, moe = to_json(tiny_config()), to_json(tiny_config(**MOE))
    assert dense["model_type"] == "qwen3" and not set(MOE) & set(dense) and "router_aux_loss_coef" not in dense
    assert moe["model_type"] == "qwen3_moe" and {name: moe[name] for name in MOE} == MOE
    with pytest.raises(UserError, match="num_experts, .* in a config.json of model_type 'qwen3'"):
        parse({**moe, "model_type": "qwen3"}, "x")
    with pytest.raises(UserError, match="num_experts_per_tok is 5, but num_experts is 4"):
        tiny_config(**{**MOE, "num_experts_per_tok": 5})
    with pytest.raises(UserError, match="moe_intermediate_size is 0"):
        tiny_config(**{**MOE, "moe_intermediate_size": 0})


@pytest.mark.parametrize("changes", [{}, {"norm_topk_prob": False, "num_experts_per_tok": 1}, {"num_experts": 2}])
def test_sorted_equals_token_by_token(changes: dict[str, object]) -> None:
    layer = random_moe(**changes).double()
    hidden = torch.randn(2, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    options = {**MOE, **changes}
    expected = each_token(
        layer, hidden.flatten(0, 1), options["num_experts_per_tok"], normalize=bool(options["norm_topk_prob"])
    )
    # The router runs in float32.
    torch.testing.assert_close(layer.float()(hidden.float(), []).flatten(0, 1), expected.float(), atol=1e-5, rtol=1e-5)


def test_gradients_are_those_of_the_token_by_token_loop() -> None:
    layer = random_moe()
    hidden = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(2), requires_grad=True)
    target = torch.randn(12, 32, generator=torch.Generator().manual_seed(3))
    found = torch.autograd.grad((layer(hidden, [])[0] * target).sum(), (hidden, *layer.parameters()))
    loss = (each_token(layer, hidden[0], 2, normalize=True) * target).sum()
    expected = torch.autograd.grad(loss, (hidden, *layer.parameters()))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_unused_experts_get_zero_gradients() -> None:
    layer = random_moe()
    with torch.no_grad():
        layer.gate.weight[3] = 0.0
        layer.gate.weight[:3, 0] = 100.0
    hidden = torch.ones(1, 5, 32)
    layer(hidden, []).sum().backward()
    assert layer.experts.down_proj.grad is not None
    assert not layer.experts.down_proj.grad[3].any() and layer.experts.down_proj.grad.any()


def test_the_balancing_loss_is_transformers() -> None:
    model = CausalLM(tiny_config(**MOE, num_hidden_layers=1))
    model.reset_parameters(0)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.mul_(50)
    seen = []
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(IDS)
    hook.remove()
    loss = model.auxiliary_loss()
    logits = F.linear(seen[0].flatten(0, 1), model.model.layers[0].mlp.gate.weight)
    expected = load_balancing_loss_func((logits,), 4, 2)
    torch.testing.assert_close(loss / 0.001, expected)
    assert expected > 2.01, "not balanced by chance"
    (gradient,) = torch.autograd.grad(loss, model.model.layers[0].mlp.gate.weight)
    assert gradient.any()
    assert CausalLM(tiny_config()).auxiliary_loss() == 0


def test_balance_is_averaged_over_layers() -> None:
    model = CausalLM(tiny_config(**MOE, router_aux_loss_coef=1.0))
    model.reset_parameters(0)
    model(IDS)
    assert model.auxiliary_loss().item() == pytest.approx(2.0, abs=0.05)  # k, for a router that knows nothing yet


def test_training_learns_and_repeats_bit_for_bit(tmp_path: Path, tokens_dir: Path) -> None:
    """bfloat16, several passes a step: two runs of one configuration agree to the last bit."""
    model = presets.with_moe(tiny_config(eos_token_id=0), 4, 2)
    config = TrainConfig(
        steps=6, batch_size=4, window_length=64, gradient_accumulation_steps=2, warmup_steps=1, learning_rate=1e-2,
        validation_windows=2, checkpoint_every=3, validate_every=6, precision="bf16",
    )  # fmt: skip
    first, second = (train(tokens_dir, tmp_path / name, model, config) for name in "ab")
    assert first.files["model.safetensors"] == second.files["model.safetensors"]
    losses = [json.loads(line).get("loss") for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    assert losses[-1] < losses[0] - 0.2 and losses[0] == pytest.approx(math.log(384), abs=0.1)


def test_active_parameters_equal_the_dense_models() -> None:
    dense = presets.build("demo", 1000)
    moe = presets.with_moe(dense, 8, 2)
    assert (moe.num_experts, moe.num_experts_per_tok, moe.moe_intermediate_size) == (8, 2, 256)
    with torch.device("meta"):
        counts = {model: sum(p.numel() for p in CausalLM(model).parameters()) for model in (dense, moe)}
    idle = 4 * 6 * 3 * 192 * 256
    assert counts[moe] - idle == counts[dense] + 4 * 192 * 8  # the routers
    with pytest.raises(UserError, match="512 neurons .* do not divide among 3 active experts"):
        presets.with_moe(dense, 8, 3)
    with pytest.raises(UserError, match="num_experts_per_tok is 4, but num_experts is 2"):
        presets.with_moe(dense, 2, 4)


@pytest.mark.parametrize("kind", ["stem", "staple"])
def test_memories_inside_the_feed_forward_are_refused(kind: str) -> None:
    with pytest.raises(UserError, match=f"{kind} joins the FFN's up projection") as caught:
        CausalLM(tiny_config([{"kind": kind, "layers": [1], "options": {}}], **MOE))
    assert "layer 1" in str(caught.value.where)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, tokens_dir: Path) -> tuple[Path, Path]:
    """(checkpoint, export) of a random mixture of experts; do not change them."""
    directory = tmp_path_factory.mktemp("moe")
    checkpoint = write_checkpoint(directory / "moe", tiny_config(**MOE, eos_token_id=0), tokens_dir)
    config = ExportConfig(context_length=64, prefill_tokens=16, verify_tokens=40)
    export(checkpoint, tokens_dir, directory / "export", config)
    return checkpoint, directory / "export"


def opened(directory: Path) -> GraphSpec:
    return GraphSpec.from_json(json.loads((directory / "graph_spec.json").read_text()), directory)


def test_onnx_runtime_equals_pytorch(exported: tuple[Path, Path], tokens_dir: Path) -> None:
    checkpoint, graphs = exported
    ids = open_shards(tokens_dir).validation[:40].astype(np.int64)
    expected = load_model(checkpoint)(torch.from_numpy(ids)[None])[0].numpy()
    spec = opened(graphs)
    with RomReader(graphs / "embedding.safetensors") as embedding:
        decoder = OnnxDecoder(spec, embedding, [])
        found = [decoder.prefill(cpu_sessions(graphs, spec.prefill), ids[:25])]
        sessions = cpu_sessions(graphs, spec.decode)
        found += [decoder.decode(sessions, token)[None] for token in ids[25:]]
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-4)


def test_decode_reads_the_chosen_experts_only(exported: tuple[Path, Path]) -> None:
    """Each expert weight enters one Gather of k slices in decode, and no copy of it is stored."""
    graph = onnx.load(exported[1] / "decode.onnx", load_external_data=False).graph
    assert {node.op_type for node in graph.node} >= {"TopK", "Gather"}
    names = [value.name for value in graph.initializer if ".mlp.experts." in value.name]
    assert len(names) == 6
    for name in names:
        (user,) = [node for node in graph.node if name in node.input]
        assert user.op_type == "Gather" and user.input[0] == name
    model = load_model(exported[0])
    stored = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert manifest.load(exported[1]).metrics["weights_bytes"] == stored


def test_a_bundle_says_what_a_token_reads(exported: tuple[Path, Path], tmp_path: Path, dense_checkpoint: Path) -> None:
    checkpoint, graphs = exported
    bundle = tmp_path / "bundle"
    model = load_model(checkpoint)
    metrics = pack(graphs, checkpoint, bundle, PackConfig()).metrics
    assert metrics["name"] == "moe"
    every = sum(parameter.numel() for parameter in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert metrics["ram_parameters"] == every
    assert metrics["active_parameters"] == every - experts // 2
    assert metrics["weight_bytes_per_token"] == 4 * (every - experts // 2)
    assert metrics["expert_bytes_per_token"] == 2 * experts
    dense = sum(parameter.numel() for parameter in load_model(dense_checkpoint).parameters())
    assert metrics["active_parameters"] == dense + 3 * 4 * 32  # the routers


@pytest.mark.skipif(not runner.BUILT_BINARY.is_file(), reason="`make runner` has not built the harness")
def test_the_harness_generates_pytorchs_tokens(exported: tuple[Path, Path], tokens_dir: Path, tmp_path: Path) -> None:
    checkpoint, graphs = exported
    pack(graphs, checkpoint, tmp_path / "bundle", PackConfig())
    prompt = open_shards(tokens_dir).validation[:20].tolist()
    (tmp_path / "ids.txt").write_text(" ".join(map(str, prompt)))
    arguments = ["generate", "--bundle", str(tmp_path / "bundle"), "--prompt-file", str(tmp_path / "ids.txt")]
    report = runner.run_json([*arguments, "--max-new-tokens", "12", "--threads", "1"])
    model, ids = load_model(checkpoint), list(prompt)
    for _ in range(12):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert report["generated_tokens"] == ids[20:]


def test_a_memory_beside_the_experts_folds_and_exports(tmp_path: Path, tokens_dir: Path) -> None:
    config = tiny_config(MEKI, **MOE, eos_token_id=0)
    trained = write_checkpoint(tmp_path / "trained", config, tokens_dir)
    folded = tmp_path / "folded"
    reparam(trained, tokens_dir, folded, ReparamConfig(table_precision="fp32", proof_windows=2, window_length=64))
    sizes = ExportConfig(context_length=64, prefill_tokens=16, verify_tokens=30)
    export(folded, tokens_dir, tmp_path / "export", sizes)
    assert pack(tmp_path / "export", folded, tmp_path / "bundle", PackConfig()).metrics["name"] == "moe+meki"


@pytest.mark.skipif(not qnn_available(), reason="onnxruntime-qnn has no wheel for this platform")
def test_the_npu_compiler_takes_the_graphs(exported: tuple[Path, Path], tokens_dir: Path, tmp_path: Path) -> None:
    checkpoint, graphs = exported
    metrics = compile_local(graphs, checkpoint, tokens_dir, tmp_path / "npu", CompileConfig(verify_steps=2)).metrics
    assert metrics["simulator_decode_min_cosine"] > 0.999
