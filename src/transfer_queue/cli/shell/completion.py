"""`tq completion`: print a script with which a shell completes commands, options, files and the names of systems."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from transfer_queue.cli.options import Commands

SHELLS = ("bash", "zsh", "fish")
EPILOG = """\
to install it for this user:
  bash   tq completion bash > ~/.local/share/bash-completion/completions/tq
  zsh    tq completion zsh > ~/.zfunc/_tq     (with fpath+=~/.zfunc before compinit)
  fish   tq completion fish > ~/.config/fish/completions/tq.fish
"""

# The folders of the systems, as `system_folder.paths.runtime_dir` chooses them. The shell starts no Python for them.
_FOLDERS = '"$TQ_RUNTIME_DIR" "/run/user/$(id -u)/transfer_queue" "${TMPDIR:-/tmp}/transfer_queue-$(id -u)"'
PREAMBLES = {
    "bash": f"""
_tq_systems() {{
  local folder
  for folder in {_FOLDERS}; do
    if [ -n "$folder" ] && [ -d "$folder" ]; then
      compgen -W "$(command ls "$folder" 2>/dev/null)" -- "$1"
      return
    fi
  done
}}
""",
    "zsh": f"""
_tq_systems() {{
  local folder
  for folder in {_FOLDERS}; do
    if [[ -n "$folder" && -d "$folder" ]]; then
      compadd -- $folder/*(N/:t)
      return
    fi
  done
}}
""",
    "fish": """
function _tq_systems
    for folder in "$TQ_RUNTIME_DIR" "/run/user/"(id -u)"/transfer_queue" "/tmp/transfer_queue-"(id -u)
        if test -n "$folder" -a -d "$folder"
            command ls "$folder" 2>/dev/null
            return
        end
    end
end
""",
}
SYSTEMS = {"bash": "_tq_systems", "zsh": "_tq_systems", "fish": "(_tq_systems)"}


def add(commands: Commands) -> None:
    """Add the command to the parser of `tq`."""
    command = commands.add_parser(
        "completion", help="print a script that completes `tq` commands in a shell",
        description="Prints a script that completes commands, options, files and the names of systems.",
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    command.add_argument("shell", choices=SHELLS)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError:
        print("tq: completion needs the package shtab: pip install 'transfer_queue[completion]'", file=sys.stderr)
        return 1
    parser = options.top_parser
    _mark_values(parser)
    preamble: Any = PREAMBLES  # its annotation says str
    print(shtab.complete(parser, options.shell, preamble=preamble), end="")
    return 0


def _mark_values(parser: argparse.ArgumentParser) -> None:
    """Say which options take a file or the name of a system, and describe each command in one line."""
    import shtab

    for action in parser._actions:
        marked: Any = action
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                command = action.choices[listed.dest]
                command.description = listed.help  # shells show it next to the command, on one line
                _mark_values(command)
        elif "--name" in action.option_strings:
            marked.complete = SYSTEMS
        elif action.dest in ("conf", "file"):
            marked.complete = shtab.FILE
