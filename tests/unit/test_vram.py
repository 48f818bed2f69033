"""The memory plan: the JSON contract, the verdicts with their fixes, hardware, calibration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specserve.checkpoint.facts import ModelFacts
from specserve.config.schema import Settings
from specserve.engine.output.logs import EngineReport
from specserve.findings import Finding
from specserve.gpu.devices import Device, DeviceProcess
from specserve.memory import calibration
from specserve.memory import plan as vram
from specserve.memory import text as vram_text
from specserve.memory.findings import of_plan
from specserve.units import GIB

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936,
    "tie_word_embeddings": False, "max_position_embeddings": 40960,
}  # fmt: skip
QWEN3_0_6B: dict[str, Any] = {
    **QWEN3_8B, "num_hidden_layers": 28, "num_attention_heads": 16, "hidden_size": 1024, "intermediate_size": 3072,
    "tie_word_embeddings": True,
}  # fmt: skip
H100 = {"gpu_name": "NVIDIA H100 80GB HBM3"}
RTX_4090 = {"gpu_name": "NVIDIA GeForce RTX 4090"}


def plan(
    hardware: dict[str, Any] | None = None, *, draft: bool = True, target: dict[str, Any] = QWEN3_8B,
    speculation: dict[str, Any] | None = None, models: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None, **given: Any,
) -> vram.MemoryPlan:  # fmt: skip
    """Qwen3-8B, with Qwen3-0.6B as its draft unless told otherwise."""
    body: dict[str, Any] = {
        "models": {"target_model": {"path": "target", **(models or {})}},
        "engine": engine or {},
        "hardware": hardware or {},
        "speculative_decoding": {"num_speculative_tokens": 3, **(speculation or {})},
    }
    if draft:
        body["models"]["draft_model"] = {"path": "draft"}
    proposer = ModelFacts("draft", QWEN3_0_6B) if draft else None
    given = {"engine_version": "0.32.0", **given}
    return vram.plan(Settings.model_validate(body), ModelFacts("target", target), proposer, **given)


def device(
    index: int = 0, *, used_gib: float = 0.0, total_gib: float = 80.0, reserved_gib: float = 0.5
) -> Device:
    """A detected GPU."""
    return Device(
        index,
        f"GPU-{index}",
        "NVIDIA H100 80GB HBM3",
        int(total_gib * GIB),
        int(used_gib * GIB),
        int(reserved_gib * GIB),
    )


def only(found: list[Finding], code: str) -> Finding:
    """The one finding of this code."""
    (one,) = [f for f in found if f.code == code]
    return one


def test_the_json_contract() -> None:
    """Every key of the contract is there, and every number of bytes is an integer."""
    body = json.loads(json.dumps(plan(H100).as_dict()))
    assert {"fits", "gpus", "kv_bytes_per_token", "max_concurrency", "without_draft", "largest_max_model_len", "terms",
            "confidence"} <= body.keys()  # fmt: skip
    gpu = {"index", "total_bytes", "budget_bytes", "target_weights_bytes", "draft_weights_bytes", "activation_bytes",
           "cuda_graph_bytes", "non_torch_bytes", "kv_cache_bytes", "kv_cache_tokens"}  # fmt: skip
    assert gpu <= body["gpus"][0].keys()
    assert all(isinstance(v, int) for v in body["gpus"][0].values())
    assert body["max_concurrency"].keys() == {"tokens", "requests"}
    assert body["without_draft"].keys() == {"kv_cache_tokens", "requests"}
    assert all(term.keys() == {"name", "bytes", "formula", "source"} for term in body["terms"])
    assert body["kv_bytes_per_token"] == (36 + 28) * 4096


def test_the_terms_add_up() -> None:
    """Budget = weights + activation + graphs + non-torch + KV cache, to the byte."""
    gpu = plan(H100).gpus[0]
    parts = (gpu.target_weights_bytes, gpu.draft_weights_bytes, gpu.activation_bytes, gpu.cuda_graph_bytes,
             gpu.non_torch_bytes, gpu.kv_cache_bytes)  # fmt: skip
    assert sum(p or 0 for p in parts) == gpu.budget_bytes


def test_graphs_come_on_top_before_0_21() -> None:
    """Up to 0.20 CUDA graphs are not taken out of the budget."""
    gpu = plan(H100, engine_version="0.19.0").gpus[0]
    assert gpu.cuda_graph_bytes > 0
    assert (
        gpu.budget_bytes or 0
    ) - gpu.weights_bytes - gpu.activation_bytes - gpu.non_torch_bytes == gpu.kv_cache_bytes


def test_what_does_not_fit_shows_every_term_and_the_largest_context() -> None:
    """The error is a table; its fix names the largest max_model_len, and that one fits."""
    refused = plan(RTX_4090, engine={"max_model_len": 40960})
    error = only(of_plan(refused), "does-not-fit")
    assert error.severity == "error"
    lines = error.message.splitlines()
    assert lines[0].startswith("target and draft do not fit GPU 0: need ")
    assert lines[0].endswith("budget 21.2 GiB (0.90 of 23.5 GiB)")
    assert [line.split("  ")[1] for line in lines[1:]] == [
        "target weights",
        "draft weights",
        "KV cache",
        "overhead",
    ]
    assert "1 sequence of 40960 tokens, 256 KiB per token" in lines[3]
    longest = refused.largest_max_model_len
    assert error.fix == f"set engine.max_model_len: {longest}, or less, or quantize the target"
    assert plan(RTX_4090, engine={"max_model_len": longest}).fits
    assert plan(RTX_4090, engine={"max_model_len": longest + 16}).fits is False


def test_weights_that_do_not_fit_at_all_say_by_how_much() -> None:
    """Where no context fits, the fix does not name one."""
    refused = plan({"gpu_name": "NVIDIA T4"})
    assert refused.largest_max_model_len == 0
    assert (only(of_plan(refused), "does-not-fit").fix or "").startswith(
        "weights and overhead alone are "
    )


def test_a_smaller_batch_is_named_first_where_it_is_enough() -> None:
    """What the activation takes beyond what is missing can be had without another GPU or model."""
    lower = "lower engine.max_num_seqs ({}) and engine.max_num_batched_tokens ({}), or "
    for seqs, tokens, start in (
        (1024, 8192, "weights and overhead alone are "),
        (512, 32768, "lower "),
    ):
        batch = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens, "max_model_len": 8192}
        fix = only(of_plan(plan(RTX_4090, engine=batch)), "does-not-fit").fix or ""
        assert fix.startswith(start)
        assert lower.format(seqs, tokens) in fix
    assert plan(
        RTX_4090, engine={"max_num_seqs": 64, "max_num_batched_tokens": 8192, "max_model_len": 8192}
    ).fits


def test_the_draft_is_counted() -> None:
    """With the draft fewer requests fit than without."""
    made = plan(H100, engine={"max_model_len": 32768})
    assert made.without_draft.requests > made.capacity.requests * 1.5
    assert vram_text.conclusion(made) == (
        f"fits; {made.capacity.requests:.1f} requests of 32k tokens with the draft, "
        f"{made.without_draft.requests:.1f} without"
    )


@pytest.mark.parametrize(("method", "copies"), [("eagle3", 2), ("draft_model", 1)])
def test_the_draft_is_repeated_or_shared(method: str, copies: int) -> None:
    """A head with TP 1 beside a target with TP 2 lies whole on each GPU; a draft model always has the target's TP."""
    models: dict[str, Any] = {
        "target_model": {"path": "t", "tensor_parallel_size": 2},
        "draft_model": {"path": "d"},
    }
    found = []
    for tp in (None, 1):
        models["draft_model"]["tensor_parallel_size"] = tp
        body = {"models": models, "hardware": H100, "speculative_decoding": {"method": method}}
        made = vram.plan(
            Settings.model_validate(body), ModelFacts("t", QWEN3_8B), ModelFacts("d", QWEN3_0_6B)
        )
        found.append(made.gpus[1].draft_weights_bytes)
    assert found[1] == pytest.approx(copies * found[0], rel=0.02)


def test_online_quantization_does_not_touch_the_draft() -> None:
    """quantization: fp8 halves the target's layers; the draft stays in 16 bits."""
    plain, online = plan(H100), plan(H100, models={"quantization": "fp8"})
    assert online.gpus[0].target_weights_bytes < 0.6 * plain.gpus[0].target_weights_bytes
    assert online.gpus[0].draft_weights_bytes == plain.gpus[0].draft_weights_bytes


def test_lookup_methods_need_no_memory() -> None:
    """ngram and suffix have neither weights nor KV."""
    made = plan(H100, draft=False, speculation={"method": "ngram"})
    assert made.gpus[0].draft_weights_bytes == 0
    assert made.kv_bytes_per_token == 36 * 4096
    refused = plan({"gpu_name": "NVIDIA T4"}, draft=False, speculation={"method": "suffix"})
    for text in (
        vram_text.render(made),
        vram_text.render(refused),
        only(of_plan(refused), "does-not-fit").message,
    ):
        assert "draft" not in text


def test_detected_gpus_are_planned_without_what_the_driver_keeps() -> None:
    """CUDA's total is NVML's total without its reservation; the budget is a share of that."""
    made = plan(devices=[device()])
    assert made.gpus[0].total_bytes == int(79.5 * GIB)
    assert made.gpus[0].budget_bytes == pytest.approx(0.9 * 79.5 * GIB, abs=1)


def test_described_hardware_wins_over_what_is_there() -> None:
    """hardware: plans for another machine even on one with GPUs."""
    assert plan(RTX_4090, devices=[device()]).gpu_name == "NVIDIA GeForce RTX 4090"


def test_no_gpu_is_not_a_verdict() -> None:
    """Without a GPU and without hardware: weights and KV bytes are known, whether it fits is not."""
    made = plan(devices=None)
    assert made.fits is None
    assert made.gpus[0].budget_bytes is None
    assert made.gpus[0].target_weights_bytes > 15 * GIB
    assert [f.severity for f in of_plan(made)] == ["info", "info", "info"]
    assert "vram-not-checked" in {f.code for f in of_plan(made)}


def test_too_few_gpus_are_refused() -> None:
    """TP 4 on a machine with two GPUs."""
    made = plan(devices=[device(0), device(1)], models={"tensor_parallel_size": 4})
    found = only(of_plan(made), "does-not-fit")
    assert found.message == "TP 4 x PP 1 needs 4 GPUs; there are 2"
    assert found.fix == "give it 4 GPUs, or set models.target_model.tensor_parallel_size: 2"
    three = plan(devices=[device(i) for i in range(3)], models={"tensor_parallel_size": 4})
    assert (
        only(of_plan(three), "does-not-fit").fix == found.fix
    )  # 32 heads on 3 GPUs would be refused next


def test_tp_must_divide_heads_and_vocabulary() -> None:
    """32 heads cannot be shared by 5 GPUs."""
    made = plan(H100, models={"tensor_parallel_size": 5})
    assert made.fits is False
    found = only(of_plan(made), "does-not-fit")
    assert "cannot be split over 5 GPUs" in found.message
    assert found.fix == "set models.target_model.tensor_parallel_size: 4"


def test_others_memory_is_shown_and_refuses_when_too_much() -> None:
    """vLLM will not start with less free than its share; the fix names a share that is free."""
    refused = plan(devices=[device(used_gib=20)])
    error = only(of_plan(refused), "other-processes")
    assert error.severity == "error"
    assert (error.fix or "").endswith("set engine.gpu_memory_utilization: 0.71, or less")
    assert plan(devices=[device(used_gib=20)], engine={"gpu_memory_utilization": 0.71}).fits


def test_who_holds_others_memory_is_named() -> None:
    """Pid, name and size where NVML tells, for the error and for the warning."""
    held = (DeviceProcess(41, int(1.5 * GIB), "python3"), DeviceProcess(42, None))
    for used, severity in ((20, "error"), (2, "warning")):
        finding = only(
            of_plan(plan(devices=[replace(device(used_gib=used), processes=held)])),
            "other-processes",
        )
        assert finding.severity == severity
        assert "by other processes (pid 41 python3 1.5 GiB, pid 42 (unknown))" in finding.message


def test_a_little_of_others_memory_is_a_warning() -> None:
    """More than half a GiB is worth a line, not a refusal."""
    made = plan(devices=[device(used_gib=2)])
    assert made.fits
    assert only(of_plan(made), "other-processes").severity == "warning"
    assert not [
        f for f in of_plan(plan(devices=[device(used_gib=0.2)])) if f.code == "other-processes"
    ]


def test_draft_logits_that_no_profiling_sees_are_named() -> None:
    """1024 sequences x 3 draft tokens x 151936 x 4 bytes is 1.7 GiB."""
    message = only(of_plan(plan(H100)), "logits-buffer-large").message
    assert (
        message
        == "a full step of draft tokens needs 1.7 GiB of logits that vLLM's profiling does not see"
    )
    small, bounded = (
        plan(H100, engine={"max_num_seqs": 64}),
        plan(H100, speculation={"max_batch_size": 8}),
    )
    scheduled = plan(H100, speculation={"schedule": [(1, 64, 3), (65, 1024, 0)]})
    for made in (small, bounded, scheduled):
        assert not [f for f in of_plan(made) if f.code == "logits-buffer-large"]


def test_kept_draft_distributions_count_too() -> None:
    """Probabilistic drafting keeps the draft's logits beside the target's: twice the memory."""
    greedy, sampled = plan(H100), plan(H100, speculation={"draft_sample_method": "probabilistic"})
    assert sampled.late_bytes == 2 * greedy.late_bytes


def test_the_table_names_both_formats() -> None:
    """A quantized target beside a 16-bit draft: each with its own format."""
    quantized = {
        **QWEN3_8B,
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
    }
    lines = vram_text.render(plan(H100, target=quantized)).splitlines()
    assert lines[1].endswith("awq")
    assert lines[2].endswith("draft_model, 16 bits")


def test_a_share_above_0_92_with_a_draft_is_tight() -> None:
    """The draft allocates outside the budget, so a high utilization is warned about, with a number to set."""
    warning = only(of_plan(plan(H100, engine={"gpu_memory_utilization": 0.95})), "memory-tight")
    assert warning.fix == "set engine.gpu_memory_utilization: 0.92"


def test_nothing_outside_the_budget_is_refused() -> None:
    """Eight GPUs without NVLink take more than a GiB for collectives after the cache is sized."""
    hardware = {"gpu_name": "NVIDIA RTX PRO 4500 Blackwell", "gpu_count": 8}
    made = plan(
        hardware, models={"tensor_parallel_size": 8}, engine={"gpu_memory_utilization": 0.96}
    )
    assert made.refusal == "headroom"


def test_headroom_is_what_nobody_has() -> None:
    """What others hold is no room: the GPU they are on is named, with what is left there."""
    gpus = [device(0), device(1, used_gib=7.6)]
    made = plan(devices=gpus, models={"tensor_parallel_size": 2})
    assert made.refusal == "headroom"
    assert only(of_plan(made), "does-not-fit").message.startswith(
        "only 0.35 GiB of GPU 1 stay outside"
    )


def test_few_requests_are_named_with_and_without_the_draft() -> None:
    """Fewer than two requests of the full context is a warning."""
    made = plan(
        {"gpu_name": "NVIDIA L40S"}, engine={"max_model_len": 40960, "gpu_memory_utilization": 0.8}
    )
    assert 1 < made.capacity.requests < 2
    assert "without the draft" in only(of_plan(made), "low-concurrency").message


def test_an_unknown_architecture_is_no_fit_and_no_refusal() -> None:
    """No crash and no silent zero: what is unknown is in the plan and a finding of its own."""
    made = plan(H100, draft=False, target={"model_type": "mystery"}, speculation={"enabled": False})
    assert made.confidence == "assumed"
    assert made.fits is None
    assert [size.part for size in made.unknown] == ["target weights", "KV cache"]
    assert made.as_dict()["max_concurrency"]["requests"] is None
    assert only(of_plan(made), "size-unknown").severity == "error"
    assert "target weights  unknown" in vram_text.render(made)
    assert vram_text.conclusion(made) == (
        "memory: cannot say whether it fits: unknown size of target weights and KV cache"
    )


def test_an_unknown_size_without_hardware_is_a_note() -> None:
    """Where there is no GPU to fit on, nobody waits for the verdict."""
    made = plan(devices=None, draft=False, target={"model_type": "mystery"},
                speculation={"enabled": False})  # fmt: skip
    assert only(of_plan(made), "size-unknown").severity == "info"
    assert only(of_plan(made), "vram-not-checked").severity == "info"


def test_what_is_known_and_too_large_is_refused_whatever_is_unknown() -> None:
    """The known terms are a lower bound: a target of 15 GiB is too large for a T4 without its draft."""
    body = {"models": {"target_model": {"path": "target"}, "draft_model": {"path": "draft"}},
            "hardware": {"gpu_name": "NVIDIA T4"}}  # fmt: skip
    draft = ModelFacts("draft", {"model_type": "mystery"})
    made = vram.plan(Settings.model_validate(body), ModelFacts("target", QWEN3_8B), draft)
    assert {size.part for size in made.unknown} == {"draft weights", "KV cache"}
    assert made.fits is False
    assert "size-unknown" not in {f.code for f in of_plan(made)}


def test_an_assumed_kv_cache_refuses_nobody_and_fits_nobody() -> None:
    """Layers of an unknown kind may cost less than was assumed: only the known terms refuse, and what
    fits only if they do is no fit."""
    odd = {**QWEN3_8B, "layer_types": ["hyena"]}
    alone: dict[str, Any] = {"draft": False, "speculation": {"enabled": False}}
    assert plan(RTX_4090, target=odd, engine={"max_model_len": 40960}, **alone).fits is None
    assert plan(RTX_4090, target=odd, engine={"max_model_len": 4096}, **alone).fits
    assert plan({"gpu_name": "NVIDIA T4"}, target=odd, **alone).fits is False


def test_the_cpu_backend_reports_ram() -> None:
    """Weights and VLLM_CPU_KVCACHE_SPACE against free memory; nothing of a GPU."""
    env = {"env": {"VLLM_CPU_KVCACHE_SPACE": "4"}, "max_model_len": 4096}
    made = plan(engine=env, backend="cpu", free_ram_bytes=32 * GIB)
    assert made.fits
    assert made.gpus[0].kv_cache_bytes == 4 * GIB
    assert (
        made.gpus[0].activation_bytes,
        made.gpus[0].cuda_graph_bytes,
        made.gpus[0].non_torch_bytes,
    ) == (0, 0, 0)
    assert vram_text.render(made).startswith("Memory, 32.0 GiB free\n")
    refused = plan(engine=env, backend="cpu", free_ram_bytes=16 * GIB)
    assert (
        "not fit in memory: need 20.4 GiB, free 16.0 GiB"
        in only(of_plan(refused), "does-not-fit").message
    )


def test_pipeline_stages_are_planned_apart() -> None:
    """The last stage holds the LM head and the sampler, so it decides."""
    made = plan(
        H100, models={"pipeline_parallel_size": 2}, draft=False, speculation={"enabled": False}
    )
    assert [g.stage for g in made.gpus] == [0, 1]
    assert made.gpus[1].activation_bytes > made.gpus[0].activation_bytes
    assert made.tightest.stage == 1


def test_text_has_every_term_and_ends_with_the_conclusion() -> None:
    """The table a person reads."""
    lines = vram_text.render(plan(H100)).splitlines()
    assert lines[0] == "GPU 0: NVIDIA H100 80GB HBM3, budget 71.3 GiB (0.90 of 79.2 GiB)"
    assert lines[1].split() == ["target", "weights", "15.3", "GiB", "16", "bits"]
    assert lines[-1].startswith("fits; ")


def test_a_gpu_of_unknown_memory_is_named() -> None:
    """What is missing is the memory then, not the name."""
    said = vram_text.conclusion(plan({"gpu_name": "banana"}))
    assert said == "memory not checked: 'banana' is not the name of a known GPU"


def _grid() -> list[vram_text.Cell]:
    def again(length: int, draft: bool, share: float) -> vram.MemoryPlan:
        return plan(
            RTX_4090, draft=draft, engine={"max_model_len": length, "gpu_memory_utilization": share}
        )

    return vram_text.grid(again, 8192, 40960, {0.8, 0.85, 0.9, 0.95}, draft=True)


def test_the_grid_varies_context_draft_and_share() -> None:
    """Four contexts, with the draft and without, four shares of the GPU."""
    cells = _grid()
    assert {c.max_model_len for c in cells} == {2048, 4096, 8192, 16384}
    assert {c.utilization for c in cells} == {0.8, 0.85, 0.9, 0.95}
    assert len(cells) == 32
    text = vram_text.render_grid(cells).splitlines()
    assert text[0].endswith("0.80 of the GPU  0.85 of the GPU  0.90 of the GPU  0.95 of the GPU")
    assert len(text) == 9
    assert " - " in text[-2]  # 16384 tokens with the draft do not fit the smallest share


def report(**figures: Any) -> EngineReport:
    """What an engine said."""
    return EngineReport(**figures)


def test_close_figures_give_no_warning() -> None:
    """Within 15 % plan and engine agree; both numbers are kept for /status."""
    made = plan(H100)
    close = report(kv_cache_tokens=int((made.gpus[0].kv_cache_tokens or 0) * 1.1))
    found = calibration.reconcile(made, close)
    assert found.warning is None
    assert found.as_dict()["kv_cache_tokens"]["measured"] == close.kv_cache_tokens


def test_a_figure_far_off_is_one_warning_with_both_numbers() -> None:
    """A draft that was placed otherwise than planned: 18.0 GiB planned, 30 loaded."""
    made = plan(H100)
    found = calibration.reconcile(
        made,
        report(model_loading_bytes=30 * GIB, kv_cache_tokens=made.gpus[0].kv_cache_tokens),
    )
    assert found.warning == (
        "memory plan is off: model_loading_bytes planned 16.4 GiB, the engine reports 30.0 GiB (-45 %)"
    )


def test_what_the_engine_did_not_say_is_not_compared() -> None:
    """A silent engine gives no comparison and no warning."""
    found = calibration.reconcile(plan(H100), report())
    assert found.comparisons == ()
    assert found.warning is None


def test_a_calibration_replaces_what_was_modelled(tmp_path: Path) -> None:
    """Measured once, saved beside the config, the next plan gives exactly the engine's pool."""
    config = tmp_path / "pair.yaml"
    made = plan(H100)
    said = report(
        model_loading_bytes=int(16.8 * GIB),
        available_kv_bytes=50 * GIB,
        graph_capture_bytes=GIB // 2,
    )
    measured = calibration.measure(made, said, key="k", engine="0.32.0")
    assert measured is not None
    assert measured.engine == "0.32.0"
    assert calibration.save(measured, config) == tmp_path / "pair.memory.json"
    assert calibration.load(config, key="other deployment") is None
    odd = {"key": "k", "weights_bytes": "16", "overhead_bytes": 0}
    calibration.path_for(tmp_path / "edited.yaml").write_text(json.dumps(odd))
    assert calibration.load(tmp_path / "edited.yaml", key="k") is None
    again = plan(H100, calibration=calibration.load(config, key="k"))
    assert again.confidence == "measured"
    assert again.gpus[0].kv_cache_bytes == 50 * GIB
    assert again.gpus[0].weights_bytes == int(16.8 * GIB)
    assert again.without_draft.requests > again.capacity.requests


def test_on_the_cpu_the_engine_says_less() -> None:
    """The CPU backend logs only tokens: the plan's own weights are kept, and nothing is invented beside them."""
    env = {"env": {"VLLM_CPU_KVCACHE_SPACE": "4"}, "max_model_len": 4096}
    made = plan(engine=env, backend="cpu", free_ram_bytes=32 * GIB)
    measured = calibration.measure(made, report(kv_cache_tokens=16384), key="k")
    assert measured == calibration.Calibration("k", made.gpus[0].weights_bytes, 0)
    again = plan(engine=env, backend="cpu", free_ram_bytes=32 * GIB, calibration=measured)
    assert (again.confidence, again.gpus[0].kv_cache_bytes) == ("measured", 4 * GIB)
    assert calibration.measure(made, report(), key="k") is None


def test_a_damaged_calibration_is_no_calibration(tmp_path: Path) -> None:
    """A file that is not ours is ignored."""
    (tmp_path / "pair.memory.json").write_text('{"key": "k"}')
    assert calibration.load(tmp_path / "pair.yaml", key="k") is None


@pytest.mark.parametrize("length", ["auto", -1])
def test_auto_length_is_what_fits(length: str | int) -> None:
    """max_model_len auto is planned with the longest sequence that fits, up to the model's own."""
    fixed = plan(RTX_4090)
    assert fixed.fits is False
    made = plan(RTX_4090, engine={"max_model_len": length})
    assert made.fits
    assert made.max_model_len == fixed.largest_max_model_len < 40960
    assert "(max_model_len: auto)" in vram_text.conclusion(made)
    assert plan(H100, engine={"max_model_len": length}).max_model_len == 40960
