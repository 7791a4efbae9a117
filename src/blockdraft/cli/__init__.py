"""The `blockdraft` command: one file per sub-command, and the only place that wires rooms together.

`--help` has to answer at once, so nothing here imports torch, transformers or pydantic before a command runs.
A mistake of the person at the keyboard is one line on standard error and exit code 2; `--debug`, anywhere on the
line, shows the traceback instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from blockdraft.cli import (
    ablate,
    bench,
    check,
    choices,
    doctor,
    export,
    generate,
    importing,
    info,
    launching,
    profiling,
    regenerate,
    train,
)

__all__ = ["app", "main"]

app = typer.Typer(
    name="blockdraft",
    help="Train block-diffusion drafters and generate with them: faster, and exactly the target's own answer.",
    epilog="Add --debug to any command to see the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate.command)
app.command("train")(train.command)
app.command("regenerate")(regenerate.command)
app.command("bench")(bench.command)
app.command("choices")(choices.command)
app.command("ablate")(ablate.command)
app.command("doctor")(doctor.command)
app.command("check")(check.command)
app.command("export")(export.command)
app.command("import")(importing.command)
app.command("command")(launching.command)
app.command("profile")(profiling.command)
app.command("info")(info.command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit code: 0, 2 for a user's mistake, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    try:
        code = app([word for word in arguments if word != "--debug"], prog_name="blockdraft", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe (head, less) went away.  Python would complain once more when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        if debug or not _is_user_error(error):
            raise
        code = 2
        # An empty call shows the help by itself; its exception has nothing to add.
        if message := _one_line(error):
            typer.echo(f"error: {message}", err=True)
    if code == 130:
        typer.echo("interrupted", err=True)
    sys.exit(code)


def _is_user_error(error: Exception) -> bool:
    # Usage errors of the command line have no public common class; all of them can format themselves.
    return isinstance(error, (ValueError, OSError, typer.TyperException)) or hasattr(error, "format_message")


def _one_line(error: Exception) -> str:
    if hasattr(error, "format_message"):
        text = str(error.format_message())
    else:
        text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else ""
