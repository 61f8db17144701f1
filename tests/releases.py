"""Real upstream code for tests: the releases whose source a package index has.

A fork's releases are what its manifest's `[archives]` says, read by `rebase.archives`, so a new one
is tested on the day it appears. They are kept between runs in ~/.cache/forkman/releases, or where
FORKMAN_TEST_CACHE says: the downloads by hash, and a mirror a fork that all test processes share.
Without the network a test takes what is there, and where nothing is, it is skipped by name; on CI
(`CI=true`) that is an error, for there the releases must have been looked at.
"""

import os
import pwd
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock
from packaging.version import Version

from rebase import archives, branch, manifest, queue, refs
from rebase.branch import Files
from rebase.errors import EnvironmentFault
from rebase.git import ObjectId
from rebase.history import History
from rebase.objects import Objects
from rebase.outcome import Outcome
from rebase.replay import Step, replay

ROOT = Path(__file__).parents[1]
# Each fork's oldest release that its queue is held against: before the pin, as far as what the
# queue uses is there (megatron-core 0.12 has no TESpecProvider).
OLDEST = {"megatron": "0.13.0", "megatron-bridge": "0.3.0", "sglang": "0.5.5"}


def _kept() -> Path:
    # not Path.home(): tests have a home of their own
    home = pwd.getpwuid(os.getuid()).pw_dir
    return Path(os.environ.get("FORKMAN_TEST_CACHE") or Path(home, ".cache/forkman/releases"))


@dataclass(frozen=True)
class Carried:
    """A fork's queue carried to a release. before, after: the trees without it and with it."""

    objects: Objects
    before: ObjectId
    after: ObjectId
    outcomes: tuple[Outcome, ...]

    def touched(self) -> Iterator[tuple[str, bytes, bytes]]:
        """The files that the changes edit: path, content before, content after."""
        for path, (old, new) in self.objects.changed(self.before, self.after).items():
            assert old and new, "our queues add and remove no file"
            yield path.decode(), self.objects.read(old.id), self.objects.read(new.id)

    def files(self) -> Files:
        """The tree after the queue."""
        return Files(self.objects, self.after)


class Releases:
    """The releases of a fork's upstream. tags: oldest first, from `OLDEST` on, with commits."""

    def __init__(self, fork: str, mirror: Path) -> None:
        entry = manifest.load(ROOT).forks[fork]
        assert entry.archives
        self.fork, self.mirror, self.objects = fork, mirror, Objects(mirror)
        self._tag = entry.archives.tag
        known = refs.tags(mirror)
        named = {Version(tag.removeprefix(self.tag(""))): tag for tag in known}
        self.tags = {
            named[version]: known[named[version]]
            for version in sorted(named)
            if version >= Version(OLDEST[fork])
        }
        self._pin = self.tags[self.tag(entry.archives.pin)]

    def tag(self, version: str) -> str:
        """What a release's tag is called."""
        return self._tag.replace("{version}", version)

    def since_pin(self) -> list[tuple[str, ObjectId]]:
        """The releases from the pin on: tag and commit, oldest first."""
        tags = list(self.tags.items())
        return tags[[commit for _, commit in tags].index(self._pin) :]

    @cache  # noqa: B019 - there is one of these a fork, and it stays
    def steps(self) -> tuple[Step, ...]:
        """The fork's queue."""
        changes = queue.load(ROOT / "forks" / self.fork)
        return tuple(branch.steps(self.objects, self.fork, self._pin, changes))

    @cache  # noqa: B019
    def carried(self, tag: str) -> Carried:
        """The fork's queue carried to a release. Nothing of it is written."""
        commit = self.tags[tag]
        history = History(self.objects.git, commit, commit)
        outcomes = tuple(replay(self.objects, self.steps(), commit, history))
        before = self.objects.tree_of(commit)
        return Carried(self.objects, before, outcomes[-1].tree, outcomes)


_known: dict[str, Releases] = {}
_unreachable: list[str] = []


def of(fork: str) -> Releases:
    """The releases of a fork. Skips the test where there are none and no network."""
    if fork not in _known:
        entry = manifest.load(ROOT).forks[fork].archives
        assert entry
        mirror = _kept() / f"{fork}.git"
        mirror.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{mirror}.lock"):
            if not _unreachable:  # once is enough: the index is the same for all
                try:
                    archives.update(
                        mirror, entry.package, entry.tag, entry.prefix,
                        since=OLDEST[fork], cache=_kept() / "archives",
                    )  # fmt: skip
                except EnvironmentFault as error:
                    if os.environ.get("CI") == "true":
                        raise
                    _unreachable.append(error.what)
            if not mirror.exists() or not refs.tags(mirror):
                pytest.skip(f"needs the releases of {entry.package}: {_unreachable[0]}")
        _known[fork] = Releases(fork, mirror)
    return _known[fork]
