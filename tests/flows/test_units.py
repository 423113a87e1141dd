"""systemd units: filled in for any folder, and accepted by systemd itself where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flows import units
from rlhf.errors import BadInput

FOLDER = 'a "project" of 100% $HOME'


def test_a_folder_of_any_name_is_quoted_as_systemd_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    found = units.filled(folder)
    assert len(found) == 3
    for name, text in found.items():
        assert re.fullmatch(
            r"roundhouse-a-project-of-100-HOME-\w{8}-(server|worker|mlflow).service", name
        )
        assert "@" not in text
        assert f'WorkingDirectory={tmp_path}/a "project" of 100%% $HOME\n' in text


def test_folders_of_one_name_have_units_of_their_own(tmp_path: Path) -> None:
    first, second = (units.filled(tmp_path / place / "reviews") for place in ("a", "b"))
    assert not first.keys() & second.keys()
    assert set(first) == set(units.filled(tmp_path / "a/reviews"))
    for found in (first, second):
        (worker,) = (text for name, text in found.items() if name.endswith("-worker.service"))
        (wanted,) = re.findall(r"^Wants=(.+)$", worker, re.MULTILINE)
        assert wanted in found
        assert f"After={wanted}\n" in worker


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_takes_them(tmp_path: Path) -> None:
    folder = tmp_path / "a project of 100%"
    folder.mkdir()
    for name, text in units.filled(folder).items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, tmp_path.glob("*.service"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "roundhouse" not in done.stderr


def test_without_systemd_the_mend_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with pytest.raises(BadInput, match="python -m flows worker"):
        units.install(tmp_path)
    assert not (tmp_path / "config").exists()


def test_a_log_in_that_systemd_does_not_know_keeps_the_units_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "systemctl"
    program.write_text("#!/bin/sh\necho 'Failed to connect to bus' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with pytest.raises(units.StageFailed, match="Failed to connect to bus"):
        units.install(tmp_path)
    assert len(list((tmp_path / "config/systemd/user").iterdir())) == 3
    program.write_text('#!/bin/sh\necho "$@" >> "$XDG_CONFIG_HOME/said"\n')
    said = units.install(tmp_path)
    assert sum("is there already" in line for line in said) == 3
    assert "--user enable --now" in (tmp_path / "config/said").read_text()
