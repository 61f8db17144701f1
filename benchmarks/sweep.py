"""How a queue fares at upstream commits that nobody chose: every 50th since the pin.

    python benchmarks/sweep.py FORK [BRANCH ...] [--every N]

Run it inside a project, after `forkman fetch`. Takes the commits that each branch of upstream (by
default main, or else master) was at since it left the pin, every Nth of them and its head, and
carries the fork's queue to each as `forkman audit --at` would: on top of the fork's present layers
where those fit, else without them. Writes nothing but objects into the mirror.

Prints for each change how often it ended in which way, then each conflict with its commit; a change
is fit where it is applied, already upstream or not needed. Exits with 1 where less than 99 % is.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from rebase import refs
from rebase.audit import carried
from rebase.errors import ForkmanError
from rebase.git import Git, ObjectId
from rebase.manifest import find_root
from rebase.outcome import Status
from rebase.workspace import Workspace

ENOUGH = 0.99


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("fork")
    parser.add_argument("branches", nargs="*", metavar="BRANCH")
    parser.add_argument("--every", type=int, default=50, metavar="N", help="default: 50")
    options = parser.parse_args()
    try:
        ws = Workspace(find_root(Path.cwd()))
        commits = chosen(ws, options.fork, options.branches, options.every)
        return sweep(ws, options.fork, commits)
    except ForkmanError as error:
        sys.exit(f"{error.what} {error.todo}")


def chosen(ws: Workspace, fork: str, branches: Sequence[str], every: int) -> list[ObjectId]:
    """Every Nth commit that the branches were at since the pin, and their heads; each once."""
    mirror = ws.mirror(fork, ws.source(fork))
    heads, pin = refs.branches(mirror), ws.manifest(fork).pin.commit
    branches = branches or ["main" if "main" in heads else "master"]
    if unknown := set(branches) - heads.keys():
        sys.exit(f"{fork}: upstream has no branch {', '.join(sorted(unknown))}.")
    git = Git(mirror)
    found: dict[ObjectId, None] = {}
    for branch in branches:
        walk = git.text("rev-list", "--first-parent", "--reverse", f"{pin}..{heads[branch]}")
        passed = list(map(ObjectId, walk.split()))
        taken = dict.fromkeys((*passed[every - 1 :: every], *passed[-1:]))
        print(f"{fork} {branch}: {len(taken)} of {len(passed)} commits", flush=True)
        found |= taken
    return list(found)


def sweep(ws: Workspace, fork: str, commits: Sequence[ObjectId]) -> int:
    """Carry the queue to each commit and print what became of it; the exit status."""
    ended: defaultdict[str, Counter[Status]] = defaultdict(Counter)
    conflicts: list[str] = []
    bare = 0
    with ws.lock():
        for number, commit in enumerate(commits, 1):
            if sys.stderr.isatty():
                print(f"\r{number} of {len(commits)}", end="", file=sys.stderr, flush=True)
            report = carried(ws, fork, commit).report
            bare += any(note.startswith("Without ") for note in report.notes)
            for outcome in report.outcomes:
                ended[outcome.change][outcome.status] += 1
                for conflict in outcome.conflicts:
                    conflicts.append(f"{commit[:9]} {outcome.change}: {conflict.detail}")
    width = max(map(len, ended), default=0)
    for change, statuses in ended.items():
        shown = ", ".join(f"{count} {status.value}" for status, count in statuses.most_common())
        print(f"{change:{width}}  {shown}")
    total = sum((statuses for statuses in ended.values()), Counter[Status]())
    fit = total.total() - total[Status.CONFLICT]
    print(f"{fit} of {total.total()} fit" + (f"; without layers at {bare} commits" if bare else ""))
    print(*conflicts, sep="\n")
    return int(fit < ENOUGH * total.total())


if __name__ == "__main__":
    sys.exit(main())
