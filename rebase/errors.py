"""Errors for people, and the contract with scripts.

Every error a user can cause or meet says three things: what happened (naming the fork, the file,
the change), what is still as it was, and what to do now.
"""

import enum


class ExitCode(enum.IntEnum):
    """What forkman's exit status means; scripts and CI may rely on it."""

    DONE = 0  # done, or nothing to do and said so
    PERSON = 1  # a person is needed: a conflict, a failed verification, residue
    USAGE = 2  # wrong arguments, or a wrong manifest, queue or patch
    ENVIRONMENT = 3  # network, disk, git, or a lock held by another run
    BUG = 70  # a bug in forkman


class ForkmanError(Exception):
    """Something a person must know about.

    what: what happened, naming the fork, file or change it happened to.
    kept: what is still as it was.
    todo: what to do now; empty where there is nothing to add.
    """

    exit_code = ExitCode.BUG

    def __init__(self, what: str, *, kept: str = "Nothing was changed.", todo: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.kept = kept
        self.todo = todo


class NeedsPerson(ForkmanError):
    """A person has to decide: conflicts, a verification that failed."""

    exit_code = ExitCode.PERSON


class UsageError(ForkmanError):
    """What forkman was given cannot be used: arguments, manifests, queues, patches."""

    exit_code = ExitCode.USAGE


class EnvironmentFault(ForkmanError):
    """The world around forkman failed: network, disk, git, a lock."""

    exit_code = ExitCode.ENVIRONMENT
