"""Ctrl-C and SIGTERM, answered between two steps, so that a checkpoint can be written first."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Within the ``with`` block the first signal only sets ``received``; a second one acts at once.

    Outside the main thread, where Python allows no handlers, signals keep their usual effect.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def reraise(self) -> None:
        """End as the received signal would have: ``KeyboardInterrupt``, or exit code 143."""
        if self.received is signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
