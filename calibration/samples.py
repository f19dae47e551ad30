"""Real text through the float graphs, as a device runs it: prefill in chunks, then single steps.

Each window of text starts with an empty cache, fills it by prefill and ends in decode steps, so the
ranges are those of a cache as it really is, early and late, in both graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calibration.graphs import FloatGraphs, session
from calibration.ranges import Observations, observe
from export.onnx_decoder import OnnxDecoder
from meki_edge import console
from meki_edge.errors import UserError
from meki_edge.graph_spec import HIDDEN, GraphSpec, Part
from meki_edge.rom.reader import RomReader
from meki_edge.tokens import TokenShards

ADVISED_SAMPLES = 64
"""Fewer were seen to clip the logits."""
ADVISED_GATE_TOKENS = 2_000
"""On fewer, chance alone moves the perplexity by as much as a quantization does."""
FIXED_ROLES = frozenset(
    {"attention_mask", "memory_mask", "position_cos", "position_sin", "memory_rows", "input_embeds"}
    | {"past_key", "past_value", "memory_state", HIDDEN}
)
"""Inputs whose range is known without running anything, or seen where another call or part computes them."""
SAVE_EVERY = 4  # windows


@dataclass(frozen=True, kw_only=True)
class Host:
    """What feeds the graphs: the files behind embeddings and rows."""

    spec: GraphSpec
    embedding: RomReader
    roms: Sequence[RomReader]

    def decoder(self) -> OnnxDecoder:
        """An empty sequence."""
        return OnnxDecoder(self.spec, self.embedding, self.roms)


@dataclass(frozen=True, eq=False)
class Windows(Sequence[np.ndarray]):
    """``num_windows`` windows of ``text``, evenly spaced from its first token to the one at ``last``.

    Each is cut out when it is asked for, int64 ``[length]``: text on disk stays there.
    """

    text: np.ndarray
    num_windows: int
    last: int
    length: int

    def __len__(self) -> int:
        return self.num_windows

    def __getitem__(self, number: int) -> np.ndarray:
        if not 0 <= number < self.num_windows:
            raise IndexError(number)
        start = number * self.last // max(self.num_windows - 1, 1)
        return self.text[start : start + self.length].astype(np.int64)


def training_windows(shards: TokenShards, count: int, length: int) -> Windows:
    """``count`` windows of training text, spread evenly over all of it.

    They overlap only where the text is too short to be cut into that many.

    Raises:
        UserError: the text is shorter than one window, or too short for so many that no two are the same.
    """
    available = len(shards.train) - length
    if available < 0:
        raise UserError(
            f"the training split has {len(shards.train)} tokens, a calibration window needs {length}",
            where=shards.directory,
            fix="tokenize more text, or shorten the windows with --window-length",
        )
    if count > available + 1:
        raise UserError(
            f"{count} samples, but windows of {length} tokens start at {available + 1} places of the training split",
            where="--samples",
            fix=f"give at most {available + 1}, or tokenize more text",
        )
    return Windows(shards.train, count, available, length)


def gate_windows(shards: TokenShards, count: int, length: int) -> Windows:
    """The first windows of validation text, end to end: ``count`` of them, or as many as there are.

    Raises:
        UserError: the text is shorter than one window.
    """
    available = shards.count_validation_windows(count, length)
    return Windows(shards.validation, available, (available - 1) * length, length)


def collect(
    graphs: FloatGraphs, host: Host, text: Windows, decode_steps: int, found: Path, *, histogram: bool
) -> Observations:
    """Run ``text`` and observe every activation; resumes from, and leaves behind, the file ``found``.

    The last ``decode_steps`` tokens of each window go through the decode graph, one at a time.
    """
    observations, done = Observations(histogram=histogram), 0
    if found.is_file():
        observations, progress = Observations.load(found)
        done = progress["windows"]
    if done == len(text):
        return observations
    spec = graphs.spec
    with console.progress() as bar:
        task = bar.add_task("calibrate (windows)", total=len(text), completed=done)
        prefill = [_Watching(graphs, part, observations, prepack=True) for part in spec.prefill.parts]
        decode = [_Watching(graphs, part, observations, prepack=False) for part in spec.decode.parts]
        for number in range(done, len(text)):
            decoder, ids = host.decoder(), text[number]
            split = len(ids) - decode_steps
            if split:
                decoder.prefill(prefill, ids[:split])
            for token in ids[split:]:
                decoder.decode(decode, token)
            bar.advance(task)
            if (number + 1) % SAVE_EVERY == 0 or number + 1 == len(text):
                observations.save(found, windows=number + 1)
    return observations


class _Watching:
    """The session of one part that also reports its activations to ``observations``."""

    def __init__(self, graphs: FloatGraphs, part: Part, observations: Observations, *, prepack: bool) -> None:
        model, structure = graphs.load(part)
        skip = frozenset(tensor.name for tensor in part.inputs if tensor.role in FIXED_ROLES)
        self._observations = observations
        self._watched = observe(model, structure, skip, sample=observations.histogram)
        self._session = session(model, graphs.directory, prepack=prepack)
        self._names = [output.name for output in self._session.get_outputs()]

    def run(self, output_names: Sequence[str], input_feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """As ``InferenceSession.run``."""
        results = dict(zip(self._names, self._session.run(self._names, input_feed), strict=True))
        self._observations.add(self._watched, results)
        return [results[name] for name in output_names]
