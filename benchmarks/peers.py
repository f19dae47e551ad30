"""The harness's decoding beside that of other runtimes: the same weights, precision and threads.

    pip install onnxruntime-genai                # wheels
    pip install llama-cpp-python gguf            # compiles llama.cpp: 20 minutes on 2 cores
    python benchmarks/peers.py                   # 20 GB of scratch space, 15 minutes
    python benchmarks/peers.py --small           # a quick trial

(In an environment that has meki-edge; a peer that is not installed is left out with a line.)

Two dense models with random weights, in the Qwen3 architecture: the shape of Qwen3-0.6B, and that of
SmolLM2-135M. Each is exported and packed for the harness, turned into a model of onnxruntime-genai
by its own builder (`-p fp32 -e cpu`: com.microsoft GroupQueryAttention), and written as GGUF for
llama.cpp (f32 weights and KV cache; f16 of both beside it, for what it is worth). A prompt's
continuation tells how many tokens each has in common with the harness. Then the arms take turns, the
order reversed every second round, and what counts is the median of the rounds' paired ratios.

The harness's graphs have static shapes, as an NPU needs them: they attend to every slot of the KV
cache, the peers' only to those in use. `--context-length 256` shows what that costs.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from decode import CONTEXT_LENGTH as USUAL_CONTEXT
from decode import bench
from reparam import qwen3_06b, write_checkpoint, write_tokens
from rich.table import Table

from export.graph import ExportConfig, export
from meki_edge import console, tokens
from meki_edge.device import host, runner, stats
from meki_edge.device.bundle import open_bundle
from meki_edge.device.pack import PackConfig, pack
from meki_edge.errors import UserError
from meki_edge.files import read_json, write_json
from meki_edge.manifest import FILE_NAME
from meki_edge.model.checkpoint import TOKENIZER, WEIGHTS, Checkpoint
from meki_edge.model.config import ModelConfig

HARNESS = "harness"
TARGETS = {("Qwen3-0.6B", "genai"): 1.0}
PROMPT_TOKENS, CHECKED_TOKENS = 4, 8
PACKAGES = ("onnxruntime", "onnxruntime-genai", "llama-cpp-python")
INSTALL = {
    "onnxruntime_genai": "pip install onnxruntime-genai",
    "llama_cpp": "pip install llama-cpp-python",
    "gguf": "pip install gguf",
}


def shapes(*, small: bool) -> dict[str, ModelConfig]:
    """The models, without their weights; ``small``: 4 layers and a tenth of the vocabulary."""
    qwen = replace(qwen3_06b(small=small), memories=())
    smollm = replace(
        qwen,
        vocab_size=4_096 if small else 49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=4 if small else 30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=1e5,
    )
    return {"Qwen3-0.6B": qwen, "SmolLM2-135M": smollm}


class Peer(Protocol):
    """A runtime with a model in it."""

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """The likeliest ``count`` tokens after ``prompt``."""

    def tokens_per_s(self, count: int) -> float:
        """Speed of decoding ``count`` tokens one by one, each chosen by its logits."""


class Genai:
    """onnxruntime-genai, as its users write the loop."""

    def __init__(self, directory: Path, threads: int, context_length: int) -> None:
        import onnxruntime_genai

        self._context_length = context_length

        self._library = onnxruntime_genai
        config = onnxruntime_genai.Config(str(directory))
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = onnxruntime_genai.Model(config)

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        generator = self._started(prompt)
        for _ in range(count):
            generator.generate_next_token()
        return [int(token) for token in generator.get_sequence(0)[len(prompt) :]]

    def tokens_per_s(self, count: int) -> float:
        generator = self._started([1])
        generator.generate_next_token()  # from logits that are there: the first step is the next one's
        start = time.perf_counter()
        for _ in range(count):
            generator.generate_next_token()
        return count / (time.perf_counter() - start)

    def _started(self, prompt: Sequence[int]) -> Any:
        parameters = self._library.GeneratorParams(self._model)
        # At least as many tokens as there is room for: none of them ends the text.
        length = self._context_length
        parameters.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = self._library.Generator(self._model, parameters)
        generator.append_tokens(np.array(prompt, np.int32))
        return generator


class LlamaCpp:
    """llama.cpp through the C API that llama-cpp-python binds."""

    def __init__(self, path: Path, threads: int, context_length: int, *, half: bool) -> None:
        import llama_cpp

        self._library = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)  # kept: C calls it
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise UserError("llama.cpp does not load the model", where=path, fix="remove the file, and run again")
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = context_length
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F16 if half else llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        self._reset()
        found = [self._step(list(prompt))]
        while len(found) < count:
            found.append(self._step(found[-1:]))
        return found

    def tokens_per_s(self, count: int) -> float:
        self._reset()
        token = self._step([1])
        start = time.perf_counter()
        for _ in range(count):
            token = self._step([token])
        return count / (time.perf_counter() - start)

    def _reset(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def _step(self, ids: list[int]) -> int:
        """Feed ``ids``; the likeliest next one."""
        array = (self._library.llama_token * len(ids))(*ids)
        status = self._library.llama_decode(self._context, self._library.llama_batch_get_one(array, len(ids)))
        if status:
            raise UserError(f"llama.cpp failed with status {status}", where="llama_decode", fix="check the free memory")
        logits = self._library.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


class Harness:
    """The harness, a process a measurement."""

    def __init__(self, bundle: Path, scratch: Path, trace: np.ndarray, threads: int) -> None:
        self._bundle, self._threads = bundle, threads
        self._trace, self._prompt = scratch / "trace.txt", scratch / "prompt.txt"
        self._trace.write_text("\n".join(map(str, trace)))

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        self._prompt.write_text("\n".join(map(str, prompt)))
        arguments = ["generate", "--bundle", str(self._bundle), "--prompt-file", str(self._prompt)]
        arguments += ["--max-new-tokens", str(count), "--threads", str(self._threads)]
        return runner.run_json(arguments)["generated_tokens"]

    def tokens_per_s(self, count: int) -> float:
        test = bench(self._bundle, self._trace, count, self._threads)
        return 1e6 * test["num_tokens"] / test["elapsed_us"]


def build_bundle(scratch: Path, checkpoint: Callable[[], Path], tokens_dir: Path, context_length: int) -> Path:
    """The bundle for the harness; the one of benchmarks/decode.py serves as well."""
    suffix = "" if context_length == USUAL_CONTEXT else f"-{context_length}"
    bundle = scratch / f"bundle-dense{suffix}"
    if not (bundle / FILE_NAME).is_file():
        graphs = scratch / f"export-dense{suffix}"
        shape = ExportConfig(context_length=context_length, verify_tokens=130)
        export(checkpoint(), tokens_dir, graphs, shape)
        pack(graphs, checkpoint(), bundle, PackConfig(name="dense"))
        shutil.rmtree(graphs)
    return bundle


def build_genai(scratch: Path, checkpoint: Callable[[], Path]) -> Path:
    """The checkpoint as a model of onnxruntime-genai, by its builder."""
    out = scratch / "genai-fp32"
    if (out / "genai_config.json").is_file():
        return out
    source = scratch / "hugging-face"
    source.mkdir(exist_ok=True)
    config = read_json(checkpoint() / "config.json") | {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    write_json(source / "config.json", config)
    write_json(source / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    shutil.copyfile(checkpoint() / TOKENIZER, source / TOKENIZER)
    (source / WEIGHTS).unlink(missing_ok=True)
    (source / WEIGHTS).symlink_to((checkpoint() / WEIGHTS).resolve())
    console.info("onnxruntime-genai builds its model")
    partial = out.with_suffix(".partial")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", partial]
    command += ["-p", "fp32", "-e", "cpu", "-c", scratch / "genai-cache"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise UserError(f"the builder of onnxruntime-genai failed: {''.join(last)}", where=source, fix="see its error")
    partial.rename(out)
    shutil.rmtree(source)
    return out


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def build_gguf(scratch: Path, checkpoint: Callable[[], Path], *, half: bool) -> Path:
    """The checkpoint as a GGUF file of f32 or, its matrices, f16; without a vocabulary."""
    import gguf

    path = scratch / f"model-{'f16' if half else 'f32'}.gguf"
    if path.is_file():
        return path
    temporary = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(temporary, "qwen3", use_temp_file=False)
    with Checkpoint(checkpoint()) as opened:
        config = opened.config
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if half else gguf.LlamaFileType.ALL_F32)
        writer.add_tokenizer_model("no_vocab")
        for name in opened.names:
            values = opened.read(name).numpy()
            writer.add_tensor(_gguf_name(name), values.astype(np.float16) if half and values.ndim > 1 else values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    temporary.rename(path)
    return path


def _gguf_name(name: str) -> str:
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}"


def open_arms(name: str, config: ModelConfig, arguments: argparse.Namespace) -> dict[str, Peer]:
    """Every runtime that is installed, with this model in it."""
    scratch = arguments.scratch / (f"{name}-small" if arguments.small else f"{name}-fp16")
    tokens_dir = scratch / "tokens"
    if not (tokens_dir / FILE_NAME).is_file():
        write_tokens(tokens_dir, config.vocab_size)

    def checkpoint() -> Path:
        """The weights; what is packed needs them no more, so they are written only when asked for."""
        directory = scratch / "checkpoint-peers"
        if not (directory / FILE_NAME).is_file():
            console.info(f"{name}: writing random weights")
            write_checkpoint(directory, config, tokens_dir)
        return directory

    context_length = arguments.context_length
    bundle = build_bundle(scratch, checkpoint, tokens_dir, context_length)
    open_bundle(bundle)
    trace = np.array(tokens.open_shards(tokens_dir).validation[: arguments.tokens])
    arms: dict[str, Peer] = {HARNESS: Harness(bundle, scratch, trace, arguments.threads)}
    if _installed("onnxruntime_genai"):
        arms["genai"] = Genai(build_genai(scratch, checkpoint), arguments.threads, context_length)
    if _installed("llama_cpp") and _installed("gguf"):
        for half in (False, True):
            path = build_gguf(scratch, checkpoint, half=half)
            peer = LlamaCpp(path, arguments.threads, context_length, half=half)
            arms[f"llama.cpp {'f16' if half else 'f32'}"] = peer
    shutil.rmtree(scratch / "checkpoint-peers", ignore_errors=True)
    return arms


def _installed(module: str) -> bool:
    if importlib.util.find_spec(module) is None:
        console.info(f"{module} is left out, it is not installed: {INSTALL[module]}")
        return False
    return True


def measure(name: str, arms: dict[str, Peer], config: ModelConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    """Agreement, then ``rounds`` interleaved measurements of every arm."""
    prompt = np.random.default_rng(1).integers(config.vocab_size, size=PROMPT_TOKENS).tolist()
    wanted = arms[HARNESS].generate(prompt, CHECKED_TOKENS)
    same = {arm: _agreement(wanted, peer.generate(prompt, CHECKED_TOKENS)) for arm, peer in arms.items()}
    speeds: dict[str, list[float]] = {arm: [] for arm in arms}
    with console.progress("{task.fields[arm]}") as bar:
        task = bar.add_task(name, total=arguments.rounds * len(arms), arm="")
        for index in range(arguments.rounds):
            for arm in list(arms) if index % 2 == 0 else list(arms)[::-1]:
                bar.update(task, arm=arm)
                speeds[arm].append(arms[arm].tokens_per_s(arguments.tokens))
                bar.advance(task)
    return {
        "same_tokens": same,
        "tokens_per_s": {arm: stats.samples(values) for arm, values in speeds.items()},
        "ratios": {
            arm: {**stats.paired_ratio(speeds[HARNESS], values), "target": TARGETS.get((name, arm))}
            for arm, values in speeds.items()
            if arm != HARNESS
        },
    }


def _agreement(wanted: list[int], found: list[int]) -> int:
    """How many tokens are the same before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b), len(wanted))


def show(result: dict[str, Any]) -> None:
    """The result as a table."""
    config = result["config"]
    title = f"decoding, dense, {config['threads']} threads, {config['tokens']} tokens a round"
    table = Table(title=f"{title}, context {config['context_length']}")
    for heading in ("shape", "runtime", "same tokens", "tokens/s", "harness / it, median of pairs", "target"):
        table.add_column(heading, justify="left" if heading in ("shape", "runtime") else "right")
    for name, found in result["shapes"].items():
        for arm, speed in found["tokens_per_s"].items():
            ratio = found["ratios"].get(arm, {"median": None, "target": None})
            interval = "" if ratio.get("low") is None else f" ({ratio['low']:.3f} … {ratio['high']:.3f})"
            table.add_row(
                name,
                arm,
                f"{found['same_tokens'][arm]} of {CHECKED_TOKENS}",
                f"{speed['mean']:.2f} ± {speed['sd'] or 0:.2f}",
                "" if ratio["median"] is None else f"{ratio['median']:.3f}{interval}",
                "" if ratio["target"] is None else f"≥ {ratio['target']}",
            )
    console.show_wide(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a quick trial: 4 layers, a tenth of the vocabulary")
    parser.add_argument("--shape", choices=list(shapes(small=True)), help="this shape only")
    parser.add_argument("--tokens", type=int, default=128, help="tokens decoded in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context-length", type=int, default=USUAL_CONTEXT, help="slots of the KV cache")
    parser.add_argument("--scratch", type=Path, default=Path("build/benchmarks/decode"), help="as for decode.py")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/peers.json"))
    arguments = parser.parse_args()
    chosen = {k: v for k, v in shapes(small=arguments.small).items() if arguments.shape in (None, k)}
    measured = {}
    for name, config in chosen.items():
        arms = open_arms(name, config, arguments)
        measured[name] = measure(name, arms, config, arguments)
    installed = {package.metadata["Name"] for package in importlib.metadata.distributions()}
    result = {
        "config": {key: getattr(arguments, key) for key in ("small", "tokens", "threads", "context_length")},
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES if name in installed},
        "host": host.facts(),
        "shapes": measured,
    }
    show(result)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.output, result)


if __name__ == "__main__":
    main()
