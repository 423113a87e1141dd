"""One round's run of a checkout: settings, lock, plan, and what watches over the stages.

No Prefect here.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from flows import history
from flows.definitions import DEVICE_STAGES
from flows.display import Display
from flows.plan import Stage, check_workspace, make_plan
from flows.runner import Runner, devices, workspace_lock
from rlhf import champion, config, tracking
from rlhf.config import Pipeline
from rlhf.errors import BadInput, StageFailed
from rlhf.optimise.imported import check_imported

Commit = Literal["always", "able", "never"]


@dataclass(frozen=True)
class Request:
    """What a caller wants of a round. `python -m flows run --help` says what each field means."""

    round: str | None = None
    overrides: Mapping[str, Any] | str | None = None
    template: str | None = None
    allow_dirty: bool = False
    commit: Commit = "always"
    stage: str | None = None
    force: bool = False


class LoopStopped(BadInput):
    """The gate, or a person, stopped the loop: no round follows until a person decides."""


@dataclass
class Session:
    """What the flow works with."""

    folder: Path
    pipeline: Pipeline
    request: Request
    round: str
    target: str
    stages: dict[str, Stage]
    runner: Runner
    display: Display
    not_committed: str | None = None
    """Why no round of this run will be committed."""
    rounds: list[str] = field(init=False)
    """The rounds that this run brings to their decision: the one asked for, and those before it that were not."""
    _commits: dict[str, str] = field(default_factory=dict)
    """What became of each round's commit, in words."""
    _refused: list[str] = field(default_factory=list)
    """The rounds that git, or what it holds, kept from being committed."""
    _forwarding: ExitStack | None = None

    def __post_init__(self) -> None:
        before = [
            name.removeprefix("promote@")
            for name, stage in self.stages.items()
            if name.startswith("promote@") and stage.runs and name != self.target
        ]
        self.rounds = [*before, self.round]

    def parts(self) -> Iterator[tuple[str, list[Stage]]]:
        """The run's rounds in order, each with the stages that bring it to its decision."""
        taken: set[str] = set()
        for name in list(self.rounds):
            last = f"promote@{name}"
            wanted = {last, *_ancestors(self.stages, last)} - taken
            yield name, [stage for stage in self.stages.values() if stage.name in wanted]
            taken |= wanted

    def end_at(self, name: str) -> None:
        """Bring no round after this one to its decision: it needs a person's first."""
        self.display.say(f"{self.round} is not started: a person decides {name} first")
        self.rounds = self.rounds[: self.rounds.index(name) + 1]
        self.round, self.target = name, f"promote@{name}"
        wanted = {self.target, *_ancestors(self.stages, self.target)}
        self.stages = {key: stage for key, stage in self.stages.items() if key in wanted}

    def start_ahead(self) -> None:
        """Run the first stages, up to a gate, while Prefect's server still starts.

        The flow's tasks then take them up. Only where there is no choice to make: one stage at a
        time, no GPU to share.
        """
        if self.pipeline.resources.gpus:
            return
        finished = {name for name, stage in self.stages.items() if not stage.runs}
        chain: list[str] = []
        while True:
            ready = [
                name
                for name, stage in self.stages.items()
                if name not in finished and finished.issuperset(stage.after)
            ]
            if len(ready) != 1 or (chain and chain[-1].startswith("promote@")):
                break
            chain += ready
            finished.update(ready)

        def work() -> None:
            for name in chain:
                outcome = self.runner.run(name)
                if outcome is None or not outcome.ok:
                    return

        threading.Thread(target=work, name="ahead", daemon=True).start()

    @property
    def anything_to_run(self) -> bool:
        """Whether any stage is out of date."""
        return any(stage.runs for stage in self.stages.values())

    @property
    def status(self) -> champion.Status:
        """What the round came to so far."""
        return champion.status(self.folder, self.round)

    @property
    def committed(self) -> str:
        """What became of the round's commit, in words."""
        return self._commits.get(self.round, "")

    def uses_a_device(self, stage: str) -> bool:
        """Whether a stage takes a GPU slot."""
        return self.pipeline.resources.gpus > 0 and stage.split("@")[0] in DEVICE_STAGES

    def plan_again(self) -> None:
        """Look anew at what is out of date, after pipeline.yaml has changed."""
        self.pipeline = config.load(self.folder / "pipeline.yaml")
        self.stages = {stage.name: stage for stage in make_plan(self.target, self.folder)}
        self.runner.forget(name for name, stage in self.stages.items() if stage.runs)

    def forward(self) -> None:
        """Send what stages measure to MLflow from now on."""
        if self.anything_to_run and self._forwarding is None:
            self._forwarding = ExitStack()
            self._forwarding.enter_context(tracking.forwarding(self.folder))

    def forwarded(self) -> None:
        """Return when MLflow has everything written so far."""
        if self._forwarding is not None:
            self._forwarding.close()
            self._forwarding = None

    def conclude(self, name: str | None = None) -> None:
        """Record what is decided, commit and tag it, show it beside the other rounds; does nothing that is done.

        Args:
            name: a decided round of this run, before a stage of the next one starts; None: the one asked for.
        """
        from flows import lineage, overview

        name = name or self.round
        if self.anything_to_run:
            order_lock(self.folder)
        lineage.write_record(self.folder, name)
        self._commit(name)
        if name != self.round and name in self._commits:
            self.display.say(self._commits[name])
        overview.log(self.pipeline, self.folder)

    def _commit(self, name: str) -> None:
        from flows.report import verdict

        if self.not_committed is not None:
            self._commits[name] = f"{name} is not committed: {self.not_committed}"
            return
        decision = champion.read_decision(self.folder, name) or {}
        message, allow_dirty = f"Round {name}: {verdict(decision)}", self.request.allow_dirty
        try:
            self._check_order(name)
            commit = history.commit_round(self.folder, name, message, allow_dirty=allow_dirty)
        except StageFailed as error:
            self._refused.append(name)
            if self.request.commit != "able":
                raise
            self._commits[name] = str(error)
            return
        if commit:
            self._commits[name] = f"committed as {commit[:10]}, tag {history.tag(name)}"

    def _check_order(self, name: str) -> None:
        """A round's commit would take along what one before it, that git refused, has left."""
        before = [other for other in self._refused if other != name]
        if before:
            raise StageFailed(f"{name} is done, but not in git: {before[0]} is committed first")


def conclude_left(pipeline: Pipeline, folder: Path, *, allow_dirty: bool = False) -> Iterator[str]:
    """Record, commit and tag the decided rounds that are not in git yet, in order; yields what was done."""
    from flows import lineage
    from flows.report import verdict

    decided = [name for name in pipeline.rounds if _is_decided(pipeline, folder, name)]
    for name in history.never_committed(folder, decided):
        if not _is_recorded(folder, name):
            continue
        problem = history.misfit(folder, name)
        if problem is not None:
            yield f"{name} is decided, but not in git: {problem}"
            continue
        lineage.write_record(folder, name)
        decision = champion.read_decision(folder, name) or {}
        message = f"Round {name}: {verdict(decision)}"
        commit = history.commit_round(folder, name, message, allow_dirty=allow_dirty)
        committed = f"committed as {commit[:10]}, " if commit else ""
        yield f"{name} was decided earlier and is in git now: {committed}tag {history.tag(name)}"


def _is_decided(pipeline: Pipeline, folder: Path, name: str) -> bool:
    """Whether a round is decided by the word that stands now."""
    from flows.rounds import is_decided_anew

    status = champion.status(folder, name)
    return status not in ("unrun", "awaiting") and not is_decided_anew(pipeline, folder, name)


def _is_recorded(folder: Path, name: str) -> bool:
    """Whether a round's policy is here and dvc.lock has its decision as it is here."""
    path = f"runs/{name}/metrics/decision.json"
    known = history.outputs_now(folder, name).get(f"promote@{name}", {}).get(path)
    found = hashlib.md5((folder / path).read_bytes(), usedforsecurity=False).hexdigest()
    return known == found and (folder / f"runs/{name}/promoted").is_dir()


def order_lock(folder: Path) -> None:
    """Put the entries of dvc.lock in the order of a serial `dvc repro`.

    DVC adds a stage's entry when the stage ends, and side by side that order is chance.
    """
    import networkx
    from dvc.repo import Repo
    from dvc.utils.serialize import load_yaml, modify_yaml

    from flows.dvcrun import write_whole

    write_whole()
    with Repo(str(folder)) as repo, repo.lock:
        serial = [stage.addressing for stage in networkx.dfs_postorder_nodes(repo.index.graph)]
        path = str(folder / "dvc.lock")
        found = list(load_yaml(path)["stages"])
        known = [name for name in serial if name in set(found)]
        ordered = [name for name in found if name not in set(serial)] + known
        if ordered == found:
            return
        with modify_yaml(path) as lock:
            for name in ordered:
                lock["stages"].move_to_end(name)


_opened: list[Session] = []


def current_session() -> Session:
    """The session that this process has open."""
    return _opened[-1]


@contextmanager
def open_session(
    request: Request | None = None,
    folder: str | Path = ".",
    *,
    continues: str | None = None,
    wait: float = 0.0,
) -> Iterator[Session]:
    """Check, lock, append the round if it is new, plan; on leaving, end what still runs.

    A session that this process has already opened is taken up again.

    Args:
        request: what is wanted.
        folder: the project's folder.
        continues: the round that an earlier process of the same run has begun.
        wait: seconds to wait for another flow that holds the checkout.
    """
    if _opened:
        yield _opened[-1]
        return
    request = request or Request()
    folder = Path(folder).resolve()
    check_workspace(folder)
    _check_request(request)
    path = folder / "pipeline.yaml"
    history.refuse_unfinished_merge(folder)
    _load(path)
    with ExitStack() as stack:
        display = stack.enter_context(Display())
        stack.enter_context(workspace_lock(folder, wait=wait, on_wait=display.say))
        history.refuse_unfinished_merge(folder)
        declared = _load(path)  # as the holder before us has left it
        not_committed = _check_history(declared, request, folder)
        _check_remote(declared, folder)
        if not_committed is None:
            for line in conclude_left(declared, folder, allow_dirty=request.allow_dirty):
                display.say(line)
        if request.stage is not None:
            name, target = _round_of(declared, request.stage), request.stage
            _check_stage(target, folder)
        else:
            name = _choose(path, declared, request, continues)
            target = f"promote@{name}"
        pipeline = config.load(path)
        stages = {stage.name: stage for stage in make_plan(target, folder)}
        runner = Runner(
            folder,
            parallel=pipeline.resources.parallel,
            gpus=pipeline.resources.gpus,
            timeout=float(os.environ.get("ROUNDHOUSE_STAGE_TIMEOUT", 24 * 3600)),
            push=pipeline.lineage.push,
            on_begin=lambda name: display.begin(name, runner.progress_path(name)),
            on_end=lambda name, ok: display.end(name, ok=ok),
            on_note=lambda name, words: display.say(f"{name:<26} {words}"),
        )
        stack.callback(runner.end_all)
        session = Session(
            folder, pipeline, request, name, target, stages, runner, display, not_committed
        )
        stack.callback(session.forwarded)
        _opened.append(session)
        stack.callback(_opened.remove, session)
        yield session


def _load(path: Path) -> Pipeline:
    declared = config.load(path)
    config.check_files(declared, path.parent)
    check_imported(declared)
    devices(declared.resources.gpus)
    return declared


def _check_request(request: Request) -> None:
    for name in ("round", "template", "stage"):
        _check_type(name, getattr(request, name), (str,), "text like r3, in quotes", optional=True)
    for name in ("allow_dirty", "force"):
        _check_type(name, getattr(request, name), (bool,), "true or false")
    example = '{"candidates.ppo.kl.coef": 0.02}'
    _check_type("overrides", request.overrides, (str, Mapping), example, optional=True)
    if request.commit not in get_args(Commit):
        raise BadInput(
            f"commit={request.commit}", rule="one of " + ", ".join(get_args(Commit)), mend="always"
        )


def _check_type(
    name: str, value: Any, kinds: tuple[type, ...], example: str, *, optional: bool = False
) -> None:
    if isinstance(value, kinds) or (optional and value is None):
        return
    words = {str: "text", bool: "a boolean", Mapping: "a mapping"}
    rule = " or ".join(words[kind] for kind in kinds) + (" or nothing" if optional else "")
    raise BadInput(
        f"{name}={value!r} is of type {type(value).__name__}", rule=rule, mend=f"write {example}"
    )


def _check_history(pipeline: Pipeline, request: Request, folder: Path) -> str | None:
    """Why the round will not be committed; BadInput if it is to be, and git is not ready for it."""
    if request.stage is not None:
        return "a stage by itself is no round"
    if not pipeline.lineage.commit:
        return "lineage.commit is false in pipeline.yaml"
    if request.commit == "never":
        return "committing was turned off for this run"
    if request.commit == "able":
        return history.obstacle(folder, allow_dirty=request.allow_dirty)
    history.check(folder, allow_dirty=request.allow_dirty)
    return None


def _check_remote(pipeline: Pipeline, folder: Path) -> None:
    """A push after every stage needs somewhere to push to."""
    if not pipeline.lineage.push:
        return
    from dvc.config import Config

    if not Config(str(folder / ".dvc"), validate=False)["core"].get("remote"):
        raise BadInput(
            "lineage.push is true, and DVC has no default remote",
            where="pipeline.yaml",
            rule="every finished stage is pushed",
            mend="dvc remote add --default NAME URL, or lineage.push: false",
        )


def _choose(path: Path, pipeline: Pipeline, request: Request, continues: str | None) -> str:
    """The round to run, appended if it is new. Under the lock, so that two flows never choose the same next round."""
    from flows import rounds

    folder = path.parent
    name = continues or request.round
    is_new = name is None or (
        name not in pipeline.rounds and config.ROUND_NAME.fullmatch(name) is not None
    )
    holder = None
    if is_new or name in pipeline.rounds:
        holder = rounds.awaited(pipeline, folder, None if is_new else name)
    if holder is not None:
        if name is not None or champion.status(folder, holder) != "awaiting":
            raise _refusal(folder, holder)
        name = holder
    elif is_new:
        following, absent = rounds.next_round(pipeline, folder)
        if name is not None and not absent:
            raise BadInput(
                f"{name} is not declared, and {following} is not decided yet",
                where=str(path),
                rule="a round is appended after one that is decided",
                mend=f"python -m flows run --round {following}",
            )
        name = name or following
    assert name is not None
    overrides = rounds.parse_overrides(request.overrides) if request.overrides else None
    if name not in pipeline.rounds or overrides or request.template:
        rounds.append_round(path, name, template=request.template, overrides=overrides)
    return name


def _refusal(folder: Path, holder: str) -> BadInput:
    """That a round waits for this one's decision; of a stopped one, in the kind that ends a tick well."""
    from flows import rounds

    error = rounds.undecided(folder, holder)
    return error if champion.status(folder, holder) == "awaiting" else LoopStopped(str(error))


def _round_of(pipeline: Pipeline, stage: str) -> str:
    """The round that a stage belongs to; the first one for those before all rounds."""
    key = stage.partition("@")[2]
    if key in pipeline.candidates:
        return pipeline.candidates[key].round
    return key if key in pipeline.rounds else next(iter(pipeline.rounds))


def _check_stage(name: str, folder: Path) -> None:
    """A stage by itself: it exists, and what it reads is up to date."""
    from difflib import get_close_matches

    plan = {stage.name: stage for stage in make_plan(None, folder)}
    if name not in plan:
        near = get_close_matches(name, plan, n=3, cutoff=0.5)
        raise BadInput(
            f"no stage {name}",
            where="dvc.yaml",
            rule="a stage is named like data, reward_model@r1 or policy@r1-ppo",
            mend="use " + (", ".join(near) if near else ", ".join(plan)),
        )
    stale = [before for before in _ancestors(plan, name) if plan[before].runs]
    if stale:
        raise BadInput(
            f"{', '.join(stale)} would run before {name}",
            where="dvc.yaml",
            rule="a stage by itself reads what is up to date",
            mend=f"run the round (python -m flows run), or dvc repro {name}",
        )


def _ancestors(plan: Mapping[str, Stage], name: str) -> list[str]:
    wanted: set[str] = set()
    left = list(plan[name].after)
    while left:
        before = left.pop()
        if before not in wanted:
            wanted.add(before)
            left += plan[before].after
    return [stage for stage in plan if stage in wanted]
