"""The command ``mesh``: a table of subcommands, each imported when it is asked for."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from infra.failure import report
from schemas.errors import MeshError

COMMANDS = {
    "up": "infra.commands.up:up",
    "control": "infra.commands.roles:control",
    "worker": "infra.commands.roles:worker",
    "bridge": "infra.commands.roles:bridge",
    "prepare": "infra.commands.prepare:prepare",
    "status": "infra.commands.status:status",
    "drain": "infra.commands.drain:drain",
    "keys": "infra.commands.keys:keys_app",
    "dead": "infra.commands.dead:dead_app",
    "generate": "infra.commands.generate:generate",
    "profile": "infra.commands.profile:profile",
    "load": "loadgen.cli:load_app",
    "bench": "loadgen.cli:bench_app",
    "simulate": "loadgen.simulate.command:simulate",
    "chaos": "loadgen.chaos.command:chaos",
}


class _Commands(TyperGroup):
    """Finds a subcommand in ``COMMANDS``; ``mesh --help`` imports them all."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if isinstance(found, typer.Typer):
            command = typer.main.get_command(found)
            command.name = cmd_name
            return command
        single = typer.Typer(add_completion=False)
        single.command(cmd_name)(found)
        return typer.main.get_command(single)


app = typer.Typer(
    cls=_Commands,
    name="mesh",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _mesh() -> None:
    """An LLM inference mesh whose backbone is a message queue."""


def main() -> None:
    """Run the command line; an error of ours becomes one line and an exit code."""
    try:
        app()
    except MeshError as error:
        name = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] in COMMANDS else ""
        sys.exit(report(f"mesh {name}".rstrip(), error))


if __name__ == "__main__":
    main()
