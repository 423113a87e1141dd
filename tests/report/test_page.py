"""The page opens whatever is missing, says why, and draws nothing that the data do not support."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import made
import pytest

from rlhf import contracts
from rlhf.report import figures, page
from rlhf.report.findings import Findings, Missing, find


class Reader(HTMLParser):
    """Checks that tags close in order, and keeps the text."""

    VOID = ("meta", "br", "img", "link", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v]

    def handle_endtag(self, tag: str) -> None:
        if tag in ("html",):
            self.open = [t for t in self.open if t not in ("body", "html")]
            return
        assert self.open, tag
        assert self.open.pop() == tag, (tag, self.open)

    def handle_data(self, data: str) -> None:
        self.text += data


DECISION = {
    "status": "promoted",
    "promoted": "r1-grpo",
    "reason": "r1-grpo has the highest gold_mean on choose prompts",
    "decision": None,
    "verdict": {"reason": "as above"},
}


def rendered(folder: Path, candidates: dict[str, str], **changes: Any) -> tuple[Findings, str, str]:
    found = find(folder, "r1", candidates, starts_as="incoming", num_bootstrap=100, seed=0)
    prompts = {contracts.prompt_id(f"prompt {i}"): f"prompt {i} <script>" for i in range(60)}
    options: dict[str, Any] = {
        "project": "a & project", "start": "r0", "prompts": prompts, "warnings": {"r1-ppo": ["the KL <jumped>"]},
        "seed": 3, "packages": {"torch": "2.13.0"},
    }  # fmt: skip
    text = page.render(found, changes.pop("decision", DECISION), **(options | changes))
    reader = Reader()
    reader.feed(text)
    assert not reader.open, reader.open
    assert all(link.startswith("#") for link in reader.links), "it needs another file"
    return found, text, " ".join(reader.text.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("page")
    made.candidate(place, "r1-ppo")
    made.candidate(place, "r1-grpo", (0.0, 0.3, 0.6, 0.9, 1.5), seed=1)
    made.reward_model(place)
    made.best_of_n(place)
    return place


BOTH = {"r1-ppo": "ppo", "r1-grpo": "grpo"}


def test_a_whole_page(folder: Path) -> None:
    found, text, words = rendered(folder, BOTH)
    assert "r1-grpo is promoted" in words
    assert words.index("is promoted") < words.index("How far proxy and gold part")
    gold = found.paths[0].gold
    assert not isinstance(gold, Missing)
    assert f"The curve of gold peaks at {gold.peak_kl:.1f} nats" in words
    assert "left on the table" in words
    assert "Parts of gold that fell while the proxy rose: rep" in words
    assert "step-00004 is the checkpoint with the highest gold." in words
    assert "the KL <jumped>" in words  # escaped in the source
    assert "<script>" not in text
    assert "answer 0 <b>&" in words
    assert "60 report prompts, which chose no checkpoint" in words
    assert "git checkout round/r1" in words
    assert "Gold is highest at n = " in words
    assert (
        text.count("<svg") == 7
    )  # two paths, frontier, committee, best of n, accuracy, calibration
    assert len(text.encode()) < 600_000


def test_the_same_numbers_give_the_same_bytes(folder: Path) -> None:
    assert rendered(folder, BOTH)[1] == rendered(folder, BOTH)[1]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("kept", "Nothing is promoted; the policy of r0 stays"),
        ("stopped", "Nothing is promoted, and the loop stops"),
        ("awaiting", "A person is to decide; the policy of r0 stays meanwhile"),
    ],
)
def test_other_decisions(folder: Path, status: str, words: str) -> None:
    decision = DECISION | {"status": status, "promoted": None}
    assert words in rendered(folder, BOTH, decision=decision)[2]


def test_a_persons_word(folder: Path) -> None:
    said = {"by": "Ada", "at": "2026-01-31", "choice": "promote"}
    decision = DECISION | {"decision": said, "verdict": {"reason": "nobody passes"}}
    assert (
        "Decided by Ada (2026-01-31); the gate by itself: nobody passes"
        in rendered(folder, BOTH, decision=decision)[2]
    )


def test_no_gold(tmp_path: Path) -> None:
    made.candidate(tmp_path, "r1-ppo", gold=False)
    _, text, words = rendered(tmp_path, {"r1-ppo": "ppo"})
    assert "gaming of the proxy cannot be seen here" in words
    assert "No curve of gold: no gold is declared." in words
    assert "Which part of gold moved" not in words
    assert "Cannot be said: no gold is declared." in words  # in place of the frontier
    assert ">gold: what is meant<" not in text


def test_nothing_was_evaluated(tmp_path: Path) -> None:
    _, text, words = rendered(tmp_path, BOTH)
    assert words.count("Cannot be said: no candidate was evaluated.") == 3
    assert "r1-ppo: " in words
    assert "<svg" not in text


@pytest.mark.parametrize(
    "options",
    [
        {"distances": (0.0, 1.0)},
        {"distances": (0.0, 0.0, 0.0, 0.0)},
        {"prompts": 1},
        {"prompts": 2, "samples": 1},
    ],
    ids=str,
)
def test_little_data(tmp_path: Path, options: dict[str, Any]) -> None:
    made.candidate(tmp_path, "r1-ppo", **options)
    _, _, words = rendered(tmp_path, {"r1-ppo": "ppo"})
    assert "nan" not in words.lower().split()
    assert "inf" not in words.lower().split()


def test_curves_stop_where_measurements_do(folder: Path) -> None:
    """No line is drawn beyond the last point, only dots before the first, and a peak beyond it has no star."""
    from matplotlib.figure import Figure

    found = find(folder, "r1", BOTH, starts_as="incoming", num_bootstrap=50, seed=0)
    axes = Figure().add_subplot()
    proxy = found.paths[0].proxy
    assert not isinstance(proxy, Missing)
    figures._line(axes, proxy, "black")
    assert max(line.get_xdata()[-1] for line in axes.lines) <= proxy.reach  # type: ignore[index]
    assert len(axes.lines) == 2
    whole, dotted = axes.lines
    assert whole.get_xdata()[0] == dotted.get_xdata()[-1] == proxy.first  # type: ignore[index]
    assert dotted.get_linestyle() == ":"


def test_no_number_is_minus_nothing() -> None:
    assert page._number(-0.001) == "0.00"
    assert page._number(-0.01) == "-0.01"
