"""Which graphs does the local NPU compiler take? Each is really compiled, none may fall back to the CPU.

The compiler is native code that now and then ends the process it runs in, so graphs are compiled in
a worker process; when it dies, the graph it was at is recorded as a crash and another worker goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

SOC_MODEL = 69  # Snapdragon 8 Elite; what is taken hardly depends on the chip
ON_THE_CPU = "nodes would run on the CPU"


def try_compile(
    models: Iterable[Path], *, soc_model: int = SOC_MODEL, advance: Callable[[], None] = lambda: None
) -> dict[Path, str | None]:
    """Compile every model; None where that succeeded, else why it failed (``crash: …`` for a dead worker).

    ``advance`` is called once a model.
    """
    left = list(models)
    results: dict[Path, str | None] = {}
    with tempfile.TemporaryDirectory() as scratch:
        while left:
            command = [sys.executable, "-m", "export.npu_trial", str(soc_model), scratch]
            worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            while left:
                try:
                    worker.stdin.write(f"{left[0].absolute()}\n")
                    worker.stdin.flush()
                    line = worker.stdout.readline()
                except BrokenPipeError:
                    line = ""
                while line and not line.startswith("{"):  # what the native libraries print
                    line = worker.stdout.readline()
                results[left.pop(0)] = json.loads(line)["error"] if line else f"crash: exit status {worker.wait()}"
                advance()
                if not line:
                    break
            worker.stdin.close()
            worker.stdout.close()
            worker.wait()
    return results


def _work(soc_model: int, scratch: Path) -> None:
    import onnx
    import onnxruntime as ort
    import onnxruntime_qnn

    from export.qnn_worker import PROVIDER, session

    ort.set_default_logger_severity(4)
    ort.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())
    for line in sys.stdin:
        context = scratch / "graph_ctx.onnx"
        try:
            session(Path(line.strip()), soc_model, 1, context)
            left = {node.op_type for node in onnx.load(context, load_external_data=False).graph.node} - {"EPContext"}
            error = f"{ON_THE_CPU}: {', '.join(sorted(left))}" if left else None
        except Exception as problem:
            text = str(problem)
            error = ON_THE_CPU if "assigned to the default CPU EP" in text else text
        sys.stdout.write(json.dumps({"error": error}) + "\n")
        sys.stdout.flush()
        for file in scratch.iterdir():
            file.unlink()


if __name__ == "__main__":
    _work(int(sys.argv[1]), Path(sys.argv[2]))
