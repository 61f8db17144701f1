"""What a person has open on a fork: a replay they are resolving, or its branch.

It is in `<root>/.forkman/open/<fork>.json`:

    target        where the fork goes; where it stands for a plain edit
    run           the run that ended in the conflict (see `workspace.Run`); null for a plain edit
    rests_on      the two bases and the queue's key; if they change, it is void
    head          the commit the branch has come to
    outcomes      of the steps up to there; if they are as many as the steps, it is finished
    steps         how many there are
    change, files the change in conflict and the files it is in; empty for a plain edit
    remembered    the resolutions git's rerere knew before; `abort` forgets the others
    worktree      where the person works
    ready         whether it holds what they are to work on; false while that is being made
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rebase import worktree
from rebase.carry import Replayable, prepare
from rebase.errors import ForkmanError, NeedsPerson
from rebase.git import ObjectId
from rebase.outcome import Outcome
from rebase.queue import Queue
from rebase.workspace import (
    Run,
    Target,
    Workspace,
    outcome_from,
    outcomes_data,
    run_from,
    target_from,
)


@dataclass(frozen=True)
class Open:
    """What a person has open on a fork."""

    fork: str
    target: Target
    run: Run | None  # what the replay that is resolved lands with; None for editing the branch
    rests_on: tuple[str, ...]
    head: ObjectId
    outcomes: tuple[Outcome, ...]
    worktree: Path
    steps: int
    remembered: tuple[str, ...] = ()
    change: str = ""
    files: tuple[str, ...] = ()
    ready: bool = False

    @property
    def resolved(self) -> bool:
        """Whether nothing is in conflict any more, and it only waits to land."""
        return self.run is not None and len(self.outcomes) == self.steps


def read(ws: Workspace, fork: str) -> Open | None:
    """What is open on a fork, None where nothing is."""
    path = ws.state / "open" / f"{fork}.json"
    try:
        data = json.loads(path.read_bytes())
        return Open(
            fork,
            target_from(data["target"]),
            run_from(data["run"]) if data["run"] else None,
            tuple(data["rests_on"]),
            data["head"],
            tuple(outcome_from(each) for each in data["outcomes"]),
            Path(data["worktree"]),
            data["steps"],
            tuple(data["remembered"]),
            data["change"],
            tuple(data["files"]),
            data["ready"],
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise NeedsPerson(
            f"{fork}: {path}, which says what is open on it, cannot be read: {error!r}.",
            kept="The worktree and what is in it are as they were.",
            todo=f"Take what you need from {ws.state / 'worktrees' / fork}, then remove {path}.",
        ) from None


def write(ws: Workspace, state: Open) -> None:
    """Keep what is open, whole or not at all."""
    ws.write_state(
        "open",
        state.fork,
        {
            "target": asdict(state.target),
            "run": state.run and asdict(state.run),
            "rests_on": state.rests_on,
            "head": state.head,
            "outcomes": outcomes_data(state.outcomes),
            "worktree": str(state.worktree),
            "steps": state.steps,
            "remembered": state.remembered,
            "change": state.change,
            "files": state.files,
            "ready": state.ready,
        },
    )


def refuse_open(ws: Workspace, forks: Sequence[str], *, but_resolved: bool = False) -> None:
    """Raise NeedsPerson where somebody has one of the forks open.

    but_resolved: let those pass whose replay is resolved to its end, and only waits to land.
    """
    for fork in forks:
        if not (state := read(ws, fork)):
            continue
        target = state.target
        if state.run and ws.stand(fork, target.new.source) == target.new:
            close(ws, fork)  # it landed, in a run that was killed right after that
            continue
        then = f"forkman continue {fork}, or forkman abort {fork}"
        if not state.run:
            what = f"{fork}: its branch is open for editing in {state.worktree}."
            then = f"forkman save {fork}, or forkman abort {fork}"
        elif finished(ws, target):
            if but_resolved:
                continue
            what = f"{fork}: its replay onto {target.new.pin} is resolved and waits to land."
        else:
            what = (
                f"{fork}: its replay onto {target.new.pin} is open in {state.worktree}"
                f" ({len(state.outcomes)} changes done)."
            )
            then = f"forkman continue {fork}, forkman skip {fork}, or forkman abort {fork}"
        raise NeedsPerson(what, todo=f"Go on with it: {then}.")


def finished(ws: Workspace, target: Target) -> tuple[Outcome, ...] | None:
    """The outcomes of a replay onto `target` that a person resolved to its end."""
    state = read(ws, target.fork)
    if not state or not state.run or state.target.new != target.new:
        return None
    with suppress(ForkmanError):
        made = prepare(ws, target)
        if state.rests_on == rests_on(made) and len(state.outcomes) == len(made.steps):
            return state.outcomes
    return None


def rests_on(made: Replayable) -> tuple[str, ...]:
    key = made.queue.key() if isinstance(made.queue, Queue) else made.queue
    return (made.old, made.new, key)


def close(ws: Workspace, fork: str) -> None:
    """Remove the worktree of a fork and the note that it is open."""
    if state := read(ws, fork):
        for source in ("git", "archives"):
            mirror = ws.mirror(fork, source)
            if mirror.is_dir():
                worktree.remove(mirror, state.worktree)
        ws.write_state("open", fork, None)
