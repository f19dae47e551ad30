"""The command line: the commands in the order of the pipeline, and where errors end.

A :class:`UserError` becomes three lines and exit code 1, wrong usage exit code 2, Ctrl-C 130.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

import typer

from meki_edge import cli_hub, cli_npu, cli_phone, cli_pipeline, cli_tools, console
from meki_edge.errors import UserError
from meki_edge.files import FREE_SPACE, STORAGE_ERRORS

INTERRUPTED = 130
PERMISSION_ERRORS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
PATH_ERRORS = frozenset({errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR})

app = typer.Typer(
    name="meki-edge",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Language models with token-indexed memory: train, fold, export, compile, run from flash, compare.\n\n"
    "Each step writes a directory with a manifest, and the next step reads it. "
    "An interrupted step resumes when the same command runs again; a finished one is not repeated.",
)
for command in (
    cli_pipeline.tokenize,
    cli_pipeline.train,
    cli_pipeline.reparam,
    cli_pipeline.export,
    cli_npu.calibrate,
    cli_npu.lint,
    cli_pipeline.compile_,
    cli_pipeline.pack,
    cli_pipeline.run,
    cli_pipeline.compare,
):
    app.command(command.__name__.rstrip("_"), rich_help_panel="Pipeline, in this order")(command)
for command in (cli_phone.sideload, cli_phone.bench, cli_phone.unload, cli_phone.doctor):
    app.command(command.__name__, rich_help_panel="On a phone")(command)
for command in (cli_tools.generate, cli_tools.inspect, cli_tools.verify, cli_tools.memories, cli_npu.bounds):
    app.command(command.__name__, rich_help_panel="Tools")(command)
app.command("profile", rich_help_panel="At AI Hub")(cli_hub.profile)
app.add_typer(cli_hub.app, name="hub", rich_help_panel="At AI Hub")


def main() -> None:
    """The console script: run the app, turn errors into messages and exit codes."""
    # PyTorch's OpenMP threads spin at every barrier; beside other work on the same cores that makes
    # training three times slower. Read when the library loads, so set before any command imports it.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    signal.signal(signal.SIGTERM, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # an ASCII locale must not stop a report
    try:
        app()
    except SystemExit as leave:
        if leave.code == INTERRUPTED:  # typer's exit after Ctrl-C
            console.info("interrupted: run the same command again, and what can resume does")
        raise
    except UserError as error:
        console.show_error(error)
        sys.exit(1)
    except KeyboardInterrupt:
        console.info("interrupted: run the same command again, and what can resume does")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.exit(141)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        fix = "make the model, the batch or the vocabulary smaller, or use a machine with more memory"
        console.show_error(UserError("not enough memory", where="this machine", fix=fix))
        sys.exit(1)
    except OSError as error:
        if error.errno in PERMISSION_ERRORS:
            fix = "check the permissions, or choose another --output-dir"
        elif error.errno in PATH_ERRORS:
            fix = "check the path"
        elif error.errno in STORAGE_ERRORS:
            fix = FREE_SPACE
        else:
            raise
        where = error.filename or "the output directory, or standard output"
        console.show_error(UserError(str(error.strerror), where=where, fix=fix))
        sys.exit(1)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt



if __name__ == "__main__":
    main()
