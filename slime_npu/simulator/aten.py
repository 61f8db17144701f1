"""CPU kernels for PyTorch's own operators on `npu` tensors.

Simulated device memory is host memory, so a CPU kernel can compute on it in place: each `aten::`
operator that torch_npu registers gets a kernel that calls the CPU's on aliases of its arguments and
moves new results into memory from torch_npu's allocator. Views, allocation and metadata stay
torch_npu's own, and so do its autograd formulas.

An alias is a view of one CPU storage that spans the whole address space (a tensor is then an
offset, a size and strides), because making such a view is several times cheaper than making a
storage. Nothing may therefore resize an alias; `out=` arguments get a fresh tensor instead.

Random numbers come from the CPU's generator, seeded for each operator from the NPU generator's seed
and offset: they are not an NPU's numbers, but seeding, saving and restoring its state work.
"""

import struct
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

START = 4096  # the lowest address that a storage may name
SPAN = (1 << 47) - START

# What allocates or describes memory computes nothing and stays native, as do all views.
NATIVE = {
    "as_strided_",
    "empty",
    "empty_like",
    "empty_strided",
    "is_pinned",
    "is_set_to",
    "new_empty_strided",
    "record_stream",
    "resize_",
    "resize_as_",
    "set_",
    "_fused_sdp_choice",
    "_lazy_clone",
    "_local_scalar_dense",
    "_pin_memory",
}

# These take tensors of several devices.
ACROSS_DEVICES = {
    "copy_",
    "_copy_from",
    "_copy_from_and_resize",
    "_to_copy",
    "_foreach_copy_",
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
}

_libraries: dict[str, torch.library.Library] = {}
_bases: dict[torch.dtype, Tensor] = {}
_sizes: dict[torch.dtype, int] = {}
_empty_strided = torch.empty_strided  # before transfer_to_npu or anybody else wraps it


def register() -> None:
    """Registers the kernels; torch_npu must have been imported. A second call does nothing."""
    if _libraries:
        return
    _make_bases()
    for namespace in ("aten", "npu"):
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
            namespace, _, rest = name.partition("::")
            packet, _, overload = rest.partition(".")
            if namespace != "aten" or packet in NATIVE:
                continue
            operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if operator is None or _is_view(operator) or not _has_cpu_kernel(name):
                continue
            _libraries[namespace].impl(rest, _kernel(operator), "PrivateUse1")
        for rest, function in ABOVE_AUTOGRAD.items():
            _libraries["aten"].impl(rest, function, "AutogradPrivateUse1")
        for name, function in GAPS.items():
            namespace, _, rest = name.partition("::")
            _libraries[namespace].impl(rest, function, "PrivateUse1", allow_override=True)


def _is_view(operator: OpOverload) -> bool:
    aliases = [result.alias_info for result in operator._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _has_cpu_kernel(name: str) -> bool:
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        for key in (
            "CPU",
            "CompositeExplicitAutograd",
            "CompositeImplicitAutograd",
            "CompositeExplicitAutogradNonFunctional",
        )
    )


# -- memory ----------------------------------------------------------------------------------------


def _make_bases() -> None:
    storage = torch._C._construct_storage_from_data_pointer(START, torch.device("cpu"), SPAN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some types are deprecated, some experimental
        for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
            try:
                _bases[dtype] = torch.empty(0, dtype=dtype).set_(storage, 0, (0,), (1,))
            except RuntimeError:
                continue  # an NPU has no such tensors either
            _sizes[dtype] = dtype.itemsize


def alias(tensor: Tensor) -> Tensor:
    """A CPU tensor over the same memory as the NPU tensor."""
    address = tensor.data_ptr()
    dtype = tensor.dtype
    if not address:
        return _empty_strided(tensor.size(), tensor.stride(), dtype=dtype)
    offset = (address - START) // _sizes[dtype]
    made = _bases[dtype].as_strided(tensor.size(), tensor.stride(), offset)
    if tensor.is_neg():
        made = torch._neg_view(made)
    return made.conj() if dtype.is_complex and tensor.is_conj() else made


def lift(tensor: Tensor, device: torch.device | None) -> Tensor:
    """A CPU result as a tensor of `device`, in memory from torch_npu's allocator."""
    if device is None or device.type == "cpu":
        return tensor
    stride = tensor.stride()
    if 0 in stride and tensor.numel() > 1:
        tensor = tensor.contiguous()
        stride = tensor.stride()
    made = _empty_strided(tensor.size(), stride, dtype=tensor.dtype, device=device)
    if tensor.numel():
        alias(made).copy_(tensor)
    return made


# -- kernels ---------------------------------------------------------------------------------------


def _kernel(operator: OpOverload) -> Callable[..., Any]:
    """A kernel that runs `operator` on the CPU, over the memory of its NPU arguments."""
    schema = operator._schema
    across = schema.name.partition("::")[2] in ACROSS_DEVICES
    names = [argument.name for argument in schema.arguments]
    outputs = [argument.name for argument in schema.arguments if argument.is_out]
    origins = _origins(schema)
    creates = len(schema.returns) == 1 and origins == [None]
    places = "device" in names
    seeded = torch.Tag.nondeterministic_seeded in operator.tags

    def kernel(*args: Any, **kwargs: Any) -> Any:
        cpu_args, device = _on_cpu(args, None, across, operator)
        if kwargs or places:
            rest = {name: value for name, value in kwargs.items() if name not in outputs}
            values, device = _on_cpu(rest.values(), device, across, operator)
            cpu_kwargs = dict(zip(rest, values, strict=True))
            for name in outputs:
                cpu_kwargs[name], its = _fresh(kwargs[name])
                device = device or its
            if places:
                device = _placed(kwargs.get("device"), device)
                cpu_kwargs |= {"device": "cpu", "pin_memory": None}
        else:
            cpu_kwargs = kwargs
        if seeded:
            result = _seeded(operator, cpu_args, cpu_kwargs, "generator" in names, device)
        else:
            result = operator(*cpu_args, **cpu_kwargs)
        if creates and isinstance(result, Tensor):
            return lift(result, device)
        for name in outputs:
            _write(kwargs[name], cpu_kwargs[name])
        if len(origins) == 1:
            return _back(result, origins[0], args, kwargs, device)
        if origins:
            return tuple(
                _back(value, origin, args, kwargs, device)
                for value, origin in zip(result, origins, strict=True)
            )
        return None

    return kernel


def _origins(schema: torch.FunctionSchema) -> list[tuple[int, str] | None]:
    """For each result, which argument it is (place and name), or None if it is a new one."""
    written = {
        mark: (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for mark in argument.alias_info.before_set
    }
    return [
        written[next(iter(result.alias_info.before_set))]
        if result.alias_info is not None and result.alias_info.is_write
        else None
        for result in schema.returns
    ]


def _on_cpu(
    values: Iterable[Any], device: torch.device | None, across: bool, operator: OpOverload
) -> tuple[list[Any], torch.device | None]:
    """The values with aliases for NPU tensors, and these tensors' one device.

    CPU tensors pass if they are numbers (no dimension), or if the operator takes several devices.
    """
    found = []
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_cpu:
                its = value.device
                if device is None:
                    device = its
                elif its != device and not across:
                    raise _devices_differ(operator, device, its)
                value = alias(value)
            elif not across and value.dim():
                raise _devices_differ(operator, device or torch.device("npu"), value.device)
        elif isinstance(value, (list, tuple)):
            value, device = _on_cpu(value, device, across, operator)
        found.append(value)
    return found, device


def _placed(wanted: Any, device: torch.device | None) -> torch.device:
    """Where a result goes: the device asked for, or the arguments', or the current one."""
    device = torch.device(wanted or device or "npu")
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.npu.current_device())


def _fresh(out: Any) -> tuple[Any, torch.device]:
    """What an operator may resize and fill in the place of its `out=`, and where that lies."""
    if isinstance(out, Tensor):
        return torch.empty(0, dtype=out.dtype, device="cpu"), out.device
    return [_fresh(item)[0] for item in out], out[0].device


def _write(out: Any, made: Any) -> None:
    if not isinstance(out, Tensor):
        for one, its in zip(out, made, strict=True):
            _write(one, its)
        return
    if out.size() != made.size():
        out.resize_(made.size())
    if made.numel():
        alias(out).copy_(made)


def _back(
    value: Any,
    origin: tuple[int, str] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device | None,
) -> Any:
    if origin is not None:
        index, name = origin
        return args[index] if index < len(args) else kwargs[name]
    if isinstance(value, Tensor):
        return lift(value, device)
    if isinstance(value, list):
        return [_back(item, None, args, kwargs, device) for item in value]
    return value


def _devices_differ(operator: OpOverload, one: torch.device, other: torch.device) -> RuntimeError:
    return RuntimeError(
        f"{operator}: expected all tensors to be on the same device, but found at least two "
        f"devices, {one} and {other}!"
    )


def _seeded(
    operator: OpOverload,
    args: list[Any],
    kwargs: dict[str, Any],
    takes_generator: bool,
    device: torch.device | None,
) -> Any:
    """Runs a random operator with numbers that follow from the NPU generator's state."""
    assert device is not None, operator
    generator = kwargs.get("generator") or torch.npu.default_generators[device.index]
    state = generator.get_state()
    seed, offset = struct.unpack("<Qq", bytes(state[:16].tolist()))
    mixed = (seed * 0x9E3779B97F4A7C15 + offset * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
    state[8:16] = torch.tensor(list(struct.pack("<q", offset + 4)), dtype=torch.uint8)
    generator.set_state(state)
    if takes_generator:
        return operator(*args, **kwargs | {"generator": torch.Generator().manual_seed(mixed)})
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(mixed)
        return operator(*args, **kwargs)


# -- operators that the CPU has no kernel for ------------------------------------------------------


def _contiguous(
    self: Tensor, *, memory_format: torch.memory_format = torch.contiguous_format
) -> Tensor:
    if self.is_contiguous(memory_format=memory_format):
        return self
    return self.clone(memory_format=memory_format)


def _cast(self: Tensor, dtype: torch.dtype | int, *types_of_an_npu: Any) -> Tensor:
    return self.to(_DTYPES[dtype] if isinstance(dtype, int) else dtype)


def _gradients(
    function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor, mask: Sequence[bool] = (True,)
) -> tuple[Tensor | None, ...]:
    """What the CPU's autograd gives for `function` of NPU tensors, where the mask asks for it."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set() - _AUTOGRAD
    # A kernel runs below autograd; this enters it again.
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        leaves = [
            alias(tensor).detach().requires_grad_(wanted)
            for tensor, wanted in zip(inputs, mask, strict=True)
        ]
        result = function(*leaves)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        gradients = iter(torch.autograd.grad(result, wanted, alias(grad)) if wanted else ())
    return tuple(lift(next(gradients), grad.device) if wanted else None for wanted in mask)


def _matmul_backward(
    grad: Tensor, self: Tensor, other: Tensor, mask: list[bool]
) -> tuple[Tensor | None, ...]:
    return _gradients(torch.matmul, grad, self, other, mask=mask)


def _l1_loss_backward(grad: Tensor, self: Tensor, target: Tensor, reduction: int) -> Tensor | None:
    target = alias(target)
    return _gradients(lambda x: _aten.l1_loss(x, target, reduction), grad, self)[0]


def _kl_div_backward(
    grad: Tensor, self: Tensor, target: Tensor, reduction: int = 1, *, log_target: bool = False
) -> Tensor | None:
    target = alias(target)

    def kl_div(x: Tensor) -> Tensor:
        made: Tensor = _aten.kl_div(x, target, reduction, log_target=log_target)
        return made

    return _gradients(kl_div, grad, self)[0]


def _kl_div_target_backward(
    grad: Tensor, self: Tensor, target: Tensor, reduction: int = 1, *, log_target: bool = False
) -> Tensor | None:
    self = alias(self)

    def kl_div(y: Tensor) -> Tensor:
        made: Tensor = _aten.kl_div(self, y, reduction, log_target=log_target)
        return made

    return _gradients(kl_div, grad, target)[0]


def _cross_entropy_backward(
    grad: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    positive: Tensor | None,
    reduction: int,
) -> Tensor | None:
    rest = [None if t is None else alias(t) for t in (target, weight, positive)]

    def loss(x: Tensor) -> Tensor:
        made: Tensor = _aten.binary_cross_entropy_with_logits(x, *rest, reduction)
        return made

    return _gradients(loss, grad, self)[0]


def _repeat_interleave_backward(
    grad: Tensor, self: Tensor, repeats: int | Tensor, dim: int | None = None
) -> Tensor | None:
    count = alias(repeats) if isinstance(repeats, Tensor) else repeats
    return _gradients(lambda x: torch.repeat_interleave(x, count, dim), grad, self)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = allowed.masked_fill(~attn_mask, float("-inf"))
    arguments = query, key, value, attn_mask, dropout_p, is_causal
    made: Tensor = _aten._scaled_dot_product_attention_math(*arguments, **options)[0]
    return made


_aten = torch.ops.aten
_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.ADInplaceOrView
)
_DTYPES = {  # c10::ScalarType
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    9: torch.complex64,
    10: torch.complex128,
    11: torch.bool,
    15: torch.bfloat16,
}

# These torch_npu computes itself where it should record them for autograd.
ABOVE_AUTOGRAD: dict[str, Callable[..., Any]] = {
    "one_hot": _kernel(_aten.one_hot.default),
    "scaled_dot_product_attention": _attention,
}

# Operators of PyTorch's for which torch_npu calls kernels that no CPU has, by their own formulas.
GAPS: dict[str, Callable[..., Any]] = {
    "aten::contiguous": _contiguous,
    "aten::matmul_backward": _matmul_backward,
    "npu::_npu_dtype_cast": _cast,
    "npu::_npu_dtype_cast_backward": _cast,
    "npu::npu_dtype_cast": _cast,
    "npu::npu_dtype_cast_backward": _cast,
    "npu::l1_loss_backward": _l1_loss_backward,
    "npu::kl_div_backward": _kl_div_backward,
    "npu::kl_div_target_backward": _kl_div_target_backward,
    "npu::npu_binary_cross_entropy_with_logits_backward": _cross_entropy_backward,
    "npu::repeat_interleave_backward_int": _repeat_interleave_backward,
    "npu::repeat_interleave_backward_tensor": _repeat_interleave_backward,
}
