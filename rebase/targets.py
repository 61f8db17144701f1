"""Where each fork goes: fetch the upstreams, then the leader's newest release and what follows it.

Upstream is read over git, and from release archives where git cannot reach it. A fork that cannot
say where to go is a `ForkReport` with the problem, so that one run tells of every fork.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rebase import archives, manifest, refs, upstream
from rebase.errors import EnvironmentFault, ForkmanError, NeedsPerson, UsageError
from rebase.git import ObjectId
from rebase.outcome import ForkReport, Layer, Pin
from rebase.workspace import Source, Stand, Target, Workspace, mirror_faults

Progress = upstream.Progress


# -- fetching --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fetch:
    """What fetching the upstream of one fork came to.

    source: which of its sources can be used; None where there is none, and `fault` says why.
    """

    fork: str
    source: Source | None
    notes: tuple[str, ...] = ()
    fault: ForkmanError | None = None


def fetch(
    ws: Workspace,
    forks: Sequence[str],
    *,
    progress: Progress | None = None,
    accept_moved_tags: bool = False,
) -> dict[str, Fetch]:
    """Fetch the upstreams of `forks`: over git, and where that fails from release archives."""
    return {fork: _fetch(ws, fork, progress, accept_moved_tags) for fork in forks}


def fetch_all(
    ws: Workspace,
    forks: Sequence[str],
    *,
    progress: Progress | None = None,
    accept_moved_tags: bool = False,
) -> list[Fetch]:
    """`fetch` for the command of that name: all forks where none is named, alone in the project."""
    for fork in forks:
        ws.manifest(fork)
    with ws.lock():
        chosen = forks or list(ws.project.forks)
        found = fetch(ws, chosen, progress=progress, accept_moved_tags=accept_moved_tags)
        return list(found.values())


def _fetch(ws: Workspace, fork: str, progress: Progress | None, accept_moved_tags: bool) -> Fetch:
    mirror, entry = ws.mirror(fork, "git"), ws.manifest(fork)
    try:
        got = upstream.fetch(
            mirror, ws.url(fork), progress=progress, accept_moved_tags=accept_moved_tags
        )
    except UsageError as error:
        return Fetch(fork, None, (error.what,), error)
    except EnvironmentFault as error:
        fault = error
    else:
        return Fetch(fork, "git", _news(got, accept_moved_tags))
    if mirror.is_dir():
        note = f"{fault.what.rstrip('.')}. What was fetched before is used."
        return Fetch(fork, "git", (note,), fault)
    if not entry.archives:
        return Fetch(fork, None, (fault.what,), fault)
    package, mirror = entry.archives.package, ws.mirror(fork, "archives")
    note = f"{fault.what.rstrip('.')}. The release archives of {package} are used instead."
    try:
        updated = archives.update(
            mirror,
            package,
            entry.archives.tag,
            entry.archives.prefix,
            since=entry.archives.pin,
            cache=ws.state / "archives",
            progress=progress,
        )
    except ForkmanError as error:
        if mirror.is_dir() and refs.tags(mirror):
            note = f"{note} {error.what} What was fetched before is used."
            return Fetch(fork, "archives", (note,), fault)
        return Fetch(fork, None, (f"{fault.what} {error.what}",), fault)
    return Fetch(fork, "archives", (note, *updated.skipped))


def _news(got: upstream.Fetched, accepted: bool) -> tuple[str, ...]:
    """What of a fetch a maintainer must know."""
    then = (
        "accepted." if accepted
        else "it stays here as it was. To accept it: forkman sync --accept-moved-tags"
    )  # fmt: skip
    notes = [
        f"Upstream moved the tag {tag.tag} from {tag.old[:9]} to {tag.new[:9]}; {then}"
        for tag in got.moved_tags
    ]
    notes += [
        f"Upstream {'rewrote' if gone.new else 'deleted'} the branch {gone.branch}; its old tip"
        f" {gone.old[:9]} is kept."
        for gone in got.gone
    ]
    notes += [
        f"Upstream deleted the tag {tag}, whose name is in the way of a new one; it is kept, and"
        f" {tag} still names it."
        for tag in got.aside
    ]
    if got.shallow:
        notes.append(f"{got.url} is shallow: its history ends at {got.shallow[0][:9]}.")
    return tuple(notes)


def needed(ws: Workspace, named: Sequence[str]) -> list[str]:
    """The forks whose trees say where those in `named` go, and that were never fetched."""
    others = {other for fork in named for other in _others(ws, fork)}
    return [fork for fork in others - set(named) if not ws.mirror(fork, "git").is_dir()]


def _others(ws: Workspace, fork: str) -> set[str]:
    """The forks whose trees say where this one goes, or what goes on before its changes."""
    entry = ws.manifest(fork)
    follow = {entry.follow.fork} if entry.follow else set()
    return follow | {layer.fork for layer in entry.layers}


# -- where to go -----------------------------------------------------------------------------------


def targets(
    ws: Workspace,
    found: Mapping[str, Fetch],
    named: Sequence[str],
    to: str | None,
    *,
    accept_moved_tags: bool = False,
) -> list[Target | ForkReport]:
    """Where each fork is to go; a ForkReport with a problem for one that cannot say.

    The leader goes to its newest release, and with it those that follow it; `to` sends the leader,
    or each fork in `named`, elsewhere: a tag, a commit, `latest`, or `main` for upstream's branch.
    """
    new: dict[str, Stand] = {}
    result: list[Target | ForkReport] = []
    for fork in ws.project.forks:
        if named and fork not in named:
            continue
        got = found[fork]
        pin = ws.manifest(fork).pin
        if not got.source:
            result.append(not_fetched(got, pin))
            continue
        try:
            with mirror_faults(ws, fork):
                old = ws.stand(fork, got.source)
                target = _target(ws, fork, got.source, old, new, bool(named), to)
            if not accept_moved_tags:
                _refuse_moved_tag(target, to)
        except _NoSuchRevision:
            if got.fault:  # it may be among what could not be fetched
                raise got.fault from None
            raise
        except ForkmanError as error:
            # What it lacks may be what could not be fetched.
            asked = (found.get(each) for each in (fork, *_others(ws, fork)))
            out_of_reach = any(each and each.fault for each in asked)
            stays = ForkReport(fork, got.source, pin, pin, "", notes=got.notes)
            result.append(
                replace(stays, problem=error.what, todo=error.todo, unreachable=out_of_reach)
            )
            continue
        new[fork] = target.new
        result.append(replace(target, notes=got.notes + target.notes))
    return result


def _target(
    ws: Workspace,
    fork: str,
    source: Source,
    old: Stand,
    new: Mapping[str, Stand],
    named: bool,
    to: str | None,
) -> Target:
    entry, leader = ws.manifest(fork), ws.project.stack.leader
    notes: tuple[str, ...] = ()
    if to and (named or fork == leader):
        pin, how = _asked(ws, fork, source, to), "as asked"
    elif source == "archives":
        pin, how = _newest(ws, fork, source), "newest release"
    elif fork == leader or (named and not entry.follow):
        pin, how = _newest(ws, fork, source), "leads" if fork == leader else "newest release"
    elif entry.follow:
        pin, how = _followed(ws, entry, new), f"follows {entry.follow.fork} {entry.follow.file}"
    else:
        pin, how = old.pin, "stays"
    if how in ("leads", "newest release") and _is_behind(ws, fork, source, pin, old.pin):
        pin, how = old.pin, f"{how}; stays, as {pin} is behind it"
    layers: tuple[tuple[Layer, ...], ...] = ()
    if source == "git":
        layers = _layers(ws, entry, new)
    elif entry.layers:
        others = " and ".join(sorted({layer.fork for layer in entry.layers}))
        notes = (f"Without the layers from {others}, which release archives do not hold.",)
    return Target(fork, old, Stand(source, pin, layers), how, notes)


class _NoSuchRevision(UsageError):
    """What was asked for is wrong, not what a fork has."""


def _asked(ws: Workspace, fork: str, source: Source, to: str) -> Pin:
    if to == "latest" or (to == "main" and source == "archives"):
        return _newest(ws, fork, source)
    mirror = ws.mirror(fork, source)
    if commit := refs.resolve(mirror, to):
        names = refs.tags(mirror)
        return Pin(commit, to if names.get(to) == commit else _tag_at(ws, fork, source, commit))
    if to == "main":  # whatever upstream calls it
        for name in ("master", "archives"):
            if commit := refs.branches(mirror).get(name):
                return Pin(commit)
    raise _NoSuchRevision(
        f"{fork}: upstream has no {to!r}.",
        todo=f"Name a tag, a branch or a commit of {ws.url(fork)}"
        + (" (only its release archives can be reached)." if source == "archives" else "."),
    )


def _newest(ws: Workspace, fork: str, source: Source) -> Pin:
    mirror, entry = ws.mirror(fork, source), ws.manifest(fork)
    tagged = source == "archives" or entry.upstream.releases.refs == "tags"
    names = refs.tags(mirror) if tagged else refs.branches(mirror)
    if name := manifest.newest(entry, names):
        return Pin(names[name], name if tagged else None)
    raise UsageError(
        f"{fork}: no {'tag' if tagged else 'branch'} of upstream is a release by the pattern"
        f" {entry.upstream.releases.pattern.pattern!r}.",
        todo=f"Correct upstream.releases in {entry.path.name}, or say where to go: --to",
    )


def _tag_at(ws: Workspace, fork: str, source: Source, commit: ObjectId) -> str | None:
    """The release tag of a commit, if it has one."""
    tags = refs.tags(ws.mirror(fork, source))
    return manifest.newest(
        ws.manifest(fork), (name for name, at in tags.items() if at == commit), prereleases=True
    )


def _followed(ws: Workspace, entry: manifest.Manifest, new: Mapping[str, Stand]) -> Pin:
    assert entry.follow
    content = _file(ws, entry.follow.fork, entry.follow.file, new)
    name = manifest.followed(entry, content)
    commit = refs.resolve(ws.mirror(entry.fork, "git"), name)
    if not commit:
        raise UsageError(
            f"{entry.fork}: {entry.follow.fork}'s {entry.follow.file} names {name}, which"
            f" {ws.url(entry.fork)} does not have.",
            todo="Fetch from a repository that has it: --upstream"
            f" {entry.fork}=URL, or go elsewhere: --to",
        )
    tags = refs.tags(ws.mirror(entry.fork, "git"))
    return Pin(commit, name if name in tags else _tag_at(ws, entry.fork, "git", commit))


def _layers(
    ws: Workspace, entry: manifest.Manifest, new: Mapping[str, Stand]
) -> tuple[tuple[Layer, ...], ...]:
    """The layers of a fork as they are where the other forks go."""
    found: list[tuple[Layer, ...]] = []
    for layer in entry.layers:
        order = _file(ws, layer.fork, layer.order.file, new) if layer.order else None
        patches = []
        for path in manifest.layer_paths(layer, order):
            stand = new.get(layer.fork) or ws.stand(layer.fork, "git")
            objects = ws.objects(layer.fork, "git")
            at = objects.find(objects.tree_of(stand.pin.commit), path.encode())
            if not at:
                raise UsageError(
                    f"{entry.fork}: its layer {path} is not in {layer.fork} {stand.pin}.",
                    todo=f"See how {layer.fork} keeps its patches there, and correct layers in"
                    f" {entry.path.name}.",
                )
            patches.append(Layer(layer.fork, path, at.id))
        found.append(tuple(patches))
    return tuple(found)


def _file(ws: Workspace, fork: str, path: str, new: Mapping[str, Stand]) -> bytes:
    """A file of another fork's upstream, where that fork goes or stands."""
    stand = new.get(fork) or ws.stand(fork, "git")
    objects = ws.objects(fork, "git")
    entry = objects.find(objects.tree_of(stand.pin.commit), path.encode())
    if entry:
        return objects.read(entry.id)
    raise UsageError(
        f"{fork} {stand.pin} has no {path}.", todo="Correct the manifest that names it."
    )


def _refuse_moved_tag(target: Target, to: str | None) -> None:
    """Raise NeedsPerson where the pin's own tag names another commit than it did.

    The manifest says what the tag was, also where the mirror is new and never saw it move.
    """
    old, new = target.old.pin, target.new.pin
    if not new.tag or new.tag != old.tag or new.commit == old.commit:
        return
    if not (to and new.commit.startswith(to)):
        raise NeedsPerson(
            f"{target.fork}: upstream's tag {new.tag} names {new.commit} now, and the pin says that"
            f" it is {old.commit}.",
            todo=f"See what upstream says about it. To move there: forkman sync {target.fork}"
            f" --to {new.commit[:9]}, or all with --accept-moved-tags",
        )


def _is_behind(ws: Workspace, fork: str, source: Source, old: Pin, new: Pin) -> bool:
    if old.commit == new.commit:
        return False
    git = ws.objects(fork, source).git
    done = git.call("merge-base", "--is-ancestor", old.commit, new.commit, ok=(0, 1, 128))
    return done.returncode == 0


def staying(ws: Workspace, got: Fetch) -> Target | ForkReport:
    """The target that leaves a fork where it is."""
    pin = ws.manifest(got.fork).pin
    if not got.source:
        return not_fetched(got, pin)
    try:
        stand = ws.stand(got.fork, got.source)
    except ForkmanError as error:
        return ForkReport(got.fork, got.source, pin, pin, "", (), error.what, error.todo)
    return Target(got.fork, stand, stand, "stays", got.notes)


def not_fetched(got: Fetch, pin: Pin) -> ForkReport:
    assert got.fault
    what, todo = " ".join(got.notes), got.fault.todo
    out_of_reach = isinstance(got.fault, EnvironmentFault)
    return ForkReport(got.fork, "git", pin, pin, "", (), what, todo, out_of_reach)
