"""Is MeKi's lower validation loss chance? The demo's two arms with several seeds.

    python benchmarks/seeds.py build/demo/tokens --seeds 0 1 2

Each seed trains a dense model and its MeKi twin (same backbone start, data order and budget) and
prints both losses and their difference; the same as JSON under --out. What is trained is kept, so
an interrupted run goes on where it stopped. About 4 minutes a seed on 2 cores.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from meki_edge import console
from meki_edge.files import write_json
from meki_edge.tokens import open_shards
from meki_edge.train import presets
from meki_edge.train.config import TrainConfig
from meki_edge.train.loop import train

ARMS = {"dense": None, "meki": "meki"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/seeds"))
    arguments = parser.parse_args()
    vocab_size = open_shards(arguments.tokens).vocab_size
    losses: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed in arguments.seeds:
        # The demo's recipe (demo.mk).
        config = TrainConfig(
            steps=arguments.steps,
            batch_size=8,
            window_length=256,
            learning_rate=2e-3,
            minimum_learning_rate_ratio=0.1,
            warmup_steps=60,
            validate_every=120,
            seed=seed,
        )
        for arm, memory in ARMS.items():
            model = presets.build("demo", vocab_size, memory=memory)
            made = train(arguments.tokens, arguments.out / f"{arm}-{seed}-{arguments.steps}", model, config)
            losses[arm].append(made.metrics["validation_loss"])
    differences = [meki - dense for dense, meki in zip(losses["dense"], losses["meki"], strict=True)]
    rows = [
        [str(seed), f"{dense:.4f}", f"{meki:.4f}", f"{meki - dense:+.4f}"]
        for seed, dense, meki in zip(arguments.seeds, losses["dense"], losses["meki"], strict=True)
    ]
    medians = [f"{statistics.median(losses[arm]):.4f}" for arm in ARMS]
    rows.append(["median", *medians, f"{statistics.median(differences):+.4f}"])
    console.show_table("validation loss, nats a token", ["seed", "dense", "meki", "meki − dense"], rows)
    write_json(arguments.out / "seeds.json", {"seeds": arguments.seeds, **losses, "difference": differences})


if __name__ == "__main__":
    main()
