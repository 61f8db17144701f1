"""git as a process: one typed way to run it, the same on every machine.

Replay and export must give the same bytes whatever the user configured, so `Git.run` starts git in
an environment with no user or system configuration, no attributes and no locale. Fetching and the
worktrees in which people resolve conflicts are the user's own ground: proxies, credentials,
`insteadOf`, editors and merge tools live in their configuration, and `Git.run_as_user` keeps it.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NewType

from rebase.errors import EnvironmentFault

ObjectId = NewType("ObjectId", str)  # 40 hexadecimal digits
EMPTY_TREE = ObjectId("4b825dc642cb6eb9a060e54bf8d69288fbee4904")
_OLDEST = (2, 39)

# Variables that point git at another repository; a hook or an alias that calls forkman exports them
# (`git rev-parse --local-env-vars` lists them).
_ELSEWHERE = {
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_CONFIG", "GIT_CONFIG_COUNT",
    "GIT_CONFIG_PARAMETERS", "GIT_DIR", "GIT_GRAFT_FILE", "GIT_IMPLICIT_WORK_TREE",
    "GIT_INDEX_FILE", "GIT_NAMESPACE", "GIT_NO_REPLACE_OBJECTS", "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX", "GIT_REPLACE_REF_BASE", "GIT_SHALLOW_FILE", "GIT_WORK_TREE",
}  # fmt: skip
_USER = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
_ANYBODY = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
_NEUTRAL = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    # From 2.43 a bare repository reads .gitattributes from HEAD; older ones ignore this variable.
    "GIT_ATTR_SOURCE": EMPTY_TREE,
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_NO_LAZY_FETCH": "1",  # what a blobless mirror lacks is fetched as the user, and at once
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
    "LANGUAGE": "",
    "TZ": "UTC",
}
_NEUTRAL_ARGS = ("-c", f"core.attributesFile={os.devnull}")


class GitError(Exception):
    """git exited with an error. As text: what it said, then which command of git's said it.

    args: what git was asked; status: its exit status; stderr: what it said, as text.
    """

    def __init__(self, args: tuple[str, ...], status: int, stderr: bytes) -> None:
        self.command = args
        self.status = status
        self.stderr = stderr.decode("utf-8", "replace").strip()
        words = iter(args)
        # The options before the command are forkman's own; -c has its value in the next word.
        name = next((w for w in words if not (w == "-c" and next(words)) and w[:1] != "-"), "")
        super().__init__(f"{self.stderr or 'no reason given'} (git {name}, exit status {status})")


class Git:
    """git on one repository (`directory` is a bare repository or a worktree)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def run(
        self,
        *args: str,
        input: bytes = b"",
        ok: tuple[int, ...] = (0,),
        env: Mapping[str, str] | None = None,
    ) -> bytes:
        """Run git in the neutral environment and return its standard output.

        ok: the exit statuses that are no error. env: variables to add.
        Raises GitError for any other status, EnvironmentFault where git cannot be started.
        """
        return self.call(*args, input=input, ok=ok, env=env).stdout

    def call(
        self,
        *args: str,
        input: bytes = b"",
        ok: tuple[int, ...] = (0,),
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """`run`, for callers that also need the exit status or standard error."""
        return self._start(
            (*_NEUTRAL_ARGS, *args), _ANYBODY | _NEUTRAL | dict(env or {}), input, ok
        )

    def run_as_user(
        self, *args: str, input: bytes = b"", ok: tuple[int, ...] = (0,)
    ) -> subprocess.CompletedProcess[bytes]:
        """Run git with the user's own configuration: for fetching and for worktrees."""
        return self._start(args, _USER, input, ok)

    def text(self, *args: str) -> str:
        """`run`, for output that is one line of ASCII: ids, counts, refs."""
        return self.run(*args).decode("ascii").strip()

    def resolve(self, revision: str, kind: str = "commit") -> ObjectId | None:
        """The id of `revision` peeled to `kind`, or None where there is no such object."""
        # --end-of-options: a revision from a manifest or the command line is never an option.
        found = self.run(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{{kind}}}",
            ok=(0, 1, 128),
        )  # fmt: skip
        return ObjectId(found.decode("ascii").strip()) if found.strip() else None

    def _start(
        self, args: tuple[str, ...], env: dict[str, str], input: bytes, ok: tuple[int, ...]
    ) -> subprocess.CompletedProcess[bytes]:
        try:
            done = subprocess.run(
                ["git", *args], cwd=self.directory, env=env, input=input, capture_output=True
            )
        except FileNotFoundError as error:
            if not self.directory.is_dir():
                raise EnvironmentFault(f"The repository {self.directory} is gone.") from error
            raise _no_git() from error
        if done.returncode not in ok:
            check_version()
            raise GitError(args, done.returncode, done.stderr)
        return done


def _no_git() -> EnvironmentFault:
    return EnvironmentFault(
        "git is not installed, or not on PATH.", todo="Install git 2.39 or newer."
    )


@cache
def check_version() -> None:
    """Raise EnvironmentFault where the installed git is older than forkman can use.

    A fetch asks, and whoever meets an error of git's, which then is the reason; commands that read
    what is here do not pay for a process.
    """
    try:
        said = subprocess.run(["git", "--version"], env=_ANYBODY, capture_output=True).stdout
    except FileNotFoundError as error:
        raise _no_git() from error
    found = re.match(rb"git version ((\d+)\.(\d+)\S*)", said)
    if found and (int(found[2]), int(found[3])) < _OLDEST:
        raise EnvironmentFault(
            f"git {found[1].decode('ascii', 'replace')} is too old for forkman.",
            todo="Install git 2.39 or newer, and have it first on PATH.",
        )
