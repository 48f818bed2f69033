"""``specserve batch`` from its options to its outcome."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from pydantic import JsonValue

from specserve.app import arm, preflight
from specserve.app.arm import ArmServer, ArmSpec
from specserve.app.batch import inputs
from specserve.app.batch.inputs import InputFormat, LineShape
from specserve.app.batch.journal import Journal, Totals
from specserve.app.batch.pace import FIRST, MOST, Pace, Yielding
from specserve.app.batch.run import BatchProgress, BatchRun
from specserve.config.load import Loaded
from specserve.engine.http.client import EngineClient, own_client
from specserve.engine.http.metrics import EngineSnapshot
from specserve.engine.inside import economics
from specserve.errors import ConfigError, EngineLost, Interrupted, Problem, SpecserveError, Unsound
from specserve.sidecar import speedup
from specserve.supervise.child import exit_cause
from specserve.units import duration, percent

_PEEK_BYTES = 65_536


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The options of ``specserve batch``, as they were typed."""

    source: Path | None
    """None is standard input."""
    output: Path | None
    """None is standard output."""
    again: str
    """The command that goes on where this one ends."""
    url: str | None = None
    api_key: str | None = None
    form: InputFormat | None = None
    csv_column: str | None = None
    template: str | None = None
    completions: bool = False
    extra: Mapping[str, JsonValue] = field(default_factory=dict)
    model: str | None = None
    ordered: bool = True
    resume: bool = False
    concurrency: int | None = None
    yields: bool = False
    yield_ttft_seconds: float = 1.0
    retries: int = 5
    timeout_seconds: float = 1800.0
    patience_seconds: float = 600.0


@dataclass(frozen=True)
class BatchOutcome:
    """What a batch came to."""

    output: Path | None
    totals: Totals
    """Of all runs."""
    bad_lines: tuple[tuple[int, str], ...]
    """Line and reason; of this run."""
    made: int
    """Requests that this run ended."""
    tokens: int
    """That this run was given."""
    seconds: float
    """From the first request of this run to its last answer."""
    most_in_flight: int
    acceptance_rate: float | None = None
    """Over this run, from the server's counters; None where nothing was drafted or it is unknown.
    """
    others_tokens: float | None = None
    """That the server made for others meanwhile, which the acceptance rate includes."""
    saved_seconds: float | None = None
    """Estimated against the same without speculation; None without a profile that covers it."""
    profile: str | None = None
    """Where that estimate is from."""

    @property
    def tokens_per_second(self) -> float | None:
        """Of this run; None where it made none or the server counts none."""
        if not self.tokens or self.seconds <= 0:
            return None
        return self.tokens / self.seconds

    def sentence(self) -> str:
        """The last line."""
        totals = self.totals
        parts = [f"{totals.answered:,} answered"]
        if totals.failed:
            parts.append(f"{totals.failed:,} failed")
        if totals.bad_lines:
            noun = "lines that are" if totals.bad_lines > 1 else "line that is"
            parts.append(f"{totals.bad_lines:,} {noun} no request")
        said = ", ".join(parts)
        if self.made < totals.lines:
            said += f" ({self.made:,} of them now)"
        if self.made:
            said += f" in {duration(self.seconds)}"
        rate = self.tokens_per_second
        if rate is not None:
            said += f", {rate:,.0f} tokens/s with up to {self.most_in_flight} in flight"
        if self.acceptance_rate is not None:
            said += f"; acceptance {percent(self.acceptance_rate)}"
            if self.others_tokens:
                said += f" (with {self.others_tokens:,.0f} tokens of others)"
        if self.saved_seconds is not None:
            less = "less"
            if self.saved_seconds < 0:
                less = "more"
            said += (
                f"; about {duration(abs(self.saved_seconds))} {less} than without speculation "
                f"(estimated from {self.profile})"
            )
        return f"{said}."

    def as_dict(self) -> dict[str, JsonValue]:
        """The JSON form."""
        return {
            "output": str(self.output),
            "answered": self.totals.answered,
            "failed": self.totals.failed,
            "bad_lines": self.totals.bad_lines,
            "this_run": {
                "requests": self.made,
                "output_tokens": self.tokens,
                "seconds": round(self.seconds, 3),
                "tokens_per_second": self.tokens_per_second,
                "most_in_flight": self.most_in_flight,
                "acceptance_rate": self.acceptance_rate,
                "others_tokens": self.others_tokens,
                "saved_seconds_estimated": self.saved_seconds,
            },
        }

    def error(self) -> SpecserveError | None:
        """What keeps it from being a success; None when all was answered."""
        totals, where = self.totals, str(self.output or "standard output")
        if totals.bad_lines:
            problems = [Problem(reason, f"line {line}") for line, reason in self.bad_lines]
            more = totals.bad_lines - len(problems)
            if more > 0:
                text = f"has {more:,} more lines of INPUT that are no request, as invalid_request"
                problems.append(Problem(text, where))
            return ConfigError(problems)
        if totals.failed:
            look = "jq -c 'select(.error != null or .response.status_code != 200)'"
            return Unsound(
                f"{totals.failed:,} of {totals.lines:,} requests failed; "
                "each has its reason in its line",
                where=where,
                fix=f"{look} {where}",
            )
        return None


@dataclass(frozen=True)
class BatchReport:
    """Who is told how far it is."""

    tell: Callable[[BatchProgress], None]
    seconds: float
    """Between two reports."""


def run(
    loaded: Loaded | None,
    options: BatchOptions,
    environ: Mapping[str, str],
    report: BatchReport,
) -> BatchOutcome:
    """Answer every request. Raises ConfigError, PreflightRefused, EngineStartError, EngineLost or
    Interrupted; all but the first two leave a batch that can be resumed."""
    _require_sensible(loaded, options)
    with _opened(options.source) as (file, size_bytes):
        shape = _shape(options, file)
        inputs.require_template(shape)
        with Journal(
            options.output,
            inputs.identity(options.source, shape),
            ordered=options.ordered,
            resume=options.resume,
        ) as journal:
            try:
                if options.resume and not _is_anything_left(options, journal, shape):
                    return BatchOutcome(options.output, journal.totals, (), 0, 0, 0.0, 0)
                with _server(loaded, options, environ) as (client, ended):
                    work = BatchRun(
                        client=client,
                        journal=journal,
                        source=file,
                        source_bytes=size_bytes,
                        shape=shape,
                        pace=_pace(loaded, options),
                        retries=options.retries,
                        timeout_seconds=options.timeout_seconds,
                        patience_seconds=options.patience_seconds,
                        report=report.tell,
                        report_seconds=report.seconds,
                        server_ended=ended,
                    )
                    return _measured(work, loaded, options)
            except KeyboardInterrupt:
                raise _interrupted(journal, options) from None
            except (ConfigError, EngineLost) as error:
                raise _resumable(error, journal, options) from error


def _measured(work: BatchRun, loaded: Loaded | None, options: BatchOptions) -> BatchOutcome:
    """The work done, and what the server counted meanwhile."""
    before = arm.counters(work.client, work.clock, timeout=10)
    if options.yields:
        if before is None:
            raise ConfigError(
                "its /metrics cannot be read, which alone tells whether others wait",
                where=work.client.base_url,
                fix="leave --yield out",
            )
        work.yielding = Yielding(options.yield_ttft_seconds)
    began = work.clock()
    work.run()
    seconds = work.clock() - began
    after = arm.counters(work.client, work.clock, timeout=10)
    outcome = BatchOutcome(
        options.output,
        work.journal.totals,
        tuple(work.bad_lines),
        work.made,
        work.tokens,
        seconds,
        work.highest,
    )
    return _compared(outcome, loaded, before, after, work.busy_seconds / max(seconds, 0.001))


def _require_sensible(loaded: Loaded | None, options: BatchOptions) -> None:
    if loaded is None and options.url is None:
        raise ConfigError(
            "needs a CONFIG to launch, or --url of a server that runs",
            where="batch",
            fix="specserve batch CONFIG INPUT OUTPUT",
        )
    for path, name in ((options.source, "INPUT"), (options.output, "OUTPUT")):
        if options.resume and path is None:
            raise ConfigError(
                "'-' cannot be resumed: nothing of it is left; must be a file",
                where=name,
                fix="leave --resume out, or name a file",
            )
    if options.csv_column is not None and options.form not in (None, "csv"):
        raise ConfigError(
            f"a column of CSV, and --input-format is {options.form}",
            where="--csv-column",
            fix="--input-format csv",
        )
    if options.form == "csv" and options.csv_column is None:
        raise ConfigError(
            "no column is named; must say which holds the prompts",
            where="--input-format csv",
            fix="add --csv-column NAME",
        )
    if options.source is not None and options.source == options.output:
        raise ConfigError(
            "is INPUT as well; must be another file", where=f"OUTPUT {options.output}"
        )


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[tuple[BinaryIO, int | None]]:
    """The input and its size; None for what has none."""
    if path is None:
        yield sys.stdin.buffer, None
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", where=str(path), fix="name a file of requests"
        ) from None
    with file:
        if not path.is_file():
            raise ConfigError(
                "is no regular file; must be one, or - for standard input",
                where=str(path),
                fix=f"cat {path} | specserve batch ... - OUTPUT",
            )
        yield file, path.stat().st_size


def _shape(options: BatchOptions, source: BinaryIO) -> LineShape:
    form = options.form or inputs.sniff(options.source, options.csv_column)
    if form is None:
        form = inputs.form_of(_peek(source))
    delimiter = ","
    if options.source is not None and options.source.suffix.lower() == ".tsv":
        delimiter = "\t"
    return LineShape(
        format=form,
        csv_column=options.csv_column,
        delimiter=delimiter,
        template=options.template,
        completions=options.completions,
        extra=options.extra,
        model=options.model,
    )


def _peek(source: BinaryIO) -> bytes:
    """The first bytes, which stay to be read."""
    peek: Callable[[int], bytes] | None = getattr(source, "peek", None)
    if peek is None:
        return b""
    return peek(_PEEK_BYTES)


def _is_anything_left(options: BatchOptions, journal: Journal, shape: LineShape) -> bool:
    """Whether a server is needed at all: one may take minutes to start."""
    with _opened(options.source) as (source, _):
        return any(not journal.has(raw.index) for raw in inputs.lines(source, shape))


@contextlib.contextmanager
def _server(
    loaded: Loaded | None, options: BatchOptions, environ: Mapping[str, str]
) -> Iterator[tuple[EngineClient, Callable[[], str | None]]]:
    """A client of the server that runs, or of one that lives as long as the batch; and why that
    one is gone."""
    if options.url is not None:
        if loaded is not None:
            client = own_client(loaded.settings, options.url, key=options.api_key)
        else:
            client = EngineClient(options.url, options.api_key)
        client.models(timeout=30)  # does it answer, and to us?
        yield client, lambda: None
        return
    assert loaded is not None
    preflight.require(preflight.run(loaded, environ=environ, purpose="launch"))
    output = options.output or Path("batch")
    server = ArmServer(ArmSpec(output.name, loaded), output.parent, environ)
    calm = False
    try:
        try:
            server.start()
        except SpecserveError as error:
            named = [replace(p, where="the server") for p in error.problems]
            raise type(error)(named) from None
        yield server.client, lambda: _ended(server)
        calm = True
    finally:
        if not calm:  # what is in flight is asked again, so nobody waits for it
            server.terminate()
            time.sleep(0.5)
        server.stop()


def _ended(server: ArmServer) -> str | None:
    if server.child is None:
        return None
    status = server.child.poll()
    if status is None:
        return None
    return exit_cause(status)


def _pace(loaded: Loaded | None, options: BatchOptions) -> Pace:
    if options.concurrency is not None:
        return Pace(most=options.concurrency, limit=options.concurrency, fixed=True)
    most = MOST
    if loaded is not None and options.url is None:
        most = min(loaded.settings.server.max_concurrent_requests or MOST, MOST)
    return Pace(most=most, limit=FIRST)


def _compared(
    outcome: BatchOutcome,
    loaded: Loaded | None,
    before: EngineSnapshot | None,
    after: EngineSnapshot | None,
    in_flight: float,
) -> BatchOutcome:
    """The outcome with what the server's counters and a profile add."""
    if before is None or after is None:
        return outcome
    if before.process_start_seconds != after.process_start_seconds:
        return outcome  # it started anew, and its counters with it
    spec = arm.speculation(before, after)
    if spec is None or spec.accepted_tokens < 0 or spec.draft_tokens <= 0:
        return outcome
    outcome = replace(
        outcome,
        acceptance_rate=spec.accepted_tokens / spec.draft_tokens,
        others_tokens=arm.foreign_tokens(before, after, outcome.tokens),
    )
    if loaded is None or loaded.settings.sidecar.benchmark_profile is None:
        return outcome
    path = Path(loaded.settings.sidecar.benchmark_profile)
    found = speedup.load(path).at(in_flight)
    old, new = before.total("generation_tokens"), after.total("generation_tokens")
    if found is None or old is None or new is None or new <= old:
        return outcome
    ratio = economics.tokens_per_step(new - old, spec.accepted_tokens) / found[0]
    return replace(outcome, saved_seconds=outcome.seconds * (ratio - 1), profile=str(path))


def _interrupted(journal: Journal, options: BatchOptions) -> Interrupted:
    if _can_resume(journal, options):
        return Interrupted(
            f"interrupted; {journal.totals.lines:,} lines are kept", fix=options.again
        )
    return Interrupted(
        "interrupted; what is done cannot be resumed, for INPUT or OUTPUT is no file"
    )


def _can_resume(journal: Journal, options: BatchOptions) -> bool:
    return journal.resumable and options.source is not None


def _resumable(error: SpecserveError, journal: Journal, options: BatchOptions) -> SpecserveError:
    """The same error, with the command that goes on."""
    if not _can_resume(journal, options):
        return error
    problems = []
    for problem in error.problems:
        fix = options.again
        if problem.fix is not None:
            fix = f"{problem.fix}, then: {options.again}"
        problems.append(replace(problem, fix=fix))
    return type(error)(problems)
