"""Looking without changing anything: where each fork stands, its queue, how its branch changed."""

from dataclasses import dataclass
from pathlib import Path

from rebase import manifest, refs
from rebase.errors import UsageError
from rebase.manifest import QueueFolder
from rebase.outcome import Pin
from rebase.workspace import Workspace

# `sync` writes them; this module is on the path of `forkman status`, which must start at once.
STATES, BASES = "refs/forkman/states/", "refs/forkman/bases/"
QUEUED = "refs/forkman/queued/"  # where a queue is a branch: its tip from which a state was made


@dataclass(frozen=True)
class ForkStatus:
    """Where a fork stands.

    newest: upstream's newest release as last fetched; None where nothing was fetched or there is
    none. changes: how many the queue has; None where it is a branch elsewhere.
    open: what a person has open on it: "a conflict", "a resolved replay", "the branch", or "".
    last: how the last replay ended: the target and the count of each outcome; "" where none was.
    """

    fork: str
    pin: Pin
    newest: str | None
    fetched: bool
    changes: int | None
    open: str
    last: str


@dataclass(frozen=True)
class LogEntry:
    """A change of a queue. status: how its last replay ended, "" where it was never replayed."""

    change: str
    subject: str
    author: str
    status: str
    note: str


def status(ws: Workspace) -> list[ForkStatus]:
    """Where every fork of the project stands; reads what is here and fetches nothing."""
    return [_status(ws, fork) for fork in ws.project.forks]


def _status(ws: Workspace, fork: str) -> ForkStatus:
    entry = ws.manifest(fork)
    pin, names = entry.pin, None
    mirror = ws.mirror(fork, "git")
    if mirror.is_dir():
        tagged = entry.upstream.releases.refs == "tags"
        names = refs.tags(mirror) if tagged else refs.branches(mirror)
    elif entry.archives and ws.mirror(fork, "archives").is_dir():
        names = refs.tags(ws.mirror(fork, "archives"))
        tag = entry.archives.tag_of(entry.archives.pin)
        pin = Pin(names.get(tag, pin.commit), tag)
    changes = None
    if isinstance(entry.queue, QueueFolder):
        series = ws.root / entry.queue.path / "series"
        if not series.is_file():
            raise UsageError(f"{fork}: its queue has no {entry.queue.path}/series.")
        lines = series.read_bytes().splitlines()
        changes = sum(1 for line in lines if line.strip() and not line.lstrip().startswith(b"#"))
    state, opened = ws.read_state("open", fork), ""
    if state and not state["run"]:
        opened = "the branch"
    elif state:
        waits = len(state["outcomes"]) == state["steps"]
        opened = "a resolved replay" if waits else "a conflict"
    last = ws.last(fork)
    counts: dict[str, int] = {}
    for outcome in last.outcomes if last else ():
        counts[outcome.status.value] = counts.get(outcome.status.value, 0) + 1
    return ForkStatus(
        fork,
        pin,
        manifest.newest(entry, names) if names else None,
        names is not None,
        changes,
        opened,
        ""
        if not last
        else f"{last.target.new.pin}: "
        + ", ".join(f"{count} {name}" for name, count in counts.items()),
    )


def log(ws: Workspace, fork: str) -> list[LogEntry]:
    """The queue of a fork, each change with its last outcome.

    Raises UsageError for a queue that is a branch elsewhere and was not replayed yet.
    """
    from rebase import branch
    from rebase.queue import Patch

    last = ws.last(fork)
    outcomes = {outcome.change: outcome for outcome in last.outcomes} if last else {}
    found: list[LogEntry] = []
    where = ws.manifest(fork).queue
    if not isinstance(where, QueueFolder):
        if not last:
            raise UsageError(
                f"{fork}: its queue is the branch {where.ref} of {where.url}, and no replay has"
                " read its changes yet.",
                todo=f"They show here after one: forkman sync --dry-run {fork}",
            )
        for outcome in outcomes.values():
            found.append(
                LogEntry(outcome.change, outcome.subject, "", outcome.status.value, outcome.note)
            )
        return found
    for change in ws.queue(fork).changes:
        if isinstance(change, Patch):
            author, message = change.mail.author, change.mail.message
        else:
            step = branch.recipe_step(change)
            author, message = step.author, step.message
        known = outcomes.get(change.name)
        found.append(
            LogEntry(
                change.name,
                message.partition(b"\n")[0].decode("utf-8", "replace"),
                author.rpartition(b" <")[0].decode("utf-8", "replace"),
                known.status.value if known else "",
                known.note if known else "",
            )
        )
    return found


def range_diff(ws: Workspace, fork: str, old: str | None, new: str | None) -> str:
    """How the branch of a fork changed between two of its states, as `git range-diff` says it.

    old, new: the pins the states stood on (`v0.2.2`); by default the last two that landed.
    """
    ws.manifest(fork)
    source = ws.source(fork)
    mirror = ws.mirror(fork, source)
    states = _states(mirror)
    if not (old and new):
        here = str(ws.stand(fork, source).pin)
        states.sort(key=lambda name: name == here)  # the last, also where a fork went back
        if len(states) < 1 + (old is None or old == here):
            raise UsageError(
                f"{fork}: {len(states)} state(s) of its branch are known: "
                + (", ".join(states) or "none")
                + ".",
                todo="A state is kept each time a fork lands on another pin.",
            )
        old, new = old or states[-2], new or states[-1]
    for name in (old, new):
        if name not in states:
            raise UsageError(
                f"{fork}: no state of its branch on {name} is known.",
                todo=f"Known are: {', '.join(states) or 'none'}.",
            )
    from rebase.git import Git

    output = Git(mirror).run(
        "range-diff", "--no-color", "--no-dual-color", "--creation-factor=80",
        f"{BASES}{old}..{STATES}{old}", f"{BASES}{new}..{STATES}{new}",
    )  # fmt: skip
    return output.decode("utf-8", "replace")


def _states(mirror: Path) -> list[str]:
    """The names of the states a mirror holds, oldest first."""
    from rebase.git import Git

    listed = Git(mirror).run("for-each-ref", "--format=%(refname)", STATES)
    names = [name.removeprefix(STATES) for name in listed.decode().splitlines()]
    logs = mirror / "logs"

    def landed(name: str) -> float:
        log = logs / f"{STATES}{name}"
        return log.stat().st_mtime if log.exists() else 0

    return sorted(names, key=landed)
