"""The command line: turns arguments into calls and results into exit codes; it decides nothing."""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from rebase.errors import EnvironmentFault, ExitCode, ForkmanError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from rebase.outcome import Report
    from rebase.workspace import Workspace

# Everything else is imported where it is used: `forkman --help` must not wait for libgit2 or rich.

F = TypeVar("F", bound=Callable[..., Any])

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
_out = click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False, resolve_path=True),
    help="Where exports go.  [default: exports/ in the project]",
)
_upstream = click.option(
    "--upstream",
    "urls",
    multiple=True,
    metavar="FORK=URL",
    help="Another address of an upstream, for this run.",
)
_moved = click.option(
    "--accept-moved-tags", is_flag=True, help="Let tags move that upstream moved."
)


def _named(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not value.strip():  # an unset variable of a script
        raise click.BadParameter("it is empty", ctx, param)
    return value


_dry = click.option("--dry-run", "dry", is_flag=True, help="Decide everything, write nothing.")
_at = click.option(
    "--at", metavar="REV", help="A tag, branch or commit of upstream.  [default: the pin]"
)
_summary = click.option(
    "--summary",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append the report to this file, as Markdown (for $GITHUB_STEP_SUMMARY).",
)


class _Command(click.Command):
    """A command whose errors become words and an exit code (see `ExitCode`)."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except Exception as error:
            _fail(error, ctx.params.get("as_json", False), ctx.params.get("summary"))


class _Group(click.Group):
    command_class = _Command
    group_class = type


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="forkman", prog_name="forkman")
def cli() -> None:
    """Keep hardware forks of fast-moving projects alive.

    Manifests pin upstreams, queues hold the changes of each fork; forkman replays the queues onto
    new upstream releases, reports conflicts, and writes verified patches.
    """


@cli.command()
@_json
def status(as_json: bool) -> None:
    """Where every fork stands, as last fetched."""
    from rebase import inspect

    rows = inspect.status(_workspace())
    _print(as_json, rows, "status")


@cli.command()
@click.argument("forks", nargs=-1, metavar="[FORK]...")
@_moved
@_upstream
@_json
def fetch(
    forks: tuple[str, ...], accept_moved_tags: bool, urls: tuple[str, ...], as_json: bool
) -> None:
    """Fetch upstreams: over git, or release archives where git cannot reach them."""
    from rebase import targets as job

    ws = _workspace(urls)
    with _progress() as progress:
        rows = job.fetch_all(ws, forks, progress=progress, accept_moved_tags=accept_moved_tags)
    _print(as_json, rows, "fetch")
    if faults := [row.fault for row in rows if row.fault]:
        sys.exit(max(fault.exit_code for fault in faults))


@cli.command()
@click.argument("forks", nargs=-1, metavar="[FORK]...")
@click.option(
    "--to", metavar="TAG|COMMIT|latest|main", callback=_named, help="Where to go instead."
)
@_dry
@_out
@_moved
@_upstream
@_summary
@_json
def sync(
    forks: tuple[str, ...],
    to: str | None,
    dry: bool,
    out: Path | None,
    accept_moved_tags: bool,
    urls: tuple[str, ...],
    summary: Path | None,
    as_json: bool,
) -> None:
    """Fetch, replay onto new releases, verify, and land pins, queues and exports together.

    The leading fork goes to its newest release and the others follow it; with FORK, only those.
    """
    from rebase import sync as job

    ws = _workspace(urls)
    with _progress() as progress:
        report = job.sync(
            ws, forks, to=to, dry=dry, out=out, accept_moved_tags=accept_moved_tags,
            progress=progress,
        )  # fmt: skip
    _finish(report, as_json, summary)


@cli.command()
@click.argument("fork")
@click.option(
    "--onto",
    required=True,
    metavar="REV",
    callback=_named,
    help="A tag, branch or commit of upstream.",
)
@_dry
@_out
@_upstream
@_json
def rebase(
    fork: str, onto: str, dry: bool, out: Path | None, urls: tuple[str, ...], as_json: bool
) -> None:
    """Replay one fork's queue onto another upstream revision, and land it."""
    from rebase import sync as job

    with _progress() as progress:
        report = job.rebase(_workspace(urls), fork, onto, dry=dry, out=out, progress=progress)
    _finish(report, as_json)


@cli.command()
@click.argument("forks", nargs=-1, metavar="[FORK]...")
@_out
@_upstream
@_json
def export(forks: tuple[str, ...], out: Path | None, urls: tuple[str, ...], as_json: bool) -> None:
    """Write the patches of each fork, at its pin, for downstream."""
    from rebase import sync as job

    with _progress() as progress:
        report = job.export_forks(_workspace(urls), forks, out=out, progress=progress)
    _finish(report, as_json)


@cli.command()
@click.argument("index", required=False, type=click.Path(path_type=Path))
@_json
def verify(index: Path | None, as_json: bool) -> None:
    """Apply exported patches in every way downstream may, and compare trees.

    INDEX is an index.json or its folder; by default that of the project's exports.
    """
    from rebase import sync as job

    ws = _workspace()
    with _progress() as progress:
        rows = job.verify_exports(ws, index, progress=progress)
    _print(as_json, rows, "verified")
    if any(row.findings for row in rows):
        sys.exit(ExitCode.PERSON)


@cli.command()
@click.argument("index", type=click.Path(path_type=Path))
@click.option("--to", "checkout", required=True, type=click.Path(path_type=Path), help="Where.")
@click.option("--fork", help="Which fork's patch, where the index has several.")
@click.option("--reverse", is_flag=True, help="Take the patch away.")
@click.option("--check", is_flag=True, help="Only say whether it applies.")
@_json
def apply(
    index: Path, checkout: Path, fork: str | None, reverse: bool, check: bool, as_json: bool
) -> None:
    """Apply an exported patch to a source tree: all of it, or nothing.

    INDEX is an index.json or its folder. Needs no project: this is for downstream builds.
    """
    from rebase import export as job

    row = job.apply_to(index, checkout, fork=fork, reverse=reverse, check=check)
    _print(as_json, row, "applies" if check else "taken_away" if reverse else "applied")


@cli.command()
@click.argument("fork")
@_json
def log(fork: str, as_json: bool) -> None:
    """The queue of a fork, each change with its last outcome."""
    from rebase import inspect

    _print(as_json, inspect.log(_workspace(), fork), "log")


@cli.command()
@click.argument("fork")
@click.argument("old", required=False)
@click.argument("new", required=False)
@_json
def diff(fork: str, old: str | None, new: str | None, as_json: bool) -> None:
    """How a fork's branch changed between two of the pins it landed on (git range-diff)."""
    from rebase import inspect

    _print(as_json, inspect.range_diff(_workspace(), fork, old, new), "diff")


@cli.command()
@click.argument("forks", nargs=-1, metavar="[FORK]...")
@_at
@click.option(
    "--accept",
    metavar="REASON",
    help="Accept all residue found in FORK, with this reason, beside its queue.",
)
@_json
def audit(forks: tuple[str, ...], at: str | None, accept: str | None, as_json: bool) -> None:
    """Look for what a clean replay hides: CUDA-only code, broken contracts, broken files."""
    from rebase import audit as job

    ws = _workspace()
    if accept is not None:
        if len(forks) != 1:
            raise click.UsageError("--accept needs one FORK: each has its own reasons.")
        done = job.accept(ws, forks[0], accept, at=at)
        _print(as_json, done, "accepted")
        rows = [done.left]
    else:
        with _progress() as progress:
            rows = job.audit(ws, forks, at=at, progress=progress)
        _print(as_json, rows, "audited")
    if any(row.findings for row in rows):
        sys.exit(ExitCode.PERSON)


@cli.command()
@click.argument("forks", nargs=-1, metavar="[FORK]...")
@click.option(
    "--at", "revisions", multiple=True, metavar="REV", help="At this revision; may be repeated."
)
@_json
def needs(forks: tuple[str, ...], revisions: tuple[str, ...], as_json: bool) -> None:
    """What each branch must do, and how that is met at each target."""
    from rebase import needs as job

    with _progress() as progress:
        rows = job.needs(_workspace(), forks, at=revisions, progress=progress)
    _print(as_json, rows, "needs")
    if not all(row.how for row in rows):
        sys.exit(ExitCode.PERSON)


@cli.group()
def recipe() -> None:
    """Write recipes: changes that say which code to change."""


@recipe.command(name="try")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@_at
@_json
def try_(file: Path, at: str | None, as_json: bool) -> None:
    """Show what a recipe would do to an upstream revision, and say of itself; touches nothing.

    FILE lies in its fork's folder (forks/FORK/name.py); the series need not name it yet.
    """
    from rebase import trial
    from rebase.outcome import Status

    done = trial.attempt(_workspace(), file, at=at)
    _print(as_json, done, "tried")
    if done.outcome.status is Status.CONFLICT:
        sys.exit(ExitCode.PERSON)


@cli.command()
@click.argument("fork")
@_upstream
@_json
def edit(fork: str, urls: tuple[str, ...], as_json: bool) -> None:
    """Open a worktree: at the conflict of the last replay, or else on the branch."""
    from rebase import resolve

    _print(as_json, resolve.edit(_workspace(urls), fork), "opened")


@cli.command()
@click.argument("fork")
@_json
def save(fork: str, as_json: bool) -> None:
    """Turn the commits in a fork's worktree back into its queue."""
    from rebase import resolve

    _print(as_json, resolve.save(_workspace(), fork), "saved")


def _go_on(fork: str, as_json: bool, skip: bool) -> None:
    from rebase import resolve
    from rebase.outcome import Report

    with _progress() as progress:
        result = resolve.go_on(_workspace(), fork, skip=skip, progress=progress)
    if isinstance(result, Report):
        _finish(result, as_json)
    else:
        _print(as_json, result, "opened")
        sys.exit(ExitCode.PERSON)


@cli.command(name="continue")
@click.argument("fork")
@_json
def continue_(fork: str, as_json: bool) -> None:
    """Take the resolution from the worktree; land when nothing is in conflict any more."""
    _go_on(fork, as_json, skip=False)


@cli.command()
@click.argument("fork")
@_json
def skip(fork: str, as_json: bool) -> None:
    """Leave out the change in conflict, and go on."""
    _go_on(fork, as_json, skip=True)


@cli.command()
@click.argument("fork")
@_json
def abort(fork: str, as_json: bool) -> None:
    """Forget the open replay or edit of a fork, and remove its worktree."""
    from rebase import resolve

    _print(as_json, resolve.abort(_workspace(), fork), "aborted")


@cli.command()
@click.argument("fork")
@click.argument(
    "patches", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATCH..."
)
@click.option("--split", type=click.Choice(["file"]), help="Make a change of each file.")
@_upstream
@_json
def adopt(
    fork: str, patches: tuple[Path, ...], split: str | None, urls: tuple[str, ...], as_json: bool
) -> None:
    """Bring existing patches into a fork's queue: diffs or mails, squashed or a series."""
    from rebase import adopt as job

    rows = job.adopt(_workspace(urls), fork, patches, by_file=split == "file")
    _print(as_json, rows, "adopted")


# -- between click and the rest ------------------------------------------------------------------


def _workspace(urls: tuple[str, ...] = ()) -> "Workspace":
    """The project around the current directory."""
    from rebase.manifest import find_root
    from rebase.workspace import Workspace

    given: dict[str, str] = {}
    for pair in urls:
        fork, equals, url = pair.partition("=")
        if not (fork and equals and url):
            raise click.BadParameter(f"{pair!r} is not FORK=URL", param_hint="--upstream")
        given[fork] = url
    try:
        here = Path.cwd()
    except FileNotFoundError:  # a worktree that a landing or an abort removed
        raise UsageError(
            "The current directory is gone.", todo="Go into the project, then run this again."
        ) from None
    ws = Workspace(find_root(here), given)
    if ws.recovered:
        click.echo(ws.recovered, err=True)
    return ws


def _console(stderr: bool = False) -> "Console":
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=False)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    from rebase import report

    with report.progress(_console(stderr=True)) as progress:
        yield progress


def _print(as_json: bool, data: Any, show: str) -> None:
    """Print what a command found, as JSON or with the function of `answers` that shows it."""
    from rebase import answers

    if as_json:
        click.echo(answers.to_json(data))
    else:
        console = _console()
        if not console.is_terminal:
            console.width = 10_000  # a pipe has no width, and names are not to be wrapped
        getattr(answers, show)(data, console)


def _finish(done: "Report", as_json: bool, summary: Path | None = None) -> None:
    """Show a report, and exit as it says."""
    from rebase import report

    if as_json:
        click.echo(report.to_json(done))
    else:
        report.show(done, _console())
    if summary:
        try:
            _summarise(summary, report.markdown(done))
        except EnvironmentFault as error:  # standard output has its one answer already
            _fail(error, as_json=False, summary=None)
    sys.exit(done.exit_code)


def _summarise(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise EnvironmentFault(
            f"The summary {path} cannot be written: {error.strerror}.",
            kept="What the report above says was done.",
        ) from None


def _fail(error: Exception, as_json: bool, summary: Path | None) -> NoReturn:
    """End on an error, with its words and its exit code."""
    from rebase import report
    from rebase.git import GitError
    from rebase.words import reason

    if isinstance(error, OSError | GitError):
        error = EnvironmentFault(
            reason(error) if isinstance(error, OSError) else str(error),
            kept="Pins, queues and exports are the old ones or the new ones, all together.",
            todo="Look at the disk, the network and git, then run this again.",
        )
    if not isinstance(error, ForkmanError):
        import traceback

        traceback.print_exception(error)
        click.echo("This is a bug in forkman. Please report it.", err=True)
        sys.exit(ExitCode.BUG)
    report.show_error(error, _console(stderr=True))
    with suppress(OSError, EnvironmentFault):  # that these cannot be written may be the error
        if as_json:
            click.echo(report.error_json(error))
        if summary:
            _summarise(summary, report.error_markdown(error))
    sys.exit(error.exit_code)


def main() -> None:
    """Run forkman. What a terminal's encoding lacks is shown as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    cli(prog_name="forkman")


if __name__ == "__main__":
    main()
