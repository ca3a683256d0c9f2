"""The directive ``cli-options``: every option of every command, taken from the program itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def _plain(words: str) -> str:
    """Turn rich's markup into Markdown."""
    return re.sub(r"\[cyan\](.*?)\[/\]", r"`\1`", words).replace("|", r"\|")


def _row(parameter: Any) -> str:
    """One row of the table of options."""
    kind = "" if parameter.is_flag else parameter.metavar
    names = ", ".join(
        f"`{name}{' ' + kind if name.startswith('--') and kind else ''}`" for name in parameter.opts
    )
    return f"| {names.replace('|', chr(92) + '|')} | {_plain(parameter.help or '')} |"


def _placeholder(argument: Any) -> str:
    word = argument.metavar or argument.name.upper()
    return f"[{word}]..." if argument.nargs == -1 else word


def _command(name: str, command: Any) -> str:
    """One section for one command."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join(["howsmooth", name, "[OPTIONS]", *map(_placeholder, arguments)])
    lines = [command.help or "", "", "```text", usage, "```", ""]
    for argument in arguments:
        lines += [f"{argument.metavar or argument.name.upper()}", f": {_plain(argument.help or '')}", ""]
    lines += ["| option | meaning |", "|---|---|", *map(_row, options), ""]
    if command.epilog:
        lines += [_plain(command.epilog)]
    return "\n".join(lines)


class CliOptions(SphinxDirective):
    """Usage and options of one command, its name the argument."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Write the section as Markdown and have it parsed."""
        import typer

        from howsmooth.cli import app

        name = self.arguments[0]
        commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
        page = Path(self.env.doc2path(self.env.docname)).read_text(encoding="utf-8")
        missing = set(commands) - set(re.findall(r"^```\{cli-options\} (\w+)$", page, re.MULTILINE))
        if missing:
            raise self.error(f"commands without a section in the docs: {', '.join(sorted(missing))}")
        return self.parse_text_to_nodes(_command(name, commands[name]))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("cli-options", CliOptions)
    return {"parallel_read_safe": True}
