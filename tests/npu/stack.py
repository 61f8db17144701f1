"""Makes the folder that FORKMAN_STACK names: patched source trees, one folder a release of slime.

    python tests/npu/stack.py FOLDER [--upstream FORK=URL]... [RELEASE]...

For each release it makes FOLDER/<release>/{slime,megatron,mindspeed,sglang}: the trees its image is
built from, with slime's own layers and this project's exports applied, as downstream applies them.
FOLDER/<release>/unpatched/slime is slime's package as upstream has it.
Those trees are on no package index, so the tests that need them run only where this folder is.
SGLang is made where its upstream has the commit, and is otherwise what is installed. The one of
v0.3.1 wants transformers 5 (`pip install --target DIR transformers==5.12.1`, PYTHONPATH=DIR).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
RELEASES = ("v0.2.2", "v0.2.3", "v0.2.4", "v0.3.0", "v0.3.1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("releases", nargs="*", default=RELEASES)
    parser.add_argument("--upstream", action="append", default=[], metavar="FORK=URL")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        project.mkdir()
        for name in ("manifests", "forks"):
            shutil.copytree(PROJECT / name, project / name)
        for release in given.releases:
            make(release, given.folder.resolve() / release, project, given.upstream)


def make(release: str, folder: Path, project: Path, upstreams: list[str]) -> None:
    """The trees of one release of slime; `project` moves to it."""
    addresses = [word for upstream in upstreams for word in ("--upstream", upstream)]
    rebase(project, "slime", release, addresses)
    tree(project, "slime", folder)
    dockerfile = (folder / "slime" / "docker" / "Dockerfile").read_text(encoding="utf-8")
    for fork in ("megatron", "mindspeed", "sglang"):
        try:
            follow(project, fork, dockerfile, addresses)
        except subprocess.CalledProcessError:
            if fork != "sglang":
                raise
            print(f"{release}: its SGLang could not be had; what is installed stands in")
        else:
            tree(project, fork, folder)


def follow(project: Path, fork: str, dockerfile: str, addresses: list[str]) -> None:
    """Export a fork at the revision that slime's Dockerfile names, or at its pin."""
    manifest = tomllib.loads((project / "manifests" / f"{fork}.toml").read_text(encoding="utf-8"))
    if "follow" not in manifest:
        run([sys.executable, "-m", "rebase.cli", "export", fork, *addresses], project)
        return
    pattern = manifest["follow"]["pattern"]
    match = re.search(pattern, dockerfile, re.MULTILINE)
    if match is None:
        raise SystemExit(f"slime's Dockerfile names no {fork} ({pattern})")
    rebase(project, fork, match[1], addresses)


def rebase(project: Path, fork: str, revision: str, addresses: list[str]) -> None:
    command = [sys.executable, "-m", "rebase.cli", "rebase", fork, "--onto", revision, *addresses]
    run(command, project)


def tree(project: Path, fork: str, folder: Path) -> None:
    """The fork's upstream at its pin in folder/<fork>, its layers and our export applied."""
    entry = json.loads((project / "exports" / "index.json").read_text())["forks"][fork]
    into = folder / fork
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    mirror = project / ".forkman" / "mirrors" / f"{fork}.git"
    archive = subprocess.run(
        ["git", f"--git-dir={mirror}", "archive", entry["pin"]["commit"]],
        check=True,
        stdout=subprocess.PIPE,
    )
    subprocess.run(["tar", "-x", "-C", str(into)], check=True, input=archive.stdout)
    if fork == "slime":
        unpatched = folder / "unpatched"
        shutil.rmtree(unpatched, ignore_errors=True)
        shutil.copytree(into / "slime", unpatched / "slime")
    for layer in entry["layers"]:
        run(["git", "apply", str(folder / layer["fork"] / layer["path"])], into)
    export = project / "exports" / "index.json"
    run(
        [sys.executable, "-m", "rebase.cli", "apply", str(export), "--fork", fork, "--to", "."],
        into,
    )
    print(f"{into}: {entry['pin']['tag'] or entry['pin']['commit'][:9]}, patched")


def run(command: list[str], folder: Path) -> None:
    """Run quietly; what it said is shown where it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, command)


if __name__ == "__main__":
    main()
