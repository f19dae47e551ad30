"""All memories on one backbone: what each buys, and what a token costs to read and to run.

    python benchmarks/memories.py build/demo/tokens --seeds 0 1 2 --steps 480

Every arm has the same backbone, initial backbone weights, data order and number of tokens; only
the memory differs (memory_costs.survey places each as its paper does, so FLOPs differ a little and
are printed). Each arm is trained with every seed; the first seed's model goes through reparam
(fp16), export and pack, and all bundles are measured in interleaved rounds with the C++ harness.

Prints a table, writes JSON and a plot under --out. Everything finished is kept, so an interrupted
run goes on where it stopped. On 2 cores one arm takes about a minute for 240 steps of 2,048 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from export.graph import ExportConfig, export
from meki_edge import console
from meki_edge.device.pack import PackConfig, pack
from meki_edge.device.run import RunConfig, run
from meki_edge.files import write_json
from meki_edge.memory_costs import survey
from meki_edge.model.config import ModelConfig
from meki_edge.reparam import ReparamConfig, reparam
from meki_edge.tokens import open_shards
from meki_edge.train import presets
from meki_edge.train.config import TrainConfig
from meki_edge.train.loop import train

L3_ENTRIES = 32  # at most, a token: the paper's 512 would make the prefill graph's input huge


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One model of the comparison."""

    name: str
    model: ModelConfig
    flops_per_token: int
    """FLOPs of a decoded token beside dense."""


def arms(vocab_size: int) -> list[Arm]:
    """Dense, the plain mixture of experts, and every memory at the demo's shape."""
    dense = presets.build("demo", vocab_size)
    found = [
        Arm(name="dense", model=dense, flops_per_token=0),
        Arm(name="moe", model=presets.with_moe(dense, num_experts=8, num_experts_per_tok=2), flops_per_token=0),
    ]
    for cost in survey(dense):
        options = {name: value for name, value in cost.options.items() if value is not None}
        if cost.kind == "l3":
            options["max_entries"] = L3_ENTRIES
        name = cost.kind if not options.get("rank") else f"{cost.kind}-r{options['rank']}"
        model = presets.with_memory(dense, cost.kind, layers=cost.layers, options=options)
        found.append(Arm(name=name, model=model, flops_per_token=cost.flops_per_token))
    return found


def train_arm(arm: Arm, tokens: Path, out: Path, seed: int, steps: int) -> dict[str, Any]:
    """Train ``arm`` with ``seed`` (or find it trained) and return the manifest's metrics."""
    config = TrainConfig(
        steps=steps,
        batch_size=8,
        window_length=256,
        learning_rate=2e-3,
        minimum_learning_rate_ratio=0.1,
        warmup_steps=min(60, steps // 4),
        validate_every=steps,
        seed=seed,
    )
    return train(tokens, directory(arm, out, seed, steps), arm.model, config).metrics


def directory(arm: Arm, out: Path, seed: int, steps: int) -> Path:
    """Where an arm's training run lies."""
    return out / "train" / f"{arm.name}-{seed}-{steps}"


def bundle(arm: Arm, trained: Path, tokens: Path, out: Path) -> Path:
    """The arm's bundle: folded where it has a memory, exported, packed."""
    checkpoint = trained
    if arm.model.memories:
        checkpoint = out / "rom" / trained.name
        reparam(trained, tokens, checkpoint, ReparamConfig(proof_windows=8))
    exported, packed = out / "export" / trained.name, out / "bundle" / trained.name
    export(checkpoint, tokens, exported, ExportConfig(context_length=512, prefill_tokens=64))
    pack(exported, checkpoint, packed, PackConfig(name=arm.name))
    return packed


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Validation loss over bytes read a token."""
    figure, axes = plt.subplots(figsize=(8, 5))
    for row in rows:
        axes.errorbar(row["rom_bytes_per_token"] + 1, row["loss_mean"], yerr=row["loss_sd"], fmt="o", capsize=3)
        at = (row["rom_bytes_per_token"] + 1, row["loss_mean"])
        axes.annotate(row["arm"], at, xytext=(6, 4), textcoords="offset points")
    axes.set_xscale("log")
    axes.set(xlabel="bytes read from the ROM a token, plus one")
    axes.set(ylabel="validation loss, nats a token (mean ± sd of seeds)")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=480, help="of 8 windows of 256 tokens")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/memories"))
    arguments = parser.parse_args()
    chosen = arms(open_shards(arguments.tokens).vocab_size)
    trained = {
        arm.name: [train_arm(arm, arguments.tokens, arguments.out, seed, arguments.steps) for seed in arguments.seeds]
        for arm in chosen
    }
    first = arguments.seeds[0]
    bundles = [
        bundle(arm, directory(arm, arguments.out, first, arguments.steps), arguments.tokens, arguments.out)
        for arm in chosen
    ]
    runs = arguments.out / f"runs-{first}-{arguments.steps}"
    run(bundles, arguments.tokens, runs, RunConfig(prompt_tokens=256, generate_tokens=128, repetitions=3), force=True)
    results = json.loads((runs / "results.json").read_text(encoding="utf-8"))
    measured = {entry["name"]: entry for entry in results["arms"]}
    rows = []
    for arm in chosen:
        losses = [metrics["validation_loss"] for metrics in trained[arm.name]]
        found = measured[arm.name]
        rows.append(
            {
                "arm": arm.name,
                "losses": losses,
                "loss_mean": statistics.mean(losses),
                "loss_sd": statistics.stdev(losses) if len(losses) > 1 else 0.0,
                "ram_parameters": trained[arm.name][0]["ram_parameters"],
                "flops_beside_dense": arm.flops_per_token,
                "rom_bytes_per_token": found["metrics"]["rom_bytes_per_token"],
                "weight_bytes_per_token": found["metrics"]["weight_bytes_per_token"],
                "decode_tokens_per_s": found["tests"]["tg128"]["tokens_per_s"]["mean"],
                "train_tokens_per_s": statistics.median(m["tokens_per_s"] for m in trained[arm.name]),
            }
        )
    rows.sort(key=lambda row: row["loss_mean"])
    write_json(arguments.out / "memories.json", {"seeds": arguments.seeds, "steps": arguments.steps, "arms": rows})
    plot(rows, arguments.out / "memories.svg")
    headings = ["memory", "losses", "mean ± sd", "RAM parameters", "ROM bytes a token", "weight bytes a token"]
    headings += ["decode tok/s", "train tok/s"]
    console.show_table(
        f"{arguments.steps * 8 * 256 / 1e6:.2f} M tokens, {len(arguments.seeds)} seeds",
        headings,
        [
            [
                row["arm"],
                " ".join(f"{loss:.3f}" for loss in row["losses"]),
                f"{row['loss_mean']:.3f} ± {row['loss_sd']:.3f}",
                f"{row['ram_parameters']:,}",
                f"{row['rom_bytes_per_token']:,}",
                f"{row['weight_bytes_per_token']:,}",
                f"{row['decode_tokens_per_s']:,.0f}",
                f"{row['train_tokens_per_s']:,.0f}",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
