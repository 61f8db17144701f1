"""Runs one job on Ray: starts Ray or joins it, submits, shows the log, and ends as the job ended.

A `Cluster` says where Ray is, or how to start it; a `Job` says what runs on it. `launch` starts a
head, waits for the other nodes, submits the job and returns its exit code; on each other node
`serve` adds that node for as long as the head lives. What would stop a run is looked for first
(`refusals`), so that nothing has been started when it is refused.

Only what was started here is ended here. Between this process and Ray stands a keeper, the ancestor
of all that Ray starts, also of what Ray's own processes leave behind when they end (it takes that
in: `PR_SET_CHILD_SUBREAPER`, prctl(2)). It ends what is below it and then itself, also where this
process is killed. No process is looked for by name. Of a Ray that was there already, only the job
is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REFUSED = 2  # nothing was started
LOST = 3  # Ray did not come up, or went away and with it what became of the job

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE = 20.0  # seconds that a job gets to end when it is stopped


class LaunchError(RuntimeError):
    """The job was not run, or what became of it is not known; the message says why.

    code  what the launcher exits with
    """

    def __init__(self, message: str, code: int = REFUSED) -> None:
        super().__init__(message)
        self.code = code


class _Signalled(KeyboardInterrupt):
    """Somebody asked the launcher to end; `number` is the signal.

    asyncio lets a KeyboardInterrupt out of its callbacks, and swallows what else is no Exception.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True)
class Job:
    """What runs: a command, what its environment adds, and the NPUs it needs."""

    command: Sequence[str]
    environ: Mapping[str, str]
    devices: int


@dataclass(frozen=True)
class Cluster:
    """A Ray to start, or one to join.

    host            this node's address, by which the others reach it
    nodes, devices  how many nodes, and NPUs on each
    cpus            what Ray counts as each node's processors; None counts them
    port            of Ray's head; the port after it serves Ray clients
    dashboard_port  of its dashboard, where jobs are submitted; the port after it is its agent's
    there           whether this Ray runs already: then it is joined, and stays
    """

    host: str = "127.0.0.1"
    nodes: int = 1
    devices: int = 8
    cpus: int | None = None
    port: int = 6379
    dashboard_port: int = 8265
    there: bool = False

    @property
    def dashboard(self) -> str:
        """Where jobs are submitted."""
        return f"http://{_bracketed(self.host)}:{self.dashboard_port}"

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports that a head takes."""
        return self.port, self.port + 1, self.dashboard_port, self.dashboard_port + 1

    def head(self, folder: str) -> list[str]:
        """The command that starts the head, its files in `folder`."""
        return [
            *_ray("start", "--head", "--block", "--disable-usage-stats"),
            f"--node-ip-address={self.host}",
            f"--port={self.port}",
            f"--ray-client-server-port={self.port + 1}",
            f"--dashboard-host={self.host}",
            f"--dashboard-port={self.dashboard_port}",
            f"--dashboard-agent-listen-port={self.dashboard_port + 1}",
            f"--temp-dir={folder}",
            *self._resources(),
        ]

    def worker(self, host: str) -> list[str]:
        """The command by which the node at address `host` joins this head."""
        return [
            *_ray("start", "--block", "--disable-usage-stats"),
            f"--address={_bracketed(self.host)}:{self.port}",
            f"--node-ip-address={host}",
            f"--dashboard-agent-listen-port={self.dashboard_port + 1}",
            *self._resources(),
        ]

    def _resources(self) -> list[str]:
        resources = [f"--resources={json.dumps({'NPU': self.devices})}"]
        return resources if self.cpus is None else [*resources, f"--num-cpus={self.cpus}"]


def refusals(job: Job, cluster: Cluster) -> list[str]:
    """What keeps `launch` from running the job, each with what to do; starts nothing."""
    if importlib.util.find_spec("ray") is None:
        return ["Ray is not installed: pip install 'ray[default]'"]
    found: list[str] = []
    if cluster.there:
        try:
            found += _lacking(job, _nodes(cluster))
        except _Unreachable as error:
            found.append(
                f"no Ray at {cluster.dashboard} ({error}): name the node and the port of its "
                f"dashboard, or let this command start Ray"
            )
        return found
    if cluster.nodes > 1 and cluster.host in ("127.0.0.1", "localhost", "::1"):
        found.append(
            f"{cluster.nodes} nodes cannot meet at {cluster.host}: give this node's address"
        )
    if job.devices > cluster.nodes * cluster.devices:
        found.append(
            f"the job needs {job.devices} NPUs, and {cluster.nodes} nodes of {cluster.devices} are "
            f"{cluster.nodes * cluster.devices}"
        )
    processors = cluster.nodes * (cluster.cpus or os.cpu_count() or 1)
    if job.devices > processors:
        found.append(
            f"each of the job's {job.devices} NPUs comes with a processor, and there are "
            f"{processors}: tell Ray to count more"
        )
    found += _taken(cluster.ports)
    return found + device_refusals(cluster.devices, job.environ)


def device_refusals(devices: int, environ: Mapping[str, str]) -> list[str]:
    """What this node lacks to offer `devices` NPUs; they are counted in a process of their own."""
    from slime_npu.device import NoNPU, is_npu

    try:
        is_npu(strict=True)
    except NoNPU as error:
        return [str(error)]
    count = "import torch, torch_npu; print(torch_npu.npu.device_count())"
    done = subprocess.run(
        [sys.executable, "-c", count],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return [f"torch_npu does not work here: {last}"]
    there = int(done.stdout.split()[-1])
    if there >= devices:
        return []
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    why = "" if visible is None else f" (ASCEND_RT_VISIBLE_DEVICES={visible!r})"
    return [f"{devices} NPUs were asked for, and this node has {there}{why}"]


def launch(job: Job, cluster: Cluster, wait: float = 600) -> int:
    """Run the job and return its exit code; 128 + n where signal n ended it, or this process.

    wait  how many seconds the other nodes may take to join

    Raises LaunchError where it is refused, or Ray does not come up or goes away under it.
    """
    reasons = refusals(job, cluster)
    if reasons:
        raise LaunchError("\n".join(reasons))
    _prepare_client(cluster.host)
    try:
        with _signals(), contextlib.ExitStack() as started:
            ended: Callable[[], str | None] = _never
            if not cluster.there:
                ended = started.enter_context(_ray_here(cluster.head, "head", job.environ))
                _await_nodes(job, cluster, ended, wait)
            return _run(job, cluster, ended)
    except _Signalled as error:
        return 128 + error.number


def serve(cluster: Cluster, host: str, environ: Mapping[str, str]) -> int:
    """Give this node, at address `host`, to a head elsewhere until that ends; the exit code.

    Raises LaunchError where this node has too few NPUs or does not join.
    """
    reasons = device_refusals(cluster.devices, environ)
    if reasons:
        raise LaunchError("\n".join(reasons))
    try:
        with _signals(), _ray_here(lambda _: cluster.worker(host), "worker", environ) as ended:
            joined = False
            while (reason := ended()) is None:
                time.sleep(1)
                if not joined:
                    with contextlib.suppress(_Unreachable):
                        joined = host in _nodes(cluster)
            if not joined:
                raise LaunchError(f"this node did not join {cluster.host}: {reason}", LOST)
            print("the cluster has ended", file=sys.stderr)
            return 0
    except _Signalled as error:
        return 128 + error.number


def script(job: Job, cluster: Cluster) -> str:
    """What `launch` does, as commands for a shell. Runs nothing."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in sorted(job.environ.items())]
    parts = ["# The environment, of Ray and of the job.", *lines, ""]
    if not cluster.there:
        parts += ["# Ray, on this node.", shlex.join(cluster.head(_FOLDER)) + " &", ""]
        if cluster.nodes > 1:
            join = shlex.join(cluster.worker("ADDRESS"))
            parts += [f"# And on each of the other {cluster.nodes - 1}, ADDRESS its own.", join, ""]
    submit = _ray("job", "submit", f"--address={cluster.dashboard}")
    submit.append(f"--runtime-env-json={json.dumps(_runtime_env(job))}")
    parts += ["# The job.", f"{shlex.join(submit)} -- \\", _folded(job.command)]
    return "\n".join(parts)


_FOLDER = "/tmp/slime_npu-XXXXXXXX"  # as mkdtemp names it


def _folded(command: Sequence[str]) -> str:
    """The command over several lines, a flag with its values on each."""
    lines: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return " \\\n".join(f"    {shlex.join(line)}" for line in lines if line)


def _ray(*words: str) -> list[str]:
    """Ray's command line, in this interpreter's environment."""
    return [sys.executable, "-m", "ray.scripts.scripts", *words]


def _runtime_env(job: Job) -> dict[str, Any]:
    return {"env_vars": dict(job.environ)}


# -- Ray on this node ------------------------------------------------------------------------------


@contextlib.contextmanager
def _ray_here(
    command: Callable[[str], Sequence[str]], what: str, environ: Mapping[str, str]
) -> Iterator[Callable[[], str | None]]:
    """Ray on this node for as long as the context; gives a function that says why Ray ended.

    It runs in the job's environment, as a part of that does not come through Ray's jobs
    (`slime_npu.environ`). Its files are kept where the context ends with an error.
    """
    folder = Path(tempfile.mkdtemp(prefix="slime_npu-"))
    log = folder / f"{what}.log"
    with log.open("wb") as output:
        keeper = subprocess.Popen(
            [sys.executable, "-P", __file__, str(os.getpid()), *command(str(folder))],  # _keep
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C on the terminal is for this process alone
        )

    def ended() -> str | None:
        if keeper.poll() is None:
            return None
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return "\n".join([f"Ray's {what} ended (exit code {keeper.returncode})", *said[-8:]])

    keep = False
    try:
        yield ended
    except Exception:
        keep = True
        raise
    finally:
        keeper.terminate()
        keeper.wait()
        if keep:
            print(f"Ray's files are in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _keep(launcher: int, command: Sequence[str]) -> int:
    """Run `command` and return its exit code; whatever came of it has ended then.

    This is a process of its own, between the launcher and Ray: what Ray starts stays below it,
    whichever of Ray's processes end, and nothing else does. It ends when the launcher does.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_PR_SET_CHILD_SUBREAPER, 1), (_PR_SET_PDEATHSIG, signal.SIGTERM)):
        if libc.prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != launcher:
        return LOST  # it ended before this process could ask to be told
    child: subprocess.Popen[bytes] | None = None
    try:
        with _signals():
            child = subprocess.Popen(list(command))
            while True:
                pid, status = os.waitpid(-1, 0)
                if pid == child.pid:
                    return os.waitstatus_to_exitcode(status)
    except _Signalled as error:
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)
        return 128 + error.number
    finally:
        for number in _ENDING:  # the launcher asks again when Ray has ended by itself
            signal.signal(number, signal.SIG_IGN)
        _end_descendants()


def _end_descendants() -> None:
    """Give them time to end by themselves, then ask them to, then make them."""
    for number, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0), (None, 5.0)):
        deadline = time.monotonic() + seconds
        while (left := _descendants()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            if number is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def _descendants() -> list[int]:
    """The processes below this one that run; its children that have ended are taken in."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # pid (name, which may hold anything) state parent ...: proc(5)
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found, ahead = [], [os.getpid()]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return found


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise `_Signalled` once; after that they wait for the clean-up."""

    def once(number: int, frame: Any) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise _Signalled(number)

    before = {number: signal.getsignal(number) for number in _ENDING}
    for number in _ENDING:
        signal.signal(number, once)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- a cluster, by its dashboard -------------------------------------------------------------------


class _Unreachable(Exception):
    """The dashboard does not answer."""


def _nodes(cluster: Cluster) -> dict[str, dict[str, float]]:
    """The resources of each node that is alive, by its address."""
    _prepare_client(cluster.host)
    from ray.util.state import list_nodes

    try:
        nodes = list_nodes(address=cluster.dashboard, timeout=10, raise_on_missing_output=False)
    except Exception as error:  # requests', Ray's and the server's own
        raise _Unreachable(str(error).splitlines()[0] if str(error) else repr(error)) from None
    return {n.node_ip: dict(n.resources_total) for n in nodes if n.state == "ALIVE"}


def _lacking(job: Job, nodes: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What the job needs and these nodes have not. Each device comes with a processor."""
    found = []
    for resource in ("NPU", "CPU"):
        there = sum(node.get(resource, 0) for node in nodes.values())
        if there < job.devices:
            each = ", ".join(f"{ip} has {n.get(resource, 0):g}" for ip, n in sorted(nodes.items()))
            found.append(
                f"the job needs {job.devices} {resource}s of Ray, and there are {there:g}: {each}"
            )
    return found


def _await_nodes(job: Job, cluster: Cluster, ended: Callable[[], str | None], wait: float) -> None:
    """Wait until all nodes have joined, and check what they brought."""
    deadline, shown = time.monotonic() + wait, -1
    while True:
        reason = ended()
        if reason is not None:
            raise LaunchError(reason, LOST)
        nodes: dict[str, dict[str, float]] = {}
        with contextlib.suppress(_Unreachable):
            nodes = _nodes(cluster)
        if len(nodes) >= cluster.nodes:
            break
        if len(nodes) != shown and cluster.nodes > 1:
            shown = len(nodes)
            print(f"{shown} of {cluster.nodes} nodes are there", file=sys.stderr, flush=True)
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{len(nodes)} of {cluster.nodes} nodes were there after {wait:g} s: start the "
                f"others with --join {cluster.host}",
                LOST,
            )
        time.sleep(0.5)
    lacking = _lacking(job, nodes)
    if lacking:
        raise LaunchError("\n".join(lacking), LOST)


def _taken(ports: Sequence[int]) -> list[str]:
    """Which ports somebody listens on, at whatever address of this node."""
    found = []
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                found.append(
                    f"port {port} cannot be used ({error.strerror}): it may be another Ray's. "
                    f"Give other ports, or use that Ray"
                )
    return found


def _prepare_client(host: str) -> None:
    """Let this process speak with the dashboard at `host`; comes before the first import of Ray.

    It is spoken to directly, whatever proxies the environment names. And Ray, when it starts, takes
    up a token for authentication that lies ready; its clients do so only when told.
    """
    for name in ("no_proxy", "NO_PROXY"):
        there = os.environ.get(name, "")
        if host not in there.split(","):
            os.environ[name] = f"{there},{host}" if there else host
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if "RAY_AUTH_TOKEN" in os.environ or token.is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _never() -> None:
    return None


# -- the job ---------------------------------------------------------------------------------------


def _run(job: Job, cluster: Cluster, ended: Callable[[], str | None]) -> int:
    """Submit, show the log, and return the exit code. The job does not outlive this."""
    from ray.job_submission import JobStatus, JobSubmissionClient

    name = f"slime_npu-{uuid.uuid4().hex[:12]}"
    try:
        client = JobSubmissionClient(cluster.dashboard)
        client.submit_job(
            entrypoint=shlex.join(job.command), submission_id=name, runtime_env=_runtime_env(job)
        )
    except (RuntimeError, ConnectionError) as error:
        raise LaunchError(f"{cluster.dashboard} did not take the job: {error}", LOST) from error
    try:
        _show(client, name, ended)
        info = client.get_job_info(name)
    except _Signalled:
        print(f"stopping {name}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):  # with Ray gone, so is the job
            client.stop_job(name)
            _settle(client, name)
        raise
    except (RuntimeError, ConnectionError) as error:
        raise LaunchError(f"Ray went away under the job: {ended() or error}", LOST) from error
    if info.status == JobStatus.SUCCEEDED:
        return 0
    code = info.driver_exit_code
    message = (info.message or "").partition(", last available logs")[0]  # they are shown
    print(f"{name} {info.status.lower()}: {message}", file=sys.stderr)
    if not code:  # it never ran, or was stopped
        return 1
    return int(code) if code > 0 else 128 - int(code)


def _show(client: Any, name: str, ended: Callable[[], str | None]) -> None:
    """Copy the job's log here until the job has ended."""
    shown = 0

    async def tail() -> None:
        nonlocal shown
        passed = 0  # each tail starts at the beginning
        async for lines in client.tail_job_logs(name):
            new = lines[max(0, shown - passed) :]
            passed += len(lines)
            shown = max(shown, passed)
            print(new, end="", flush=True)

    while True:
        asyncio.run(tail())
        _settle(client, name, 5)
        if client.get_job_status(name).is_terminal():
            return
        if ended() is not None:
            raise RuntimeError("its processes ended")


def _settle(client: Any, name: str, seconds: float = _GRACE) -> None:
    """Wait until the job's status is its last."""
    deadline = time.monotonic() + seconds
    while not client.get_job_status(name).is_terminal() and time.monotonic() < deadline:
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(_keep(int(sys.argv[1]), sys.argv[2:]))
