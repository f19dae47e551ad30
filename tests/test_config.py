"""Strict configuration: unknown keys, wrong types, and Hugging Face's own files."""

from __future__ import annotations

import json

import pytest
from tiny import MEKI, TINY, tiny_config
from transformers import Qwen3Config

from export.layout import graph_spec
from meki_edge.config import to_dict
from meki_edge.errors import UserError
from meki_edge.graph_spec import GraphSpec
from meki_edge.model.config import parse, to_json


def test_round_trip_with_memories() -> None:
    config = tiny_config(MEKI, eos_token_id=3)
    assert parse(to_json(config), "copy") == config


def test_a_transformers_config_loads_as_it_is() -> None:
    theirs = json.loads(Qwen3Config(**TINY).to_json_string())
    ours = parse(theirs, "config.json")
    assert (ours.hidden_size, ours.rope_theta, ours.memories) == (32, 10000.0, ())


def test_plain_rope_in_every_spelling() -> None:
    bare = {key: value for key, value in TINY.items() if key != "rope_theta"}
    for spelling in (
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5}},
    ):
        assert parse({**bare, **spelling}, "config.json").rope_theta == 5e5


def test_our_dense_config_loads_in_transformers() -> None:
    theirs = Qwen3Config(**to_json(tiny_config()))
    assert theirs.num_key_value_heads == 2 and theirs.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hiden_size": 64}, "unknown key 'hiden_size'; did you mean 'hidden_size'?"),
        ({"hidden_size": "64"}, "expected int, got '64'"),
        ({"hidden_size": True}, "expected int, got True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported (only 'silu')"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling asks for the RoPE variant 'yarn', which"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling asks for the RoPE variant 'linear'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters asks for the RoPE variant 'longrope'"),
        ({"rope_parameters": {"rope_type": ["llama3"]}}, "rope_parameters asks for the RoPE variant ['llama3']"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rope_parameters asks for another"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters asks for another RoPE than the"),
        ({"rope_scaling": 4.0}, "rope_scaling asks for another RoPE than the plain one, which is not supported: 4.0"),
        ({"rope_parameters": {"rope_theta": "far"}}, "expected float, got 'far'"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0"),
        ({"partial_rotary_factor": 0.5}, "unknown key 'partial_rotary_factor'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"hidden_size": -4}, "hidden_size is -4"),
        ({"memory_form": "rome"}, "memory_form is 'rome'"),
        ({"memories": [{"kind": "mekki", "layers": [0], "options": {}}]}, "unknown memory 'mekki'; did you mean 'meki'?"),
        ({"memories": [{"kind": "meki", "layers": [7], "options": {"memory_dim": 4}}]}, "layers [7] do not name"),
        ({"memories": [{"kind": "meki", "layers": [0], "options": {"dim": 4}}]}, "unknown key 'dim'"),
        ({"memories": [{"kind": "meki", "layers": [0], "options": {}}]}, "the key 'memory_dim' is missing"),
    ],
)
def test_errors_say_what(changes: dict, what: str) -> None:
    with pytest.raises(UserError) as caught:
        parse({**TINY, **changes}, "config.json")
    assert caught.value.what.startswith(what)


def test_a_missing_key_is_named() -> None:
    values = dict(TINY)
    del values["head_dim"]
    with pytest.raises(UserError, match="'head_dim' is missing"):
        parse(values, "config.json")


@pytest.fixture(scope="module")
def spec() -> dict:
    """``graph_spec.json`` of a model with a memory, in two contexts."""
    shapes = {"context_length": 64, "prefill_tokens": 8, "shorter_contexts": (16,)}
    return json.loads(json.dumps(to_dict(graph_spec(tiny_config(MEKI), eos_token_id=3, **shapes))))


FILE = "is not the name of a file beside graph_spec.json"


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        ("schema", 1, "graph_spec.json is of schema 1, this version reads 3"),
        ("schema", "3", "graph_spec.json is of schema '3', this version reads 3"),
        ("schema", None, "graph_spec.json is of schema None, this version reads 3"),
        ("mask_value", 0, "mask_value is 0.0, not a number from -65504 to -50"),
        ("mask_value", 100.0, "mask_value is 100.0"),
        ("mask_value", -49.9, "mask_value is -49.9"),
        ("mask_value", float("nan"), "mask_value is nan"),
        ("mask_value", float("-inf"), "mask_value is -inf"),
        ("eos_token_id", 384, "eos_token_id is 384, the vocabulary has 384 tokens"),
        ("eos_token_id", -1, "eos_token_id is -1, the vocabulary has 384 tokens"),
        ("embedding.file", "../embedding.safetensors", f"'../embedding.safetensors' {FILE}"),
        ("roms.0.file", "a/rom.safetensors", f"'a/rom.safetensors' {FILE}"),
        ("roms.0.file", "/rom.safetensors", f"'/rom.safetensors' {FILE}"),
        ("decode.parts.0.file", "..", f"'..' {FILE}"),
        ("prefill.parts.0.file", "", f"'' {FILE}"),
        ("shorter.0.decode.parts.0.file", "a\\b", f"{'a' + chr(92) + 'b'!r} {FILE}"),
    ],
)
def test_a_graph_spec_that_no_reader_takes(spec: dict, path: str, value: object, what: str) -> None:
    assert to_dict(GraphSpec.from_json(spec, "here")).keys() == spec.keys()
    changed = json.loads(json.dumps(spec))
    inner, *names = changed, *path.split(".")
    for name in names[:-1]:
        inner = inner[int(name) if isinstance(inner, list) else name]
    inner[names[-1]] = value
    with pytest.raises(UserError) as caught:
        GraphSpec.from_json(changed, "here")
    assert caught.value.what.startswith(what) and caught.value.fix == "run `meki-edge export` again"


def test_another_schema_comes_before_all_else() -> None:
    with pytest.raises(UserError, match="graph_spec.json is of schema 1, this version reads 3"):
        GraphSpec.from_json({"schema": 1}, "here")
    with pytest.raises(UserError, match="expected a JSON object"):
        GraphSpec.from_json([], "here")
    with pytest.raises(UserError, match="the key 'schema' is missing"):
        GraphSpec.from_json({}, "here")
