"""`paceline`: one command line. Nothing here imports torch, so `--help` answers at once."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from paceline import __version__
from paceline.errors import DEBUG, PacelineError, plain
from paceline.tools.cli.doctor import doctor
from paceline.tools.cli.export import export
from paceline.tools.cli.methods import methods
from paceline.tools.cli.plan import plan
from paceline.tools.cli.race import race
from paceline.tools.cli.run import run

app = typer.Typer(
    name="paceline",
    help="Data-parallel training for PyTorch: every published way to synchronise, behind two lines.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def paceline(
    asked: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help=f"Show where an error was raised ({DEBUG}=1).")] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"  # an environment variable, so that the workers see it too


# Everything after SCRIPT belongs to the script, even if it looks like an option of ours.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(methods)
app.command()(doctor)
app.command()(race)
app.command()(plan)
app.command()(export)


def main() -> None:
    try:
        app(prog_name="paceline")
    except PacelineError as error:
        if os.environ.get(DEBUG):
            raise
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        print_error(
            PacelineError(
                f"{type(error).__name__}: {error}",
                why="this was not foreseen, and may be a mistake in Paceline",
                do="run the same with --debug in front of the command, `paceline --debug run ...`, which shows where",
            )
        )
        sys.exit(PacelineError.exit_code)


def print_error(error: PacelineError) -> None:
    """Print what went wrong, why, and what to do, on stderr."""
    lines = [Text(f"paceline: {plain(error.what)}", style="bold red")]
    if error.why:
        lines.append(Text(f"  why: {plain(error.why)}"))
    if error.do:
        lines.append(Text(f"  do:  {plain(error.do)}"))
    console = Console(stderr=True, highlight=False)
    for line in lines:
        console.print(line, soft_wrap=True)


if __name__ == "__main__":
    main()
