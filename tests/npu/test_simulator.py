"""The simulator: the real torch_npu on a CPU, its limits, and how programs get onto it."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch_npu
from torch.nn import functional as F

from slime_npu import simulator

MIB = 1 << 20
REPOSITORY = Path(__file__).parents[2]


def run(*command, **environment):
    """`python -m slime_npu.simulator` with these arguments, from a process without a simulator."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SLIME_NPU_SIMULATOR")}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "slime_npu.simulator", *command],
        env=clean | {"PYTHONPATH": str(REPOSITORY)} | environment,
        capture_output=True,
        text=True,
    )


# -- devices ---------------------------------------------------------------------------------------


@pytest.mark.plumbing
def test_the_published_wheel_owns_npu_devices():
    tensor = torch.ones(2, 3, device="npu:1")
    assert torch_npu.__file__.startswith(sys.prefix)
    assert tensor.device == torch.device("npu", 1)
    assert torch.npu.get_device_name(1) == "Ascend910B3"
    assert torch.accelerator.current_accelerator().type == "npu"
    assert (tensor.sum() * 2).item() == 12


@pytest.mark.plumbing
def test_asking_where_torch_npu_lies_takes_no_kernel_from_who_imports_it_later():
    ask = "import importlib.util as u; u.find_spec('torch_npu'); import torch, torch_npu"
    done = run("--", sys.executable, "-c", ask + "; print((torch.ones(2).npu() * 3).sum().item())")
    assert (done.stdout[-4:], done.returncode) == ("6.0\n", 0), done.stderr


@pytest.mark.plumbing
def test_the_wheel_is_not_shadowed_by_a_module_of_ours():
    assert "torch_npu" not in {path.stem for path in simulator.CHILDREN.iterdir()}


@pytest.mark.plumbing
@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 8),
        ("", 0),
        ("0", 1),
        ("4,5,6,7", 4),
        ("0,2,1", 2),  # cut where it stops ascending
        ("3,3", 1),
        ("1,x,2", 1),
        ("x", 0),
        ("6,7,8", 2),  # there is no ninth
        ("0, 1", 1),
        ("-1", 0),
    ],
)
def test_visible_devices_are_taken_as_cann_takes_them(visible, count):
    environment = os.environ | simulator.environment(8)
    environment.pop("ASCEND_RT_VISIBLE_DEVICES", None)
    if visible is not None:
        environment["ASCEND_RT_VISIBLE_DEVICES"] = visible
    code = "import acl; print(acl.rt.get_device_count())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.stdout.decode().strip() == f"({count}, 0)"


def third_of_two():
    with pytest.raises(RuntimeError, match="device"):
        torch.ones(1, device="npu:2")
    return torch.npu.device_count()


@pytest.mark.plumbing
def test_a_device_that_is_not_visible_is_an_error(ranks, monkeypatch):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,6")
    assert ranks(third_of_two, 1) == [2]


# -- memory ----------------------------------------------------------------------------------------


def free_before_with_and_after(settings):
    torch.npu.memory._set_allocator_settings(settings)

    def free():
        return [torch.npu.mem_get_info(device)[0] for device in (0, 1)]

    before = free()
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="npu:0")
    held = free()
    allocated = torch.npu.memory_allocated(0)
    del kept
    torch.npu.empty_cache()
    peak = torch.npu.memory_stats(0)["allocated_bytes.all.peak"]
    return before, held, free(), allocated, peak


@pytest.mark.plumbing
@pytest.mark.parametrize("expandable", [False, True])
def test_memory_is_accounted_for_each_device(ranks, monkeypatch, expandable):
    monkeypatch.setenv("SLIME_NPU_SIMULATOR_MEMORY", str(256 * MIB))
    settings = f"expandable_segments:{expandable}"
    [(before, held, after, allocated, peak)] = ranks(free_before_with_and_after, 1, settings)
    assert before == after == [256 * MIB, 256 * MIB]
    assert 64 * MIB <= before[0] - held[0] <= 80 * MIB  # torch_npu rounds up
    assert held[1] == 256 * MIB
    assert 64 * MIB <= allocated == peak <= 65 * MIB


def third_hundred_of_256():
    def hundred():
        return torch.empty(100 * MIB, dtype=torch.uint8, device="npu:0")

    kept = [hundred(), hundred()]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        hundred()
    del kept
    hundred()
    return str(caught.value)


@pytest.mark.plumbing
def test_more_memory_than_a_device_has_is_an_out_of_memory_error(ranks, monkeypatch):
    monkeypatch.setenv("SLIME_NPU_SIMULATOR_MEMORY", str(256 * MIB))
    [message] = ranks(third_hundred_of_256, 1)
    assert "NPU out of memory. Tried to allocate" in message
    assert "256.00 MiB total capacity" in message


@pytest.mark.plumbing
def test_results_take_memory_of_their_device():
    torch.npu.empty_cache()
    before = torch.npu.memory_allocated(2)
    ones = torch.ones(MIB, device="npu:2")
    made = ones + ones
    assert 8 * MIB <= torch.npu.memory_allocated(2) - before <= 9 * MIB
    assert made.device == ones.device


# -- operators -------------------------------------------------------------------------------------


@pytest.mark.plumbing
def test_what_is_not_simulated_fails_by_its_own_name():
    tensor = torch.ones(4, 4, device="npu")
    with pytest.raises(RuntimeError, match="Swish is not simulated"):
        torch_npu.npu_silu(tensor)
    with pytest.raises(RuntimeError, match="aclnnFFN"):
        torch_npu.npu_ffn(tensor.half(), tensor.half(), tensor.half(), "relu", inner_precise=1)
    with pytest.raises(RuntimeError, match="aclrtIpcMemGetExportKey"):
        torch.multiprocessing.reductions.reduce_tensor(tensor)


@pytest.mark.plumbing
def test_tensors_of_different_devices_do_not_mix():
    here, there, host = (torch.ones(3, device=d) for d in ("npu:0", "npu:1", "cpu"))
    for other in (there, host):
        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
            here + other
    assert (here + torch.tensor(1.0)).tolist() == [2, 2, 2]  # a number is welcome anywhere
    assert here.copy_(there * 3).tolist() == [3, 3, 3]
    assert here[torch.tensor([True, False, True])].shape == (2,)


@pytest.mark.reference
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_layout_is_kept_across_devices(dtype):
    host = torch.arange(24).to(dtype).reshape(2, 3, 4)
    for view in (host, host.transpose(0, 2), host[:, ::2, 1:], host.expand(2, 2, 3, 4), host[0:0]):
        there = view.to("npu")
        assert torch.equal(there.cpu(), view)
        assert torch.equal((there + there).cpu(), view + view)
        assert (there + there).stride() == (view + view).stride()
    if dtype.is_complex:
        assert torch.equal(host.to("npu").conj().cpu(), host.conj())
        assert torch.equal(host.to("npu").conj().imag.cpu(), host.conj().imag)


@pytest.mark.reference
def test_out_arguments_are_resized_without_touching_their_neighbours():
    base = torch.zeros(8, device="npu")
    one, two = torch.ones(6, device="npu"), torch.ones(6, device="npu")
    torch.add(one, two, out=base[2:8])
    assert base.tolist() == [0, 0, 2, 2, 2, 2, 2, 2]
    grown = torch.empty(0, device="npu")
    assert torch.add(one, two, out=grown) is grown
    assert grown.tolist() == [2] * 6
    assert one.tolist() == two.tolist() == [1] * 6
    parts = [torch.empty(2, device="npu"), torch.empty(4, device="npu")]
    torch.split_with_sizes_copy(torch.arange(6.0, device="npu"), [2, 4], out=parts)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3, 4, 5]]
    values, indices = torch.empty(1, device="npu"), torch.empty(1, dtype=torch.int64, device="npu")
    torch.max(torch.tensor([[1.0, 3.0]], device="npu"), 1, out=(values, indices))
    assert (values.item(), indices.item()) == (3, 1)


@pytest.mark.reference
def test_random_numbers_follow_the_generator_of_the_device():
    def numbers():
        tensor = torch.ones(100, device="npu")
        return [torch.rand(3, device="npu"), F.dropout(tensor, 0.5)]

    torch.npu.manual_seed(7)
    state = torch.npu.get_rng_state()
    first, second = numbers(), numbers()
    torch.npu.set_rng_state(state)
    again = numbers()
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], second[0])
    own = torch.Generator(device="npu").manual_seed(7)
    assert torch.equal(torch.rand(3, device="npu", generator=own), first[0])


@pytest.mark.reference
def test_the_generator_of_the_host_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    F.dropout(torch.ones(100, device="npu"), 0.5)
    torch.randn(5, device="npu")
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.reference
@pytest.mark.parametrize(
    "shapes",
    [
        ((3, 4), (4, 5)),
        ((4,), (4,)),
        ((2, 3, 4), (4, 5)),
        ((2, 3, 4), (4,)),
        ((5, 1, 3, 4), (2, 4, 3)),
    ],
)
def test_gradients_of_matmul_are_the_cpu_s(shapes):
    host = [torch.randn(shape, requires_grad=True) for shape in shapes]
    there = [tensor.detach().npu().requires_grad_() for tensor in host]
    for pair in (host, there):
        torch.matmul(*pair).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad.cpu()) for a, b in zip(host, there, strict=True))


@pytest.mark.reference
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: F.kl_div(x.log_softmax(-1), y, reduction="batchmean"),
        lambda x, y: F.kl_div(y.log(), x.softmax(-1), reduction="sum"),
        F.l1_loss,
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=y[0]),
        lambda x, y: (x.repeat_interleave(2, 0) * y.repeat_interleave(2, 0)).sum(),
        lambda x, y: (x.softmax(-1, dtype=torch.float64) * y).sum(),
        lambda x, y: (x.gather(1, (y > 0.2).long()) * y).sum(),
        lambda x, y: torch.where(y > 0.2, x, y).square().sum(),
        lambda x, y: (F.one_hot((y > 0.2).long(), 3).sum(-1) * x).sum(),
    ],
    ids=[
        *("kl_div", "kl_div_target", "l1_loss", "cross_entropy", "repeat_interleave"),
        *("softmax_dtype", "gather", "where", "one_hot"),
    ],
)
def test_torch_npu_s_own_formulas_give_the_cpu_s_gradients(function):
    torch.manual_seed(0)
    data, other = torch.randn(3, 4), torch.rand(3, 4).softmax(-1)
    gradients = []
    for device in ("cpu", "npu"):
        x = data.to(device, copy=True).requires_grad_()
        function(x, other.to(device)).backward()
        gradients.append(x.grad.cpu())
    assert torch.equal(*gradients)


@pytest.mark.reference
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": True}, {"scale": 0.3}])
def test_attention_is_the_cpu_s(options):
    torch.manual_seed(0)
    host = [torch.randn(2, heads, 6, 8, requires_grad=True) for heads in (4, 2, 2)]
    there = [tensor.detach().npu().requires_grad_() for tensor in host]
    results = []
    for tensors in (host, there):
        given = dict(options)
        if "attn_mask" in given:
            given["attn_mask"] = torch.ones(6, 6, device=tensors[0].device).tril(1).bool()
        result = F.scaled_dot_product_attention(*tensors, enable_gqa=True, **given)
        result.square().sum().backward()
        results.append(result.detach().cpu())
    torch.testing.assert_close(results[1], results[0])
    for ours, theirs in zip(there, host, strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


# -- where it runs ---------------------------------------------------------------------------------


@pytest.mark.plumbing
def test_a_real_device_keeps_the_simulator_away(tmp_path):
    assert simulator.real_npu(tmp_path) is None
    (tmp_path / "davinci_manager").touch()
    assert simulator.real_npu(tmp_path) is None
    (tmp_path / "davinci0").touch()
    assert str(tmp_path / "davinci0") in simulator.real_npu(tmp_path)


@pytest.mark.plumbing
def test_it_refuses_where_a_real_cann_is_on_the_loader_s_path(tmp_path):
    source = tmp_path / "cann.c"
    source.write_text("int aclInit(const char *path) { return 0; }")
    library = tmp_path / "libascendcl.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    done = run("--", sys.executable, "-c", "print('ran')", LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 2
    assert "real libascendcl.so" in done.stderr
    assert done.stdout == ""


@pytest.mark.plumbing
def test_a_process_that_has_torch_npu_already_is_refused():
    code = """if True:
        import sys, types
        sys.modules["torch_npu"] = types.ModuleType("torch_npu")
        from slime_npu import simulator
        simulator.load()
        """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert "SimulatorError: torch_npu was imported before the simulator" in done.stderr


@pytest.mark.plumbing
def test_loading_again_must_ask_for_the_same():
    simulator.load_from_environment()
    with pytest.raises(simulator.SimulatorError, match="Start another process"):
        simulator.load(devices=3)


@pytest.mark.plumbing
@pytest.mark.parametrize(("devices", "memory"), [(0, 1), (65, 1), (1, 0)])
def test_impossible_machines_are_refused(devices, memory):
    with pytest.raises(ValueError, match="cannot"):
        simulator.environment(devices, memory)


@pytest.mark.plumbing
def test_without_a_compiler_it_says_so(tmp_path):
    done = run(
        "--", "true", XDG_CACHE_HOME=str(tmp_path), PATH=str(tmp_path), CC="no-such-compiler"
    )
    assert done.returncode == 2
    assert "no C compiler" in done.stderr


@pytest.mark.plumbing
def test_processes_that_build_at_once_share_one_result(tmp_path):
    command = [sys.executable, "-c", "from slime_npu import simulator; print(simulator.build())"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    builds = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    folders = {build.communicate()[0] for build in builds}
    assert all(build.returncode == 0 for build in builds)
    assert len(folders) == 1
    assert [str(path) for path in (tmp_path / "slime_npu").iterdir()] == [folders.pop().strip()]


# -- programs and their children -------------------------------------------------------------------


@pytest.mark.plumbing
def test_a_program_runs_on_it_unchanged(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import sys, torch\n"
        "print(torch.npu.device_count(), torch.npu.mem_get_info()[1], sys.argv[1:])\n"
    )
    done = run("--devices", "3", "--memory", "512M", "--", sys.executable, script, "--memory", "x")
    assert done.stdout.splitlines()[-1] == f"3 {512 * MIB} ['--memory', 'x']", done.stderr


@pytest.mark.plumbing
def test_the_exit_code_is_the_program_s():
    assert run("--", "sh", "-c", "exit 41").returncode == 41
    assert run("--", "no-such-program").returncode == 127
    assert run("--devices", "99", "--", "true").returncode == 2
    assert run("--memory", "much", "--", "true").returncode == 2


@pytest.mark.plumbing
def test_signals_reach_the_program():
    command = [sys.executable, "-m", "slime_npu.simulator", "--", "sh", "-c", "echo up; sleep 60"]
    program = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout.readline() == "up\n"
    program.send_signal(signal.SIGTERM)
    assert program.wait(timeout=10) == -signal.SIGTERM


def device_and_sum(queue):
    tensor = torch.ones(3, device="npu") + 1
    queue.put((torch.npu.device_count(), tensor.sum().item()))


@pytest.mark.plumbing
def test_spawned_children_are_simulated():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=device_and_sum, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == (torch.npu.device_count(), 6.0)
    child.join()


@pytest.mark.plumbing
def test_a_child_s_own_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('hidden one ran')\n")
    path = os.environ["PYTHONPATH"] + os.pathsep + str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", "pass"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "hidden one ran\n"
    assert done.stderr == ""


@pytest.mark.plumbing
def test_processes_without_torch_start_without_it():
    code = "import sys; print([m for m in sys.modules if m.startswith(('torch', 'slime_npu'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n"


@pytest.mark.plumbing
def test_ray_finds_the_devices_by_itself_and_its_workers_are_simulated(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent(
            """
            import ray
            ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
            found = ray.cluster_resources()
            print(found["NPU"], "accelerator_type:Ascend910B3" in found)

            @ray.remote(resources={"NPU": 2})
            def work():
                import torch
                return torch.npu.device_count(), (torch.ones(2, device="npu:1") + 1).sum().item()

            print(ray.get(work.remote()))
            """
        )
    )
    done = run("--devices", "4", "--", sys.executable, script)
    assert done.stdout.splitlines()[-2:] == ["4.0 True", "(2, 4.0)"], done.stderr


# -- pytest ----------------------------------------------------------------------------------------


@pytest.mark.plumbing
def test_the_plugin_puts_a_test_run_on_simulated_npus(tmp_path):
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent(
            """
            import pytest
            from slime_npu import simulator

            @pytest.mark.plumbing
            def test_loaded(ranks):
                assert simulator.loaded()
                assert callable(ranks)

            def test_calls(npu_calls):
                assert not npu_calls
                simulator.count("npu_swiglu")
                assert npu_calls["npu_swiglu"] == 1

            @pytest.mark.hardware
            def test_speed():
                raise AssertionError
            """
        )
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "slime_npu.simulator.plugin", "-rs"),
            *("--strict-markers", "-p", "no:cacheprovider", "test_it.py"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{REPOSITORY}"},
        capture_output=True,
        text=True,
    )
    assert "2 passed, 1 skipped" in done.stdout, done.stdout
    assert "needs a real NPU; this one is simulated" in done.stdout


def fails_on_rank_1():
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 has its reasons")
    time.sleep(60)


def exits_on_rank_0():
    if os.environ["RANK"] == "0":
        os._exit(7)
    time.sleep(60)


@pytest.mark.plumbing
def test_a_rank_s_error_is_the_test_s_and_ends_the_others(ranks):
    started = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 has its reasons") as caught:
        ranks(fails_on_rank_1, 2)
    assert "on rank 1" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="rank 0 ended without a result, exit code 7"):
        ranks(exits_on_rank_0, 2)
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] did not finish within 0.5 s"):
        ranks(time.sleep, 2, 60, timeout=0.5)
    assert time.monotonic() - started < 40


@pytest.mark.hardware
def test_the_simulator_stays_away_on_this_machine():
    with pytest.raises(simulator.SimulatorError, match="real NPU"):
        simulator.load()
