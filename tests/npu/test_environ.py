"""The environment of a job: CANN's own variables, this stack's settings, and nothing made up."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slime_npu import environ

pytestmark = pytest.mark.plumbing

# In the shape of CANN's own: unset variables read, search paths put in front, helpers left behind.
SET_ENV = """
toolkit_home={home}
export LD_LIBRARY_PATH=${{toolkit_home}}/lib64:${{toolkit_home}}/lib64/plugin:$LD_LIBRARY_PATH
export PYTHONPATH=${{toolkit_home}}/python/site-packages:$PYTHONPATH
export PATH=${{toolkit_home}}/bin:$PATH
export ASCEND_AICPU_PATH=${{toolkit_home}}
export ASCEND_OPP_PATH=${{toolkit_home}}/opp
export TOOLCHAIN_HOME=${{toolkit_home}}/toolkit
export ASCEND_HOME_PATH=${{toolkit_home}}
echo "environment set"
[ -n "$NEVER_SET" ] && export NEVER=1
"""


def install(script: Path, home: Path, text: str = SET_ENV) -> dict[str, str]:
    """A CANN as its installer leaves it; gives the environment of a shell that knows its home."""
    (home / "lib64").mkdir(parents=True)
    (home / "lib64" / "libascendcl.so").touch()
    script.write_text(text.format(home=home))
    return {"HOME": "/nowhere", "PATH": "/usr/bin:/bin", "ASCEND_HOME_PATH": str(home)}


@pytest.fixture(params=["cann/{}", "ascend-toolkit/latest/../{}"], ids=["8.5", "before 8.5"])
def cann(request, tmp_path):
    """The home of an installed CANN, whose script lies where its release puts it."""
    if request.param == "cann/{}":
        home = tmp_path / "cann-8.5.0"
        script = home / "set_env.sh"
    else:
        home = tmp_path / "ascend-toolkit" / "latest"
        script = home.parent / "set_env.sh"
    home.mkdir(parents=True)
    install(script, home)
    return home


def caller(home, **more):
    return {"HOME": "/nowhere", "PATH": "/usr/bin:/bin", "ASCEND_HOME_PATH": str(home)} | more


def test_cann_is_what_its_script_sets(cann):
    assert environ.cann(caller(cann)) == {
        "LD_LIBRARY_PATH": f"{cann}/lib64:{cann}/lib64/plugin",
        "PYTHONPATH": f"{cann}/python/site-packages",
        "PATH": f"{cann}/bin:/usr/local/bin:/usr/bin:/bin",
        "ASCEND_AICPU_PATH": f"{cann}",
        "ASCEND_OPP_PATH": f"{cann}/opp",
        "TOOLCHAIN_HOME": f"{cann}/toolkit",
        "ASCEND_HOME_PATH": f"{cann}",
    }


def test_cann_is_the_same_for_a_caller_that_sourced_it_before(cann):
    bare = caller(cann)
    assert environ.cann(bare | environ.cann(bare)) == environ.cann(bare)


def test_search_paths_keep_what_the_caller_has(cann):
    ours = environ.cann(caller(cann, LD_LIBRARY_PATH="/driver/lib64::/x", PYTHONPATH="/mine"))
    assert ours["LD_LIBRARY_PATH"] == f"{cann}/lib64:{cann}/lib64/plugin:/driver/lib64:/x"
    assert ours["PYTHONPATH"] == f"{cann}/python/site-packages:/mine"


@pytest.mark.parametrize("place", ["Ascend/cann", "Ascend/ascend-toolkit"])
def test_cann_is_found_where_its_installer_puts_it(tmp_path, place):
    home = tmp_path / place
    home.mkdir(parents=True)
    bare = install(home / "set_env.sh", home) | {"HOME": str(tmp_path)}
    del bare["ASCEND_HOME_PATH"]
    if Path("/usr/local/Ascend").exists():
        pytest.skip("this host has a CANN of its own, which comes first")
    assert environ.cann(bare)["ASCEND_HOME_PATH"] == str(home)


def test_a_placeholder_home_is_an_error():
    with pytest.raises(environ.NoCANN, match="ASCEND_HOME_PATH='/path/to/cann' is no CANN"):
        environ.job(environ=caller("/path/to/cann"))


@pytest.mark.skipif(Path("/usr/local/Ascend").exists(), reason="this host has a CANN of its own")
def test_no_cann_is_an_error_that_says_where_was_looked():
    with pytest.raises(environ.NoCANN, match=r"/usr/local/Ascend/cann/set_env\.sh"):
        environ.job(environ={"HOME": "/nowhere", "PATH": "/usr/bin"})


def test_a_script_for_another_folder_is_an_error(tmp_path):
    install(tmp_path / "set_env.sh", tmp_path)
    (tmp_path / "set_env.sh").write_text("export ASCEND_HOME_PATH=<install_path>/cann\n")
    with pytest.raises(environ.NoCANN, match=r"holds no lib64/libascendcl\.so"):
        environ.cann(caller(tmp_path))


def test_a_script_that_fails_is_an_error_with_its_words(tmp_path):
    install(tmp_path / "set_env.sh", tmp_path)
    (tmp_path / "set_env.sh").write_text("echo 'wrong architecture' >&2; exit 3\n")
    with pytest.raises(environ.NoCANN, match=r"failed \(3\): wrong architecture"):
        environ.cann(caller(tmp_path))


def test_every_path_of_a_jobs_environment_exists_or_was_the_callers(cann):
    for folder in ("bin", "opp", "toolkit", "python/site-packages", "lib64/plugin"):
        (cann / folder).mkdir(parents=True)
    for value in environ.job(environ=caller(cann)).values():
        for part in value.split(":"):
            assert not part.startswith("/") or Path(part).is_dir(), part


def test_a_jobs_settings_are_what_the_stack_needs(cann):
    job = environ.job(environ=caller(cann))
    assert job["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"] == "1"
    assert job["TORCHDYNAMO_DISABLE"] == "1"
    assert job["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:True"
    assert job["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert re.fullmatch(r"\d+-\d+", job["HCCL_HOST_SOCKET_PORT_RANGE"])
    assert re.fullmatch(r"\d+-\d+", job["HCCL_NPU_SOCKET_PORT_RANGE"])
    assert job["HCCL_CONNECT_TIMEOUT"] == job["HCCL_EXEC_TIMEOUT"] == "1800"
    assert job["ASCEND_HOME_PATH"] == str(cann)


def test_the_noset_variable_is_the_one_ray_reads():
    npu = pytest.importorskip("ray._private.accelerators.npu")
    assert environ.NOSET == npu.NOSET_ASCEND_RT_VISIBLE_DEVICES_ENV_VAR


@pytest.mark.parametrize("value", ["0", "", "false", "true"])
def test_the_noset_variable_with_another_value_is_an_error(cann, value):
    with pytest.raises(ValueError, match="this stack needs 1"):
        environ.job(environ=caller(cann, **{environ.NOSET: value}))


@pytest.mark.parametrize(
    "name",
    [
        "RAY_EXPERIMENTAL_NOSET_ASCEND_VISIBLE_DEVICES",
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICE",
    ],
)
def test_a_misspelled_noset_variable_is_an_error(cann, name):
    with pytest.raises(
        ValueError, match=f"{name} is not known to Ray; its name is {environ.NOSET}"
    ):
        environ.job(environ=caller(cann, **{name: "1"}))


def test_the_callers_own_settings_win_over_the_defaults(cann):
    own = {"HCCL_CONNECT_TIMEOUT": "300", "HCCL_NPU_SOCKET_PORT_RANGE": "auto", "SLIME_NPU": "1"}
    assert own.items() <= environ.job(environ=caller(cann, **own)).items()


def test_visible_devices_are_no_part_of_a_job(cann):
    assert "ASCEND_RT_VISIBLE_DEVICES" not in environ.job(
        environ=caller(cann, ASCEND_RT_VISIBLE_DEVICES="0,1")
    )


def test_a_jobs_environment_is_the_same_whatever_else_the_caller_has(cann):
    noise = {"EDITOR": "vi", "HCCL_IF_IP": "10.0.0.1", "LS_COLORS": ":", "http_proxy": "http://p"}
    assert environ.job(environ=caller(cann, **noise)) == environ.job(environ=caller(cann))


def test_what_nnals_script_set_goes_along(cann):
    own = {"ATB_HOME_PATH": "/nnal/atb", "ASDOPS_LOG_LEVEL": "ERROR", "LCCL_PARALLEL": "0"}
    assert own.items() <= environ.job(environ=caller(cann, **own)).items()


def test_jobs_with_other_numbers_have_other_ports(cann):
    first, second = (environ.job(number, environ=caller(cann)) for number in range(2))
    different = {name for name in first if first[name] != second[name]}
    assert different == {"HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"}


def test_a_job_on_the_simulator_gets_the_simulators_variables():
    simulator = pytest.importorskip("slime_npu.simulator")
    given = simulator.environment(devices=4)
    job = environ.job(environ=given | {"HOME": "/nowhere"})
    assert given.items() <= job.items()
    assert "PYTORCH_NPU_ALLOC_CONF" not in job  # growing blocks need a real device
    assert job[environ.NOSET] == "1"


def test_torch_compile_is_eager_in_a_jobs_environment():
    code = """
import torch
calls = []
def backend(graph, inputs):
    calls.append(graph)
    return graph.forward
double = torch.compile(lambda x: x + x, backend=backend)
assert double(torch.ones(2)).tolist() == [2.0, 2.0]
print(len(calls))
"""
    dynamo = environ.job(environ={"SLIME_NPU_SIMULATOR_DEVICES": "1"})["TORCHDYNAMO_DISABLE"]
    bare = {n: v for n, v in os.environ.items() if not n.startswith("SLIME_NPU")}
    bare |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    counts = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=bare | more,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout.strip()
        for more in ({}, {"TORCHDYNAMO_DISABLE": dynamo})
    ]
    assert counts == ["1", "0"]
