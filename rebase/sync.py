"""The main job: fetch, pick targets, replay, verify, and land pins, queues and exports together.

Everything is decided before anything is written. A fork whose upstream cannot be reached, whose
layer does not apply, whose changes conflict or whose audit has findings keeps the whole group it
was to land with from landing, and every such thing of every fork is reported in one run.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rebase import branch, export, landing, manifest, opened, refs, targets, upstream
from rebase.carry import Carried, carry, push
from rebase.errors import UsageError
from rebase.inspect import BASES, QUEUED, STATES
from rebase.landing import Refs
from rebase.outcome import ForkReport, Report
from rebase.queue import Queue, RecipeFile
from rebase.targets import Progress
from rebase.workspace import Last, Run, Source, Target, Workspace


def sync(
    ws: Workspace,
    named: Sequence[str] = (),
    *,
    to: str | None = None,
    dry: bool = False,
    out: Path | None = None,
    accept_moved_tags: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Fetch, pick targets, replay and verify the forks (all, or those in `named`), then land.

    dry: everything but the landing. out: where exports go, `exports/` by default.
    """
    for fork in named:
        ws.manifest(fork)
    with ws.lock():
        opened.refuse_open(ws, named or list(ws.project.forks), but_resolved=True)
        needed = [*named, *targets.needed(ws, named)] if named else list(ws.project.forks)
        found = targets.fetch(ws, needed, progress=progress, accept_moved_tags=accept_moved_tags)
        where = targets.targets(ws, found, named, to, accept_moved_tags=accept_moved_tags)
        command = " ".join(("sync", *named, *(("--to", to) if to else ())))
        return move(ws, where, command, dry=dry, out=out, progress=progress)


def rebase(
    ws: Workspace,
    fork: str,
    onto: str,
    *,
    dry: bool = False,
    out: Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Replay one fork onto an upstream revision and land it; fetches only what is not here yet."""
    ws.manifest(fork)
    with ws.lock():
        opened.refuse_open(ws, [fork], but_resolved=True)
        source: Source = "git"
        if ws.mirror(fork, "archives").is_dir() and not ws.mirror(fork, "git").is_dir():
            source = "archives"
        found = {fork: targets.Fetch(fork, source)}
        mirror = ws.mirror(fork, source)
        known = mirror.is_dir() and (onto == "latest" or refs.resolve(mirror, onto))
        if not known:
            found = targets.fetch(ws, [fork], progress=progress)
        where = targets.targets(ws, found, [fork], onto)
        command = f"rebase {fork} --onto {onto}"
        return move(ws, where, command, dry=dry, out=out, progress=progress)


def export_forks(
    ws: Workspace,
    forks: Sequence[str] = (),
    *,
    out: Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write the exports of `forks`, or of all, as they stand; what was never fetched is fetched."""
    with ws.lock():
        where: list[Target | ForkReport] = []
        for fork in forks or ws.project.forks:
            ws.manifest(fork)
            got = targets.Fetch(fork, "git")
            if not ws.mirror(fork, "git").is_dir():
                got = targets.fetch(ws, [fork], progress=progress)[fork]
            where.append(targets.staying(ws, got))
        command = " ".join(("export", *forks))
        return move(ws, where, command, out=out, remember=False, progress=progress)


def verify_exports(
    ws: Workspace, index: Path | None = None, *, progress: Progress | None = None
) -> list[export.Verification]:
    """Verify what was exported to `index`, by default the project's, for every fork in it."""
    if not index:
        index = ws.exports / export.INDEX
        if not index.exists():
            raise UsageError("Nothing is exported yet.", todo="Export it: forkman export")
    found: list[export.Verification] = []
    entries = export.read_index(index)
    for number, (fork, entry) in enumerate(entries.items(), 1):
        objects = ws.objects(fork, entry.source)
        if not objects.git.resolve(entry.pin.commit):
            raise UsageError(
                f"{fork}: its mirror does not have the commit {entry.pin.commit} that the export"
                " is for.",
                todo=f"Fetch it: forkman fetch {fork}",
            )
        upstream.complete(objects.git.directory, [entry.pin.commit])
        base = branch.base(objects, entry.pin.commit, entry.layers, ws.layer)
        objects.flush()
        found.append(export.verify(objects, index, fork, objects.tree_of(base)))
        if progress:
            progress("verify", number, len(entries))
    return found


def move(
    ws: Workspace,
    where: Sequence[Target | ForkReport],
    command: str,
    *,
    dry: bool = False,
    out: Path | None = None,
    remember: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Carry every fork to its target and land them together, or say why not.

    remember: keep what the replays found, for `log` and `edit`.
    """
    out = out or ws.exports
    tell = progress or (lambda text, done, total: None)
    carried: list[Carried] = []
    reports: list[ForkReport] = []
    for target in where:
        if isinstance(target, ForkReport):
            reports.append(target)
            continue
        tell(f"replay {target.fork}", 0, 1)
        done = carry(ws, target, opened.finished(ws, target))
        if not done.report.problem:
            done = _audited(ws, done)
        tell(f"replay {target.fork}", 1, 1)
        carried.append(done)
        reports.append(done.report)
    if remember:
        without = tuple(report.fork for report in reports if report.problem)
        run = Run(command, tuple(done.target for done in carried), without, str(out))
        for done in carried:
            if not done.report.problem:
                ws.remember(Last(run, done.target, done.report.outcomes))
    if any(report.problem or report.conflicts or report.findings for report in reports):
        return Report(command, tuple(reports), landed=False, dry=dry)
    tell("verify", 0, 1)
    before = export.listed(out, all_anew=len(carried) == len(ws.project.forks))
    entries, exports = _together(ws, carried, before)
    index = export.index(entries.values())
    failed = _verified(carried, index, exports)
    tell("verify", 1, 1)
    reports = [
        replace(each, problem=failed[each.fork]) if each.fork in failed else each
        for each in reports
    ]
    written = _all_files(ws, carried, out, before, exports | {export.INDEX: index})
    changed = [path for path, content in sorted(written.files.items()) if content != _now(path)]
    report = Report(
        command, tuple(reports), landed=False, dry=dry,
        written=tuple(_shown(ws, path) for path in changed if written.files[path] is not None),
        removed=tuple(_shown(ws, path) for path in changed if written.files[path] is None),
    )  # fmt: skip
    if dry or failed:
        return report
    old, new = _states(carried)
    for mirror, states in old.items():  # without a reflog, which tells in what order states landed
        refs.move(mirror, states)
    landing.land(ws.landing, landing.Landing(written.files, new, written.seen))
    for each in carried:
        if each.target.new != each.target.old:
            opened.close(ws, each.target.fork)
    to_push = {each.target.fork: _to_push(ws, each) for each in carried}
    reports = [replace(each, notes=each.notes + to_push[each.fork]) for each in reports]
    return replace(report, forks=tuple(reports), landed=True)


def _audited(ws: Workspace, done: Carried) -> Carried:
    """With what the audit of a fork that moves found."""
    if not ws.manifest(done.target.fork).audit:
        return done
    from rebase import audit  # griffe takes a while to import, and only who audits needs it

    try:
        return replace(done, report=replace(done.report, audit=audit.moved(ws, done)))
    except UsageError as error:
        return replace(done, report=replace(done.report, problem=error.what, todo=error.todo))


def _to_push(ws: Workspace, done: Carried) -> tuple[str, ...]:
    """What a person has to do where the queue is a branch, which landed in the mirror only."""
    where, made = ws.manifest(done.target.fork).queue, done.made
    if not made or isinstance(made.queue, Queue) or made.old == made.new:
        return ()
    assert isinstance(where, manifest.QueueBranch)
    command = push(ws, done.target.new, done.target.fork, where, made.queue)
    return (f"Push its branch {where.ref}, before the next sync: {command}",)


def _shown(ws: Workspace, path: Path) -> str:
    return str(path.relative_to(ws.root) if path.is_relative_to(ws.root) else path)


def _now(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _together(
    ws: Workspace, carried: Sequence[Carried], before: Mapping[str, export.Exported]
) -> tuple[dict[str, export.Exported], dict[str, bytes]]:
    """The index's entries, other forks' as they are there already, and the files of `carried`."""
    entries = {fork: entry for fork, entry in before.items() if fork in ws.project.forks}
    files: dict[str, bytes] = {}
    for done in carried:
        entries[done.target.fork], its = _exported(ws, done)
        files |= its
    return entries, files


def _all_files(
    ws: Workspace,
    carried: Sequence[Carried],
    out: Path,
    before: Mapping[str, export.Exported],
    exports: Mapping[str, bytes],
) -> "_Written":
    """Everything a landing writes: manifests, queues, exports; exports that are no more go."""
    files: dict[Path, bytes | None] = {}
    seen: dict[Path, bytes | None] = {}
    for done in carried:
        if entry := before.get(done.target.fork):
            files |= {out / file.path: None for file in entry.files}
        written = _project_files(ws, done)
        files |= written.files
        seen |= written.seen
    files |= {out / name: content for name, content in exports.items()}
    return _Written(files, seen)


@dataclass(frozen=True)
class _Written:
    """What a run would write: absolute path → content or None; and what it was decided on."""

    files: dict[Path, bytes | None]
    seen: dict[Path, bytes | None]


def _queue(queue: Queue, done: Carried) -> Queue:
    """The queue as it is after a replay: patches for the new base, without what upstream has."""
    assert done.made
    if done.made.old == done.made.new:
        return queue
    mails = {outcome.change: mail for outcome, mail in done.mails}
    for change in queue.changes:
        if isinstance(change, RecipeFile):
            continue  # it finds its place anew wherever it goes
        if change.name in mails:
            queue = queue.with_change(change.name, mails[change.name])
        else:
            queue = queue.without(change.name)
    return queue


def _project_files(ws: Workspace, done: Carried) -> _Written:
    """The manifest and the queue of a fork after a replay."""
    assert done.made
    target, entry = done.target, ws.manifest(done.target.fork)
    text = entry.path.read_bytes()
    if target.new.source == "git":
        patches = [
            [manifest.LayerPatch(layer.path, layer.blob) for layer in layers]
            for layers in target.new.layers
        ]
        content = manifest.with_pin(text, target.new.pin, patches)
    else:
        assert entry.archives and target.new.pin.tag
        before, _, after = entry.archives.tag.partition("{version}")
        version = target.new.pin.tag.removeprefix(before).removesuffix(after)
        content = manifest.with_pin(text, archive=version)
    files: dict[Path, bytes | None] = {entry.path: content}
    seen: dict[Path, bytes | None] = {entry.path: text}
    was = done.made.queue
    if isinstance(was, Queue) and isinstance(entry.queue, manifest.QueueFolder):
        folder = ws.root / entry.queue.path
        old, new = was.files(), _queue(was, done).files()
        seen |= {folder / name: text for name, text in old.items()}
        files |= {folder / name: new.get(name) for name in old.keys() | new.keys()}
    return _Written(files, seen)


def _exported(ws: Workspace, done: Carried) -> tuple[export.Exported, dict[str, bytes]]:
    """The export of one fork: its entry in the index, and its files."""
    assert done.made
    target, objects = done.target, done.made.objects
    outcomes = done.report.outcomes
    base = objects.tree_of(done.made.new)
    entry = ws.manifest(target.fork)
    address = entry.upstream.url
    if target.new.source == "archives":
        assert entry.archives
        address = f"pkg:pypi/{entry.archives.package}"
    return export.export(
        objects,
        export.ForkExport(
            target.fork,
            address,
            target.new.source,
            target.new.pin,
            target.new.patches,
            base,
            outcomes[-1].tree if outcomes else base,
            tuple((outcome.change, mail) for outcome, mail in done.mails),
            entry.export,
        ),
    )


def _verified(
    carried: Sequence[Carried], index: bytes, files: Mapping[str, bytes]
) -> dict[str, str]:
    """Verify exports before they land: fork → what is wrong; nothing for those that hold."""
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="forkman-") as scratch:
        for name, content in {export.INDEX: index, **files}.items():
            path = Path(scratch, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for done in carried:
            assert done.made
            base = done.made.objects.tree_of(done.made.new)
            result = export.verify(done.made.objects, Path(scratch), done.target.fork, base)
            if result.findings:
                failed[done.target.fork] = "The export does not hold: " + "; ".join(
                    map(str, result.findings)
                )
    return failed


def _states(carried: Sequence[Carried]) -> tuple[dict[Path, Refs], dict[Path, Refs]]:
    """The branch of each fork as it was and as it is, as refs for `forkman diff`."""
    old: dict[Path, Refs] = {}
    new: dict[Path, Refs] = {}
    for done in carried:
        assert done.made
        made, mirror = done.made, done.made.objects.git.directory
        was, now = str(done.target.old.pin), str(done.target.new.pin)
        if was != now:
            tip = branch.chain(made.objects, made.old, made.steps)
            old[mirror] = {BASES + was: made.old, STATES + was: tip}
        commits = [outcome.commit for outcome in done.report.outcomes if outcome.commit]
        tip = commits[-1] if commits else made.new
        new[mirror] = {BASES + now: made.new, STATES + now: tip}
        if not isinstance(made.queue, Queue):
            new[mirror] = {**new[mirror], QUEUED + now: made.queue}
        made.objects.flush()
    return old, new
