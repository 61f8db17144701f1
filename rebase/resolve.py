"""A person at work on a fork's branch: resolving a replay's conflicts, or editing the branch.

`edit` opens a worktree: where the last replay of the fork ended in conflicts, at the first of them;
otherwise on the branch as it is. `continue` and `skip` take the replay from conflict to conflict;
when the last one is resolved, everything the replay was to land with lands. `save` turns the
commits of an edited branch back into the queue. `abort` forgets it all.
"""

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from rebase import address, branch, landing, opened, patch, worktree
from rebase.carry import Replayable, prepare
from rebase.errors import NeedsPerson, UsageError
from rebase.git import Git, ObjectId
from rebase.mail import Mail
from rebase.manifest import QueueFolder
from rebase.opened import Open
from rebase.outcome import Outcome, Report, Status
from rebase.queue import Queue, from_commits
from rebase.replay import Edit, Step, Upstreamed, replay
from rebase.sync import move
from rebase.targets import Progress
from rebase.workspace import (
    Target,
    Workspace,
)

# -- opening -------------------------------------------------------------------------------------


def edit(ws: Workspace, fork: str) -> Open:
    """Open the fork: at the first conflict of its last replay, or else its branch as it is."""
    ws.manifest(fork)
    with ws.lock():
        opened.refuse_open(ws, [fork])
        path = ws.state / "worktrees" / fork
        last = ws.last(fork)
        if last and last.conflicts and not _moved_since(ws, last.target):
            made = prepare(ws, last.target)
            state = Open(
                fork, last.target, last.run, opened.rests_on(made), made.new, (), path,
                len(made.steps), worktree.resolutions(made.objects.git.directory),
            )  # fmt: skip
            state = _advance(ws, state, made)
            if not state.resolved:
                return state
            opened.close(ws, fork)  # what was in conflict then is not any more
        stand = ws.stand(fork, ws.source(fork))
        target = Target(fork, stand, stand, "stays")
        made = prepare(ws, target)
        tip = branch.chain(made.objects, made.new, made.steps)
        made.objects.flush()
        worktree.add(made.objects.git.directory, path, tip)
        rests_on, count = opened.rests_on(made), len(made.steps)
        state = Open(fork, target, None, rests_on, tip, (), path, count, ready=True)
        opened.write(ws, state)
        return state


def _moved_since(ws: Workspace, target: Target) -> bool:
    """Whether the fork does not stand any more where `target` leads from."""
    return ws.stand(target.fork, target.old.source) != target.old


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
        state = replace(state, head=head, outcomes=tuple(outcomes), change="", files=())
        opened.write(ws, state)
        worktree.remove(objects.git.directory, state.worktree)
        return state
    objects.flush()
    step = made.steps[len(outcomes)]
    if not isinstance(step.does, Edit):
        raise NeedsPerson(
            f"{state.fork}: the recipe {step.name} finds nothing to edit: "
            + "; ".join(conflict.detail for conflict in outcome.conflicts),
            todo=f"Correct the recipe (forks/{state.fork}/{step.name}), then sync again. To work on"
            f" the branch as it stands: forkman abort {state.fork}, then forkman edit {state.fork}",
        )
    files = tuple(os.fsdecode(conflict.path) for conflict in outcome.conflicts)
    state = replace(
        state, head=head, outcomes=tuple(outcomes), change=step.name, files=files, ready=False
    )
    opened.write(ws, state)
    worktree.add(objects.git.directory, state.worktree, head)
    # What upstream has of the change is no part of the conflict.
    tree, before = objects.tree_of(head), step.does.before
    conflicted = objects.merge(before, tree, step.does.after).stages.keys()
    rest, _, _ = Upstreamed(objects, made.history).without(step.does, tree, conflicted)
    worktree.bring_conflict(objects, state.worktree, step, Edit(before, rest))
    state = replace(state, ready=True)
    opened.write(ws, state)
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
        state = opened.read(ws, fork)
        if not state or not state.run:
            raise UsageError(
                f"{fork}: no replay is open.",
                todo=f"After a sync that ended in a conflict, open it: forkman edit {fork}",
            )
        made = prepare(ws, state.target)
        if state.rests_on != opened.rests_on(made):
            raise NeedsPerson(
                f"{fork}: its queue or its pin changed since this replay was opened.",
                todo=f"Start again: forkman abort {fork}, then forkman sync",
            )
        if not state.resolved:
            if state.ready:
                step = made.steps[len(state.outcomes)]
                state = _taken(made, state, step, skip)
            state = _advance(ws, state, made)
        if not state.resolved:
            return state
        return _land(ws, state, progress)


def _land(ws: Workspace, state: Open, progress: Progress | None) -> Report:
    """Land a fork whose replay is resolved, with all the others of its run."""
    fork, run = state.fork, state.run
    assert run
    missing = {*run.without, *(each.fork for each in run.targets if _moved_since(ws, each))}
    if missing:
        raise NeedsPerson(
            f"{fork}: its replay is resolved. It lands together with {', '.join(sorted(missing))},"
            " which could not be carried then, or was moved since.",
            kept="The resolution is kept; nothing has landed.",
            todo=f"Run again, which takes the resolution from here: forkman {run.command}",
        )
    others = [each.fork for each in run.targets if each.fork != fork]
    opened.refuse_open(
        ws, [each for each in others if (it := opened.read(ws, each)) and not it.run]
    )
    return move(ws, run.targets, run.command, out=Path(run.out), progress=progress)


def _taken(made: Replayable, state: Open, step: Step, skip: bool) -> Open:
    """The state after the change in the worktree was resolved or skipped."""
    objects = made.objects
    before = objects.tree_of(state.head)
    if not skip and (strays := worktree.untracked(state.worktree)):
        raise NeedsPerson(
            f"{state.fork}: git does not know these files in {state.worktree}, and the worktree"
            " will go:\n  " + "\n  ".join(strays),
            kept="The worktree and the replay are as they were.",
            todo=f"Add them (git add) or remove them, then: forkman continue {state.fork}",
        )
    if skip:
        outcome = Outcome(step.name, step.subject, Status.SKIPPED, before)
        return replace(state, outcomes=(*state.outcomes, outcome))
    assert isinstance(step.does, Edit)
    wanted = step.does.after
    tree = worktree.resolution(objects, state.worktree, state.fork, state.head, wanted)
    if tree == before:
        raise NeedsPerson(
            f"{state.fork}: nothing of {step.name} is left in {state.worktree}: it is as upstream"
            " has it.",
            kept="The worktree and the replay are as they were.",
            todo=f"To leave the change out: forkman skip {state.fork}. To begin with it anew:"
            f" forkman abort {state.fork}, then forkman sync and forkman edit {state.fork}",
        )
    head = objects.commit(tree, [state.head], step.author, step.message)
    objects.flush()
    outcome = Outcome(step.name, step.subject, Status.APPLIED, tree, head, note="Resolved by hand.")
    return replace(state, head=head, outcomes=(*state.outcomes, outcome))


def abort(ws: Workspace, fork: str) -> Path | None:
    """Forget what is open on a fork: its worktree, the resolutions made there, and the replay that
    ended in conflicts, so that `edit` opens the branch. Returns where the worktree was.
    """
    ws.manifest(fork)
    with ws.lock():
        state = opened.read(ws, fork)
        if state and state.run:
            mirror = ws.mirror(fork, state.target.new.source)
            new = {*worktree.resolutions(mirror)} - {*state.remembered}
            worktree.forget(mirror, new)
        opened.close(ws, fork)
        ws.forget(fork)
        return state.worktree if state else None


# -- saving an edited branch ---------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """What `save` made of the commits in a worktree: file names of changes.

    untracked: files in the worktree that no commit holds, for which it stays.
    moved: the changes that were there before have another order.
    """

    kept: tuple[str, ...]
    changed: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    untracked: tuple[str, ...] = ()
    moved: bool = False


def save(ws: Workspace, fork: str) -> Saved:
    """Turn the commits in the worktree of a fork back into its queue.

    A commit is the change with its message, or else with its subject, or else a new one. Raises
    NeedsPerson where something is not committed, or a commit edits what a recipe makes.
    """
    where = ws.manifest(fork).queue
    with ws.lock():
        state = opened.read(ws, fork)
        if not state or state.run:
            raise UsageError(
                f"{fork}: its branch is not open for editing.", todo=f"Open it: forkman edit {fork}"
            )
        if not isinstance(where, QueueFolder):
            url = address.locate(where.url, ws.root)
            push = ["git", "-C", str(state.worktree), "push", url, f"HEAD:{where.ref}"]
            raise UsageError(
                f"{fork}: its queue is the branch {where.ref} of {where.url}.",
                todo=f"Push your commits there: {shlex.join(push)}",
            )
        git = Git(state.worktree)
        if command := worktree.unfinished(state.worktree):
            raise NeedsPerson(
                f"{fork}: a git {command} is not finished in {state.worktree}.",
                kept="The queue is as it was.",
                todo=f"Finish it there (git {command} --continue or --abort), then save again.",
            )
        if dirty := git.run_as_user("status", "--porcelain", "--untracked-files=no").stdout:
            raise NeedsPerson(
                f"{fork}: not everything in {state.worktree} is committed:\n"
                + dirty.decode("utf-8", "replace").rstrip(),
                kept="The queue is as it was.",
                todo="Commit it there, or undo it, then save again.",
            )
        made = prepare(ws, state.target)
        if state.rests_on != opened.rests_on(made):
            raise NeedsPerson(
                f"{fork}: its queue or its pin changed since the branch was opened.",
                kept="The queue, and your commits in the worktree, are as they were.",
                todo=f"Take your commits aside (git format-patch in {state.worktree}), then:"
                f" forkman abort {fork}",
            )
        assert isinstance(made.queue, Queue)
        queue, saved = _requeued(made, made.queue, fork, ObjectId(git.text("rev-parse", "HEAD")))
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
        if saved.untracked:
            made = prepare(ws, state.target)
            state = replace(state, rests_on=opened.rests_on(made), steps=len(made.steps))
            opened.write(ws, state)
        else:  # nothing in the worktree would be lost
            opened.close(ws, fork)
        return saved


def _requeued(made: Replayable, queue: Queue, fork: str, head: ObjectId) -> tuple[Queue, Saved]:
    """The queue that the commits up to `head` make of `queue`."""
    objects = made.objects
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
    order = list[str]()
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
        parent = objects.tree_of(objects.parents_of(id)[0])
        if isinstance(step.does, Edit):
            same = (step.author, step.message) == (mail.author, mail.message)
            now = queue.with_change(step.name, mail)
            if now is queue or (same and step.does == Edit(parent, objects.tree_of(id))):
                kept.append(step.name)
            else:
                changed.append(step.name)
                queue = now
            continue
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
    before = [step.name for step in made.steps if step.name in order]
    moved = before != [name for name in order if name in before]
    saved = Saved(tuple(kept), tuple(changed), tuple(added), gone, moved=moved)
    return queue.with_order(order), saved


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
