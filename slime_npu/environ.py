"""The environment that a job on NPUs is started with.

`job()` is both what `ray start` runs in on each node and what goes into the job's runtime
environment (`{"env_vars": job()}`): CANN's variables, taken from the installed CANN alone, and the
settings this stack needs. What the caller's environment sets wins over a default here.

Both, because `ray job submit` takes RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES out of a job's
runtime environment before its actors get it (ray/dashboard/modules/job/job_supervisor.py): it holds
where the node was started with it, and in actors that set it themselves, as slime's do.

CANN's variables come from its own `set_env.sh`, sourced in a shell of its own from a bare
environment, so the result is the same whether or not the caller sourced it before. Which CANN:
ASCEND_HOME_PATH, which `set_env.sh` sets too, else the places where its installer puts it. On the
simulator they are the simulator's own.

Not here: `ASCEND_RT_VISIBLE_DEVICES`, which belongs to `ray start` (see `slime_npu.ray`), and what
differs between the hosts of a job, as HCCL_IF_IP does.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from slime_npu import distributed

NOSET = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"

_SCRIPTS = ("cann/set_env.sh", "ascend-toolkit/set_env.sh")  # from 8.5 on; before
_SEARCH_PATHS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "CMAKE_PREFIX_PATH")
_SHELL_OWN = {"_", "PWD", "OLDPWD", "SHLVL"}
_BESIDE_CANN = ("ATB_", "ASDOPS_", "LCCL_")  # NNAL's own set_env.sh, which needs the caller's torch
_SIMULATOR = "SLIME_NPU_SIMULATOR_"


class NoCANN(RuntimeError):
    """There is no CANN whose environment could be used; the message says where was looked."""


def job(
    number: int = 0, minutes: float = 30, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment variables of a job on NPUs.

    number   tells jobs that share hosts apart: their HCCL ports do not meet
    minutes  how long a process group waits for its peers
    environ  the caller's environment

    Raises NoCANN where there is none, ValueError where `environ` sets something that cannot work.
    """
    _refuse_misspelled(environ)
    defaults = {
        # torch.compile and what decorates functions with it at import: eager on NPU.
        "TORCHDYNAMO_DISABLE": "1",
        # Megatron wants one queue, so that communication starts in the order it was issued.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        # Each process sees every device of its node, and finds its own by id.
        NOSET: "1",
        **distributed.port_ranges(number),
        **distributed.timeouts(minutes),
    }
    if not _simulated(environ):
        # Batches differ in length: blocks that grow leave no gaps between them.
        defaults["PYTORCH_NPU_ALLOC_CONF"] = "expandable_segments:True"
    decided = {n: v for n, v in environ.items() if n == "SLIME_NPU" or n.startswith(_BESIDE_CANN)}
    return cann(environ) | decided | {n: environ.get(n, value) for n, value in defaults.items()}


def cann(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that the installed CANN sets, search paths put before the caller's own.

    Raises NoCANN where ASCEND_HOME_PATH names no CANN, none is found, or its script fails.
    """
    if _simulated(environ):
        own = ("PYTHONPATH", "TASK_QUEUE_ENABLE")
        return {n: v for n, v in environ.items() if n in own or n.startswith(_SIMULATOR)}
    script = _script(environ)
    bare = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": environ.get("HOME", "/")}
    before, after = _shell(":", bare), _shell('. "$0" >/dev/null', bare, script)
    ours = {n: v for n, v in after.items() if v != before.get(n) and n not in _SHELL_OWN}
    home = ours.get("ASCEND_HOME_PATH", "")
    if not (Path(home) / "lib64" / "libascendcl.so").exists():
        raise NoCANN(
            f"{script} sets ASCEND_HOME_PATH={home!r}, which holds no lib64/libascendcl.so"
        )
    for name in _SEARCH_PATHS:
        if name in ours:
            ours[name] = _joined(ours[name], environ.get(name, before.get(name, "")))
    return ours


def _simulated(environ: Mapping[str, str]) -> bool:
    return any(name.startswith(_SIMULATOR) for name in environ)


def _script(environ: Mapping[str, str]) -> Path:
    home = environ.get("ASCEND_HOME_PATH")
    if home is not None:
        candidates = [Path(home) / "set_env.sh", Path(home).parent / "set_env.sh"]
    else:
        roots = [Path("/usr/local/Ascend"), Path(environ.get("HOME", "/")) / "Ascend"]
        candidates = [root / script for root in roots for script in _SCRIPTS]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    where = ", ".join(map(str, candidates))
    if home is not None:
        raise NoCANN(f"ASCEND_HOME_PATH={home!r} is no CANN: there is none of {where}")
    raise NoCANN(f"no CANN found: ASCEND_HOME_PATH is unset, and there is none of {where}")


def _shell(command: str, environ: Mapping[str, str], *arguments: Path) -> dict[str, str]:
    """The environment after `command` in a shell that starts with `environ`."""
    run = ["bash", "--noprofile", "--norc", "-c", f"{command}; env -0", *map(str, arguments)]
    try:
        done = subprocess.run(run, env=dict(environ), capture_output=True, timeout=60, check=True)
    except subprocess.CalledProcessError as error:
        message = error.stderr.decode(errors="replace").strip()
        raise NoCANN(f"sourcing {arguments[0]} failed ({error.returncode}): {message}") from None
    except subprocess.TimeoutExpired:
        raise NoCANN(f"sourcing {arguments[0]} did not end within 60 s") from None
    pairs = done.stdout.decode(errors="surrogateescape").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if pair)


def _joined(first: str, second: str) -> str:
    """Two search paths as one, each folder once, empty parts (the current folder) left out."""
    return ":".join(dict.fromkeys(part for part in f"{first}:{second}".split(":") if part))


def _refuse_misspelled(environ: Mapping[str, str]) -> None:
    """Raise ValueError where `environ` has what looks like a setting and does nothing, or harm."""
    for name in environ:
        if name.startswith("RAY_EXPERIMENTAL_NOSET_") and "ASCEND" in name and name != NOSET:
            raise ValueError(f"{name} is not known to Ray; its name is {NOSET}")
    if environ.get(NOSET, "1") != "1":
        raise ValueError(
            f"{NOSET}={environ[NOSET]!r}: this stack needs 1, and some of Ray's releases take any "
            f"value as 1; unset it"
        )
