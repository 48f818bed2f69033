"""The engine's environment, on machines that are folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve.config.schema import Settings
from specserve.engine.command.args import build
from specserve.engine.command.environment import (
    EngineEnvironment,
    Machine,
    api_keys,
    free_bytes,
    prepare,
    requested_repairs,
)
from specserve.engine.installed.introspect import Installed
from specserve.errors import ConfigError
from specserve.units import GIB


def settings(**sections) -> Settings:
    """A target alone from the Hub, unless said otherwise."""
    return Settings(**{"models": {"target_model": {"path": "org/target"}}, **sections})


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """x86-64 with OpenMP in the environment, tcmalloc in Debian's place and 34 GiB free."""
    files = {
        "venv/lib/libiomp5.so": "",
        "usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4": "",
        "proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable:   {34 * GIB // 1024} kB\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Machine(root=tmp_path, prefix=tmp_path / "venv", architecture="x86_64")


def on_cpu(machine: Machine, environ: dict[str, str] | None = None, **kwargs) -> EngineEnvironment:
    """Prepared for a CPU engine."""
    return prepare(
        kwargs.pop("settings", settings()), environ or {}, cpu=True, machine=machine, **kwargs
    )


def test_cpu_engine_gets_preload_memory_and_repairs(machine):
    """OpenMP before tcmalloc; 0.4 of what 34 GiB leave beside 4 GiB of runtime and 5 GiB of weights."""
    found = on_cpu(machine, weights_bytes=5 * GIB)
    openmp = f"{machine.prefix}/lib/libiomp5.so"
    tcmalloc = f"{machine.root}/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"
    assert found.env == {
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": f"{openmp}:{tcmalloc}",
        "VLLM_CPU_KVCACHE_SPACE": "10",
        "SPECSERVE_REPAIRS": "cpu-speculative-sampling,cpu-yielding",
    }
    assert found.notes == (f"preloading {openmp}, {tcmalloc}",)


def test_gpu_engine_is_not_tuned(machine):
    """No preload, no KV space, no repair, no NCCL or allocator setting."""
    assert prepare(settings(), {}, cpu=False, machine=machine).env == {"VLLM_NO_USAGE_STATS": "1"}


def test_what_is_missing_is_named_with_its_package(machine):
    """One sentence names both libraries and how to install them."""
    for path in [machine.prefix / "lib/libiomp5.so", *machine.root.glob("usr/lib/*/*")]:
        path.unlink()
    found = on_cpu(machine)
    assert "LD_PRELOAD" not in found.env
    assert " ".join(found.notes) == (
        "not preloaded, though vLLM asks for it: OpenMP (pip install intel-openmp); "
        "tcmalloc (apt-get install libtcmalloc-minimal4)"
    )


def test_openmp_is_for_x86_only(machine):
    """Elsewhere vLLM preloads torch's own OpenMP, and a second one would clash."""
    arm = Machine(machine.root, machine.prefix, "aarch64")
    assert "libiomp5" not in on_cpu(arm).env["LD_PRELOAD"]


def test_path_with_a_space_cannot_be_preloaded(machine):
    """The loader splits LD_PRELOAD at spaces: such a path would be taken for two, so it is left out and said."""
    spaced = machine.root / "my venv"
    (spaced / "lib").mkdir(parents=True)
    (spaced / "lib/libiomp5.so").touch()
    found = on_cpu(Machine(machine.root, spaced, "x86_64"))
    assert "libiomp5" not in found.env["LD_PRELOAD"]
    assert "has a space or colon" in found.notes[1]


def of_engine(machine: Machine, environ: dict[str, str], config: Settings) -> dict[str, str]:
    """The engine's whole environment, put together as a launch does."""
    prepared = on_cpu(machine, environ, settings=config)
    command = build(config, installed=Installed("vllm-cpu", "0.32.0", "python"))
    return {**prepared.over(environ), **command.env}


@pytest.mark.parametrize("place", ["environ", "engine.env"])
@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_NO_USAGE_STATS",
        "HF_HUB_OFFLINE",
        "VLLM_CPU_OMP_THREADS_BIND",
    ],
)
def test_values_of_the_user_stay(machine, tmp_path, name, place):
    """Whether from the environment or from engine.env, a value of the user's reaches the engine as it is."""
    local = {"target_model": {"path": str(tmp_path)}}
    config = settings(
        models=local, **({"engine": {"env": {name: "theirs"}}} if place == "engine.env" else {})
    )
    environ = {name: "theirs"} if place == "environ" else {}
    assert of_engine(machine, environ, config)[name] == "theirs"


def test_engine_env_wins_over_the_environment(machine):
    """What the config file says about the engine is nearer than what a shell happens to hold."""
    config = settings(engine={"env": {"VLLM_LOGGING_LEVEL": "DEBUG"}})
    environ = {"VLLM_LOGGING_LEVEL": "ERROR"}
    assert of_engine(machine, environ, config)["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_offline_only_when_all_models_are_folders(machine, tmp_path):
    """A Hub id, or a flag that may name one, keeps the Hub reachable."""
    folder = {"path": str(tmp_path)}

    def offline(**sections) -> bool:
        return "HF_HUB_OFFLINE" in on_cpu(machine, settings=settings(**sections)).env

    assert offline(models={"target_model": folder, "draft_model": folder})
    assert not offline(models={"target_model": folder, "draft_model": {"path": "org/draft"}})
    assert not offline(
        models={"target_model": folder}, engine={"extra_args": {"tokenizer": "org/tokenizer"}}
    )


def test_secrets_go_through_the_environment(machine):
    """API key and Hub token, under the names that vLLM and the Hub's client read."""
    config = settings(
        server={"api_key": "k3y"},
        models={"target_model": {"path": "org/target"}, "hub_token": "hf_token"},
    )
    found = of_engine(machine, {"HF_TOKEN": "other"}, config)
    assert (found["VLLM_API_KEY"], found["HF_TOKEN"]) == ("k3y", "hf_token")
    assert api_keys(found) == ("k3y",)


def test_our_own_variables_stay_with_us(machine):
    """Ours may carry secrets and mean nothing to the engine; the marker of the repairs is set anew."""
    environ = {"SPECSERVE_SERVER__API_KEY": "k", "SPECSERVE_REPAIRS": "old", "PATH": "/bin"}
    whole = on_cpu(machine, environ).over(environ)
    assert {n: v for n, v in whole.items() if n.startswith("SPECSERVE_")} == {
        "SPECSERVE_REPAIRS": "cpu-speculative-sampling,cpu-yielding"
    }
    assert whole["PATH"] == "/bin"


def test_repairs_can_be_turned_off(machine):
    """``engine.repairs: []`` leaves no marker, not even one that the shell had set."""
    environ = {"SPECSERVE_REPAIRS": "cpu-speculative-sampling"}
    whole = on_cpu(machine, environ, settings=settings(engine={"repairs": []})).over(environ)
    assert requested_repairs(whole) == frozenset()


def test_plugin_that_is_left_out_is_said(machine):
    """VLLM_PLUGINS without ours is the user's choice; that the repair is then missing is said."""
    notes = on_cpu(machine, {"VLLM_PLUGINS": "other"}).notes
    assert notes[-1] == (
        "VLLM_PLUGINS leaves out specserve_repairs, so these repairs are not applied: "
        "cpu-speculative-sampling, cpu-yielding"
    )


def test_key_that_only_the_engine_knows_is_refused(machine):
    """The engine would ask for a key that specserve's own checks do not send."""
    with pytest.raises(
        ConfigError, match=r"environment VLLM_API_KEY: is set but server.api_key is not"
    ):
        on_cpu(machine, {"VLLM_API_KEY": "k"})
    for ours in (None, "other"):
        theirs = settings(server={"api_key": ours}, engine={"env": {"VLLM_API_KEY": "k"}})
        with pytest.raises(
            ConfigError, match=r"engine.env.VLLM_API_KEY: is not what server.api_key is"
        ):
            on_cpu(machine, settings=theirs)
    on_cpu(
        machine, settings=settings(server={"api_key": "k"}, engine={"env": {"VLLM_API_KEY": "k"}})
    )


@pytest.mark.parametrize(
    ("free_gib", "space", "said"), [(5, "1", True), (2, "1", True), (12, "3", False)]
)
def test_kv_space_is_at_least_one_gib(machine, free_gib, space, said):
    """vLLM counts whole GiB; where less than one is sensible, the least is taken and said."""
    (machine.root / "proc/meminfo").write_text(f"MemAvailable: {free_gib * GIB // 1024} kB\n")
    found = on_cpu(machine)
    assert found.env["VLLM_CPU_KVCACHE_SPACE"] == space
    assert any("the KV cache gets the least" in note for note in found.notes) is said


def test_workers_share_the_memory(machine):
    """Each of two workers takes its own KV space."""
    config = settings(models={"target_model": {"path": "t", "tensor_parallel_size": 2}})
    assert on_cpu(machine, settings=config).env["VLLM_CPU_KVCACHE_SPACE"] == "6"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 34),
        ({"memory.max": f"{8 * GIB}\n", "memory.current": f"{3 * GIB}\n"}, 5),
        (
            {
                "memory.max": f"{8 * GIB}\n",
                "memory.current": f"{3 * GIB}\n",
                "memory.stat": f"anon 1\ninactive_file {GIB}\n",
            },
            6,
        ),
        ({"memory.max": "max\n", "memory.current": f"{3 * GIB}\n"}, 34),
        (
            {
                "memory/memory.limit_in_bytes": f"{4 * GIB}\n",
                "memory/memory.usage_in_bytes": f"{GIB}\n",
            },
            3,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": "1\n",
            },
            34,
        ),
        ({"memory.max": f"{2 * GIB}\n", "memory.current": f"{3 * GIB}\n"}, 0),
    ],
)
def test_free_memory_is_what_the_cgroup_leaves(machine, files, expected):
    """MemAvailable, or less inside a limited cgroup; its reclaimable page cache counts as free."""
    for name, text in files.items():
        path = machine.root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert free_bytes(machine.root) == expected * GIB


def test_unreadable_memory_leaves_the_choice_to_vllm(machine):
    """No number, no guess."""
    (machine.root / "proc/meminfo").unlink()
    assert "VLLM_CPU_KVCACHE_SPACE" not in on_cpu(machine).env
