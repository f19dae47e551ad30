"""Texts that outgrow shorter contexts, through the harness: the tokens of PyTorch and of a bundle without them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from harness import generate, ids_file, rewrite
from onnx import helper, numpy_helper
from test_kinds import greedy

from export.graph import ExportConfig, export
from meki_edge import tokens
from meki_edge.device import runner
from meki_edge.device.pack import PackConfig, pack
from meki_edge.device.run import RunConfig, run
from meki_edge.errors import UserError
from meki_edge.files import read_json
from meki_edge.graph_spec import GraphSpec

CONTEXTS = (24, 48, 96)
CHUNK = 16
GRAPHS = ExportConfig(context_length=96, shorter_contexts=CONTEXTS[:-1], prefill_tokens=CHUNK, verify_tokens=40)
MODELS = {"dense": {"kv_dtype": "float16"}, "mixed": {"parts": 2}}  # how each is exported
PROMPTS = {  # prompt: new tokens. Prompts that end before, at and behind a border, and texts that cross it by decoding
    1: 60,
    23: 27,
    24: 26,
    25: 3,
    32: 3,  # the second chunk ends behind the border
    47: 4,
    48: 3,
    49: 3,
    60: 37,  # up to the last slot
}


@dataclass(frozen=True, kw_only=True)
class Made:
    """A bundle with shorter contexts, and the same one without them; ``trained`` is what PyTorch runs."""

    trained: Path
    bundle: Path
    plain: Path


@pytest.fixture(scope="module")
def text(tokens_dir: Path) -> list[int]:
    return tokens.open_shards(tokens_dir).validation[:200].tolist()


@pytest.fixture(scope="module")
def make(
    exported: dict[str, tuple[Path, Path]],
    mixed: tuple[Path, Path, Path],
    tokens_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Made]:
    """Bundles of a model by name, made once; do not change them."""
    dense = exported["dense"][0]
    checkpoints = {"dense": (dense, dense), "mixed": mixed[:2]}
    known: dict[str, Made] = {}

    def made(name: str) -> Made:
        if name not in known:
            trained, checkpoint = checkpoints[name]
            directory = tmp_path_factory.mktemp("contexts")
            bundle, plain = directory / "bundle", directory / "plain"
            export(checkpoint, tokens_dir, directory / "exported", replace(GRAPHS, **MODELS[name]))
            pack(directory / "exported", checkpoint, bundle, PackConfig())
            shutil.copytree(bundle, plain)
            rewrite(plain / "graph_spec.json", lambda spec: spec.pop("shorter"))
            known[name] = Made(trained=trained, bundle=bundle, plain=plain)
        return known[name]

    return made


@pytest.mark.usefixtures("binary")
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_one_context(
    name: str, make: Callable[[str], Made], text: list[int], tmp_path: Path
) -> None:
    made = make(name)
    seen: set[int] = set()
    for length, count in PROMPTS.items():
        prompt = text[length : 2 * length]
        found = generate(made.bundle, tmp_path, prompt, count)["generated_tokens"]
        assert found == generate(made.plain, tmp_path, prompt, count)["generated_tokens"]
        if name == "mixed":  # nothing of it is rounded
            assert found == greedy(made.trained, prompt, count)
        seen.update(found)
    assert len(seen) > 6, "the model says the same whatever the prompt"


@pytest.mark.usefixtures("binary")
@pytest.mark.parametrize("depth", [0, 20, 47])
def test_bench_is_that_of_one_context(
    depth: int, make: Callable[[str], Made], text: list[int], tmp_path: Path
) -> None:
    """After warm-ups and a test that grew, a text begins in the shortest context again, and nothing is left over."""
    made = make("mixed")
    arguments = ["--trace-file", ids_file(tmp_path, text), "--prompt-tokens", "49", "--generate-tokens", "49"]
    arguments += ["--depth", str(depth), "--warmup", "2", "--threads", "1"]
    found, expected = (
        runner.run_json(["bench", "--bundle", str(bundle), *arguments]) for bundle in (made.bundle, made.plain)
    )
    assert found["generated_tokens"] == expected["generated_tokens"] and len(set(found["generated_tokens"])) > 6
    steps, reference = ([test["steps"] for test in report["tests"]] for report in (found, expected))
    for key in ("num_tokens", "rows_read", "bytes_read"):
        assert [[step[key] for step in test] for test in steps] == [[step[key] for step in test] for test in reference]


@pytest.mark.usefixtures("binary")
def test_arms_with_other_contexts_are_told_apart(
    make: Callable[[str], Made], bundles: dict[str, Path], tokens_dir: Path, tmp_path: Path
) -> None:
    config = RunConfig(prompt_tokens=0, generate_tokens=3, repetitions=1)
    run([make("dense").bundle, bundles["meki"]], tokens_dir, tmp_path / "runs", config)
    results = read_json(tmp_path / "runs" / "results.json")
    assert [arm["metrics"]["context_lengths"] for arm in results["arms"]] == [[24, 48, 96], [160]]
    (note,) = [note for note in results["notes"] if "slots" in note]
    assert note.startswith("The graphs attend to different numbers of slots") and note.endswith("(dense: 24 / 48 / 96, meki: 160).")


def says(path: Path, token: int) -> None:
    """Change a graph so that its logits are always largest at ``token``."""
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        node.output[:] = ["before" if name == "logits" else name for name in node.output]
    (logits,) = model.graph.output[:1]
    assert logits.name == "logits"
    most = np.zeros(logits.type.tensor_type.shape.dim[2].dim_value, np.float32)
    most[token] = 1e6
    model.graph.initializer.append(numpy_helper.from_array(most, "most"))
    model.graph.node.append(helper.make_node("Add", ["before", "most"], ["logits"]))
    onnx.save(model, path)


@pytest.mark.usefixtures("binary")
def test_the_shortest_context_runs(make: Callable[[str], Made], text: list[int], tmp_path: Path) -> None:
    """Each graph says its own token, so that what is generated tells which ones ran."""
    bundle = shutil.copytree(make("dense").bundle, tmp_path / "bundle")
    spec = GraphSpec.from_json(read_json(bundle / "graph_spec.json"), bundle)
    ids = {name: 100 + index for index, name in enumerate(spec.graphs)}
    names = {token: name for name, token in ids.items()}
    for name, token in ids.items():
        says(bundle / spec.graphs[name].parts[0].file, token)

    def expected(graph: str, length: int) -> str:
        context = min(slots for slots in CONTEXTS if slots >= length)
        return graph if context == CONTEXTS[-1] else f"{graph}_c{context}"

    for length, count in PROMPTS.items():
        found = generate(bundle, tmp_path, text[:length], count)["generated_tokens"]
        first = "decode" if length % CHUNK == 1 else "prefill"  # a token alone is no chunk
        ran = [expected(first, length), *(expected("decode", length + i) for i in range(1, count))]
        assert [names[token] for token in found] == ran
    arguments = ["--bundle", str(bundle), "--trace-file", ids_file(tmp_path, text), "--depth", "20", "--warmup", "1"]
    report = runner.run_json(["bench", *arguments, "--prompt-tokens", "0", "--generate-tokens", "40"])
    assert [names[token] for token in report["generated_tokens"]] == [expected("decode", 21 + i) for i in range(40)]


def test_the_c_api(binary: Path, make: Callable[[str], Made], text: list[int], tmp_path: Path) -> None:
    """Over both borders, after a reset again, and on to the last slot, which is the longest context's."""
    made = make("mixed")
    build = binary.parent
    subprocess.run(["cmake", "--build", build, "--target", "test_c_api", "-j2"], check=True)
    prompt = text[:20]
    command = [build / "tests/test_c_api", made.bundle, runner.find_ort_library(), "40", *map(str, prompt)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(map(int, done.stdout.split())) == generate(made.plain, tmp_path, prompt, 40)["generated_tokens"]


def first_input(context: dict[str, Any], role: str) -> dict[str, Any]:
    return next(tensor for tensor in context["decode"]["parts"][0]["inputs"] if tensor["role"] == role)


SPOILED: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("order", lambda s: s["shorter"].reverse(), "a context of 24 tokens follows one of 48: they must ascend"),
    ("twice", lambda s: s["shorter"].append(s["shorter"][1]), "a context of 48 tokens follows one of 48"),
    ("length", lambda s: s["shorter"][1].update(context_length=95), "[1,1,16,64], expected [1,1,16,111]"),
    ("longer", lambda s: s["shorter"][1].update(context_length=97), "[1,1,16,64], expected [1,1,16,113]"),
    ("not a list", lambda s: s.update(shorter={}), "'shorter' must be a list"),
    ("no decode", lambda s: s["shorter"][0].pop("decode"), "the key 'decode' is missing"),
    ("no length", lambda s: s["shorter"][0].pop("context_length"), "the key 'context_length' is missing"),
    ("more", lambda s: s["shorter"][0].update(vocab_size=384), "unknown key 'vocab_size'"),
    ("other graph", lambda s: s["shorter"][0].update(decode=s["decode"]), "has shape [1,1,1,97], expected [1,1,1,25]"),
    ("tokens", lambda s: s["shorter"][0]["prefill"].update(num_tokens=8), "has shape [1,16,32], expected [1,8,32]"),
    (
        "cache",
        lambda s: first_input(s["shorter"][1], "past_value").update(dtype="float32"),
        "the input past_value[0] of decode_c48.onnx is not that of decode.onnx",
    ),
    (
        "file",
        lambda s: s["shorter"][0]["decode"]["parts"][0].update(file="nowhere.onnx"),
        "cannot open the file",
    ),
    (
        "the file of another context",
        lambda s: s["shorter"][0]["decode"]["parts"][0].update(file="decode_c48.onnx"),
        "ONNX Runtime: ",
    ),
]


@pytest.mark.usefixtures("binary")
@pytest.mark.parametrize(("spoil", "what"), [case[1:] for case in SPOILED], ids=[case[0] for case in SPOILED])
def test_a_spoiled_context_is_a_user_error(
    make: Callable[[str], Made], tmp_path: Path, spoil: Callable[[dict[str, Any]], object], what: str
) -> None:
    bundle = shutil.copytree(make("dense").bundle, tmp_path / "bundle")
    rewrite(bundle / "graph_spec.json", spoil)
    with pytest.raises(UserError) as caught:
        generate(bundle, tmp_path, [1, 2, 3], 4)
    assert what in caught.value.what
    assert caught.value.where and caught.value.fix
