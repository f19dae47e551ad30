"""Asks the installed NPU compiler which operators it takes: ``python -m export.probe_operators [--only OP …]``.

Compiles about two and a half thousand one-operator graphs (:mod:`export.probe_cases`) in some minutes, and writes
the table that :mod:`export.lint_operators` reads. Run it again when `onnxruntime-qnn` changes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import onnx

from export.npu_trial import SOC_MODEL, try_compile
from export.operators import TABLE_FILE
from export.probe_cases import CASES
from export.probe_graphs import Build, Case, by_dtype, quantized_model_of, variations
from meki_edge import console
from meki_edge.files import read_json, write_json

Key = TypeVar("Key")
QUANTIZED = ("uint8", "int8", "uint16", "int16")
EMPTY = {
    "typed_input": lambda: None,
    "dtypes": list,
    "quantized": list,
    "ranks": list,
    "outputs": int,
    "must_be_constant": list,
    "input_dtypes": dict,
    "attributes": dict,
}


def taken(models: Mapping[Key, Build], what: str) -> dict[Key, bool]:
    """Which of the models compile; those that ONNX itself refuses are left out."""
    with tempfile.TemporaryDirectory() as directory, console.progress() as bar:
        paths = {}
        for number, (key, build) in enumerate(models.items()):
            model = build()
            if model is not None:
                paths[key] = Path(directory) / f"{number}.onnx"
                onnx.save(model, paths[key])
        task = bar.add_task(what, total=len(paths))
        results = try_compile(paths.values(), advance=lambda: bar.advance(task))
    return {key: results[path] is None for key, path in paths.items()}


def probe(cases: tuple[Case, ...] = CASES) -> dict[str, Any]:
    """The table: by ``domain::operator`` what :class:`export.operators.Operator` holds."""
    asked = {(number, dtype): build for number, case in enumerate(cases) for dtype, build in by_dtype(case).items()}
    dtypes = taken(asked, "dtypes")
    accepted = [[dtype for (of, dtype), ok in dtypes.items() if of == number and ok] for number in range(len(cases))]
    details = taken(
        {
            (number, *key): build
            for number, case in enumerate(cases)
            if accepted[number]
            for key, build in variations(case, accepted[number][0]).items()
        },
        "variations",
    )
    quantized = taken(
        {
            (number, activations, weights): partial(quantized_model_of, case, activations, weights)
            for number, case in enumerate(cases)
            for activations in QUANTIZED
            for weights in ("int8", activations)
        },
        "quantized",
    )
    table: dict[str, Any] = {}
    for number, case in enumerate(cases):
        entry = table.setdefault(
            f"{case.domain}::{case.op}" if case.domain else case.op,
            {name: kind() for name, kind in EMPTY.items()},
        )
        found = [activations for (of, activations, _), ok in quantized.items() if of == number and ok]
        entry["quantized"] = list(dict.fromkeys([*entry["quantized"], *found]))
        entry["typed_input"] = next((n for n, given in enumerate(case.inputs) if given and given.dtype is None), None)
        _merge(entry, case, accepted[number], {key[1:]: ok for key, ok in details.items() if key[0] == number})
    return table


def _merge(entry: dict[str, Any], case: Case, accepted: list[str], details: dict[tuple[str, str, Any], bool]) -> None:
    """Add what one case showed to its operator's entry: what one case takes is taken."""
    entry["dtypes"] = list(dict.fromkeys(entry["dtypes"] + accepted))
    if not accepted:
        return
    more = [value for (what, _, value), ok in details.items() if what == "outputs" and ok]
    entry["outputs"] = max(entry["outputs"], case.outputs, *more)
    free = {int(which) for (what, which, _), ok in details.items() if what == "free" and ok}
    bound = {int(which) for (what, which, _), ok in details.items() if what == "free" and not ok}
    free |= {number for number, given in enumerate(case.inputs) if given is not None and not given.constant}
    entry.setdefault("_free", set()).update(free)
    entry["must_be_constant"] = sorted((set(entry["must_be_constant"]) | bound) - entry["_free"])
    for (what, which, value), ok in details.items():
        if what == "rank" and ok:
            entry["ranks"] = sorted({*entry["ranks"], value})
        elif what == "dtype":
            known = entry["input_dtypes"].setdefault(which, [])
            known.extend([value] if ok and value not in known else [])
        elif what == "attribute":
            entry["attributes"].setdefault(which, {})[value] = ok


def main(arguments: list[str]) -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(prog="export.probe_operators", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=TABLE_FILE)
    parser.add_argument("--only", nargs="+", help="Probe these operators alone, and keep the table's other ones.")
    given = parser.parse_args(arguments)
    output = given.output
    kept = read_json(output)["operators"] if given.only else {}
    table = kept | probe(tuple(case for case in CASES if not given.only or case.op in given.only))
    for entry in table.values():
        entry.pop("_free", None)
    versions = {name: importlib.metadata.version(name) for name in ("onnxruntime", "onnxruntime-qnn", "onnx")}
    write_json(output, {"versions": versions, "soc_model": SOC_MODEL, "operators": dict(sorted(table.items()))})
    taken_ones = sum(bool(entry["dtypes"]) for entry in table.values())
    console.info(f"{taken_ones} of {len(table)} operators are taken → {output}")


if __name__ == "__main__":
    main(sys.argv[1:])
