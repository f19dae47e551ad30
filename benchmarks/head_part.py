"""What a head of its own (`meki-edge export --head-part`) saves of a prompt, and costs in decoding.

    python benchmarks/head_part.py            # Qwen3-0.6B shape: 12 GB of scratch space, 10 minutes
    python benchmarks/head_part.py --small    # a quick trial

The dense model with random weights is packed twice: with the head in the only part, and apart. A head
apart runs once a prompt, for its last token, where the other computes the logits of all of them. The
two take turns, a process a measurement, and the order is reversed every second round; what counts is
the median of the rounds' paired ratios.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from reparam import qwen3_06b, write_checkpoint, write_tokens
from rich.table import Table

from export.graph import ExportConfig, export
from meki_edge import console, tokens
from meki_edge.device import host, runner, stats
from meki_edge.device.pack import PackConfig, pack
from meki_edge.files import write_json
from meki_edge.manifest import FILE_NAME
from meki_edge.model.config import ModelConfig

ARMS = {"apart": True, "together": False}
CONTEXT_LENGTH = 1024


def build(scratch: Path, config: ModelConfig) -> dict[str, Path]:
    """The bundles of both arms; those that are there already are used again."""
    tokens_dir, checkpoint = scratch / "tokens", scratch / "checkpoint"
    if not (tokens_dir / FILE_NAME).is_file():
        write_tokens(tokens_dir, config.vocab_size)
    bundles = {arm: scratch / f"bundle-head-{arm}" for arm in ARMS}
    for arm, bundle in bundles.items():
        if (bundle / FILE_NAME).is_file():
            continue
        if not (checkpoint / FILE_NAME).is_file():
            write_checkpoint(checkpoint, config, tokens_dir)
        graphs = scratch / f"export-head-{arm}"
        shapes = ExportConfig(context_length=CONTEXT_LENGTH, verify_tokens=130, head_part=ARMS[arm])
        export(checkpoint, tokens_dir, graphs, shapes)
        pack(graphs, checkpoint, bundle, PackConfig(name=f"head-{arm}"))
        shutil.rmtree(graphs)
    shutil.rmtree(checkpoint, ignore_errors=True)
    return bundles


def measure(bundles: dict[str, Path], trace: Path, arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Tokens/s of every round: test → arm → values."""
    speeds: dict[str, dict[str, list[float]]] = {"pp": {arm: [] for arm in ARMS}, "tg": {arm: [] for arm in ARMS}}
    with console.progress("{task.fields[arm]}") as bar:
        task = bar.add_task("measuring", total=arguments.rounds * len(ARMS), arm="")
        for index in range(arguments.rounds):
            for arm in list(ARMS) if index % 2 == 0 else list(ARMS)[::-1]:
                bar.update(task, arm=arm)
                command = ["bench", "--bundle", str(bundles[arm]), "--trace-file", str(trace)]
                command += ["--prompt-tokens", str(arguments.prompt), "--generate-tokens", str(arguments.tokens)]
                report = runner.run_json([*command, "--threads", str(arguments.threads)])
                for name, test in zip(speeds, report["tests"], strict=True):
                    speeds[name][arm].append(1e6 * test["num_tokens"] / test["elapsed_us"])
                bar.advance(task)
    return speeds


def show(result: dict[str, Any]) -> None:
    config = result["config"]
    table = Table(title=f"head apart / in the last part, {config['shape']}")
    for column in ("test", "apart, tokens/s", "together, tokens/s", "ratio, median of pairs"):
        table.add_column(column, justify="left" if column == "test" else "right")
    for name, label in (("pp", f"prompt of {config['prompt']} tokens"), ("tg", f"decode of {config['tokens']}")):
        found = result["tests"][name]
        speeds = [f"{found['tokens_per_s'][arm]['mean']:.2f}" for arm in ARMS]
        table.add_row(label, *speeds, stats.ratio_text(found["ratio"]))
    console.stdout.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a quick trial: 4 layers, a tenth of the vocabulary")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scratch", type=Path, default=Path("build/benchmarks/head_part"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/head_part.json"))
    arguments = parser.parse_args()
    shape = "small" if arguments.small else "Qwen3-0.6B"
    scratch = arguments.scratch / shape
    bundles = build(scratch, replace(qwen3_06b(small=arguments.small), memories=()))
    trace = scratch / "trace.txt"
    count = max(arguments.prompt, arguments.tokens)
    trace.write_text("\n".join(map(str, tokens.open_shards(scratch / "tokens").validation[:count])))
    speeds = measure(bundles, trace, arguments)
    config = {key: getattr(arguments, key) for key in ("prompt", "tokens", "rounds", "threads")}
    result = {
        "config": {"shape": shape, "context_length": CONTEXT_LENGTH, **config},
        "host": host.facts(),
        "tests": {
            name: {
                "tokens_per_s": {arm: stats.samples(values) for arm, values in by_arm.items()},
                "ratio": stats.paired_ratio(by_arm["apart"], by_arm["together"]),
            }
            for name, by_arm in speeds.items()
        },
    }
    show(result)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.output, result)


if __name__ == "__main__":
    main()
