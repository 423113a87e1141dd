"""What git keeps of rounds, with real repositories."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import history
from rlhf.errors import BadInput, StageFailed
from rlhf.lifeline import alive, ident

PIPELINE = """\
# settings
seed: 0
model: {lr: 1.0e-5}
rounds:
  r1: {from: r0, decision: null}
candidates:
  r1-ppo: {round: r1, steps: 3}
evaluation: {select: last}
"""
R2 = PIPELINE.replace(
    "candidates:", "  r2: {from: r1, decision: null}  # the next\ncandidates:"
).replace("evaluation:", "  r2-ppo: {round: r2, steps: 3}\nevaluation:")


def git(folder: Path, *words: str, **environment: str) -> str:
    done = subprocess.run(
        ["git", *words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"git {words}: {done.stdout}{done.stderr}"
    return done.stdout.rstrip("\n")


def lock(**hashes: str) -> str:
    """A dvc.lock in which every round's stages wrote what the given letter says."""
    stages = "".join(
        f"  promote@{name}:\n    cmd: x\n    params:\n      pipeline.yaml:\n        seed: 0\n"
        f"        model.lr: 1e-05\n    outs:\n    - path: runs/{name}/promoted\n      md5: {md5}\n"
        for name, md5 in hashes.items()
    )
    return f"schema: '2.0'\nstages:\n{stages}"


def ran(folder: Path, **hashes: str) -> None:
    """What running rounds leaves."""
    (folder / "dvc.lock").write_text(lock(**hashes))
    for name, md5 in hashes.items():
        path = folder / f"runs/{name}/metrics/decision.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{"made": "{md5}"}}')


def make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pipeline.yaml").write_text(PIPELINE)
    (folder / "dvc.yaml").write_text("stages: {}\n")
    (folder / "code.py").write_text("a = 1\n")
    (folder / "other.py").write_text("b = 1\n")
    (folder / ".gitignore").write_text("/runs/*/promoted\n")
    return folder


def commit_all(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "all")


@pytest.fixture(autouse=True)
def _someone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person of our own, whatever the machine's git is set to."""
    settings = tmp_path / "gitconfig"
    settings.write_text(
        "[user]\nname = Ada\nemail = ada@example.org\n[init]\ndefaultBranch = main\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for name in [n for n in os.environ if n.startswith(("GIT_AUTHOR", "GIT_COMMITTER"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = make(tmp_path / "a folder, ünïcode")
    git(folder, "init", "-q")
    commit_all(folder)
    return folder


def tree(folder: Path) -> str:
    """Everything git says about index and working tree."""
    return git(folder, "status", "--porcelain=v2", "-z", "--untracked-files=all") + git(
        folder, "diff", "--cached"
    )


def committed(folder: Path, revision: str = "HEAD") -> list[str]:
    return git(
        folder, "-c", "core.quotepath=off", "show", "--pretty=", "--name-only", "-r", revision
    ).split("\n")


# --- a round's commit ---


@pytest.mark.parametrize("below", ["", "deep/project one"])
def test_a_round_is_one_commit_and_other_changes_stay_as_they_are(
    tmp_path: Path, below: str
) -> None:
    root = tmp_path / "root"
    folder = make(root / below)
    git(root, "init", "-q")
    commit_all(root)
    before = git(root, "rev-parse", "HEAD")

    (folder / "code.py").write_text("a = 2\n")
    git(folder, "add", "code.py")
    (folder / "code.py").write_text("a = 3\n")  # staged and changed again
    (folder / "other.py").unlink()
    (folder / "new.py").write_text("c = 1\n")
    (folder / "staged.py").write_text("d = 1\n")
    git(folder, "add", "staged.py")
    (root / "above.txt").write_text("untracked, above the project")
    others = tree(root)

    ran(folder, r1="aa")
    (folder / "pipeline.yaml").write_text(R2)
    assert history.obstacle(folder) is None
    made = history.commit_round(folder, "r1", "r1: promoted r1-ppo\n\nwhy so")

    assert made == git(root, "rev-parse", "HEAD")
    assert git(root, "rev-parse", "HEAD~1") == before
    assert tree(root) == others
    prefix = f"{below}/" if below else ""
    assert committed(root) == [
        f"{prefix}{name}" for name in ("dvc.lock", "pipeline.yaml", "runs/r1/metrics/decision.json")
    ]
    assert git(root, "cat-file", "-t", "round/r1") == "tag"
    assert git(root, "rev-parse", "round/r1^{commit}") == made
    assert "why so" in git(root, "tag", "-l", "--format=%(contents)", "round/r1")
    assert git(root, "log", "-1", "--format=%an %s") == "Ada r1: promoted r1-ppo"


def test_nothing_changed_is_no_commit_and_a_missing_tag_is_made(project: Path) -> None:
    ran(project, r1="aa")
    made = history.commit_round(project, "r1", "first")
    assert history.commit_round(project, "r1", "again") is None
    assert git(project, "rev-parse", "HEAD") == made
    assert git(project, "tag", "-l", "--format=%(subject)", "round/r1") == "first"
    git(project, "tag", "-d", "round/r1")  # as if killed between the two
    assert history.commit_round(project, "r1", "again") is None
    assert git(project, "rev-parse", "round/r1^{commit}") == made


def test_a_tag_left_out_by_a_kill_is_made_when_the_next_round_is_committed(project: Path) -> None:
    ran(project, r1="aa")
    first = history.commit_round(project, "r1", "the first")
    git(project, "tag", "-d", "round/r1")
    ran(project, r1="aa", r2="bb")
    second = history.commit_round(project, "r2", "the second")
    assert git(project, "rev-parse", "round/r1^{commit}") == first
    assert git(project, "rev-parse", "round/r2^{commit}") == second
    assert git(project, "tag", "-l", "--format=%(contents)", "round/r1").startswith("the first")


def test_a_tag_moves_only_with_its_rounds_result_and_the_old_one_stays(project: Path) -> None:
    ran(project, r1="aa")
    first = history.commit_round(project, "r1", "first")
    ran(project, r1="aa", r2="bb")
    second = history.commit_round(project, "r2", "second")
    assert history.commit_round(project, "r1", "again") is None
    assert git(project, "rev-parse", "round/r1^{commit}") == first  # r2 is none of its business

    for number, letter in enumerate("cd", 1):
        ran(project, r1=letter * 2, r2="bb")
        made = history.commit_round(project, "r1", f"decided again, {letter}")
        assert git(project, "rev-parse", "round/r1^{commit}") == made
        assert git(project, "tag", "-l", "round/r1.*").split() == [
            f"round/r1.{i}" for i in range(1, number + 1)
        ]
    assert git(project, "rev-parse", "round/r1.1^{commit}") == first
    assert "first" in git(project, "tag", "-l", "--format=%(contents)", "round/r1.1")
    assert "again, c" in git(project, "tag", "-l", "--format=%(contents)", "round/r1.2")
    assert git(project, "rev-parse", "round/r2^{commit}") == second


def test_a_kill_while_the_tag_moves_leaves_one_copy_of_the_old_one(project: Path) -> None:
    ran(project, r1="aa")
    first = history.commit_round(project, "r1", "first")
    git(project, "tag", "-a", "-m", "kept, then killed", "round/r1.1", "round/r1^{commit}")
    ran(project, r1="bb")
    history.commit_round(project, "r1", "second")
    assert git(project, "tag", "-l", "round/*").split() == ["round/r1", "round/r1.1"]
    assert git(project, "rev-parse", "round/r1.1^{commit}") == first


def test_a_round_that_has_not_run_is_not_committed(project: Path) -> None:
    ran(project, r1="aa")
    with pytest.raises(BadInput, match="r2 has no result"):
        history.commit_round(project, "r2", "too early")
    assert committed(project) != ["dvc.lock"]
    assert not git(project, "tag")


def test_the_first_commit_of_a_repository(tmp_path: Path) -> None:
    folder = make(tmp_path / "new")
    git(folder, "init", "-q")
    git(folder, "add", "code.py")  # staged by someone else, as `dvc init` does
    assert history.obstacle(folder) is None
    ran(folder, r1="aa")
    made = history.commit_round(folder, "r1", "r1")
    assert committed(folder) == [
        "dvc.lock", "dvc.yaml", "pipeline.yaml", "runs/r1/metrics/decision.json",
    ]  # fmt: skip
    assert git(folder, "rev-parse", "round/r1^{commit}") == made
    assert git(folder, "status", "--porcelain").split("\n") == [
        "A  code.py", "?? .gitignore", "?? other.py",
    ]  # fmt: skip
    assert history.obstacle(folder) is None


def test_in_a_worktree_and_in_a_submodule(project: Path, tmp_path: Path) -> None:
    tree_folder = tmp_path / "tree"
    git(project, "worktree", "add", "-q", "-b", "side", str(tree_folder))
    ran(tree_folder, r1="aa")
    assert history.obstacle(tree_folder) is None
    made = history.commit_round(tree_folder, "r1", "r1")
    assert git(project, "rev-parse", "side") == made
    assert git(project, "status", "--porcelain") == ""

    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "-q")
    allowed = ("-c", "protocol.file.allow=always")
    git(outer, *allowed, "submodule", "--quiet", "add", str(project), "inner")
    git(outer, "commit", "-qm", "outer")
    ran(outer / "inner", r1="aa")
    assert history.obstacle(outer / "inner") is None
    made = history.commit_round(outer / "inner", "r1", "r1")
    assert git(outer / "inner", "rev-parse", "HEAD") == made
    assert git(outer, "log", "--format=%s") == "outer"


def test_a_hook_that_started_us_does_not_mislead(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = make(tmp_path / "elsewhere")
    git(elsewhere, "init", "-q")
    commit_all(elsewhere)
    ran(project, r1="aa")
    with monkeypatch.context() as hook:
        hook.setenv("GIT_DIR", str(elsewhere / ".git"))
        hook.setenv("GIT_INDEX_FILE", str(elsewhere / ".git/index"))
        hook.setenv("GIT_WORK_TREE", str(elsewhere))
        assert history.obstacle(project) is None
        made = history.commit_round(project, "r1", "r1")
    assert git(project, "rev-parse", "HEAD") == made
    assert git(elsewhere, "status", "--porcelain") == ""
    assert git(elsewhere, "log", "--format=%s") == "all"


@pytest.mark.parametrize("hook", ["pre-commit", "commit-msg"])
def test_a_hook_that_refuses_is_told_and_everything_stays(project: Path, hook: str) -> None:
    path = project / ".git/hooks" / hook
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\necho 'no large numbers' >&2\nexit 1\n")
    path.chmod(0o755)
    (project / "code.py").write_text("a = 2\n")
    git(project, "add", "code.py")
    ran(project, r1="aa")
    before = tree(project)
    with pytest.raises(
        StageFailed, match="r1 is done, but not in git: git commit failed"
    ) as caught:
        history.commit_round(project, "r1", "r1")
    assert "no large numbers" in str(caught.value)
    assert tree(project) == before
    assert not git(project, "tag")
    path.unlink()
    assert history.commit_round(project, "r1", "r1") is not None


def test_signing_that_fails_is_told(project: Path) -> None:
    git(project, "config", "commit.gpgsign", "true")
    git(project, "config", "gpg.program", "false")
    ran(project, r1="aa")
    before = tree(project)
    with pytest.raises(StageFailed, match=r"sign"):
        history.commit_round(project, "r1", "r1")
    assert tree(project) == before


def test_a_git_command_of_the_user_is_waited_for(project: Path) -> None:
    ran(project, r1="aa")
    busy = project / ".git/index.lock"
    busy.touch()
    waiting = threading.Timer(0.7, busy.unlink)
    waiting.start()
    assert history.commit_round(project, "r1", "r1") is not None
    waiting.join()


def test_a_lock_that_nobody_holds_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_SECONDS_FOR_LOCK", 0.3)
    ran(project, r1="aa")
    busy = project / ".git/index.lock"
    busy.touch()
    before = tree(project)
    with pytest.raises(StageFailed, match=r"if no git command runs, remove .*index\.lock"):
        history.commit_round(project, "r1", "r1")
    assert tree(project) == before
    busy.unlink()
    assert history.commit_round(project, "r1", "r1") is not None


def test_a_process_killed_while_a_hook_runs_leaves_what_the_next_one_mends(project: Path) -> None:
    path = project / ".git/hooks/pre-commit"
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\necho $$ > ../hook.pid\nmv ../hook.pid ../started\nsleep 60\n")
    path.chmod(0o755)
    ran(project, r1="aa")
    program = f"from flows import history; history.commit_round({str(project)!r}, 'r1', 'r1')"
    child = subprocess.Popen(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], start_new_session=True
    )
    started = project.parent / "started"
    wait_until(started.exists)
    hook = ident(int(started.read_text()))
    child.kill()
    child.wait()
    wait_until(lambda: not (project / ".git/index.lock").exists() and not alive(hook))
    path.unlink()
    history.commit_round(project, "r1", "r1")
    assert git(project, "log", "--format=%s").split("\n") == ["r1", "all"]
    assert git(project, "rev-parse", "round/r1^{commit}") == git(project, "rev-parse", "HEAD")
    assert git(project, "diff", "--cached", "--name-only") == ""


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_paths_are_committed_alone(project: Path) -> None:
    ran(project, r1="aa")
    (project / "pipeline.yaml").write_text(R2)
    (project / "code.py").write_text("a = 2\n")
    made = history.commit_paths(project, ["pipeline.yaml", "absent.txt"], "decide r1")
    assert made is not None
    assert committed(project) == ["pipeline.yaml"]
    assert not git(project, "tag")
    assert history.commit_paths(project, ["pipeline.yaml"], "again") is None


def test_rounds_without_tag_and_commit_are_found(project: Path) -> None:
    ran(project, r1="aa", r2="bb")
    assert history.never_committed(project, ["r1", "r2"]) == ["r1", "r2"]
    history.commit_round(project, "r1", "r1")
    assert history.never_committed(project, ["r1", "r2"]) == ["r2"]
    git(project, "tag", "--delete", "round/r1")  # as in a clone without tags
    assert history.never_committed(project, ["r1", "r2"]) == ["r2"]


def test_a_name_like_a_pattern_is_a_name(project: Path) -> None:
    (project / "*.py").write_text("star")
    (project / "code.py").write_text("a = 2\n")
    history.commit_paths(project, ["*.py"], "star")
    assert committed(project) == ["*.py"]


# --- what is in the way ---


def edit_setting(folder: Path) -> None:
    (folder / "pipeline.yaml").write_text(PIPELINE.replace("seed: 0", "seed: 1"))


def edit_old_candidate(folder: Path) -> None:
    (folder / "pipeline.yaml").write_text(R2.replace("r1-ppo: {round: r1, steps: 3}", "r1-ppo: {}"))


def add_candidate_to_an_old_round(folder: Path) -> None:
    added = PIPELINE.replace("evaluation:", "  r1-dpo: {round: r1, steps: 3}\nevaluation:")
    (folder / "pipeline.yaml").write_text(added)


def remove_a_round(folder: Path) -> None:
    (folder / "pipeline.yaml").write_text(PIPELINE.replace("  r1: {from", "  r3: {from"))


def stage_setting(folder: Path) -> None:
    edit_setting(folder)
    git(folder, "add", "pipeline.yaml")


def stage_and_take_back(folder: Path) -> None:
    stage_setting(folder)
    (folder / "pipeline.yaml").write_text(PIPELINE)


def forget_settings(folder: Path) -> None:
    git(folder, "rm", "-q", "--cached", "pipeline.yaml")
    git(folder, "commit", "-qm", "untracked settings")


def edit_stages(folder: Path) -> None:
    (folder / "dvc.yaml").write_text("stages: {data: {cmd: x}}\n")


def results_of_other_settings(folder: Path) -> None:
    (folder / "dvc.lock").write_text(lock(r1="ff").replace("seed: 0", "seed: 7"))


def lose_results(folder: Path) -> None:
    (folder / "dvc.lock").unlink()


DIRTY = [
    (edit_setting, "pipeline.yaml: uncommitted changes: seed"),
    (edit_old_candidate, "uncommitted changes: candidates.r1-ppo.round"),
    (add_candidate_to_an_old_round, "uncommitted changes: candidates.r1-dpo"),
    (remove_a_round, "uncommitted changes: rounds.r1"),
    (stage_setting, "pipeline.yaml: uncommitted changes: seed"),
    (stage_and_take_back, "pipeline.yaml: what is staged differs"),
    (forget_settings, "pipeline.yaml: no commit holds it"),
    (edit_stages, "dvc.yaml: uncommitted changes"),
    (results_of_other_settings, "dvc.lock: uncommitted results of other settings: promote@r1"),
    (lose_results, "dvc.lock: results of the last commit are missing: promote@r1"),
]


@pytest.mark.parametrize(("change", "words"), DIRTY, ids=lambda item: getattr(item, "__name__", ""))
def test_what_no_commit_holds_is_refused_unless_told(
    project: Path, change: Callable[[Path], None], words: str
) -> None:
    ran(project, r1="aa")
    history.commit_round(project, "r1", "r1")
    change(project)
    assert words in (history.obstacle(project) or "")
    with pytest.raises(BadInput, match="--allow-dirty"):
        history.check(project)
    history.check(project, allow_dirty=True)


@pytest.mark.parametrize("change", [edit_setting, edit_old_candidate, edit_stages])
def test_what_is_edited_during_a_run_is_not_committed_with_it(
    project: Path, change: Callable[[Path], None]
) -> None:
    ran(project, r1="aa")
    history.commit_round(project, "r1", "r1")
    head = git(project, "rev-parse", "HEAD")
    (project / "pipeline.yaml").write_text(R2)
    history.check(project)
    ran(project, r1="aa", r2="bb")
    change(project)
    with pytest.raises(StageFailed, match=r"r2 is done, but not in git(.|\n)*undo the edit"):
        history.commit_round(project, "r2", "r2")
    assert git(project, "rev-parse", "HEAD") == head
    assert git(project, "tag") == "round/r1"
    (project / "pipeline.yaml").write_text(R2)
    (project / "dvc.yaml").write_text("stages: {}\n")
    assert history.commit_round(project, "r2", "r2") is not None


@pytest.mark.parametrize("in_git", [False, True])
@pytest.mark.parametrize("stage", ["policy@r2-ppo", "data"])
def test_no_tag_on_settings_that_the_results_were_not_made_with(
    project: Path, stage: str, in_git: bool
) -> None:
    (project / "pipeline.yaml").write_text(R2)
    ran(project, r2="bb")
    made = (
        f"  {stage}:\n    cmd: x\n    params:\n      pipeline.yaml:\n        candidates.r2-ppo:\n"
        "          round: r2\n          steps: 3\n"
        f"    outs:\n    - path: {'data/tables' if stage == 'data' else 'runs/r2/policies/r2-ppo'}\n"
        "      md5: cc\n"
    )
    with (project / "dvc.lock").open("a") as file:
        file.write(made)
        # No longer declared, its entry still there:
        file.write("  policy@r2-gone:" + made[made.index("\n") :].replace("r2-ppo", "r2-gone"))
    (project / "pipeline.yaml").write_text(R2.replace("round: r2, steps: 3", "round: r2, steps: 4"))
    if in_git:
        git(project, "commit", "-qm", "edited", "pipeline.yaml")
    for allow_dirty in (False, True):
        with pytest.raises(StageFailed, match=f"than pipeline.yaml has: {stage}\n"):
            history.commit_round(project, "r2", "r2", allow_dirty=allow_dirty)
    assert git(project, "tag") == ""
    (project / "pipeline.yaml").write_text(R2)
    assert history.misfit(project, "r2") is None
    if in_git:
        git(project, "commit", "-qm", "back", "pipeline.yaml")
    history.commit_round(project, "r2", "r2")
    assert git(project, "tag") == "round/r2"


def test_what_a_killed_round_leaves_is_its_own(project: Path) -> None:
    ran(project, r1="aa")
    history.commit_round(project, "r1", "r1")
    decided = R2.replace(
        "r1: {from: r0, decision: null}", "r1: {from: r0, decision: {choice: keep}}"
    )
    (project / "pipeline.yaml").write_text(decided + "rollback: {to: r0}\n")
    ran(project, r1="bb", r2="cc")  # promote@r1 ran again after the decision, r2 is half done
    assert history.obstacle(project) is None
    (project / "pipeline.yaml").write_text(decided + "rollback: {to: r0}\nmine: 1\n")
    assert "uncommitted changes: mine" in (history.obstacle(project) or "")


def test_a_round_that_is_no_longer_declared_may_leave_the_lock(project: Path) -> None:
    (project / "pipeline.yaml").write_text(R2)
    ran(project, r1="aa", r2="bb")
    history.commit_round(project, "r2", "r2")
    (project / "pipeline.yaml").write_text(PIPELINE)
    git(project, "commit", "-qam", "without r2")
    (project / "dvc.lock").write_text(lock(r1="aa"))
    assert history.obstacle(project) is None


def merging(folder: Path) -> None:
    git(folder, "switch", "-qc", "side")
    (folder / "code.py").write_text("a = 5\n")
    git(folder, "commit", "-qam", "side")
    git(folder, "switch", "-q", "main")
    git(folder, "merge", "-q", "--no-ff", "--no-commit", "side")


def conflicting(folder: Path, command: str) -> None:
    git(folder, "switch", "-qc", "side")
    (folder / "dvc.yaml").write_text("stages: {a: 1}\n")
    git(folder, "commit", "-qam", "side")
    git(folder, "switch", "-q", "main")
    (folder / "dvc.yaml").write_text("stages: {b: 1}\n")
    git(folder, "commit", "-qam", "main")
    subprocess.run(["git", command, "side"], cwd=folder, capture_output=True, check=False)


def markers(folder: Path) -> None:
    text = "<<<<<<< HEAD\nstages: {}\n=======\nstages: {a: 1}\n>>>>>>> side\n"
    (folder / "dvc.lock").write_text(text)
    git(folder, "add", "dvc.lock")
    git(folder, "commit", "-qm", "by mistake")


def no_name(folder: Path) -> None:
    Path(os.environ["GIT_CONFIG_GLOBAL"]).write_text("[user]\nuseConfigOnly = true\n")


def ignoring(folder: Path) -> None:
    (folder / ".gitignore").write_text("# outputs\n/runs/*/*\n")


def tag_named_round(folder: Path) -> None:
    git(folder, "tag", "round")


WAYS = [
    (tag_named_round, "a tag is named round"),
    (merging, "a merge is in progress"),
    (lambda f: conflicting(f, "merge"), "a merge is in progress"),
    (lambda f: conflicting(f, "rebase"), "a rebase is in progress"),
    (lambda f: conflicting(f, "cherry-pick"), "a cherry-pick is in progress"),
    (markers, "dvc.lock line 1: conflict marker"),
    (lambda f: git(f, "checkout", "-q", "--detach"), "HEAD is detached"),
    (no_name, "git does not know who commits"),
    (ignoring, "runs/r1/metrics/decision.json: git ignores it"),
]


@pytest.mark.parametrize(("change", "words"), WAYS, ids=[words for _, words in WAYS])
def test_a_repository_that_takes_no_commit_is_refused_even_when_dirt_is_allowed(
    project: Path, change: Callable[[Path], None], words: str
) -> None:
    change(project)
    assert words in (history.obstacle(project, allow_dirty=True) or "")
    assert "mend:" in (history.obstacle(project) or "")
    before = git(project, "rev-parse", "HEAD")
    if words.startswith("dvc.lock"):
        return
    ran(project, r1="aa")
    with pytest.raises(StageFailed, match="r1 is done, but not in git"):
        history.commit_round(project, "r1", "r1")
    assert git(project, "rev-parse", "HEAD") == before


def test_the_pattern_that_ignores_is_named(project: Path) -> None:
    ignoring(project)
    assert ".gitignore:2:/runs/*/*" in (history.obstacle(project) or "")


def test_a_repository_of_another_user(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    said = history.obstacle(project) or ""
    assert "belongs to another user" in said
    assert f"safe.directory '{project}'" in said


def test_no_repository_and_a_bare_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = make(tmp_path / "plain")
    assert "not a git repository" in (history.obstacle(folder) or "")
    bare = tmp_path / "bare"
    bare.mkdir()
    git(bare, "init", "-q", "--bare")
    assert "bare repository" in (history.obstacle(bare) or "")


def test_without_git(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(project))
    with pytest.raises(BadInput, match="git is not installed"):
        history.check(project)
