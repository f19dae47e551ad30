"""The other runtimes of benchmarks/peers.py: their models made from a checkpoint, and their decoding loops."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from meki_edge import console
from meki_edge.errors import UserError
from meki_edge.files import read_json, write_json
from meki_edge.model.checkpoint import TOKENIZER, WEIGHTS, Checkpoint


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
