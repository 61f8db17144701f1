"""A person at work on a fork's branch: resolving a replay's conflicts, or editing the branch.

`edit` opens a worktree: where the last replay of the fork ended in conflicts, at the first of them;
otherwise on the branch as it is. `continue` and `skip` take the replay from conflict to conflict;
when the last one is resolved, everything the replay was to land with lands. `save` turns the
commits of an edited branch back into the queue. `abort` forgets it all.

What is open is in `<root>/.forkman/open/<fork>.json`:

    last          the replay that is being resolved (see `workspace.Last`); null for a plain edit
    queue, onto   what it rests on: the queue's key and the two bases; if they change, it is void
    head          the commit the branch has come to
    outcomes      of the steps up to there; if they are as many as the steps, it is finished
    worktree      where the person works
"""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rebase import branch, landing, patch, worktree
from rebase.errors import ForkmanError, NeedsPerson, UsageError
from rebase.git import Git, ObjectId
from rebase.mail import Mail
from rebase.manifest import QueueFolder
from rebase.outcome import Outcome, Report, Status
from rebase.queue import Queue, from_commits
from rebase.replay import Edit, Step, Upstreamed, replay
from rebase.sync import Progress, Replayable, move, prepare
from rebase.workspace import (
    Target,
    Workspace,
    outcome_from,
    outcomes_data,
    target_from,
)


@dataclass(frozen=True)
class Open:
    """What a person has open on a fork."""

    fork: str
    target: Target
    rests_on: tuple[str, ...]
    head: ObjectId
    outcomes: tuple[Outcome, ...]
    worktree: Path
    conflict: bool  # resolving a replay; otherwise editing the branch


def read(ws: Workspace, fork: str) -> Open | None:
    """What is open on a fork, None where nothing is."""
    data = ws.read_state("open", fork)
    return data and Open(
        fork,
        target_from(data["target"]),
        tuple(data["rests_on"]),
        data["head"],
        tuple(outcome_from(each) for each in data["outcomes"]),
        Path(data["worktree"]),
        data["conflict"],
    )


def _write(ws: Workspace, state: Open) -> None:
    ws.write_state(
        "open",
        state.fork,
        {
            "target": asdict(state.target),
            "rests_on": state.rests_on,
            "head": state.head,
            "outcomes": outcomes_data(state.outcomes),
            "worktree": str(state.worktree),
            "conflict": state.conflict,
        },
    )


def refuse_open(ws: Workspace, forks: Sequence[str]) -> None:
    """Raise NeedsPerson where somebody has one of the forks open."""
    for fork in forks:
        if state := read(ws, fork):
            if state.conflict and finished(ws, state.target):
                continue
            what = (
                f"{fork}: its replay onto {state.target.new.pin} is open in {state.worktree}"
                f" ({len(state.outcomes)} changes done)."
                if state.conflict
                else f"{fork}: its branch is open for editing in {state.worktree}."
            )
            on = (
                f"forkman continue {fork}, skip or abort"
                if state.conflict
                else (f"forkman save {fork}, or forkman abort {fork}")
            )
            raise NeedsPerson(what, todo=f"Go on there: {on}.")


def finished(ws: Workspace, target: Target) -> tuple[Outcome, ...] | None:
    """The outcomes of a replay onto `target` that a person resolved to its end."""
    state = read(ws, target.fork)
    if not state or not state.conflict or state.target.new != target.new:
        return None
    with suppress(ForkmanError):
        made = prepare(ws, target)
        if state.rests_on == _rests_on(made) and len(state.outcomes) == len(made.steps):
            return state.outcomes
    return None


def _rests_on(made: Replayable) -> tuple[str, ...]:
    key = made.queue.key() if made.queue else ""
    return (made.old, made.new, key)


# -- opening -------------------------------------------------------------------------------------


def edit(ws: Workspace, fork: str) -> Open:
    """Open the fork: at the first conflict of its last replay, or else its branch as it is."""
    ws.manifest(fork)
    with ws.lock():
        refuse_open(ws, [fork])
        path = ws.state / "worktrees" / fork
        last = ws.last(fork)
        if last and last.conflicts:
            made = prepare(ws, last.target)
            state = Open(fork, last.target, _rests_on(made), made.new, (), path, True)
            state = _advance(ws, state, made)
            if len(state.outcomes) < len(made.steps):
                return state
            close(ws, fork)  # what was in conflict then is not any more
        stand = ws.stand(fork, "git" if ws.mirror(fork, "git").is_dir() else "archives")
        target = Target(fork, stand, stand, "stays")
        made = prepare(ws, target)
        tip = branch.chain(made.objects, made.new, made.steps)
        made.objects.flush()
        worktree.add(made.objects.git.directory, path, tip)
        state = Open(fork, target, _rests_on(made), tip, (), path, False)
        _write(ws, state)
        return state


def _advance(ws: Workspace, state: Open, made: Replayable) -> Open:
    """Replay on from where `state` is, to the next conflict or to the end."""
    objects = made.objects
    outcomes, head = list(state.outcomes), state.head
    left = made.steps[len(outcomes) :]
    for outcome in replay(objects, left, head, made.history, worktree.Memory(objects)):
        if outcome.status is Status.CONFLICT:
            break
        outcomes.append(outcome)
        head = outcome.commit or head
    else:
        objects.flush()
        worktree.remove(objects.git.directory, state.worktree)
        state = replace(state, head=head, outcomes=tuple(outcomes))
        _write(ws, state)
        return state
    objects.flush()
    step = made.steps[len(outcomes)]
    if not isinstance(step.does, Edit):
        raise NeedsPerson(
            f"{state.fork}: the recipe {step.name} finds nothing to edit: "
            + "; ".join(conflict.detail for conflict in outcome.conflicts),
            todo=f"Correct the recipe (forks/{state.fork}/{step.name}), then sync again.",
        )
    worktree.remove(objects.git.directory, state.worktree)
    worktree.add(objects.git.directory, state.worktree, head)
    state = replace(state, head=head, outcomes=tuple(outcomes))
    _write(ws, state)
    wanted, _, _ = Upstreamed(objects, made.history).without(step.does, objects.tree_of(head))
    worktree.bring_conflict(objects, state.worktree, step, Edit(step.does.before, wanted))
    return state


# -- going on ------------------------------------------------------------------------------------


def go_on(
    ws: Workspace, fork: str, *, skip: bool = False, progress: Progress | None = None
) -> Open | Report:
    """Take the resolution from the worktree (or skip the change) and go on to the next conflict.

    Returns what is open now, or the report of the landing once nothing is in conflict any more.
    """
    ws.manifest(fork)
    with ws.lock():
        state = read(ws, fork)
        if not state or not state.conflict:
            raise UsageError(
                f"{fork}: no replay is open.",
                todo=f"After a sync that ended in a conflict, open it: forkman edit {fork}",
            )
        made = prepare(ws, state.target)
        if state.rests_on != _rests_on(made):
            raise NeedsPerson(
                f"{fork}: its queue or its pin changed since this replay was opened.",
                todo=f"Start again: forkman abort {fork}, then forkman sync",
            )
        if len(state.outcomes) < len(made.steps):
            step = made.steps[len(state.outcomes)]
            state = _advance(ws, _taken(made, state, step, skip), made)
        if len(state.outcomes) < len(made.steps):
            return state
        last = ws.last(fork)
        if not last:
            raise UsageError(
                f"{fork}: what this replay was to land with is not known any more.",
                todo="Run forkman sync: it takes the resolved replay from here.",
            )
        others = [ws.last(each) for each in last.group]
        where = [each.target for each in others if each]
        return move(ws, where, last.command, out=Path(last.out), progress=progress)


def _taken(made: Replayable, state: Open, step: Step, skip: bool) -> Open:
    """The state after the change in the worktree was resolved or skipped."""
    objects = made.objects
    before = objects.tree_of(state.head)
    tree = before if skip else worktree.resolution(state.worktree, state.fork)
    outcome = Outcome(step.name, step.subject, Status.APPLIED, tree, note="Resolved by hand.")
    head = state.head
    if tree != before:
        head = objects.commit(tree, [head], step.author, step.message)
        objects.flush()
        outcome = replace(outcome, commit=head)
    else:
        note = "Skipped." if skip else "Resolved by hand to what upstream has."
        outcome = replace(outcome, status=Status.SKIPPED, note=note)
    return replace(state, head=head, outcomes=(*state.outcomes, outcome))


def abort(ws: Workspace, fork: str) -> Path | None:
    """Forget what is open on a fork and remove its worktree; returns where that was."""
    ws.manifest(fork)
    with ws.lock():
        state = read(ws, fork)
        close(ws, fork)
        return state.worktree if state else None


def close(ws: Workspace, fork: str) -> None:
    """Remove the worktree of a fork and the note that it is open."""
    if state := read(ws, fork):
        for source in ("git", "archives"):
            mirror = ws.mirror(fork, source)
            if mirror.is_dir():
                worktree.remove(mirror, state.worktree)
        shutil.rmtree(state.worktree, ignore_errors=True)
        ws.write_state("open", fork, None)


# -- saving an edited branch ---------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """What `save` made of the commits in a worktree: file names of changes.

    untracked: files in the worktree that no commit holds.
    """

    kept: tuple[str, ...]
    changed: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    untracked: tuple[str, ...]


def save(ws: Workspace, fork: str) -> Saved:
    """Turn the commits in the worktree of a fork back into its queue.

    A commit is the change with its message, or else with its subject, or else a new one. Raises
    NeedsPerson where something is not committed, or a commit edits what a recipe makes.
    """
    where = ws.manifest(fork).queue
    with ws.lock():
        state = read(ws, fork)
        if not state or state.conflict:
            raise UsageError(
                f"{fork}: its branch is not open for editing.", todo=f"Open it: forkman edit {fork}"
            )
        if not isinstance(where, QueueFolder):
            raise UsageError(
                f"{fork}: its queue is the branch {where.ref} of {where.url}.",
                todo=f"Push your commits there from {state.worktree}.",
            )
        git = Git(state.worktree)
        if dirty := git.run_as_user("status", "--porcelain", "--untracked-files=no").stdout:
            raise NeedsPerson(
                f"{fork}: not everything in {state.worktree} is committed:\n"
                + dirty.decode("utf-8", "replace").rstrip(),
                kept="The queue is as it was.",
                todo="Commit it there, or undo it, then save again.",
            )
        made = prepare(ws, state.target)
        if state.rests_on != _rests_on(made):
            raise NeedsPerson(
                f"{fork}: its queue or its pin changed since the branch was opened.",
                kept="The queue, and your commits in the worktree, are as they were.",
                todo=f"Take your commits aside (git format-patch in {state.worktree}), then:"
                f" forkman abort {fork}",
            )
        assert made.queue
        queue, saved = _requeued(made, fork, ObjectId(git.text("rev-parse", "HEAD")))
        folder = ws.root / where.path
        old, new = made.queue.files(), queue.files()
        landing.land(
            ws.landing,
            landing.Landing(
                {folder / name: new.get(name) for name in old.keys() | new.keys()},
                seen={folder / name: content for name, content in old.items()},
            ),
        )
        saved = replace(saved, untracked=tuple(worktree.untracked(state.worktree)))
        if not saved.untracked:  # nothing in the worktree would be lost
            close(ws, fork)
        return saved


def _requeued(made: Replayable, fork: str, head: ObjectId) -> tuple[Queue, Saved]:
    """The queue that the commits up to `head` are."""
    objects, old = made.objects, made.queue
    assert old
    if objects.git.call("merge-base", "--is-ancestor", made.new, head, ok=(0, 1)).returncode:
        raise NeedsPerson(
            f"{fork}: the branch in the worktree does not stand on {made.new[:9]} any more.",
            kept="The queue is as it was.",
            todo="Rebase it there onto that commit, then save again.",
        )
    commits = from_commits(objects.git, made.new, head, lambda a, b: patch.diff(objects, a, b))
    if commits.merges:
        raise NeedsPerson(
            f"{fork}: the branch in the worktree has merges: {', '.join(commits.merges)}.",
            kept="The queue is as it was.",
            todo=f"Rebase it there (git rebase {made.new[:9]}), then save again.",
        )
    left = {step.name: step for step in made.steps}
    queue, order = old, list[str]()
    kept, changed, added = list[str](), list[str](), list[str]()
    for id, mail in zip(commits.commits, commits.mails, strict=True):
        step = _counterpart(left, mail)
        if step is None:
            queue = queue.with_added(mail)
            order.append(queue.changes[-1].name)
            added.append(order[-1])
            continue
        del left[step.name]
        order.append(step.name)
        if isinstance(step.does, Edit):
            now = queue.with_change(step.name, mail)
            (kept if now is queue else changed).append(step.name)
            queue = now
            continue
        parent = objects.tree_of(ObjectId(objects.git.text("rev-parse", f"{id}^")))
        edits, _ = step.does(objects, parent)
        if objects.splice(parent, edits) != objects.tree_of(id):
            raise NeedsPerson(
                f"{fork}: the commit {id[:9]} edits what the recipe {step.name} makes.",
                kept="The queue is as it was.",
                todo=f"Edit the recipe (forks/{fork}/{step.name}) instead, or make your edit a"
                " commit of its own.",
            )
        kept.append(step.name)
    for name, step in left.items():
        if isinstance(step.does, Edit) or _makes_something(made, step):
            queue = queue.without(name)
        else:  # a recipe that upstream has, or nothing needs: it made no commit to begin with
            order.append(name)
            kept.append(name)
    gone = tuple(name for name in left if name not in order)
    return queue.with_order(order), Saved(tuple(kept), tuple(changed), tuple(added), gone, ())


def _counterpart(left: dict[str, Step], mail: Mail) -> Step | None:
    """The change that a commit is: the one with its message, or with its subject."""
    for step in left.values():
        if step.message == mail.message:
            return step
    subject = mail.message.partition(b"\n")[0]
    for step in left.values():
        if step.message.partition(b"\n")[0] == subject:
            return step
    return None


def _makes_something(made: Replayable, step: Step) -> bool:
    assert not isinstance(step.does, Edit)
    edits, _ = step.does(made.objects, made.objects.tree_of(made.new))
    return bool(edits)
