"""Texts that start a server, in the forms that people have them, and what a config should say."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import JsonValue

PATH = "models.target_model.path"
DRAFT = "models.draft_model.path"
TP = "models.target_model.tensor_parallel_size"
METHOD = "speculative_decoding.method"
TOKENS = "speculative_decoding.num_speculative_tokens"
EXTRA = "engine.extra_args"
ENV = "engine.env"
MTP = '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 3}\''


@dataclass(frozen=True)
class Form:
    """One input."""

    name: str
    text: str
    keys: dict[str, JsonValue]
    said: tuple[str, ...] = ()
    absent: tuple[str, ...] = field(default=())


FORMS = [
    Form("plain", f"vllm serve Q/q {MTP}", {PATH: "Q/q", METHOD: "mtp", TOKENS: 3}),
    Form(
        "continuations with trailing blanks",
        "vllm serve Q/q \\  \n  --tensor-parallel-size 2 \\\t\n  --port=9000\n",
        {PATH: "Q/q", TP: 2, "server.port": 9000},
    ),
    Form(
        "comment between continued lines",
        "vllm serve Q/q \\\n  -tp 2 \\\n  # --enforce-eager \\\n  --port 9000 # and this\n",
        {TP: 2, "server.port": 9000, "engine.enforce_eager": None},
    ),
    Form(
        "Windows line ends",
        "vllm serve Q/q \\\r\n  -tp 2 \\\r\n  --port 9000\r\n",
        {TP: 2, "server.port": 9000},
    ),
    Form(
        "continuation of cmd.exe",
        "vllm serve Q/q ^\r\n  -tp 2 ^\r\n  --port 9000\r\n",
        {TP: 2, "server.port": 9000},
    ),
    Form(
        "continuation of PowerShell",
        "vllm serve Q/q `\n  -tp 2 `\n  --port 9000\n",
        {TP: 2, "server.port": 9000},
    ),
    Form(
        "JSON over several lines",
        'vllm serve Q/q --speculative-config \'{\n  "method": "eagle3",\n  "model": "R/e",\n  "num_speculative_tokens": 4\n}\'',
        {METHOD: "eagle3", DRAFT: "R/e", TOKENS: 4},
    ),
    Form(
        "JSON with escaped quotes",
        'vllm serve Q/q -sc "{\\"method\\": \\"mtp\\", \\"num_speculative_tokens\\": 2}"',
        {METHOD: "mtp", TOKENS: 2},
    ),
    Form(
        "dotted flags",
        "vllm serve Q/q --speculative-config.method mtp --speculative_config.num_speculative_tokens=1 -O3 -cc.mode 3 "
        "--attention_config.use_x=true",
        {
            METHOD: "mtp",
            TOKENS: 1,
            EXTRA: {
                "optimization-level": 3,
                "compilation-config": {"mode": 3},
                "attention-config": {"use_x": True},
            },
        },
    ),
    Form(
        "short spec flags",
        "vllm serve Q/q --spec-method eagle3 --spec-model R/e --spec-tokens 3",
        {METHOD: "eagle3", DRAFT: "R/e", TOKENS: 3},
    ),
    Form(
        "short flags",
        "vllm serve Q/q -tp 4 -pp 2 -dp 2 -q fp8 -ep",
        {
            TP: 4,
            "models.target_model.pipeline_parallel_size": 2,
            "models.target_model.quantization": "fp8",
            EXTRA: {"data-parallel-size": 2, "enable-expert-parallel": True},
        },
    ),
    Form(
        "several names, a human length, the last of two",
        "vllm serve Q/q --served-model-name a b --max-model-len 256K --port 1 --port 9000",
        {
            "server.served_model_name": ["a", "b"],
            "engine.max_model_len": "256K",
            "server.port": 9000,
        },
        ("--port is given twice",),
    ),
    Form("a length that fits", "vllm serve Q/q --max-model-len -1", {"engine.max_model_len": -1}),
    Form("an abbreviation", "vllm serve Q/q --tensor-parallel 2", {TP: 2}),
    Form(
        "module, environment and prefixes",
        "sudo -E env VLLM_LOGGING_LEVEL=DEBUG CUDA_VISIBLE_DEVICES=0,1 nohup numactl --cpunodebind=0 "
        "python3 -u -m vllm.entrypoints.openai.api_server --model Q/q --tensor_parallel_size 2 > log 2>&1 &",
        {PATH: "Q/q", TP: 2, ENV: {"VLLM_LOGGING_LEVEL": "DEBUG", "CUDA_VISIBLE_DEVICES": "0,1"}},
    ),
    Form(
        "old module",
        "python -m vllm.entrypoints.api_server --model=Q/q --port=9000",
        {PATH: "Q/q", "server.port": 9000},
    ),
    Form(
        "module with serve",
        "uv run python -m vllm.entrypoints.cli.main serve Q/q -tp 2",
        {PATH: "Q/q", TP: 2},
    ),
    Form(
        "variables that the text sets",
        'export MODEL="Q/q"\nTP=4\nexport VLLM_USE_X=1\nvllm serve $MODEL -tp "${TP}" --port ${PORT:-9000}\n',
        {PATH: "Q/q", TP: 4, "server.port": "${PORT:-9000}", ENV: {"VLLM_USE_X": "1"}},
        (),
        ("MODEL",),
    ),
    Form(
        "variables that nobody sets",
        "vllm serve ${MODEL:?needed} --seed $SEED --master-port $PORT",
        {PATH: "${MODEL}", EXTRA: {"seed": "${SEED}", "master-port": "${PORT}"}},
    ),
    Form(
        "arrays",
        'ARGS=(\n  --tensor-parallel-size 2\n  # not this\n  --chat-template "a b.jinja"\n)\nARGS+=(--enforce-eager)\n'
        'exec vllm serve Q/q "${ARGS[@]}" "$@"\n',
        {TP: 2, "engine.enforce_eager": True, EXTRA: {"chat-template": "a b.jinja"}},
        ("$@",),
    ),
    Form(
        "flags in a variable",
        'FLAGS="--enforce-eager -tp 2"\nvllm serve Q/q $FLAGS ${MORE:-}\n',
        {TP: 2, "engine.enforce_eager": True},
    ),
    Form(
        "a command in a variable",
        'CMD="vllm serve Q/q -tp 2"\nif [ -n "$DRAFT" ]; then\n  CMD="$CMD --enforce-eager"\nfi\neval "$CMD"\n',
        {PATH: "Q/q", TP: 2},
        ("conditions of the script are not evaluated",),
    ),
    Form(
        "a variable inside JSON",
        'vllm serve Q/q --speculative-config \'{"model": "\'$DRAFT\'", "method": "eagle3", "num_speculative_tokens": \'${K:-3}\'}\'',
        {DRAFT: "${DRAFT}", TOKENS: "${K:-3}"},
    ),
    Form(
        "what would have to run",
        "vllm serve Q/q -tp $(nvidia-smi -L | wc -l) --seed `date +%s` --port 9000",
        {PATH: "Q/q", TP: None, "server.port": 9000},
        ("nvidia-smi -L | wc -l", "date +%s"),
    ),
    Form(
        "bash -c",
        'bash -lc "cd /x && exec vllm serve Q/q -tp 2 --port 9000"',
        {PATH: "Q/q", TP: 2, "server.port": 9000},
    ),
    Form(
        "over ssh and tmux", "ssh gpu1 \"tmux new -d 'vllm serve Q/q -tp 2'\"", {PATH: "Q/q", TP: 2}
    ),
    Form(
        "a here document",
        "cat > docker-compose.yml <<'EOF'\nservices:\n  v:\n    image: vllm/vllm-openai\n    command: --model Q/q -tp 2\nEOF\ndocker compose up -d\n",
        {PATH: "Q/q", TP: 2},
    ),
    Form(
        "Markdown",
        "# How\n\nRun `vllm serve x`:\n\n```bash\n$ vllm serve Q/q \\\n    -tp 2 \\\n    "
        + MTP
        + "\n```\n\nThen ask it.\n",
        {PATH: "Q/q", TP: 2, METHOD: "mtp"},
    ),
    Form(
        "several servers",
        f"vllm serve a --port 1\nvllm serve b --port 9000 {MTP}\n",
        {PATH: "b", "server.port": 9000},
        ("the server at line 1",),
    ),
    Form(
        "docker run",
        "docker run --runtime nvidia --gpus all -v ~/.cache/huggingface:/root/.cache/huggingface \\\n"
        '  --env "HUGGING_FACE_HUB_TOKEN=$TOKEN" -e VLLM_X=1 -p 8000:8000 --ipc=host -itd --rm --shm-size 16g \\\n'
        "  vllm/vllm-openai:latest --model Q/q --port 9000\n",
        {
            PATH: "Q/q",
            "server.host": "0.0.0.0",
            "server.port": 9000,
            "server.allow_unauthenticated": True,
            "models.hub_token": "${TOKEN}",
            ENV: {"VLLM_X": "1"},
        },
        ("volume ~/.cache/huggingface", "published port 8000:8000"),
    ),
    Form(
        "docker run with an entrypoint",
        "podman run --entrypoint /bin/bash --device nvidia.com/gpu=all img:1 -c 'vllm serve Q/q -tp 2'",
        {PATH: "Q/q", TP: 2},
    ),
    Form(
        "docker run of an image of one's own",
        "docker run me/img vllm serve Q/q -tp 2",
        {PATH: "Q/q", TP: 2},
    ),
    Form("docker exec", "docker exec -d box vllm serve Q/q -tp 2", {PATH: "Q/q", TP: 2}),
    Form(
        "compose with a list",
        "services:\n  v:\n    image: vllm/vllm-openai:v0.20\n    command:\n      - --model\n      - ${MODEL:-Q/q}\n"
        "      - --gpu-memory-utilization=0.90\n      - --speculative-config\n"
        '      - \'{"method":"mtp","num_speculative_tokens":3}\'\n      - --port\n      - 9000\n'
        "    environment:\n      - HF_TOKEN=${HF_TOKEN:-}\n      - VLLM_X=0\n      - NCCL_DEBUG\n    ports: ['9000:9000']\n",
        {
            PATH: "${MODEL:-Q/q}",
            "engine.gpu_memory_utilization": 0.9,
            METHOD: "mtp",
            "server.port": 9000,
            ENV: {"VLLM_X": "0"},
            "models.hub_token": None,
        },
        ("the Hub token is taken from HF_TOKEN",),
    ),
    Form(
        "compose with text, anchors and a map",
        "x-base: &base\n  image: vllm/vllm-openai\n  environment: &env\n    VLLM_X: 'yes'\n    API: ${SECRET_API_KEY}\n"
        "services:\n  web:\n    image: nginx\n  v:\n    <<: *base\n    environment:\n      <<: *env\n      OMP_NUM_THREADS: 8\n"
        "    command: >\n      --model Q/q --served-model-name a b\n      --api-key ${SECRET_API_KEY}\n",
        {
            PATH: "Q/q",
            "server.served_model_name": ["a", "b"],
            "server.api_key": "${SECRET_API_KEY}",
            ENV: {"OMP_NUM_THREADS": "8", "VLLM_X": "yes", "API": "${SECRET_API_KEY:-}"},
        },
    ),
    Form(
        "compose with a script",
        "services:\n  v:\n    image: me/x\n    entrypoint: [/bin/bash, -c]\n    command:\n      - |\n        set -e\n"
        '        ARGS=(-tp 2)\n        exec vllm serve Q/q "$${ARGS[@]}" --port $${PORT:-9000}\n',
        {PATH: "Q/q", TP: 2, "server.port": "${PORT:-9000}"},
    ),
    Form(
        "Kubernetes with arguments",
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {a: b}\n---\napiVersion: apps/v1\nkind: Deployment\n"
        "metadata: {name: v}\nspec:\n  template:\n    spec:\n      containers:\n        - name: vllm\n"
        "          image: vllm/vllm-openai:v0.20\n          args: [--model, Q/q, --port, '9000', --api-key, $(KEY)]\n"
        "          env:\n            - {name: KEY, valueFrom: {secretKeyRef: {name: s, key: k}}}\n"
        "            - {name: VLLM_X, value: '1'}\n            - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}\n",
        {PATH: "Q/q", "server.port": 9000, "server.api_key": "${KEY}", ENV: {"VLLM_X": "1"}},
    ),
    Form(
        "Kubernetes with a shell",
        "kind: Pod\nmetadata: {name: p}\nspec:\n  containers:\n    - name: v\n      image: x\n      command: [/bin/sh, -c]\n"
        "      args:\n        - >-\n          vllm serve Q/q -tp 2\n          --max-model-len 4096\n",
        {PATH: "Q/q", TP: 2, "engine.max_model_len": 4096},
    ),
    Form(
        "Kubernetes with the command whole",
        "kind: StatefulSet\nspec:\n  template:\n    spec:\n      containers:\n        - command: [vllm, serve, Q/q, -tp, '2']\n",
        {PATH: "Q/q", TP: 2},
    ),
    Form(
        "KServe",
        "apiVersion: serving.kserve.io/v1beta1\nkind: InferenceService\nmetadata: {name: i}\nspec:\n  predictor:\n    model:\n"
        "      modelFormat: {name: huggingface}\n      storageUri: hf://Q/q\n      args: [--max-model-len=4096, --tensor-parallel-size=2]\n",
        {PATH: "Q/q", TP: 2, "engine.max_model_len": 4096},
    ),
    Form(
        "production stack",
        "servingEngineSpec:\n  modelSpec:\n    - name: m\n      modelURL: Q/q\n      vllmConfig:\n        enableChunkedPrefill: false\n"
        "        maxModelLen: 4096\n        tensorParallelSize: 2\n        extraArgs: [--speculative-config.method, ngram]\n",
        {
            PATH: "Q/q",
            TP: 2,
            METHOD: "ngram",
            "engine.max_model_len": 4096,
            EXTRA: {"enable-chunked-prefill": False},
        },
    ),
    Form(
        "systemd",
        '[Unit]\nDescription=x\n\n[Service]\nUser=v\nEnvironment="VLLM_X=a b" CUDA_VISIBLE_DEVICES=0\n'
        "ExecStart=/opt/venv/bin/vllm serve Q/q \\\n  --port 9000 \\\n  -tp 2\nRestart=always\n",
        {
            PATH: "Q/q",
            TP: 2,
            "server.port": 9000,
            ENV: {"VLLM_X": "a b", "CUDA_VISIBLE_DEVICES": "0"},
        },
    ),
    Form(
        "Containerfile",
        'FROM vllm/vllm-openai:v0.20\nENV VLLM_X=1\nENTRYPOINT ["vllm", "serve"]\nCMD ["Q/q", \\\n  "--tensor-parallel-size", "2"]\n',
        {PATH: "Q/q", TP: 2, ENV: {"VLLM_X": "1"}},
    ),
    Form(
        "vLLM's config file",
        "model: Q/q\nport: 9000\ntensor-parallel-size: 2\nenable-prefix-caching: true\n",
        {PATH: "Q/q", TP: 2, EXTRA: {"enable-prefix-caching": True}},
    ),
    Form("arguments alone", "--model Q/q\n--tensor-parallel-size 2\n", {PATH: "Q/q", TP: 2}),
    Form(
        "a list of words", '["--model", "Q/q", "--tensor-parallel-size", "2"]', {PATH: "Q/q", TP: 2}
    ),
    Form(
        "vLLM of 2024",
        "python -m vllm.entrypoints.openai.api_server --model Q/q --speculative-model '[ngram]' --num-speculative-tokens 5 "
        "--ngram-prompt-lookup-max 4 --use-v2-block-manager --disable-log-requests --guided-decoding-backend xgrammar",
        {
            METHOD: "ngram",
            TOKENS: 5,
            "speculative_decoding.prompt_lookup_max": 4,
            EXTRA: {"structured-outputs-config": {"backend": "xgrammar"}},
        },
        ("--use-v2-block-manager", "--disable-log-requests"),
    ),
    Form(
        "draft settings",
        'vllm serve Q/q --speculative-config \'{"model": "d", "method": "draft_model", "num_speculative_tokens": 4, '
        '"max_model_len": "2048", "attention_backend": "FLASH_ATTN", "enforce_eager": true, "prompt_lookup_max": 3}\'',
        {
            DRAFT: "d",
            "models.draft_model.max_model_len": 2048,
            "models.draft_model.attention_backend": "FLASH_ATTN",
            "speculative_decoding.extra_config": {"enforce_eager": True},
        },
        ("method draft_model does not read it",),
    ),
    Form(
        "SGLang EAGLE3",
        "python3 -m sglang.launch_server --model meta/L --speculative-algorithm EAGLE3 --speculative-draft-model-path h/e "
        "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16 --tp 2 --mem-fraction-static 0.8 "
        "--context-length 8192 --disable-radix-cache --trust-remote-code",
        {
            PATH: "meta/L",
            DRAFT: "h/e",
            METHOD: "eagle3",
            TOKENS: 3,
            TP: 2,
            "engine.max_model_len": 8192,
            "models.target_model.trust_remote_code": True,
            EXTRA: {"enable-prefix-caching": False},
        },
        ("--mem-fraction-static 0.8", "--speculative-eagle-topk 4"),
    ),
    Form(
        "SGLang with the target's own layers",
        "python -m sglang.launch_server --model-path D/v3 --speculative-algo NEXTN --speculative-num-steps 2 --tp-size 8",
        {METHOD: "mtp", TOKENS: 2, TP: 8},
    ),
    Form(
        "TGI",
        "docker run --gpus all -e HF_TOKEN=hf_aaaaaaaaaaaaaa -p 8080:80 ghcr.io/huggingface/text-generation-inference:3.0 "
        "--model-id Q/q --speculate 3 --num-shard 2 --max-total-tokens 4096",
        {
            PATH: "Q/q",
            METHOD: "ngram",
            TOKENS: 3,
            TP: 2,
            "server.port": 80,
            "models.hub_token": "${HF_TOKEN}",
        },
        (),
        ("hf_aaa",),
    ),
    Form(
        "llama.cpp",
        "./build/bin/llama-server -m /m/t.gguf -md /m/d.gguf --draft-max 8 --draft-min 1 -c 16384 -np 4 -ngl 99 -fa on --port 9000",
        {
            PATH: "/m/t.gguf",
            DRAFT: "/m/d.gguf",
            METHOD: "draft_model",
            TOKENS: 8,
            "engine.max_model_len": 4096,
            "engine.max_num_seqs": 4,
            "server.port": 9000,
        },
        ("--draft-min 1", "GGUF"),
    ),
    Form(
        "prose with a command in it",
        "I don't know why. I run `vllm serve Q/q -tp 2 --spec-method ngram` and it's slow.\n",
        {PATH: "Q/q", TP: 2, METHOD: "ngram"},
    ),
    Form(
        "prose above a command",
        "It doesn't work:\n\nvllm serve Q/q \\\n  -tp 2 \\\n  --port 9000\n\nWhat's wrong?\n",
        {PATH: "Q/q", TP: 2, "server.port": 9000},
    ),
    Form("a root prompt", "# vllm serve Q/q -tp 2\n", {PATH: "Q/q", TP: 2}),
    Form(
        "comments behind backslashes",
        "vllm serve Q/q \\ # the model\n  -tp 2 \\   # both GPUs\n  --port 9000\n",
        {TP: 2, "server.port": 9000},
    ),
    Form(
        "KServe's LLMInferenceService",
        "kind: LLMInferenceService\nmetadata: {name: q}\nspec:\n  model: {uri: 'hf://Q/q', name: q}\n  template:\n    containers:\n"
        "      - name: main\n        env:\n          - name: VLLM_ADDITIONAL_ARGS\n"
        '            value: "--speculative-config \'{\\"method\\": \\"mtp\\", \\"num_speculative_tokens\\": 2}\' -tp 2"\n',
        {PATH: "Q/q", TP: 2, METHOD: "mtp", TOKENS: 2},
    ),
    Form(
        "llm-d's values",
        "modelArtifacts: {uri: 'hf://Q/q'}\ndecode:\n  containers:\n    - name: vllm\n      image: ghcr.io/llm-d/llm-d:v0.3\n"
        "      modelCommand: vllmServe\n      args: [--tensor-parallel-size, '2', --spec-method, ngram]\n",
        {PATH: "Q/q", TP: 2, METHOD: "ngram"},
    ),
    Form(
        "a task file with a script",
        "resources: {accelerators: H100:8}\nrun: |\n  conda activate v\n  vllm serve Q/q -tp $GPUS --port 9000 2>&1 | tee log\n",
        {PATH: "Q/q", TP: "${GPUS}", "server.port": 9000},
    ),
    Form(
        "JSON in a variable, not evaluated",
        'CMD="vllm serve Q/q --speculative-config \'{\\"method\\": \\"mtp\\", \\"num_speculative_tokens\\": 2}\'"\n$CMD\n',
        {METHOD: "mtp", TOKENS: 2},
    ),
    Form(
        "two words in one entry, and JSON that YAML read",
        "kind: Pod\nspec:\n  containers:\n    - image: vllm/vllm-openai\n      args:\n        - --model Q/q\n        - --port 9000\n"
        "        - --speculative-config\n        - {method: mtp, num_speculative_tokens: 3}\n",
        {PATH: "Q/q", "server.port": 9000, METHOD: "mtp", TOKENS: 3},
    ),
    Form(
        "variables that vLLM no longer reads",
        "VLLM_ATTENTION_BACKEND=FLASHINFER VLLM_USE_V1=1 vllm serve Q/q",
        {EXTRA: {"attention-backend": "FLASHINFER"}, ENV: None},
        ("VLLM_USE_V1=1: removed",),
    ),
    Form(
        "speculation that cannot be known",
        "vllm serve Q/q --speculative-config $SPEC",
        {"speculative_decoding.enabled": False},
        ("--speculative-config ${SPEC}",),
    ),
    Form(
        "positional parameters with defaults",
        "MODEL=${1:-Q/q}\nvllm serve $MODEL --port ${2:-9000} -tp ${TP:=2}\n",
        {PATH: "Q/q", "server.port": 9000, TP: "${TP:-2}"},
    ),
    Form(
        "Slurm",
        "#!/bin/bash\n#SBATCH -N 1\nmodule load cuda\nexport NCCL_DEBUG=INFO JOB=x\nsrun --gpus=8 bash -c 'vllm serve Q/q -tp $SLURM_GPUS'\nwait\n",
        {PATH: "Q/q", TP: "${SLURM_GPUS}", ENV: {"NCCL_DEBUG": "INFO"}},
    ),
    Form(
        "lists of values",
        "vllm serve Q/q --lora-modules x=/a y=/b --middleware m.a --middleware m.b --cudagraph-capture-sizes 1 2 --allowed-origins '[\"*\"]'",
        {
            EXTRA: {
                "lora-modules": ["x=/a", "y=/b"],
                "middleware": ["m.a", "m.b"],
                "cudagraph-capture-sizes": [1, 2],
                "allowed-origins": ["*"],
            }
        },
    ),
    Form(
        "Python's quotes",
        "vllm serve Q/q --speculative-config \"{'method': 'ngram', 'num_speculative_tokens': 5, 'prompt_lookup_max': 4}\"",
        {METHOD: "ngram", TOKENS: 5, "speculative_decoding.prompt_lookup_max": 4},
        ("was not valid JSON",),
    ),
    Form(
        "PowerShell",
        '$env:VLLM_X = "1"\ndocker run --gpus all vllm/vllm-openai `\n  --model $env:MODEL `\n  --port 9000\n',
        {PATH: "${MODEL}", "server.port": 9000, ENV: {"VLLM_X": "1"}},
    ),
    Form(
        "cmd.exe",
        "set MODEL=Q/q\r\nset VLLM_X=1\r\ndocker run vllm/vllm-openai ^\r\n --model %MODEL% ^\r\n --port %PORT%\r\n",
        {PATH: "Q/q", "server.port": "${PORT}", ENV: {"VLLM_X": "1"}},
    ),
    Form(
        "TGI by variables alone",
        "kind: Pod\nspec:\n  containers:\n    - image: ghcr.io/huggingface/text-generation-inference:3\n"
        "      env: [{name: MODEL_ID, value: Q/q}, {name: SPECULATE, value: '3'}]\n",
        {PATH: "Q/q", METHOD: "ngram", TOKENS: 3},
    ),
    Form(
        "variables that only fill in arguments",
        "kind: Pod\nspec:\n  containers:\n    - image: vllm/x\n      args: [--model, $(MODEL_ID), --port=$(PORT)]\n"
        "      env: [{name: MODEL_ID, value: Q/q}, {name: PORT, value: '9000'}, {name: HF_HOME, value: /m}]\n",
        {PATH: "Q/q", "server.port": 9000, ENV: {"HF_HOME": "/m"}},
    ),
    Form(
        "llama.cpp's lookup",
        "llama-server -hf o/q --spec-type ngram-simple --draft-max 8 --api-key $KEY",
        {PATH: "o/q", METHOD: "ngram", TOKENS: 8, "server.api_key": "${KEY}"},
    ),
    Form(
        "compose with a script and its arguments",
        "services:\n  v:\n    image: vllm/vllm-openai\n    entrypoint:\n      - /bin/bash\n      - -c\n      - |\n        python3 /patch.py\n"
        '        exec vllm serve "$$@"\n      - --\n    command:\n      - --model\n      - Q/q\n      - --served-model-name\n      - a\n      - b\n'
        '      - --speculative-config\n      - \'{"method":"mtp","num_speculative_tokens":3}\'\n',
        {PATH: "Q/q", "server.served_model_name": ["a", "b"], METHOD: "mtp", TOKENS: 3},
    ),
    Form(
        "Kubernetes with a script that reads the container's variables",
        "kind: Pod\nspec:\n  containers:\n    - image: x\n      command: [/bin/bash, -c]\n      args:\n        - |\n"
        '          MODEL=Q/q\n          vllm serve ${MODEL} -tp ${TP} --api-key "${API_KEY}"\n'
        "      env:\n        - {name: TP, value: '4'}\n        - {name: API_KEY, valueFrom: {secretKeyRef: {name: s, key: k}}}\n",
        {PATH: "Q/q", TP: 4, "server.api_key": "${API_KEY}"},
    ),
    Form(
        "a script inside a script",
        "export TP=2 KEY_TOKEN=secret\nbash -c 'vllm serve \"$1\" -tp $TP --api-key $KEY_TOKEN' serve Q/q\n",
        {PATH: "Q/q", TP: 2, "server.api_key": "${KEY_TOKEN}"},
    ),
    Form(
        "speculation from a file",
        'vllm serve Q/q --speculative-config "$(cat spec.json)"',
        {"speculative_decoding.enabled": False},
        ("$(cat spec.json)",),
    ),
]
