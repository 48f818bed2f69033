"""Reading checkpoints: what is right is read, what is wrong is named, nothing is read without a bound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specserve.checkpoint import read as checkpoint
from specserve.checkpoint import safetensors as headers
from specserve.checkpoint.facts import CheckpointRefused, ModelFacts
from specserve.checkpoint.read import MAX_CONFIG_BYTES
from specserve.checkpoint.safetensors import TensorFacts
from tests import checkpoints as make


def refusal(folder: Path) -> dict[str, str]:
    """Code -> message of a checkpoint that must be refused."""
    with pytest.raises(CheckpointRefused) as caught:
        checkpoint.read(str(folder))
    return {f.code: f"{f.where}: {f.message}" for f in caught.value.findings}


def raw(folder: Path, header: object, data: bytes = b"") -> Path:
    """A checkpoint whose only weights file has this header."""
    make.write(folder, make.Checkpoint({"model_type": "llama"}))
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(body).to_bytes(8, "little") + body + data)
    return folder


def test_single_file(tmp_path: Path) -> None:
    """Shapes, dtypes, sizes and places of tensors come from the header."""
    model = checkpoint.read(str(make.write(tmp_path / "m", make.llama())))
    assert model.tensors is not None
    embedding = model.tensors["model.embed_tokens.weight"]
    assert (embedding.dtype, embedding.shape, embedding.nbytes) == ("BF16", (320, 64), 40960)
    assert embedding.file == "model.safetensors"
    assert model.total_size_bytes == 673920
    assert model.parameters == 336960
    assert (model.architectures, model.model_type) == (("LlamaForCausalLM",), "llama")
    assert (model.folder, model.revision) == (tmp_path / "m", None)
    assert model.chat_template is not None


def test_shards_say_the_same(tmp_path: Path) -> None:
    """Sharded and single-file weights of one model give the same tensors and sum."""
    one = checkpoint.read(str(make.write(tmp_path / "one", make.llama())))
    many = checkpoint.read(str(make.write(tmp_path / "many", make.llama(), shards=4)))
    assert one.tensors is not None
    assert many.tensors is not None
    assert {n: (t.dtype, t.shape) for n, t in one.tensors.items()} == {
        n: (t.dtype, t.shape) for n, t in many.tensors.items()
    }
    assert many.total_size_bytes == one.total_size_bytes


def test_huge_sparse_weights_are_not_read(tmp_path: Path) -> None:
    """A terabyte of weights costs one header."""
    huge = make.Checkpoint({}, {"x": ("F32", (1 << 20, 1 << 18))})
    model = checkpoint.read(str(make.write(tmp_path / "m", huge, sparse=True)))
    assert model.total_size_bytes == 1 << 40


def test_links_into_a_cache_are_followed(tmp_path: Path) -> None:
    """The Hub's cache is made of links."""
    make.write(tmp_path / "blobs", make.llama())
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(f"../blobs/{file.name}")
    assert checkpoint.read(str(tmp_path / "snapshot")).total_size_bytes == 673920


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    """A named pipe called config.json is no file."""
    make.write(tmp_path / "m", make.llama())
    (tmp_path / "m" / "config.json").unlink()
    os.mkfifo(tmp_path / "m" / "config.json")
    assert "config-missing" in refusal(tmp_path / "m")


def test_dangling_link_is_a_missing_file(tmp_path: Path) -> None:
    """A link to nowhere counts as absent."""
    make.write(tmp_path / "m", make.llama())
    (tmp_path / "m" / "config.json").unlink()
    (tmp_path / "m" / "config.json").symlink_to("nowhere")
    assert "config-missing" in refusal(tmp_path / "m")


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"", b"", "is not JSON"),
        (b"[]", b"", "is not a JSON object"),
        (b"[" * 5000, b"", "nested too deeply"),
        ({"x": 1}, b"", "entry of 'x' is not an object"),
        ({"x": {"dtype": "Q5", "shape": [1], "data_offsets": [0, 1]}}, b"0", "unknown dtype 'Q5'"),
        ({"x": {"dtype": "I8", "shape": [-1], "data_offsets": [0, 1]}}, b"0", "no valid shape"),
        ({"x": {"dtype": "I8", "shape": [True], "data_offsets": [0, 1]}}, b"0", "no valid shape"),
        (
            {"x": {"dtype": "I8", "shape": [1], "data_offsets": [1, 0]}},
            b"0",
            "no valid data offsets",
        ),
        (
            {"x": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]}},
            b"0",
            "ends 1 bytes behind the end",
        ),
        (
            {"x": {"dtype": "F16", "shape": [1], "data_offsets": [0, 1]}},
            b"0",
            "does not fill its 1 bytes",
        ),
        (
            {"x": {"dtype": "I8", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 1]}},
            b"0",
            "absurd shape",
        ),
        (
            {
                "x": {"dtype": "I8", "shape": [2], "data_offsets": [0, 2]},
                "y": {"dtype": "I8", "shape": [2], "data_offsets": [1, 3]},
            },
            b"012",
            "share bytes",
        ),
    ],
)
def test_bad_header(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    """Each fault of a header is named with its file."""
    found = refusal(raw(tmp_path / "m", header, data))
    assert message in found["checkpoint-corrupt"]
    assert "m/model.safetensors" in found["checkpoint-corrupt"]


def test_header_length_is_checked_before_it_is_read(tmp_path: Path) -> None:
    """A header that claims to be larger than the file, or than the limit, is not read."""
    raw(tmp_path / "m", {})
    path = tmp_path / "m" / "model.safetensors"
    path.write_bytes((1 << 63).to_bytes(8, "little") + b"{}")
    assert "truncated or corrupt" in refusal(tmp_path / "m")["checkpoint-corrupt"]
    with path.open("wb") as f:
        f.write((200 * 1024**2).to_bytes(8, "little"))
        f.truncate(300 * 1024**2)
    assert f"more than {headers.MAX_HEADER_BYTES}" in refusal(tmp_path / "m")["checkpoint-corrupt"]


def test_a_file_of_very_many_tensors_is_read(tmp_path: Path) -> None:
    """A mixture of experts in one file: 150,000 tensors make a header of more than 16 MiB."""
    entry = {"dtype": "BF16", "shape": [64, 64]}
    names = [
        f"model.layers.{i // 384}.mlp.experts.{i % 384}.gate_proj.weight" for i in range(150_000)
    ]
    header = {
        name: entry | {"data_offsets": [i * 8192, (i + 1) * 8192]} for i, name in enumerate(names)
    }
    folder = raw(tmp_path / "m", header)
    path = folder / "model.safetensors"
    assert path.stat().st_size > 16 * 1024**2
    with path.open("r+b") as f:
        f.truncate(path.stat().st_size + 150_000 * 8192)
    tensors = checkpoint.read(str(folder)).tensors
    assert tensors is not None
    assert len(tensors) == 150_000
    assert tensors[names[-1]].shape == (64, 64)


def test_100_mb_of_json_is_refused_unread(tmp_path: Path) -> None:
    """config.json has a limit, and the message says which."""
    make.write(tmp_path / "m", make.llama())
    with (tmp_path / "m" / "config.json").open("wb") as f:
        f.truncate(100 * 1024**2)
    assert MAX_CONFIG_BYTES == 4 * 1024**2
    assert (
        "has 100 MiB; more than 4 MiB is not read" in refusal(tmp_path / "m")["checkpoint-corrupt"]
    )


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    """A broken config does not hide broken weights."""
    make.write(tmp_path / "m", make.llama(), shards=2)
    (tmp_path / "m" / "config.json").write_bytes(b"nonsense")
    for shard in (tmp_path / "m").glob("*.safetensors"):
        shard.write_bytes(b"short")
    with pytest.raises(CheckpointRefused) as caught:
        checkpoint.read(str(tmp_path / "m"))
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../x", "..", "a\\b", "", "sub/x.safetensors"]
)
def test_index_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    """Names in an index are plain file names or nothing is read."""
    make.write(tmp_path / "m", make.llama(), shards=2)
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": name}}))
    assert "checkpoint-unsafe-path" in refusal(tmp_path / "m")


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    """A path to the weights themselves is answered with the folder to give; a GGUF with its reason."""
    make.write(tmp_path / "m", make.llama())
    with pytest.raises(CheckpointRefused, match="must be the folder") as caught:
        checkpoint.read(str(tmp_path / "m" / "model.safetensors"))
    assert caught.value.findings[0].fix == f"set the path to {tmp_path}/m"
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointRefused, match="GGUF"):
        checkpoint.read(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("https://huggingface.co/Qwen/Qwen3-8B", "write Qwen/Qwen3-8B"),
        ("huggingface.co/Qwen/Qwen3-8B/tree/main", "write Qwen/Qwen3-8B"),
        ("hf://Qwen/Qwen3-8B", "write Qwen/Qwen3-8B"),
        ("s3://bucket/llm", "set models.store to a folder, then: specserve models pull CONFIG"),
        ("/nowhere/llm", "correct the path, or put the checkpoint there"),
    ],
)
def test_what_to_write_instead_of_a_path_that_is_none(path: str, fix: str) -> None:
    """A page of the Hub names its id, object storage what it takes to copy from there."""
    with pytest.raises(CheckpointRefused) as refused:
        checkpoint.read(path)
    assert [f.fix for f in refused.value.findings] == [fix]


def test_text_config_is_found_where_it_is_nested() -> None:
    """Multimodal configs keep the language model's numbers one or two levels down."""
    assert ModelFacts("x", {"text_config": {"vocab_size": 5}}).text_config == {"vocab_size": 5}
    assert ModelFacts("x", {"thinker_config": {"text_config": {"vocab_size": 6}}}).text_config == {
        "vocab_size": 6
    }
    assert ModelFacts("x", {"vocab_size": 7}).text_config == {"vocab_size": 7}


def test_parameters_count_packed_types() -> None:
    """Four-bit elements count as elements."""
    model = ModelFacts("x", {}, tensors={"w": TensorFacts("F4", (8, 2), 8, "f")})
    assert model.parameters == 16
    assert ModelFacts("x", {}).parameters is None


def test_no_torch_and_no_hub_for_a_folder(tmp_path: Path) -> None:
    """Reading a local folder imports neither torch, transformers, vllm, tokenizers nor the Hub client."""
    make.write(tmp_path / "m", make.llama())
    program = (
        "import sys; from specserve.checkpoint.read import read; read(sys.argv[1]);"
        "print([m for m in ('torch', 'transformers', 'vllm', 'tokenizers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "m")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
