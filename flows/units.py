"""systemd user units for a project folder's server, worker and MLflow, from the templates in infra/systemd.

They are named after the folder, so that every folder of a user has its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from rlhf.errors import BadInput, StageFailed

TEMPLATES = Path(__file__).resolve().parents[1] / "infra/systemd"


def filled(folder: Path) -> dict[str, str]:
    """File name -> text of the units of a folder."""
    templates = sorted(TEMPLATES.glob("roundhouse-*.service"))
    if not templates:
        raise BadInput(
            "no unit templates",
            where=str(TEMPLATES),
            rule="they come with the repository, not with an installed package",
            mend="git clone it and pip install -e .",
        )
    python = Path(sys.executable)
    prefix = prefix_of(folder)
    words = {
        "@UNIT@": prefix,
        "@DIRECTORY@": str(folder).replace("%", "%%"),
        "@NAME@": folder.name.replace("%", "%%"),
        "@PYTHON@": _quoted(str(python)).replace("$", "$$"),
        "@PATH@": _quoted(f"{python.parent}:/usr/local/bin:/usr/bin:/bin"),
        "@ARTIFACTS@": _quoted((folder / "mlartifacts").as_uri()).replace("$", "$$"),
    }
    found = {}
    for template in templates:
        text = template.read_text(encoding="utf-8")
        for mark, value in words.items():
            text = text.replace(mark, value)
        found[template.name.replace("roundhouse", prefix, 1)] = text
    return found


def prefix_of(folder: Path) -> str:
    """How the names of a folder's units begin: its own name for people, a digest of its path for what is unique."""
    folder = folder.resolve()
    name = re.sub(r"[^A-Za-z0-9_.]+", "-", folder.name)[:40].strip("-.") or "project"
    return f"roundhouse-{name}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]}"


def install(folder: Path) -> list[str]:
    """Write the units, and have systemd start them now and at every log-in; returns what was done, in words."""
    if shutil.which("systemctl") is None:
        raise BadInput(
            "systemd is not on this machine",
            rule="these are systemd units",
            mend="keep `python -m flows server` and `python -m flows worker` running by other means",
        )
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd/user"
    home.mkdir(parents=True, exist_ok=True)
    units = filled(folder)
    said = []
    for name, text in units.items():
        changed = not (home / name).is_file() or (home / name).read_text(encoding="utf-8") != text
        (home / name).write_text(text, encoding="utf-8")
        said.append(f"{home / name} " + ("is written" if changed else "is there already"))
    for words in (["daemon-reload"], ["enable", "--now", *units]):
        done = subprocess.run(["systemctl", "--user", *words], capture_output=True, text=True)
        if done.returncode:
            raise StageFailed(
                f"the units are written, but systemctl --user {words[0]} failed: {done.stderr.strip()}\n"
                f"  mend: log in as this user, then systemctl --user enable --now {' '.join(units)}"
            )
    said.append(
        "started; they start again when they end. To have them without a log-in: loginctl enable-linger"
    )
    return said


def _quoted(value: str) -> str:
    """A value as it stands inside double quotes of a unit file."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
