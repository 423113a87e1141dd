"""The Prefect flows: one round, and one stage. The order comes from DVC's graph.

Whether a stage is up to date is DVC's word.

Each stage that DVC would run becomes a Prefect task around one child process, `dvc repro
--single-item`. Nothing is rolled back when one fails: what runs is finished, nothing more starts,
and the next run goes on from there.
"""

from __future__ import annotations

import logging
import os
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flows import environment

environment.prepare()

from prefect import flow, suspend_flow_run, task  # noqa: E402
from prefect.artifacts import create_markdown_artifact  # noqa: E402
from prefect.cache_policies import NO_CACHE  # noqa: E402
from prefect.exceptions import FailedRun  # noqa: E402
from prefect.input import RunInput  # noqa: E402
from prefect.logging.handlers import APILogWorker  # noqa: E402
from prefect.runtime import deployment, flow_run  # noqa: E402
from prefect.states import Cancelled, Completed, Failed, State  # noqa: E402
from prefect.task_runners import ThreadPoolTaskRunner  # noqa: E402
from pydantic import Field  # noqa: E402

from flows import deployments, report  # noqa: E402
from flows.session import (  # noqa: E402
    Commit,
    LoopStopped,
    Request,
    Session,
    current_session,
    open_session,
)
from rlhf import champion, lifeline, tracking  # noqa: E402
from rlhf.errors import BadInput, StageFailed  # noqa: E402

if TYPE_CHECKING:
    from flows.plan import Stage

_SECONDS_FOR_ANOTHER_FLOW = 3600.0


class _StateMessage(logging.Filter):
    """Prefect logs a flow that returns a failed state as an exception of its own; the state's message is enough."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, FailedRun):
            record.msg, record.args, record.exc_info = str(error), (), None
        return True


logging.getLogger("prefect.flow_runs").addFilter(_StateMessage())


class Decision(RunInput):
    """The form that a person fills in on the page of a suspended run."""

    choice: Literal["promote", "keep", "stop"] = Field(
        description="promote a candidate; keep the incoming policy; stop: keep it and start no further round"
    )
    candidate: str | None = Field(default=None, description="With promote: like r3-ppo.")
    comment: str = Field(min_length=1, description="Why. It goes to git, MLflow and the report.")
    by: str | None = Field(
        default=None, description="Who decides. Empty: user.name of the worker's git."
    )


@task(name="stage", task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
def run_stage(name: str) -> State[Any]:
    """Bring one stage up to date."""
    session = current_session()
    stage = session.stages[name]
    force = session.request.force and name == session.target
    if not stage.runs and not force:
        return Completed(message="up to date")
    if session.runner.halted:
        return Cancelled(message="not started: another stage failed")
    outcome = session.runner.run(name, gpu=session.uses_a_device(name), force=force)
    if outcome is None:
        return Cancelled(message="not started: another stage failed")
    if not outcome.ok:
        return Failed(message=outcome.message)
    return Completed(message=f"{outcome.seconds:.1f} s")


def _round_name() -> str:
    """Until the flow has chosen the round itself."""
    return f"round-{flow_run.parameters.get('round') or 'next'}"


@flow(
    name="rlhf-round",
    flow_run_name=_round_name,
    task_runner=ThreadPoolTaskRunner(max_workers=64),  # type: ignore[arg-type]
    persist_result=False,
    validate_parameters=False,
)
def rlhf_round(
    round: str | None = None,
    overrides: dict[str, Any] | str | None = None,
    template: str | None = None,
    allow_dirty: bool = False,
    commit: Commit = "always",
) -> State[Any]:
    """Run one round to its decision; what is finished of it is kept from earlier runs.

    Args:
        round: Like r3; appended to pipeline.yaml if it is not there. Empty: the last round if it is
            unfinished, else the next one.
        overrides: Settings of a round that is appended, like {"candidates.ppo.kl.coef": 0.02}.
        template: The round that an appended one is made from. Empty: the last one.
        allow_dirty: Run though pipeline.yaml, dvc.yaml or dvc.lock have changes that are not committed.
        commit: Commit the decided round to git: always (refuse to start if that is not possible), able (if it is
            possible), never.
    """
    return _report_problems(Request(round, overrides, template, allow_dirty, commit))


@flow(
    name="rlhf-stage",
    flow_run_name="{stage}",
    persist_result=False,
    validate_parameters=False,
)
def rlhf_stage(stage: str, force: bool = False) -> State[Any]:
    """Run one stage by itself, if it is out of date.

    Args:
        stage: Like policy@r1-ppo.
        force: Run it though it is up to date.
    """
    return _report_problems(Request(stage=stage, force=force))


def send_logs() -> None:
    """Let Prefect's server have every line before it is ended."""
    APILogWorker.drain_all(timeout=5)


def _report_problems(request: Request) -> State[Any]:
    """The flow's body; what the program has words for becomes the state's message, without a traceback."""
    run, folder = str(flow_run.id or ""), Path.cwd()
    deployed = bool(deployment.id)
    if deployed and os.environ.get("PREFECT__FLOW_RUN_ID"):
        lifeline.watch([lifeline.ident(os.getppid())])  # a flow ends with its worker
    before = deployments.round_of_run(folder, run)
    try:
        deployments.note_run(folder, run, before)
        wait = _SECONDS_FOR_ANOTHER_FLOW if deployed else 0.0
        with open_session(request, folder, continues=before, wait=wait) as session:
            deployments.note_run(folder, run, session.round)
            _tell_name(request, session, run)
            state = _with_stages_ended(session, run, resumed=before is not None)
    except LoopStopped as error:
        state = Completed(message=str(error))
    except (BadInput, StageFailed) as error:
        state = Failed(message=str(error))
    deployments.forget_run(folder, run)
    return state


def _with_stages_ended(session: Session, run: str, resumed: bool) -> State[Any]:
    """Run; whatever happens on the way, no stage stays behind."""
    session.runner.flow_run_id = run
    try:
        if session.request.stage is not None:
            return _run_one(session)
        return _run_round(session, resumed)
    except BaseException:
        session.runner.end_all()
        raise


def _run_round(session: Session, resumed: bool) -> State[Any]:
    waited_already = not resumed and not session.anything_to_run
    failure = _run_rounds(session)
    if failure is not None:
        return failure
    if session.status == "awaiting":
        if not deployment.id or (waited_already and _another_asks(session)):
            return Completed(message=f"{session.round} awaits a person's decision")
        _publish(session)
        _ask(session)
        session.plan_again()
        failure = _run_stages(session, session.round, list(session.stages.values()))
        if failure is not None:
            return failure
        session.conclude()
    verdict = _publish(session)
    return Completed(message="\n".join(filter(None, [verdict, session.committed])))


def _run_one(session: Session) -> State[Any]:
    stage = session.stages[session.target]
    if not stage.runs and not session.request.force:
        return Completed(message=f"{stage.name} is up to date")
    failure = _run_stages(session, session.round, [stage])
    return failure or Completed(message=f"{stage.name} is done")


def _run_rounds(session: Session) -> State[Any] | None:
    """Bring the session's rounds to their decisions, up to the first that needs a person's; the failure, if any.

    Each is concluded before a stage of the next one starts. One that git does not take stays done, the next
    ones run all the same, and the run fails at its end.
    """
    from flows import rounds

    refusals: list[str] = []
    for name, plan in session.parts():
        holder = rounds.awaited(session.pipeline, session.folder, name)
        if holder is not None:
            session.end_at(holder)
            deployments.note_run(session.folder, str(flow_run.id or ""), holder)
            break
        failure = _run_stages(session, name, plan)
        if failure is not None:
            return Failed(message="\n".join(filter(None, [failure.message, *refusals])))
        if champion.status(session.folder, name) == "awaiting":
            continue
        try:
            session.conclude(name)
        except (BadInput, StageFailed) as error:
            refusals.append(str(error))
    return Failed(message="\n".join(refusals)) if refusals else None


def _run_stages(session: Session, name: str, plan: list[Stage]) -> State[Any] | None:
    """Submit every stage behind those it depends on, and wait for all; the failure, if there was one."""
    session.forward()
    futures: dict[str, Any] = {}
    for stage in plan:
        before = [futures[name] for name in stage.after if name in futures]
        named = run_stage.with_options(name=stage.name)  # what its page shows while it waits
        futures[stage.name] = named.submit(stage.name, wait_for=before)  # type: ignore[call-overload]
    for future in futures.values():
        future.wait()
    failures = session.runner.failures
    if failures:
        return Failed(message="\n".join(outcome.message for outcome in failures))
    if session.anything_to_run:
        tracking.tag_outputs(session.pipeline, name, session.folder)
    return None


def _publish(session: Session) -> str:
    """Write the round's artifact, with links to what MLflow then has; returns the verdict."""
    session.forwarded()
    verdict = report.verdict(report.read_decision(session.round, session.folder))
    create_markdown_artifact(
        key=f"{session.round.replace('_', '-')}-report",
        markdown=report.markdown(session.pipeline, session.round, session.folder),
        description=verdict,
    )
    return verdict


# --- a person's word ---


def _another_asks(session: Session) -> bool:
    """Whether another run is suspended for the same question already."""
    return bool(deployments.suspended_runs(os.environ["PREFECT_API_URL"], session.round))


def _ask(session: Session) -> None:
    """Write a person's decision to pipeline.yaml.

    The first time this suspends the run, and its process ends. When the run is resumed, the flow's body runs
    again, comes here again, and now has the answer. An answer that cannot be is asked for again, with the reason.
    """
    from flows import decisions

    problem = ""
    for attempt in count(1):
        form = Decision.with_initial_data(description=_question(session, problem))
        answer = suspend_flow_run(wait_for_input=form, key=f"{session.round}-{attempt}")
        try:
            decisions.decide(
                session.folder,
                session.round,
                answer.choice,
                because=answer.comment.strip(),
                by=(answer.by or "").strip() or None,
                candidate=(answer.candidate or "").strip() or None,
            )
        except BadInput as error:
            problem = str(error)
        else:
            return


def _question(session: Session, problem: str) -> str:
    complaint = f"**The last answer could not be taken.** {problem}\n\n" if problem else ""
    table = report.markdown(session.pipeline, session.round, session.folder)
    return f"{complaint}{table}\n\nPromote which candidate, keep the incoming policy, or stop the loop?"


def _tell_name(request: Request, session: Session, run: str) -> None:
    """A run for which the flow chose the round is named after it."""
    if request.round is None and request.stage is None and os.environ.get("PREFECT_API_URL"):
        body = {"name": f"round-{session.round}"}
        deployments.ask(os.environ["PREFECT_API_URL"], f"/flow_runs/{run}", body, method="PATCH")
