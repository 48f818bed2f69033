"""Repairs of known engine defects, applied inside the engine through vLLM's own plugin entry point.

vLLM calls :func:`register` in each of its processes (``vllm.general_plugins``), in a worker just
before the platform registers its stand-ins for Triton kernels (``v1/worker/worker_base.py``).
Nothing happens unless the start of the engine asked for it, and a test in this very process shows
the defect.

``cpu-speculative-sampling`` (vllm-project/vllm#55005, vLLM 0.26 to 0.33): the CPU stand-in of
``expand_kernel`` repeats a value per request over that request's draft tokens, but writes into an
int64 copy of a float buffer. Temperature, top_p and, as int32, top_k of drafted tokens are then
uninitialised memory: text sampled under speculation is garbage, and next to no draft is accepted.
Greedy text is not touched. A second defect of the same path kills the engine (seen with 0.32): a
request with ``top_k`` and without ``top_p`` ends in ``max()`` of an empty tensor as soon as a step
verifies no draft token, for instance at the request's last token.

``cpu-yielding`` (seen with vLLM 0.32 on Linux 6.18): the engine core and its worker wait for each
other by calling ``sched_yield`` without a pause
(``distributed/device_communicators/shm_broadcast.py``). When both share a core, as they soon do
where there are few, every other program on that core stands still, for up to 80 s: probes, clients,
and the kernel's own workers ("workqueue lockup" in its log). That was measured, with yielding and
without; why is not proven, but Linux' scheduler had such faults ("sched/fair: Fix zero_vruntime
tracking" of 2026-02-09 and its fix of 2026-04-05; read 2026-11-30). They sleep for a moment
instead.
"""

from __future__ import annotations

import ctypes
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from specserve.engine.command.environment import requested_repairs

if TYPE_CHECKING:
    from torch import Tensor

CPU_SPECULATIVE_SAMPLING = "cpu-speculative-sampling"
CPU_YIELDING = "cpu-yielding"
PAUSE_SECONDS = 2e-5
"""The pause of a process that waits for another. A step takes milliseconds."""
_PR_SET_TIMERSLACK = 29
_SLACK_NANOSECONDS = 1000

# A child of vLLM's logger: written by its handler, with the process named in front.
_log = logging.getLogger("vllm.specserve")
_LINE = re.compile(r"specserve repair ([a-z0-9-]+): applied")


def available_repairs() -> Mapping[str, str]:
    """Repairs that ``engine.repairs`` may name -> what each one repairs."""
    return {
        CPU_SPECULATIVE_SAMPLING: (
            "sampled text under speculation on the CPU engine (vllm-project/vllm#55005)"
        ),
        CPU_YIELDING: (
            "other programs that stand still beside the CPU engine, for up to a minute and more"
        ),
    }


def applied_in(lines: Iterable[str]) -> tuple[str, ...]:
    """The repairs that an engine's log says are in force, each once.

    >>> line = "(Worker) INFO [repairs.py:60] specserve repair cpu-speculative-sampling: applied"
    >>> applied_in([line])
    ('cpu-speculative-sampling',)
    """
    return tuple(dict.fromkeys(name for line in lines for name in _LINE.findall(line)))


def register() -> None:
    """vLLM's plugin hook. May be called more than once."""
    for name, repair in _REPAIRS.items():
        if name in requested_repairs():
            outcome = repair()
            if outcome is not None:
                _log.info("specserve repair %s: %s", name, outcome)


def repair_cpu_speculative_sampling() -> str | None:
    """What was done, for the log; None where there is nothing to say (no CPU engine, or repaired
    already).
    """
    try:
        from vllm.platforms import current_platform
        from vllm.triton_utils import HAS_TRITON
        from vllm.utils import cpu_triton_utils
    except ImportError:
        return "not applied: this vLLM has no stand-ins for Triton kernels"
    if not current_platform.is_cpu() or HAS_TRITON:  # with Triton the stand-ins are not used
        return None
    stand_in = getattr(cpu_triton_utils, "_expand_kernel_impl", None)
    if stand_in is expand:
        return None
    # The operators behind the stand-in come with this import, and no worker has loaded them yet.
    import vllm._custom_ops  # noqa: F401

    guarded = _guard_top_k()
    if stand_in is not None and shows_defect(stand_in):
        cpu_triton_utils._expand_kernel_impl = expand
        _rebind(stand_in)
        return "applied"
    if guarded:
        return "applied"
    if stand_in is None:
        return "not applied: this vLLM has no such stand-in"
    return "not applied: this vLLM does not have the defect"


def shows_defect(stand_in: Callable[..., None]) -> bool:
    """Whether an implementation of ``expand_kernel`` leaves a float or int32 buffer other than it
    must be.

    Three requests with 2, 0 and 3 draft tokens, as the sampler passes them: temperatures, of which
    0 becomes 1, and top_k. An implementation that refuses these arguments proves nothing: it is
    left alone.
    """
    import torch

    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    cases = (
        (torch.tensor([0.5, 0.7, 0.0]), 0, 1, torch.tensor([0.5, 0.5, 1.0, 1.0, 1.0])),
        (
            torch.tensor([4, 7, 9], dtype=torch.int32),
            0,
            0,
            torch.tensor([4, 4, 9, 9, 9], dtype=torch.int32),
        ),
    )
    for values, replace_from, replace_to, expected in cases:
        output = torch.full_like(expected, -1)
        try:
            stand_in(output, values, ends, replace_from, replace_to, MAX_NUM_TOKENS=128)
        except (TypeError, RuntimeError, AttributeError):
            return False
        if not torch.equal(output, expected):
            return True
    return False


def expand(  # noqa: PLR0917  # vLLM passes them by position, in the kernel's order
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # noqa: N803  # the kernel's own name
) -> None:
    """``output[i]`` becomes the value of the request that owns token ``i``, ``replace_from`` made
    ``replace_to``.

    In the buffer's own dtype. ``cu_num_tokens`` holds each request's end, so request r owns
    [end(r-1), end(r)).
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(
        input_val == replace_from, torch.full_like(input_val, replace_to), input_val
    )
    expanded = torch.repeat_interleave(values, counts.to(torch.int64))
    output[: expanded.shape[0]].copy_(expanded)


def _guard_top_k() -> bool:
    """Let top_k alone pass when there is no row to mask; True when it was needed."""
    try:
        from vllm.v1.sample.ops import topk_topp_sampler as sampler
    except ImportError:
        return False
    original = getattr(sampler, "apply_top_k_only", None)
    if original is None or not fails_without_rows(original):
        return False

    def apply_top_k_only(logits: Tensor, k: Tensor) -> Tensor:
        if k.numel():
            return original(logits, k)
        return logits

    sampler.apply_top_k_only = apply_top_k_only
    return True


def fails_without_rows(top_k: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether masking no row at all raises, instead of returning no row."""
    import torch

    try:
        top_k(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int32))
    except (RuntimeError, IndexError):
        return True
    return False


def _rebind(broken: Callable[..., None]) -> None:
    """Replace the stand-in where it was registered before the plugins were loaded (0.32 does it
    after).
    """
    sampler = sys.modules.get("vllm.v1.sample.rejection_sampler")
    bound = getattr(sampler, "expand_kernel", None)
    if getattr(bound, "_impl", None) is broken:  # vllm/triton_utils/dispatcher.py, KernelOverride
        vars(bound).update(_impl=expand, func=expand)


def repair_cpu_yielding() -> str | None:
    """What was done, for the log; None where there is nothing to say (no CPU engine, or repaired
    already).
    """
    try:
        from vllm.distributed import utils
        from vllm.platforms import current_platform
    except ImportError:
        return "not applied: this vLLM has no such module"
    # A GPU server has a core for each worker, and microseconds count there.
    if not current_platform.is_cpu():
        return None
    yields = getattr(utils, "sched_yield", None)
    if yields is None:
        return "not applied: this vLLM does not wait so"
    if yields is pause:
        return None
    broadcast = sys.modules.get("vllm.distributed.device_communicators.shm_broadcast")
    for module in (utils, broadcast):
        if getattr(module, "sched_yield", None) is yields:
            vars(module)["sched_yield"] = pause
    if sys.platform == "linux":  # which by default lets a thread sleep 50 us longer than it asks
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NANOSECONDS), 0, 0, 0)
    return "applied"


def pause() -> None:
    """Let others run, and be asleep meanwhile."""
    time.sleep(PAUSE_SECONDS)


_REPAIRS: Mapping[str, Callable[[], str | None]] = {
    CPU_SPECULATIVE_SAMPLING: repair_cpu_speculative_sampling,
    CPU_YIELDING: repair_cpu_yielding,
}
