"""Send a request to AI Hub once and once only, whatever happens, and wait for many jobs together.

The ledger (:mod:`export.hub_ledger`) holds what was sent. Before a request leaves, its intention is
written; if no answer comes back (a stop, a lost connection), the service's past jobs are searched
for the request's name before it is sent again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol, TypeVar

from export.hub_ledger import ABANDONED, DONE, FAILED, INTENDED, SENT, Entry, Ledger
from export.hub_service import JobStatus, NotFound, ServiceTrouble, Timing
from meki_edge import console
from meki_edge.errors import UserError
from meki_edge.files import write_text

LONGEST_PAUSE = 60.0  # seconds between two tries
T = TypeVar("T")


class Service(Protocol):
    """What waiting needs of the service; :class:`export.aihub.AiHub` has it."""

    timing: Timing

    def status(self, job_id: str) -> JobStatus: ...
    def find_job(self, name: str) -> str | None: ...
    def job_url(self, job_id: str) -> str: ...
    def logs(self, job_id: str, directory: Path) -> list[Path]: ...


@dataclass(frozen=True, kw_only=True)
class Request:
    """A job to be submitted. ``send`` does it, under a name that no other job has, and returns its id."""

    kind: str
    key: str
    label: str
    device: str
    options: str
    send: Callable[[str], str]


class Jobs:
    """Submits, waits, and explains failures; ``logs`` is where logs of failed jobs go.

    Args:
        resubmit: submit failed and cancelled jobs again, instead of reporting the failure again.
        explain: the lint rule that would have caught a failure, from the service's words.
    """

    def __init__(
        self,
        hub: Service,
        service: str,
        ledger: Ledger,
        logs: Path,
        *,
        resubmit: bool = False,
        explain: Callable[[str], str | None] = lambda reason: None,
    ) -> None:
        self._hub, self._service, self._ledger, self._logs = hub, service, ledger, logs
        self._resubmit, self._explain = resubmit, explain
        self._resubmitted: set[str] = set()
        self.finished: dict[str, Entry] = {}
        """Every job that was waited for, by key, in the order of the work."""
        self._started: float | None = None  # of waiting; uploads take what they take

    def submit(self, request: Request) -> Entry:
        """The job of ``request``: the one that was sent before, or a new one."""
        with self._ledger.lock(request.key, lambda: console.info(f"waiting for another run: {request.label}")):
            entry = self._ledger.get(request.key)
            if entry is not None and self._again(entry):
                entry = self._intend(request, entry.attempt + 1)
                self._resubmitted.add(request.key)
            elif entry is None:
                entry = self._intend(request, 1)
            elif entry.id is not None:
                return entry
            else:  # an earlier run stopped between intending and hearing the answer
                found = self.patiently(lambda: self._hub.find_job(entry.name))
                if found is not None:
                    console.info(f"{request.label}: found job {found}, which an interrupted run had submitted")
                    return self._ledger.update(entry, state=SENT, id=found, updated=now())
            job_id = self._send(request, entry)
            return self._ledger.update(entry, state=SENT, id=job_id, updated=now())

    def wait(self, entries: Iterable[Entry], what: str) -> dict[str, Entry]:
        """Wait until every job is finished; by key.

        Raises:
            UserError: a job failed (with the service's reason), was cancelled here, or the time ran
                out. The other jobs go on at the service; the same command finds them again.
        """
        known = {entry.key: entry for entry in entries}
        open_jobs = [key for key, entry in known.items() if entry.state not in (DONE, FAILED)]
        words = dict.fromkeys(open_jobs, "created")
        self._started = self._started or time.monotonic()
        with console.progress("{task.fields[state]}") as bar:
            task = bar.add_task(what, total=len(known), completed=len(known) - len(open_jobs), state="")
            while open_jobs:
                for key in list(open_jobs):
                    entry, words[key] = self._look(known[key])
                    known[key] = entry
                    if entry.state in (DONE, FAILED):
                        open_jobs.remove(key)
                        bar.advance(task)
                    if entry.state == FAILED:
                        console.info(f"failed: {entry.label} (job {entry.id}): {entry.reason or 'no reason was given'}")
                counts = {word: sum(words[key] == word for key in open_jobs) for word in words.values()}
                bar.update(task, state=", ".join(f"{n} {word}" for word, n in counts.items() if n))
                if open_jobs:
                    self._pause(known[open_jobs[0]], len(open_jobs))
        failed = [entry for entry in known.values() if entry.state == FAILED]
        if failed:
            raise self._failure(failed)
        self.finished |= known
        return known

    def patiently(self, call: Callable[[], T]) -> T:
        """``call``, again and again while the service is in trouble, for as long as patience lasts."""
        pause, started, told = self._hub.timing.retry_seconds, time.monotonic(), False
        while True:
            try:
                return call()
            except ServiceTrouble as trouble:
                waited = time.monotonic() - started
                if waited + pause > self._hub.timing.outage_seconds:
                    raise UserError(
                        f"AI Hub could not be used for {waited:.0f} s: {trouble.what}",
                        where=self._service,
                        fix="run the same command later: it goes on where it stopped",
                    ) from None
                if not told:
                    console.info(f"AI Hub is busy or unreachable, trying again for a while ({trouble.what})")
                    told = True
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    def _again(self, entry: Entry) -> bool:
        """Whether a job that ended badly is to be submitted anew (once a run)."""
        if entry.key in self._resubmitted:
            return False
        if entry.state == ABANDONED:
            return True
        return self._resubmit and (entry.state == FAILED or (entry.state == DONE and self._gone(entry)))

    def _gone(self, entry: Entry) -> bool:
        """Whether the service has removed a finished job, and with it what it made."""
        try:
            self.patiently(lambda: self._hub.status(entry.id or ""))
        except NotFound:
            return True
        return False

    def _intend(self, request: Request, attempt: int) -> Entry:
        suffix = f"{request.key}-{attempt}" if attempt > 1 else request.key
        return self._ledger.put(
            Entry(
                kind=request.kind,
                key=request.key,
                label=request.label,
                service=self._service,
                state=INTENDED,
                name=f"{request.label} {suffix}",
                device=request.device,
                options=request.options,
                attempt=attempt,
                created=now(),
                updated=now(),
            )
        )

    def _send(self, request: Request, entry: Entry) -> str:
        """Submit; after trouble it is not known whether the service took the job, so look before repeating."""
        tries = 0

        def attempt() -> str:
            nonlocal tries
            tries += 1
            found = self._hub.find_job(entry.name) if tries > 1 else None
            return found or request.send(entry.name)

        return self.patiently(attempt)

    def _look(self, entry: Entry) -> tuple[Entry, str]:
        """The entry after a look at the service, and the service's word for its state."""
        assert entry.id is not None
        with self._ledger.lock(entry.key):
            stored = self._stored(entry)
        if stored.id != entry.id:
            return stored, "created"
        try:
            status = self.patiently(lambda: self._hub.status(entry.id))
        except NotFound:
            reason = "the service no longer has this job"
            status = JobStatus(state="gone", finished=True, succeeded=False, reason=reason)
        if not status.finished:
            return entry, status.state
        with self._ledger.lock(entry.key):  # while we asked, another run may have submitted it anew
            if (stored := self._stored(entry)).id != entry.id:
                return stored, "created"
            state = DONE if status.succeeded else FAILED
            return self._ledger.update(entry, state=state, reason=status.reason, updated=now()), status.state

    def _stored(self, entry: Entry) -> Entry:
        """What the ledger says now of a job that is waited for: other runs write in it, too. Needs its lock."""
        stored = self._ledger.get(entry.key) or entry
        if stored.state == ABANDONED:
            what, where = f"{entry.label} was cancelled with `meki-edge hub cancel`", f"job {entry.id}"
            raise UserError(what, where=where, fix="run the same command again to submit it anew")
        if stored.state == INTENDED:
            what, where = f"another run stopped while it submitted {entry.label} anew", f"job {entry.id}"
            raise UserError(what, where=where, fix="run the same command again: it waits for the new job")
        return stored

    def _pause(self, entry: Entry, count: int) -> None:
        timing = self._hub.timing
        assert self._started is not None
        elapsed = time.monotonic() - self._started
        if timing.timeout_seconds is not None and elapsed + timing.poll_seconds > timing.timeout_seconds:
            raise UserError(
                f"{count} {'job is' if count == 1 else 'jobs are'} not finished after {elapsed:.0f} s "
                f"({entry.label}, job {entry.id})",
                where=self._hub.job_url(entry.id or ""),
                fix="they go on at AI Hub: run the same command later (or with a longer --timeout), nothing is "
                "submitted again",
            )
        time.sleep(timing.poll_seconds)

    def _failure(self, failed: list[Entry]) -> UserError:
        """What the service said of the failed jobs, what lint knows of it, and where the log is."""
        told = []
        for entry in failed:
            rule = self._explain(entry.reason or "")
            hint = f" (`meki-edge lint` has a rule for this: {rule})" if rule else ""
            told.append(f"{entry.label} failed at AI Hub: {entry.reason or 'no reason was given'}{hint}")
        logs = [self.log(entry) for entry in failed]
        return UserError(
            "; ".join(told),
            where=", ".join(str(path) for path in logs),
            fix="read the log, mend the model or the options and run again; the very same job is submitted again only "
            "with --resubmit",
        )

    def log(self, entry: Entry) -> Path:
        """Write and download what is known of a finished job; the file to read first."""
        directory = self._logs / f"{entry.id}"
        found: list[Path] = []
        try:
            found = self._hub.logs(entry.id or "", directory)
        except UserError as error:
            console.info(f"the logs of job {entry.id} could not be downloaded: {error.what}")
        summary = directory / "job.txt"
        lines = [f"{name}: {getattr(entry, name)}" for name in ("label", "id", "device", "options", "state", "reason")]
        names = [f"log: {path.name}" for path in found]
        write_text(summary, "\n".join([*lines, f"page: {self._hub.job_url(entry.id or '')}", *names]) + "\n")
        return found[0] if found else summary


def now() -> str:
    """The time, for the ledger."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def abandon(ledger: Ledger, job_id: str) -> Entry:
    """Stop waiting for a job, here and in every other run; the service offers no way to stop it."""
    with ledger.lock(ledger.job(job_id).key):
        entry = ledger.job(job_id)
        if entry.state in (DONE, FAILED):
            fix = "there is nothing to cancel"
            raise UserError(f"the job is already {entry.state}", where=f"job {job_id}", fix=fix)
        return ledger.update(entry, state=ABANDONED, updated=now())


def describe(entry: Entry) -> dict[str, Any]:
    """An entry as `meki-edge hub status --json` shows it."""
    return {
        "job": entry.id,
        "kind": entry.kind,
        "what": entry.label,
        "device": entry.device,
        "state": entry.state,
        "reason": entry.reason,
        "submitted": entry.created,
    }


def look(hub: Service, entry: Entry) -> dict[str, Any]:
    """What the service says of a job now, for ``describe``; the ledger stays as it is."""
    try:
        found = hub.status(entry.id or "")
    except ServiceTrouble as trouble:
        return {"state": "unknown", "reason": trouble.what}
    except NotFound:
        return {"state": "gone"}
    return {"state": found.state, "reason": found.reason}
