"""The commands: parse, dispatch, print. What they do stands in the modules they call."""

import io
import sys
import time
from importlib.metadata import version
from typing import Annotated

import typer

# isort: off
from tinypod.cli import demo, train, study, configs, check, eval, solve, generate, view  # noqa: F401 (as in --help)
from tinypod.cli import plan, slices, data, cache, weights, runs, pod  # noqa: F401

# isort: on
from tinypod.cli.shared import app, console, errors
from tinypod.cluster import libtpu
from tinypod.cluster.interrupts import heard
from tinypod.errors import StorageError, UserError
from tinypod.runs.terminal import fail, say

ANSWER_AFTER_S = 0.5


def main() -> None:
    """The console script: a user's error is a message and its exit code, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # where the locale knows ASCII only, × becomes ?
            stream.reconfigure(errors="replace")
    libtpu.quieten()
    try:
        with heard(_answer):
            app()
    except UserError as error:
        _fail(str(error), error.exit_code)
    except OSError as error:
        if error.filename is None and error.strerror is None:
            raise
        from tinypod.runs import storage

        again = storage.may_pass(error)
        message = f"{error.filename or 'a file'}: {error.strerror}"
        _fail(message, StorageError.exit_code if again else UserError.exit_code)
    except Exception:
        if not _in_cluster():
            raise
        errors.print_exception()
        _end(1)


def _answer() -> None:
    """To Ctrl-C, where the command neither ends by it nor has an answer of its own: it waits for a compiler."""
    time.sleep(ANSWER_AFTER_S)
    say(errors, "stopping once the computation at hand is over; Ctrl-C again ends at once")


def _fail(message: str, exit_code: int = UserError.exit_code) -> None:
    fail(errors, message)
    _end(exit_code)


def _end(exit_code: int) -> None:
    if _in_cluster():
        from tinypod.cluster.agreement import end_now

        end_now(exit_code)  # without waiting for processes that cannot come
    sys.exit(exit_code)


def _in_cluster() -> bool:
    module = sys.modules.get("tinypod.cluster.agreement")
    return module is not None and module.is_started()


@app.callback(invoke_without_command=True)
def root(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if show_version:
        console.print(f"tinypod {version('tinypod')}", highlight=False)
        raise typer.Exit
