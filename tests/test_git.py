"""git as a process: what its errors say, and which git is too old."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rebase.git import Git, GitError


def test_an_error_says_gits_own_words_first_and_not_how_it_was_called(tmp_path: Path) -> None:
    Git(tmp_path).run("init", "--quiet", "--bare")
    with pytest.raises(GitError) as caught:
        Git(tmp_path).run("-c", "gc.auto=0", "--literal-pathspecs", "rev-parse", "--verify", "none")
    assert str(caught.value) == "fatal: Needed a single revision (git rev-parse, exit status 128)"


PROGRAM = "import pathlib, rebase.git as git; git.Git(pathlib.Path.cwd()).run('merge-tree')"


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.38.9", "EnvironmentFault: git 2.38.9 is too old for forkman."),
        ("1.8.3.1", "EnvironmentFault: git 1.8.3.1 is too old for forkman."),
        ("2.39.0", "GitError: usage (git merge-tree, exit status 129)"),
        ("2.39.5 (Apple Git-154)", "GitError: usage (git merge-tree, exit status 129)"),
        ("3.0.0.rc1", "GitError: usage (git merge-tree, exit status 129)"),
    ],
)
def test_what_an_old_git_cannot_do_is_blamed_on_its_age(
    tmp_path: Path, version: str, said: str
) -> None:
    git = tmp_path / "git"
    git.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo "git version {version}" && exit\n'
        "echo usage >&2; exit 129\n"
    )
    git.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.stderr.splitlines()[-1].endswith(said)
