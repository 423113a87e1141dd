"""A round is added as text: the new part is right and the old part is untouched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flows.rounds import append_round
from rlhf import config
from rlhf.errors import BadInput

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(ROOT / "pipeline.yaml", tmp_path))


def test_the_new_round_starts_where_the_last_one_ended(path: Path) -> None:
    old_lines = path.read_text().splitlines()
    old = config.load(path)
    assert append_round(path, "r2")
    new = config.load(path)
    assert list(new.rounds) == ["r1", "r2"]
    assert (new.rounds["r2"].from_, new.rounds["r2"].sample_from) == ("r1", "r1")
    assert new.rounds["r2"].reward_model == old.rounds["r1"].reward_model
    assert list(new.candidates)[len(old.candidates) :] == [
        key.replace("r1-", "r2-") for key in old.candidates
    ]
    for key, candidate in old.candidates.items():
        moved = new.candidates[key.replace("r1-", "r2-")]
        assert (moved.round, moved.from_) == ("r2", "r1")
        assert moved.learns_from == candidate.learns_from.replace("r1/", "r2/")
        assert moved.learning_rate == candidate.learning_rate
    # every old line is still there, in order, comments and all
    new_lines = iter(path.read_text().splitlines())
    assert all(line in new_lines for line in old_lines)
    assert path.read_text().count("answers per prompt, >= 2") == 2


def test_rounds_can_be_added_again_and_again(path: Path) -> None:
    for name in ("r2", "r3", "r4"):
        append_round(path, name)
    last = config.load(path).rounds["r4"]
    assert (last.from_, last.sample_from) == ("r3", "r3")


def test_a_round_that_is_there_changes_nothing(path: Path) -> None:
    before = path.read_bytes()
    assert not append_round(path, "r1")
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["2", "r0", "round2", "r2-ppo", ""])
def test_what_is_no_round_is_refused_and_nothing_is_written(path: Path, name: str) -> None:
    before = path.read_bytes()
    with pytest.raises(BadInput, match="use r2"):
        append_round(path, name)
    assert path.read_bytes() == before


def test_a_file_without_a_final_newline_and_with_a_trailing_comment(path: Path) -> None:
    text = path.read_text().rstrip("\n") + "\n# the end"
    path.write_text(text)
    append_round(path, "r2")
    assert path.read_text().endswith("# the end\n")
    assert "r2" in config.load(path).rounds


def test_candidates_at_the_very_end_of_the_file(path: Path) -> None:
    text = path.read_text()
    start, end = text.index("\ncandidates:"), text.index("\nevaluation:")
    path.write_text(text[:start] + text[end:] + text[start:end])
    append_round(path, "r2")
    assert "r2-ppo" in config.load(path).candidates


def test_a_flow_style_section_is_refused_untouched(path: Path) -> None:
    import yaml

    raw = yaml.safe_load(path.read_text())
    text = path.read_text()
    start, end = text.index("rounds:\n"), text.index("candidates:\n")
    import json

    path.write_text(text[:start] + f"rounds: {json.dumps(raw['rounds'])}\n\n" + text[end:])
    before = path.read_bytes()
    with pytest.raises(BadInput, match="block style"):
        append_round(path, "r2")
    assert path.read_bytes() == before


def test_a_value_that_merely_looks_like_a_name_is_kept(path: Path) -> None:
    note = "samples_per_prompt: 4     #"
    path.write_text(path.read_text().replace(note, f"{note} r1 "))
    append_round(path, "r2")
    assert path.read_text().count("# r1 ") == 2
