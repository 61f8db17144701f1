"""What the NPU forks call: one package, importable with the standard library alone.

    device       is this an NPU host; its devices, memory and cache
    ray          shares, bundles and ids in Ray's terms
    distributed  backends, addresses, ports and timeouts
    environ      the environment a job on NPUs is started with
    patching     declared changes of other packages' objects
    ops          fused operators, each with a reference in plain torch
    mindspeed, megatron, bridge, qwen3_vl, sglang, slime
                 what each upstream's changed lines call
    simulator    CANN and HCCL without hardware

torch, torch_npu, ray, megatron and sglang are imported by the functions that use them, so a host
without them can import every module that the forks name.
"""
