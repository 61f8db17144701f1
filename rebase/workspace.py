"""A project on this machine: its manifests and queues, and what forkman keeps beside them.

<root>/manifests/, <root>/forks/     the project; tracked by git
<root>/exports/                      what downstream consumes; made anew by each landing
<root>/.forkman/mirrors/<fork>.git            upstream over git (see `upstream`)
<root>/.forkman/mirrors/<fork>.archives.git   upstream as release archives (see `archives`)
<root>/.forkman/archives/            downloaded archives
<root>/.forkman/landing/             the lock, and a landing under way (see `landing`)
<root>/.forkman/last/<fork>.json     what the last replay of a fork found (see `Last`)
<root>/.forkman/open/<fork>.json     a replay a person is resolving (see `resolve`)
<root>/.forkman/worktrees/<fork>/    the worktree they do it in
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rebase import address, landing, manifest, refs
from rebase.errors import EnvironmentFault, UsageError
from rebase.git import GitError
from rebase.outcome import Layer, Outcome, Pin, Status, Taken, UpstreamCommit

if TYPE_CHECKING:
    from rebase.manifest import Manifest
    from rebase.objects import Objects
    from rebase.queue import Queue

Source = Literal["git", "archives"]


@dataclass(frozen=True)
class Stand:
    """What a fork stands on: an upstream commit, and the layers that go on before its changes.

    layers: for each layer of the manifest its patches.
    """

    source: Source
    pin: Pin
    layers: tuple[tuple[Layer, ...], ...] = ()

    @property
    def patches(self) -> tuple[Layer, ...]:
        """The patches of all layers, in the order they go on."""
        return tuple(patch for layer in self.layers for patch in layer)


@dataclass(frozen=True)
class Target:
    """Where a fork is to go. how: why there ("leads", "follows slime docker/Dockerfile", …)."""

    fork: str
    old: Stand
    new: Stand
    how: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """What was to land together.

    command: what was asked; targets: of all forks; without: those that could not be carried at all,
    so that nothing could land; out: where exports go.
    """

    command: str
    targets: tuple[Target, ...]
    without: tuple[str, ...]
    out: str


@dataclass(frozen=True)
class Last:
    """What the last replay of a fork found, and the run it was part of."""

    run: Run
    target: Target
    outcomes: tuple[Outcome, ...]

    @property
    def conflicts(self) -> bool:
        return any(outcome.status is Status.CONFLICT for outcome in self.outcomes)


class Workspace:
    """The project at `root`, read once; `urls` replaces upstream addresses for this run."""

    def __init__(self, root: Path, urls: dict[str, str] | None = None) -> None:
        self.root = root
        self.state = root / ".forkman"
        self.recovered = landing.recover(self.landing)
        self.urls = urls or {}
        self._objects: dict[Path, Objects] = {}
        for fork, url in self.urls.items():
            self.manifest(fork)
            address.check(url)

    @cached_property
    def project(self) -> manifest.Project:
        return manifest.load(self.root)

    @property
    def landing(self) -> Path:
        return self.state / "landing"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only run that works on this project."""
        ignore = self.state / ".gitignore"
        if not ignore.exists():  # none of it is the project's
            self.state.mkdir(parents=True, exist_ok=True)
            ignore.write_text("*\n", "ascii")
        from rebase import upstream

        with landing.lock(self.landing):
            for mirror in self.state.glob("mirrors/*.git"):
                upstream.unlock(mirror)
            yield

    @property
    def exports(self) -> Path:
        return self.root / "exports"

    def manifest(self, fork: str) -> "Manifest":
        """The manifest of a fork. Raises UsageError where there is no such fork."""
        if found := self.project.forks.get(fork):
            return found
        raise UsageError(
            f"There is no fork {fork!r} in this project.",
            todo=f"Its forks are {', '.join(self.project.forks)}.",
        )

    def url(self, fork: str) -> str:
        """Where the upstream of a fork is fetched from in this run."""
        given = self.urls.get(fork)
        return given or address.locate(self.manifest(fork).upstream.url, self.root)

    def mirror(self, fork: str, source: Source) -> Path:
        name = f"{fork}.git" if source == "git" else f"{fork}.archives.git"
        return self.state / "mirrors" / name

    def source(self, fork: str) -> Source:
        """Which upstream of a fork is here. Raises UsageError where it was never fetched."""
        if self.mirror(fork, "git").is_dir():
            return "git"
        if self.mirror(fork, "archives").is_dir():
            return "archives"
        raise _never_fetched(fork)

    def objects(self, fork: str, source: Source) -> "Objects":
        """The objects of a fork's mirror. Raises UsageError where it was never fetched."""
        from rebase.objects import Objects

        path = self.mirror(fork, source)
        if path not in self._objects:
            if not path.is_dir():
                raise _never_fetched(fork)
            self._objects[path] = Objects(path)
        return self._objects[path]

    def layer(self, layer: Layer) -> bytes:
        """A layer's patch, by its blob."""
        return self.objects(layer.fork, "git").read(layer.blob)

    def queue(self, fork: str) -> "Queue":
        """The queue of a fork that is a folder of the project."""
        from rebase import queue

        where = self.manifest(fork).queue
        assert isinstance(where, manifest.QueueFolder)
        return queue.load(self.root / where.path)

    def stand(self, fork: str, source: Source) -> Stand:
        """Where a fork stands by its manifest."""
        entry = self.manifest(fork)
        if source == "git":
            layers = tuple(
                tuple(Layer(layer.fork, patch.path, patch.blob) for patch in layer.patches)
                for layer in entry.layers
            )
            return Stand("git", entry.pin, layers)
        assert entry.archives
        tag = entry.archives.tag_of(entry.archives.pin)
        commit = refs.tags(self.mirror(fork, "archives")).get(tag)
        if not commit:
            raise UsageError(
                f"{fork}: the package index has no release {entry.archives.pin} of"
                f" {entry.archives.package}.",
                todo=f"Correct archives.pin in {entry.path.name}.",
            )
        return Stand("archives", Pin(commit, tag))

    # -- what is kept between runs ---------------------------------------------------------------

    def last(self, fork: str) -> Last | None:
        """What the last replay of a fork found, None where there was none."""
        data = self.read_state("last", fork)
        try:
            return data and Last(
                run_from(data["run"]),
                target_from(data["target"]),
                tuple(outcome_from(each) for each in data["outcomes"]),
            )
        except (KeyError, TypeError):  # of another version of forkman: the next replay tells anew
            return None

    def forget(self, fork: str) -> None:
        """Forget what the last replay of a fork found."""
        self.write_state("last", fork, None)

    def remember(self, last: Last) -> None:
        """Keep what a replay found."""
        data = {
            "run": asdict(last.run),
            "target": asdict(last.target),
            "outcomes": outcomes_data(last.outcomes),
        }
        self.write_state("last", last.target.fork, data)

    def read_state(self, kind: str, fork: str) -> Any:
        """Read `<kind>/<fork>.json`; None where there is none, or where it is damaged."""
        try:
            return json.loads((self.state / kind / f"{fork}.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None

    def write_state(self, kind: str, fork: str, data: object) -> None:
        """Write `<kind>/<fork>.json`, whole or not at all; None removes it."""
        path = self.state / kind / f"{fork}.json"
        if data is None:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        with beside.open("w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)


def _never_fetched(fork: str) -> UsageError:
    return UsageError(
        f"{fork}: its upstream has not been fetched yet.", todo=f"Fetch it: forkman fetch {fork}"
    )


def outcomes_data(outcomes: Iterable[Outcome]) -> list[dict[str, object]]:
    """The outcomes as JSON has them, but for conflicts, which are found anew."""
    return [
        asdict(replace(each, conflicts=(), taken=()))
        | {
            "status": each.status.value,
            "taken": [asdict(it) | {"path": os.fsdecode(it.path)} for it in each.taken],
        }
        for each in outcomes
    ]


def outcome_from(data: Any) -> Outcome:
    """The inverse of one of `outcomes_data`."""
    taken = tuple(
        Taken(os.fsencode(it["path"]), it["hunks"], it["total"],
              tuple(UpstreamCommit(**by) for by in it["by"]))
        for it in data["taken"]
    )  # fmt: skip
    lists = {name: tuple(data[name]) for name in ("places", "new_places")}
    found = data | lists | {"status": Status(data["status"]), "taken": taken, "conflicts": ()}
    return Outcome(**found)


def run_from(data: Any) -> Run:
    """The inverse of `asdict`."""
    targets = tuple(target_from(each) for each in data["targets"])
    return Run(data["command"], targets, tuple(data["without"]), data["out"])


def target_from(data: Any) -> Target:
    """The inverse of `asdict`."""
    old, new = (
        Stand(
            side["source"],
            Pin(**side["pin"]),
            tuple(tuple(Layer(**patch) for patch in layer) for layer in side["layers"]),
        )
        for side in (data["old"], data["new"])
    )
    return Target(data["fork"], old, new, data["how"], tuple(data["notes"]))


@contextmanager
def mirror_faults(ws: Workspace, fork: str) -> Iterator[None]:
    """Name the fork where git fails on its mirror."""
    try:
        yield
    except GitError as error:
        mirror = ws.mirror(fork, ws.source(fork))
        raise EnvironmentFault(
            f"{fork}: git failed on its mirror: {error.stderr}",
            todo="See whether the disk and the temporary directory (TMPDIR) have room and can be"
            f" written. If it is the mirror that is damaged, remove {mirror} and fetch again; with"
            " it go the resolutions it remembers and the states that forkman diff shows.",
        ) from error
