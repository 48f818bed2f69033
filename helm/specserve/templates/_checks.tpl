{{/* What cannot work, each with a sentence. Called once, by the ConfigMap. */}}
{{- define "specserve.checks" -}}
{{- $v := .Values -}}
{{- $c := include "specserve.expanded" (dict "root" . "text" (toJson $v.config) "quoted" true) | fromJson -}}
{{- if not (dig "models" "target_model" "path" "" $c) -}}
{{- fail "config.models.target_model.path is missing; paste your specserve config under `config:`" -}}
{{- end -}}
{{- if eq (include "specserve.apiPort" .) (include "specserve.metricsPort" .) -}}
{{- fail (printf "config.server.port is %s, and so is config.sidecar.port; must be two ports" (include "specserve.apiPort" .)) -}}
{{- end -}}
{{- $mounts := list "/etc/specserve/secrets" (include "specserve.mountPath" .) -}}
{{- range .Values.extraVolumeMounts }}{{ $mounts = append $mounts .mountPath }}{{ end -}}
{{- range regexFindAll "\"(api_key|hub_token|cert|key|secret|url|bearer_token)_file\":\"[^\"]+\"" (toJson $c) -1 -}}
{{- $key := trimPrefix "\"" (first (splitList "\":\"" .)) -}}
{{- $file := trimSuffix "\"" (last (splitList "\":\"" .)) -}}
{{- $found := hasPrefix "${" $file -}}
{{- range $mounts }}{{ if hasPrefix . $file }}{{ $found = true }}{{ end }}{{ end -}}
{{- if not $found -}}
{{- fail (printf "config has %s: %s, which no volume brings into the pod; use auth, hub or tls.existingSecret, or mount it with extraVolumes and extraVolumeMounts" $key $file) -}}
{{- end -}}
{{- end -}}
{{- if or (eq .Release.Name "vllm") (eq (include "specserve.name" .) "vllm") -}}
{{- fail "a release named 'vllm' makes Kubernetes set VLLM_PORT=tcp://..., which vLLM refuses; choose another name" -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "specserve.name" .)) -}}
{{- fail (printf "objects would be named '%s', and a Service may not: letters, digits and dashes, a letter first; choose another release name, or set fullnameOverride" (include "specserve.name" .)) -}}
{{- end -}}
{{- if eq (default .Chart.AppVersion $v.image.tag) "latest" -}}
{{- fail "image.tag is 'latest'; name a version, so that a restart serves what was tested" -}}
{{- end -}}
{{- if not (or (include "specserve.keyed" .) $v.networkPolicy.enabled) -}}
{{- fail "no API key (auth.existingSecret) and no networkPolicy: anyone in the cluster could use the model; set one of them" -}}
{{- end -}}
{{- range $path := list (list "server" "api_key") (list "models" "hub_token") -}}
{{- if not (regexMatch "^ *([$][{]\\w+[}])? *$" (include "specserve.config" (dict "root" $ "path" $path "default" "") | trim)) -}}
{{- fail (printf "config.%s holds a secret in clear text; use auth.existingSecret or hub.existingSecret" (join "." $path)) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "hf_[A-Za-z0-9]{10,}" (toJson $v) -}}
{{- fail "the values hold a Hub token in clear text; put it into a Secret and name that in hub.existingSecret" -}}
{{- end -}}
{{- $model := include "specserve.modelGpus" . | int -}}
{{- $nodes := ternary (int $v.leaderWorkerSet.size) 1 $v.leaderWorkerSet.enabled -}}
{{- $copy := include "specserve.copyGpus" . | int -}}
{{- if ne (mod $copy $nodes) 0 -}}
{{- fail (printf "tensor x pipeline parallelism is %d, which %d nodes cannot share evenly" $copy $nodes) -}}
{{- end -}}
{{- if and $v.gpu.count (ne (mul (int $v.gpu.count) $nodes) $model) -}}
{{- fail (printf "gpu.count is %d on %d node(s), but the config asks for %d GPUs (tensor_parallel_size x pipeline_parallel_size x data-parallel-size)" (int $v.gpu.count) $nodes $model) -}}
{{- end -}}
{{- range $part := list "requests" "limits" -}}
{{- $asked := get (default dict (get $v.resources $part)) (default "nvidia.com/gpu" $v.gpu.resource) -}}
{{- if and $asked (ne (toString $asked) (include "specserve.gpus" $)) -}}
{{- fail (printf "resources.%s asks for %v of %s; GPUs follow from the config (%s here), or from gpu.count and gpu.resource" $part $asked (default "nvidia.com/gpu" $v.gpu.resource) (include "specserve.gpus" $)) -}}
{{- end -}}
{{- end -}}
{{- with ($v.resources.limits).memory -}}
{{- if le (include "specserve.bytes" . | int64) (include "specserve.bytes" (include "specserve.sharedMemory" $) | int64) -}}
{{- fail (printf "resources.limits.memory is %s, and /dev/shm, which counts toward it, may take %s; give more" (toString .) (include "specserve.sharedMemory" $)) -}}
{{- end -}}
{{- end -}}
{{- $need := add $v.shutdown.preStopSeconds (include "specserve.drain" .) -}}
{{- if le (include "specserve.grace" . | int) (int $need) -}}
{{- fail (printf "shutdown.gracePeriodSeconds is %s, but preStop and draining take %d s: running requests would be killed; give more" (include "specserve.grace" .) $need) -}}
{{- end -}}
{{- if lt (int $v.probes.liveness.failureThreshold) 3 -}}
{{- fail (printf "probes.liveness.failureThreshold is %d; must be at least 3, or one slow answer restarts the engine" (int $v.probes.liveness.failureThreshold)) -}}
{{- end -}}
{{- if and $v.autoscaling.keda.enabled $v.autoscaling.hpa.enabled -}}
{{- fail "autoscaling.keda and autoscaling.hpa are both enabled; two autoscalers of one Deployment fight, keep one" -}}
{{- end -}}
{{- range $kind, $scaler := $v.autoscaling -}}
{{- if and $scaler.enabled (gt (int $scaler.minReplicas) (int $scaler.maxReplicas)) -}}
{{- fail (printf "autoscaling.%s.minReplicas is %d; must be at most maxReplicas (%d)" $kind (int $scaler.minReplicas) (int $scaler.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- if and $v.autoscaling.keda.enabled (not $v.autoscaling.keda.prometheusAddress) -}}
{{- fail "autoscaling.keda needs prometheusAddress, e.g. http://prometheus-operated.monitoring:9090" -}}
{{- end -}}
{{- if and $v.autoscaling.keda.enabled (eq (int $v.autoscaling.keda.minReplicas) 0) (not $v.autoscaling.keda.cron) -}}
{{- fail "autoscaling.keda.minReplicas is 0: pods that are not there report no waiting requests, so nothing would wake them; add autoscaling.keda.cron, or set 1" -}}
{{- end -}}
{{- if and $v.leaderWorkerSet.enabled (or $v.autoscaling.keda.enabled $v.autoscaling.hpa.enabled) -}}
{{- fail "autoscaling works on the Deployment; leaderWorkerSet has none, turn one of them off" -}}
{{- end -}}
{{- with $v.metrics.prometheusRule.rules -}}
{{- if not (kindIs "slice" (get (fromYaml .) "groups")) -}}
{{- fail "metrics.prometheusRule.rules is no rule file with a list of groups; write it with: specserve alerts rules CONFIG > rules.yaml" -}}
{{- end -}}
{{- end -}}
{{- if and $v.metrics.serviceMonitor.enabled $v.metrics.podMonitor.enabled -}}
{{- fail "metrics.serviceMonitor and metrics.podMonitor are both enabled; every sample would be counted twice, keep one" -}}
{{- end -}}
{{- $most := max (int $v.replicas) (ternary (int $v.autoscaling.keda.maxReplicas) 0 $v.autoscaling.keda.enabled) (ternary (int $v.autoscaling.hpa.maxReplicas) 0 $v.autoscaling.hpa.enabled) -}}
{{- $rolling := eq $v.strategy.type "RollingUpdate" -}}
{{- if and $v.models.size (not $v.models.existingClaim) (or (gt (int $most) 1) $rolling $v.canary.enabled $v.leaderWorkerSet.enabled) (not (or (has "ReadWriteMany" $v.models.accessModes) (has "ReadOnlyMany" $v.models.accessModes))) -}}
{{- fail "models.accessModes is ReadWriteOnce, but more than one pod mounts the claim; set [ReadWriteMany], or replicas 1 with strategy Recreate" -}}
{{- end -}}
{{- if and $v.models.pull (not (or $v.models.existingClaim $v.models.size)) -}}
{{- fail "models.pull needs somewhere to put them: set models.size or models.existingClaim" -}}
{{- end -}}
{{- if and $v.canary.enabled (not $v.httpRoute.enabled) -}}
{{- fail "canary.enabled splits traffic by weight, which needs httpRoute.enabled" -}}
{{- end -}}
{{- if and $v.canary.enabled (not (include "specserve.isOn" (dict "root" $ "path" (list "speculative_decoding" "enabled") "default" true))) -}}
{{- fail "canary.enabled compares with and without speculation, but config.speculative_decoding.enabled is false; turn one of them off" -}}
{{- end -}}
{{- if and $v.canary.enabled $v.leaderWorkerSet.enabled -}}
{{- fail "canary.enabled runs one more pod, but the model needs several (leaderWorkerSet); turn one of them off" -}}
{{- end -}}
{{- $set := include "specserve.number" (dict "root" $ "path" (list "engine" "node_count") "default" 1) | int -}}
{{- if and (gt $set 1) (ne $set $nodes) -}}
{{- fail (printf "config.engine.node_count is %d, but %d node(s) are deployed; set leaderWorkerSet.enabled and leaderWorkerSet.size, and leave node_count out" $set $nodes) -}}
{{- end -}}
{{- if and $v.inferencePool.enabled (not (and $v.inferencePool.endpointPicker $v.httpRoute.enabled)) -}}
{{- fail "inferencePool.enabled needs httpRoute.enabled and inferencePool.endpointPicker, the Service that picks replicas" -}}
{{- end -}}
{{- range $role, $url := $v.models.sources -}}
{{- $known := include "specserve.config" (dict "root" $ "path" (list "models" (printf "%s_model" $role) "path") "default" "") -}}
{{- if and (not $url) $known (not (hasPrefix "/" $known)) (not (contains "${" $known)) (or $v.models.sources.target $v.models.sources.draft) -}}
{{- fail (printf "config.models.%s_model.path is the Hub id '%s' while the other model comes from an object store; give models.sources.%s too" $role $known $role) -}}
{{- end -}}
{{- if $url -}}
{{- if not $v.models.pull -}}
{{- fail (printf "models.sources.%s is set, but models.pull is not; nothing would fetch it" $role) -}}
{{- end -}}
{{- $parts := splitList "/" (trimSuffix "/" (last (splitList "://" $url))) -}}
{{- $place := printf "%s/%s" (include "specserve.mountPath" $) (join "--" (slice $parts (max 0 (sub (len $parts) 2) | int))) -}}
{{- $path := include "specserve.config" (dict "root" $ "path" (list "models" (printf "%s_model" $role) "path") "default" "") -}}
{{- if and (ne (trimSuffix "/" $path) $place) (not (contains "${" $path)) -}}
{{- fail (printf "models.sources.%s is copied to %s, but config.models.%s_model.path is '%s'; set it to %s" $role $place $role $path $place) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if has (include "specserve.mountPath" $) (list "" "/cache" "/tmp" "/dev/shm" "/etc/specserve") -}}
{{- fail (printf "models.mountPath is %s, which the pod needs for itself; choose another folder, e.g. /models" $v.models.mountPath) -}}
{{- end -}}
{{- if eq (int $v.service.port) (include "specserve.metricsPort" . | int) -}}
{{- fail (printf "service.port is %d, and so is config.sidecar.port, which the Service has for metrics; must be two ports" (int $v.service.port)) -}}
{{- end -}}
{{- if not (include "specserve.isOn" (dict "root" $ "path" (list "sidecar" "enabled") "default" true)) -}}
{{- fail "config.sidecar.enabled is false, but the pod's probes ask the sidecar: it would never be ready; leave it on" -}}
{{- end -}}
{{- $computed := list -}}
{{- if $v.leaderWorkerSet.enabled }}{{ $computed = list "SPECSERVE_ENGINE__NODE_COUNT" "SPECSERVE_ENGINE__NODE_RANK" "SPECSERVE_ENGINE__LEADER_ADDRESS" }}{{ end -}}
{{- if $v.canary.enabled }}{{ $computed = append $computed "SPECSERVE_SPECULATIVE_DECODING__ENABLED" }}{{ end -}}
{{- if or $v.models.sources.target $v.models.sources.draft }}{{ $computed = concat $computed (list "SPECSERVE_MODELS__STORE" "SPECSERVE_MODELS__TARGET_MODEL__PATH" "SPECSERVE_MODELS__DRAFT_MODEL__PATH") }}{{ end -}}
{{- range $v.extraEnv -}}
{{- if has .name $computed -}}
{{- fail (printf "extraEnv sets %s, which differs from pod to pod and is set by the chart; remove it" .name) -}}
{{- end -}}
{{- end -}}
{{- if and $v.ingress.enabled (not $v.ingress.host) -}}
{{- fail "ingress.enabled needs ingress.host" -}}
{{- end -}}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs: the Gateway that it joins" -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled (not $v.networkPolicy.egress) -}}
{{- $why := list -}}
{{- if $v.models.pull }}{{ $why = append $why "models.pull" }}{{ end -}}
{{- if dig "alerts" "notify" false $v.config }}{{ $why = append $why "config.alerts.notify" }}{{ end -}}
{{- range $role := list "target_model" "draft_model" -}}
{{- $path := include "specserve.config" (dict "root" $ "path" (list "models" $role "path") "default" "/") -}}
{{- if not (or $v.models.pull (hasPrefix "/" $path) (hasPrefix "." $path) (hasPrefix "$" $path)) -}}
{{- $why = append $why (printf "config.models.%s.path, a Hub id," $role) -}}
{{- end -}}
{{- end -}}
{{- if $why -}}
{{- fail (printf "%s must reach something outside, but networkPolicy.egress lets out DNS alone; add a rule, e.g. [{ports: [{port: 443, protocol: TCP}]}]" (join " and " $why)) -}}
{{- end -}}
{{- end -}}
{{- end }}
