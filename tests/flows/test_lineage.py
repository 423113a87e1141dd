"""Records, the tree down to the base model, and verification, with real git and real DVC."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import finished
import pytest
from conftest import child_environment
from finished import dvc, git
from rich.console import Console

from flows import history, lineage
from flows.rounds import append_round
from flows.verify import verify
from rlhf.errors import BadInput

Flows = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def three_rounds(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """r1 promotes, r2 keeps, r3 promotes by a person's word; all committed, tagged and pushed."""
    settings = tmp_path_factory.mktemp("git") / "config"
    settings.write_text("[user]\nname = Ada\nemail = ada@example.org\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_CONFIG_GLOBAL", str(settings))
        root = tmp_path_factory.mktemp("finished")
        folder = root / "a project"
        shutil.copytree(template, folder)
        dvc(folder, "remote", "add", "--default", "store", str(root / "store"))
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "project")
        finished.start(folder)
        word = {
            "choice": "promote",
            "because": "I like it",
            "by": "Grace",
            "at": "2031-01-02T03:04",
        }
        finished.run(folder, "r1", "r0")
        dvc(folder, "commit", "--force")
        commit(folder, "r1")
        append_round(folder / "pipeline.yaml", "r2")
        append_round(folder / "pipeline.yaml", "r3")
        finished.run(folder, "r2", "r1", kept=True)
        finished.run(folder, "r3", "r2", word=word)
        dvc(folder, "commit", "--force")
        commit(folder, "r2")
        commit(folder, "r3")
        dvc(folder, "push", "--quiet")
    return folder


def commit(folder: Path, name: str) -> None:
    lineage.write_record(folder, name)
    history.commit_round(folder, name, f"{name} is done")


@pytest.fixture(autouse=True)
def _someone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "gitconfig"
    settings.write_text("[user]\nname = Ada\nemail = ada@example.org\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))


@pytest.fixture
def project(three_rounds: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    shutil.copytree(three_rounds, folder)
    return folder


@pytest.fixture
def clone(three_rounds: Path, tmp_path: Path) -> Path:
    """Elsewhere, with nothing but what git holds."""
    folder = tmp_path / "a clone"
    git(tmp_path, "clone", "--quiet", str(three_rounds), str(folder))
    return folder


def record(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"runs/{name}/metrics/lineage.json").read_text())


def said(folder: Path, name: str) -> str:
    console = Console(width=200, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    console.print(lineage.tree(folder, name))
    return console.export_text()


# --- the record ---


def test_the_record_holds_what_made_the_policy(project: Path) -> None:
    found = record(project, "r3")
    assert found["policy"] == json.loads((project / "runs/r3/promoted/lineage.json").read_text())
    assert found["decision"] == {
        "status": "promoted", "promoted": "r3-ppo", "by": "Grace", "because": "I like it",
        "at": "2031-01-02T03:04",
    }  # fmt: skip
    assert found["project"] == {"commit": git(project, "rev-parse", "round/r2~0"), "changed": []}
    assert found["stages"]["promote@r3"]["outputs"]["runs/r3/promoted"].endswith(".dir")
    assert "data/tables" in found["inputs"]
    assert "runs/r2/promoted" in found["inputs"]
    assert not any(path.startswith("runs/r3/") for path in found["inputs"])
    root = Path(lineage.__file__).parents[1]
    assert found["code"]["commit"] == git(root, "rev-parse", "HEAD")
    assert len(found["code"]["sha256"]) == 64
    assert {"torch", "dvc", "transformers"} <= set(found["environment"]["packages"])
    assert found["environment"]["python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_round_that_kept_the_policy_records_whose_it_is(project: Path) -> None:
    found = record(project, "r2")
    assert (found["policy"]["round"], found["policy"]["candidate"]) == ("r1", "r1-ppo")
    assert found["decision"]["by"] == "gate"


def test_policies_without_a_lineage_of_their_own(project: Path) -> None:
    for name in ("r1", "r2"):
        (project / f"runs/{name}/promoted/lineage.json").unlink()
        (project / f"runs/{name}/metrics/lineage.json").unlink()
        lineage.write_record(project, name)
        policy = record(project, name)["policy"]
        assert (policy["round"], policy["candidate"]) == ("r1", "r1-ppo")


def test_a_record_stays_until_an_output_changes(project: Path) -> None:
    before = (project / "runs/r1/metrics/lineage.json").read_bytes()
    lineage.write_record(project, "r1")
    assert (project / "runs/r1/metrics/lineage.json").read_bytes() == before

    text = (project / "dvc.lock").read_text()
    old = record(project, "r1")["stages"]["promote@r1"]["outputs"]["runs/r1/promoted"]
    (project / "dvc.lock").write_text(text.replace(old, "f" * 32 + ".dir"))
    written = record(project, "r1")
    written["stages"]["policy@r1-ppo"]["code_commit"] = "older"
    written["stages"]["promote@r1"]["code_commit"] = "older"
    finished.write(project / "runs/r1/metrics/lineage.json", written)
    lineage.write_record(project, "r1")
    now = record(project, "r1")
    assert now["stages"]["policy@r1-ppo"]["code_commit"] == "older"
    assert now["stages"]["promote@r1"]["code_commit"] == now["code"]["commit"] != "older"
    assert now["project"]["commit"] == git(project, "rev-parse", "HEAD")


def test_changed_code_beside_the_pipeline_is_named(project: Path) -> None:
    (project / "my_loss.py").write_text("x = 1\n")
    (project / "notes.txt").write_text("of no interest")
    (project / "runs/r1/metrics/lineage.json").unlink()
    lineage.write_record(project, "r1")
    assert record(project, "r1")["project"]["changed"] == ["my_loss.py"]


def test_no_record_of_what_has_not_run(project: Path) -> None:
    with pytest.raises(BadInput, match="flows run --round r4"):
        lineage.write_record(project, "r4")
    shutil.rmtree(project / "runs/r1/promoted")
    (project / "runs/r1/metrics/lineage.json").unlink()
    with pytest.raises(BadInput, match="dvc pull promote@r1"):
        lineage.write_record(project, "r1")


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("https://user:secret@example.org/a/b.git", "https://example.org/a/b.git"),
        ("https://ghp_token@example.org:8443/a.git?x=token", "https://example.org:8443/a.git"),
        ("ssh://git:secret@example.org/a.git", "ssh://git@example.org/a.git"),
        ("git@example.org:a/b.git", "git@example.org:a/b.git"),
        ("git@example.org:/srv/b.git", "git@example.org:/srv/b.git"),
        ("ghp_TOKEN@github.com:o/r.git", "github.com:o/r.git"),
        ("git@example.org:o/r.git?token=x", "git@example.org:o/r.git"),
        ("git@example.org:o/me:secret@r.git", None),
        ("ssh://token@example.org/a.git", "ssh://example.org/a.git"),
        ("git://token@example.org/a.git#token", "git://example.org/a.git"),
        ("https://me:pa/ss@example.org/a.git", None),
        ("https://mirror.org/https://me:secret@example.org/a.git", None),
        ("https://example.org/ghp_0123456789abcdefXYZ/a.git", "https://example.org/.../a.git"),
        ("git@example.org:glpat-0123456789abcdefXYZ/a", "git@example.org:.../a"),
        ("/home/ada/code", None),
        ("../code", None),
        ("file:///home/ada/code", None),
        ("C:\\code", None),
        ("", None),
        (None, None),
    ],
)
def test_addresses_lose_their_secrets(url: str | None, public: str | None) -> None:
    assert lineage.public_url(url) == public


# --- the tree ---


@pytest.mark.parametrize("place", ["project", "clone"])
def test_the_tree_goes_down_to_the_base_model(place: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(place)
    top = lineage.ancestry(folder, "r3")
    chain = [top]
    while "parent" in chain[-1]:
        chain.append(chain[-1]["parent"])
    assert [node["round"] for node in chain] == ["r3", "r1", "r0"]
    assert [node["candidate"] for node in chain] == ["r3-ppo", "r1-ppo", None]
    assert [node["problems"] for node in chain] == [[], [], []]
    assert top["commit"] == git(folder, "rev-parse", "round/r3^{commit}")
    assert chain[1]["weights"] == record(folder, "r3")["policy"]["parent"]["weights"]
    assert chain[2]["base"]["base"] == "demo"
    assert top["pairs"]["train_pairs"] == 30

    text = said(folder, "r3")
    for words in (
        "r3-ppo step-00024, by ppo",
        "promoted by Grace at 2031-01-02T03:04: I like it",
        f"member_1 {top['reward_model']['member_1'][:12]}",
        "30 to train, 5 held out, 35 of earlier rounds",
        f"round/r1 at {chain[1]['commit'][:12]}",
        "demo, new weights (hidden_size 96",
    ):
        assert words in text, text
    assert text.index("r3-ppo") < text.index("r1-ppo step") < text.index("base model")


def test_the_tree_of_a_round_that_kept_its_policy(clone: Path) -> None:
    node = lineage.ancestry(clone, "r2")
    assert (node["kept"], node["candidate"], node["parent"]["candidate"]) == (True, None, "r1-ppo")
    assert "no candidate passes" in said(clone, "r2")


def change(path: str) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        target = folder / path
        target.write_text(target.read_text() + "!")

    return work


def another_result(folder: Path) -> None:
    path = folder / "dvc.lock"
    old = record(folder, "r1")["stages"]["promote@r1"]["outputs"]["runs/r1/promoted"]
    path.write_text(path.read_text().replace(old, "f" * 32 + ".dir"))


def rerun_r1(folder: Path) -> None:
    changed = record(folder, "r1")
    changed["policy"]["weights"] = "0" * 64
    finished.write(folder / "runs/r1/metrics/lineage.json", changed)
    shutil.rmtree(folder / "runs/r1/promoted")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change("runs/r1/promoted/model.safetensors"), "runs/r1/promoted on this disk is not the"),
        (change("runs/r0/promoted/model.safetensors"), "runs/r0/promoted on this disk is not the"),
        (
            change("runs/r3/reward_model/member_0/model.safetensors"),
            "runs/r3/reward_model/member_0 on this disk is not the recorded one",
        ),
        (change("data/tables/prompts.parquet"), "data/tables/prompts.parquet on this disk"),
        (another_result, "dvc.lock has another runs/r1/promoted than the record"),
        (rerun_r1, "r1 was run or decided again since"),
        (lambda f: git(f, "tag", "-d", "round/r1"), "no tag round/r1"),
    ],
)
def test_what_does_not_match_is_said(
    project: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(project)
    assert words in said(project, "r3")
    quick = lineage.ancestry(project, "r3", disk=False)
    assert ("on this disk" in words) != (words in json.dumps(quick))


def test_a_record_that_is_gone_is_read_from_the_tag(clone: Path) -> None:
    whole = lineage.ancestry(clone, "r3")
    (clone / "runs/r1/metrics/lineage.json").unlink()
    assert lineage.ancestry(clone, "r3") == whole


def test_an_unknown_round(clone: Path) -> None:
    with pytest.raises(BadInput, match="nothing is known of r7"):
        lineage.ancestry(clone, "r7")


def test_records_edited_into_a_circle_end(clone: Path) -> None:
    changed = record(clone, "r1")
    changed["policy"]["parent"] = {"round": "r3", "candidate": "r3-ppo", "weights": "x"}
    finished.write(clone / "runs/r1/metrics/lineage.json", changed)
    assert "its own ancestor" in said(clone, "r3")


# --- verify ---


def test_a_clone_pulls_and_verifies_a_round_and_its_ancestors(clone: Path) -> None:
    found = verify(clone, "r1", ancestors=True)
    assert found.ok, found.problems
    assert found.rounds == ["r0", "r1"]
    assert {"data/tables", "runs/r0/promoted", "runs/r1/promoted"} <= set(found.pulled)
    assert (clone / "runs/r1/promoted/model.safetensors").read_text() == "weights r1-ppo"
    assert not (clone / "runs/r3/promoted").exists()
    again = verify(clone, "r1")
    assert (again.ok, again.rounds, again.pulled) == (True, ["r1"], [])


def test_without_pulling_what_is_missing_is_named(clone: Path) -> None:
    found = verify(clone, "r3", pull=False)
    assert "runs/r3/promoted: missing" in found.problems
    assert not any("metrics" in problem for problem in found.problems)


def test_every_file_that_differs_is_named_and_left_alone(project: Path) -> None:
    assert verify(project, "r3", ancestors=True).ok
    weights = project / "runs/r3/promoted/model.safetensors"
    before = weights.stat()
    weights.write_text("weights r3-ppO")  # same size, same time: as a disk fails
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    (project / "runs/r3/policies/r3-dpo/extra.txt").write_text("more")
    (project / "runs/r3/reward_model/member_1/model.safetensors").unlink()
    finished.write(project / "runs/r3/metrics/decision.json", {})
    found = verify(project, "r3")
    assert sorted(found.problems) == [
        "runs/r3/metrics/decision.json: differs",
        "runs/r3/policies/r3-dpo/extra.txt: is not part of it",
        "runs/r3/promoted/model.safetensors: differs",
    ]
    assert found.pulled == ["runs/r3/reward_model"]
    assert weights.read_text() == "weights r3-ppO"


def test_another_result_in_this_checkout_is_not_pulled_over(project: Path) -> None:
    shutil.rmtree(project / "runs/r1/promoted")
    another_result(project)
    found = verify(project, "r1")
    assert "runs/r1/promoted: missing" in found.problems
    assert any("git checkout round/r1 has it" in problem for problem in found.problems)
    assert not found.pulled


def test_a_remote_that_lost_a_file_is_told(clone: Path, three_rounds: Path, tmp_path: Path) -> None:
    git(clone, "config", "user.name", "x")
    dvc(clone, "remote", "modify", "--local", "store", "url", str(tmp_path / "empty"))
    found = verify(clone, "r1")
    assert any(problem.startswith("dvc pull failed:") for problem in found.problems)
    assert "runs/r1/promoted: missing" in found.problems


def test_a_round_without_a_tag(project: Path) -> None:
    with pytest.raises(BadInput, match="git fetch --tags"):
        verify(project, "r9")


# --- commands ---


def flows(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows", *words],
        cwd=folder,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_commands(project: Path) -> None:
    shown = flows(project, "lineage", "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["candidate"] == "r3-ppo"
    good = flows(project, "verify", "r3", "--no-pull")
    assert good.returncode == 0, good.stderr
    assert "of r3: as round/r3" in good.stdout
    (project / "runs/r3/promoted/model.safetensors").write_text("x")
    bad = flows(project, "verify", "r3", "--no-pull")
    assert bad.returncode == 1
    assert "runs/r3/promoted/model.safetensors: differs" in bad.stderr
    assert "Traceback" not in bad.stderr


@pytest.mark.parametrize("words", [["lineage", "r3"], ["rounds"]])
def test_the_commands_are_light(clone: Path, words: list[str]) -> None:
    code = (
        "import sys\n"
        "from flows.__main__ import main\n"
        f"sys.argv = ['flows', *{words!r}]\n"
        "try:\n    main()\nexcept SystemExit as error:\n    assert not error.code, error.code\n"
        "heavy = {'torch', 'mlflow', 'prefect', 'transformers', 'pandas', 'dvc'} & set(sys.modules)\n"
        "sys.exit(f'imports {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=clone,
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
