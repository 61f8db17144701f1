"""Carrying one fork to its target: its bases, its queue as steps, the replay."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rebase import address, branch, manifest, refs, upstream
from rebase.errors import EnvironmentFault, ForkmanError, NeedsPerson, UsageError
from rebase.git import ObjectId
from rebase.history import History
from rebase.inspect import QUEUED, STATES
from rebase.mail import Mail
from rebase.objects import Objects
from rebase.outcome import ForkReport, Outcome
from rebase.queue import Queue
from rebase.replay import Step, replay
from rebase.workspace import Stand, Target, Workspace, mirror_faults
from rebase.worktree import Memory

_QUEUE = "refs/forkman/queue"  # the branch that is a fork's queue, as last fetched


@dataclass(frozen=True)
class Replayable:
    """A fork ready to be replayed: its steps on the old base, the new base, what lies between."""

    objects: Objects
    old: ObjectId
    new: ObjectId
    history: History
    steps: tuple[Step, ...]
    queue: Queue | ObjectId  # the folder's, or the tip of the branch that it is
    merges: tuple[ObjectId, ...] = ()
    notes: tuple[str, ...] = ()  # what the upstream cannot give


def prepare(ws: Workspace, target: Target) -> Replayable:
    """Make the bases and the steps of a fork. Raises where a layer or a patch does not apply."""
    fork = target.fork
    objects = ws.objects(fork, target.new.source)
    pins = [stand.pin.commit for stand in (target.old, target.new)]
    for commit in pins:
        if not objects.git.resolve(commit):
            _bring(ws, target, commit)
    notes = upstream.lacking(upstream.complete(objects.git.directory, pins))

    old, new = (
        branch.base(objects, stand.pin.commit, stand.patches, ws.layer)
        for stand in (target.old, target.new)
    )
    history = History(objects.git, old, new)
    if target.new.source == "archives":
        history = History(objects.git, *_in_line(ws, target, objects))
    where = ws.manifest(fork).queue
    if isinstance(where, manifest.QueueFolder):
        queue = ws.queue(fork)
        steps = branch.steps(objects, fork, old, queue)
        return Replayable(objects, old, new, history, tuple(steps), queue, notes=notes)
    url = address.locate(where.url, ws.root)
    tip = upstream.fetch_ref(objects.git.directory, url, where.ref, _QUEUE)
    on_pin = objects.git.call("merge-base", "--is-ancestor", pins[0], tip, ok=(0, 1))
    if on_pin.returncode:
        raise _off_its_pin(ws, target, objects, where, tip)
    steps, merges = branch.branch_steps(objects, old, tip)
    return Replayable(objects, old, new, history, tuple(steps), tip, tuple(merges), notes)


def _off_its_pin(
    ws: Workspace, target: Target, objects: Objects, where: manifest.QueueBranch, tip: ObjectId
) -> NeedsPerson:
    """What to do about a branch that was not pushed after a landing, or was pushed to since."""
    fork, pin = target.fork, str(target.old.pin)
    branch_name = f"the branch {where.ref} of {where.url}"
    what = f"{fork}: its queue, {branch_name}, does not stand on the pin {pin}."
    landed, made_from = (objects.git.resolve(ref + pin) for ref in (STATES, QUEUED))
    if not (landed and made_from):
        todo = (
            f"If a sync on another machine set this pin, push {where.ref} from there, as its report"
            " said. Else rebase it onto the pin."
        )
    elif made_from == tip:
        todo = f"Push what the last sync made of it: {push(ws, target.old, fork, where, tip)}"
    else:  # a push of the landed branch would throw away what came since
        what += f" Somebody pushed to it since that was landed ({made_from[:9]} → {tip[:9]})."
        url = address.locate(where.url, ws.root)
        commands = (
            ("git", "fetch", str(objects.git.directory), STATES + pin),
            ("git", "rebase", "--onto", "FETCH_HEAD", made_from, tip),
            ("git", "push", f"--force-with-lease={where.ref}:{tip}", url, f"HEAD:{where.ref}"),
        )
        todo = "Take what was pushed onto what landed, in a clone of that repository:\n"
        todo += "\n".join(map(shlex.join, commands))
    return NeedsPerson(what, todo=todo)


def _in_line(ws: Workspace, target: Target, objects: Objects) -> tuple[ObjectId, ObjectId]:
    """The releases between two pins as a history, each on the one before: its two ends.

    Releases made of archives have no parents, so that their ids depend on nothing else.
    """
    tags = refs.tags(objects.git.directory)
    names = manifest.releases(ws.manifest(target.fork), tags, prereleases=True)
    first, last = (names.index(stand.pin.tag or "") for stand in (target.old, target.new))
    line: list[ObjectId] = []
    for name in names[first : last + 1] if first <= last else (names[first], names[last]):
        head, _, message = objects.read(tags[name]).partition(b"\n\n")
        author = head.partition(b"\nauthor ")[2].partition(b"\n")[0]
        line.append(objects.commit(objects.tree_of(tags[name]), line[-1:], author, message))
    objects.flush()
    return line[0], line[-1]


def _bring(ws: Workspace, target: Target, commit: ObjectId) -> None:
    """Ask for a commit that no branch or tag of upstream reaches; many hosts still have it."""
    fork, mirror = target.fork, ws.mirror(target.fork, target.new.source)
    try:
        upstream.fetch_ref(mirror, ws.url(fork), commit, refs.KEPT + commit)
    except ForkmanError:
        raise UsageError(
            f"{fork}: {ws.url(fork)} does not have the commit {commit}, its pin.",
            todo=f"Fetch from a repository that has it: --upstream {fork}=URL. If upstream threw it"
            f" away, write what stands in its place into {ws.manifest(fork).path.name}; the queue's"
            " patches must apply there.",
        ) from None


def push(ws: Workspace, stand: Stand, fork: str, where: manifest.QueueBranch, tip: ObjectId) -> str:
    """The command that gives the fork's own repository its branch as it is on `stand`."""
    url = address.locate(where.url, ws.root)
    lease = f"--force-with-lease={where.ref}:{tip}"
    refspec = f"{STATES}{stand.pin}:{where.ref}"
    mirror = str(ws.mirror(fork, stand.source))
    return shlex.join(["git", "-C", mirror, "push", lease, url, refspec])


@dataclass(frozen=True)
class Carried:
    """One fork carried to its target: the report, and what it would land."""

    target: Target
    report: ForkReport
    made: Replayable | None = None
    mails: tuple[tuple[Outcome, Mail], ...] = ()


def carry(ws: Workspace, target: Target, resolved: Sequence[Outcome] | None = None) -> Carried:
    """Replay one fork onto its target. resolved: the outcomes, where a person made them."""
    report = ForkReport(
        target.fork,
        target.new.source,
        target.old.pin,
        target.new.pin,
        target.how,
        notes=target.notes,
    )
    try:
        with mirror_faults(ws, target.fork):
            made = prepare(ws, target)
            outcomes = tuple(resolved or ()) or tuple(
                replay(made.objects, made.steps, made.new, made.history, Memory(made.objects))
            )
            made.objects.flush()
            mails = branch.mails(made.objects, made.steps, outcomes, made.new)
    except ForkmanError as error:
        out_of_reach = isinstance(error, EnvironmentFault)
        report = replace(report, problem=error.what, todo=error.todo, unreachable=out_of_reach)
        return Carried(target, report)
    notes = target.notes + made.notes
    if made.merges:
        merged = ", ".join(id[:9] for id in made.merges)
        notes += (f"Merges in the queue's branch are left out, as git rebase does: {merged}.",)
    return Carried(target, replace(report, outcomes=outcomes, notes=notes), made, tuple(mails))
