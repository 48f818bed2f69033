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
{{- include "specserve.podChecks" . -}}
{{- include "specserve.scalingChecks" . -}}
{{- include "specserve.modelChecks" . -}}
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
{{- if and (eq (default .Chart.AppVersion $v.image.tag) "latest") (not $v.image.digest) -}}
{{- fail "image.tag is 'latest'; name a version, so that a restart serves what was tested" -}}
{{- end -}}
{{- if not (or (include "specserve.keyed" .) $v.networkPolicy.enabled) -}}
{{- fail "no API key (auth.existingSecret) and no networkPolicy: anyone in the cluster could use the model; set one of them" -}}
{{- end -}}
{{- include "specserve.secretChecks" . -}}
{{- $model := include "specserve.modelGpus" . | int -}}
{{- $nodes := include "specserve.nodes" . | int -}}
{{- if ne (mod $model $nodes) 0 -}}
{{- fail (printf "the config asks for %d GPUs (tensor x pipeline x data parallel size), which %d nodes cannot share evenly" $model $nodes) -}}
{{- end -}}
{{- $local := get (include "specserve.flags" . | fromJson) "data-parallel-size-local" -}}
{{- if and $local (gt $nodes 1) -}}
{{- $ranks := max 1 (div (div $model $nodes) (include "specserve.copyGpus" . | int)) -}}
{{- if ne (toString $ranks) $local -}}
{{- fail (printf "config.engine.extra_args has data-parallel-size-local %s, but each of %d nodes runs %d rank(s) (data-parallel-size / nodes); leave it out" $local $nodes $ranks) -}}
{{- end -}}
{{- end -}}
{{- if and $v.gpu.count (ne (mul (int $v.gpu.count) $nodes) $model) -}}
{{- fail (printf "gpu.count is %d on %d node(s), but the config asks for %d GPUs in all (tensor_parallel_size x pipeline_parallel_size x data-parallel-size): %d for each pod" (int $v.gpu.count) $nodes $model (div $model $nodes)) -}}
{{- end -}}
{{- range $part := list "requests" "limits" -}}
{{- $asked := get (default dict (get $v.resources $part)) (default "nvidia.com/gpu" $v.gpu.resource) -}}
{{- if and $asked (ne (toString $asked) (include "specserve.gpus" $)) -}}
{{- fail (printf "resources.%s asks for %v of %s; GPUs follow from the config (%s here), or from gpu.count and gpu.resource" $part $asked (default "nvidia.com/gpu" $v.gpu.resource) (include "specserve.gpus" $)) -}}
{{- end -}}
{{- end -}}
{{- with include "specserve.memoryLimit" . -}}
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
{{- if and $v.autoscaling.keda.enabled (not (or $v.metrics.serviceMonitor.enabled $v.metrics.podMonitor.enabled)) -}}
{{- fail "autoscaling.keda asks Prometheus for series by the job that a monitor of this chart names, and there is none: it would never scale; set metrics.serviceMonitor.enabled or metrics.podMonitor.enabled" -}}
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
{{- if and $v.inferencePool.enabled $v.tls.existingSecret -}}
{{- fail "inferencePool.enabled and tls.existingSecret: endpoint pickers read the engine's metrics in plain HTTP; end TLS at the gateway, or leave the pool out" -}}
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
{{- if and (ne $v.service.type "ClusterIP") (not (include "specserve.keyed" .)) -}}
{{- fail (printf "service.type is %s, which lets callers in from outside the cluster, and there is no API key; set auth.existingSecret" $v.service.type) -}}
{{- end -}}
{{- if and (ne $v.service.type "ClusterIP") $v.networkPolicy.enabled (not $v.networkPolicy.apiFrom) -}}
{{- fail (printf "service.type is %s, but networkPolicy lets pods of the namespace alone call the API; name who may in networkPolicy.apiFrom, e.g. [{ipBlock: {cidr: 10.0.0.0/8}}]" $v.service.type) -}}
{{- end -}}
{{- if and $v.service.loadBalancerSourceRanges (ne $v.service.type "LoadBalancer") -}}
{{- fail (printf "service.loadBalancerSourceRanges is set, but service.type is %s; set LoadBalancer, or leave the ranges out" $v.service.type) -}}
{{- end -}}
{{- if not (include "specserve.isOn" (dict "root" $ "path" (list "sidecar" "enabled") "default" true)) -}}
{{- fail "config.sidecar.enabled is false, but the pod's probes ask the sidecar: it would never be ready; leave it on" -}}
{{- end -}}
{{- $computed := list -}}
{{- if $v.leaderWorkerSet.enabled }}{{ $computed = list "SPECSERVE_ENGINE__NODE_COUNT" "SPECSERVE_ENGINE__NODE_RANK" "SPECSERVE_ENGINE__LEADER_ADDRESS" }}{{ end -}}
{{- if $v.canary.enabled }}{{ $computed = append $computed "SPECSERVE_SPECULATIVE_DECODING__ENABLED" }}{{ end -}}
{{- if or $v.models.sources.target $v.models.sources.draft }}{{ $computed = concat $computed (list "SPECSERVE_MODELS__STORE" "SPECSERVE_MODELS__TARGET_MODEL__PATH" "SPECSERVE_MODELS__DRAFT_MODEL__PATH") }}{{ end -}}
{{- range $v.extraEnv -}}
{{- if and (has .name (list "SPECSERVE_SERVER__HOST" "SPECSERVE_SIDECAR__HOST")) (regexMatch "^(localhost|127[.].*|::1)$" (toString .value)) -}}
{{- fail (printf "extraEnv sets %s to %s, where nobody outside the pod reaches it, the kubelet's probes included; leave it out, or set :: or 0.0.0.0" .name (toString .value)) -}}
{{- end -}}
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

{{/* Secrets in clear text, wherever they stand: the values are in a ConfigMap, in the pod's description and in helm's own record. */}}
{{- define "specserve.secretChecks" -}}
{{- $v := .Values -}}
{{- range $path := include "specserve.secretsIn" (dict "value" $v.config "path" "config" "hidden" false) | splitList "\n" -}}
{{- if $path -}}
{{- $how := "name a file by its _file key, which extraVolumes mounts from a Secret, or write ${NAME} and set NAME in extraEnv from a Secret (valueFrom.secretKeyRef)" -}}
{{- if eq $path "config.server.api_key" }}{{ $how = "use auth.existingSecret" }}{{ end -}}
{{- if eq $path "config.models.hub_token" }}{{ $how = "use hub.existingSecret" }}{{ end -}}
{{- fail (printf "%s holds a secret in clear text; %s" $path $how) -}}
{{- end -}}
{{- end -}}
{{- range $v.extraEnv -}}
{{- $found := include "specserve.secretsIn" (dict "value" (dict .name .value) "path" "extraEnv" "hidden" false) -}}
{{- if $found -}}
{{- fail (printf "extraEnv sets %s to a secret in clear text; take it from a Secret: valueFrom: {secretKeyRef: {name: ..., key: ...}}" .name) -}}
{{- end -}}
{{- end -}}
{{- range $v.launch.extraArgs -}}
{{- $parts := splitn "=" 2 (regexReplaceAll "^--set[= ]*" . "") -}}
{{- if include "specserve.secretsIn" (dict "value" (dict $parts._0 (default "" $parts._1)) "path" "" "hidden" false) -}}
{{- fail (printf "launch.extraArgs sets %s to a secret in clear text; use auth, hub or tls.existingSecret, or extraEnv from a Secret" $parts._0) -}}
{{- end -}}
{{- end -}}
{{- range $v.extraObjects -}}
{{- if and (eq (toString .kind) "Secret") (or .data .stringData) -}}
{{- fail "extraObjects has a Secret with its data, which helm keeps in clear text; make it apart from the chart, or by an operator" -}}
{{- end -}}
{{- end -}}
{{- $plain := omit $v "config" "extraEnv" -}}
{{- $shape := include "specserve.secretsIn" (dict "value" $plain "path" "" "hidden" false "shapes" true) -}}
{{- with $shape -}}
{{- fail (printf "%s holds a secret in clear text; put it into a Secret and name that" (first (splitList "\n" .) | trimPrefix ".")) -}}
{{- end -}}
{{- end }}

{{/* Paths of the secrets in clear text below a value, one a line. As secrets_in of specserve/log.py.
     Arguments: value, path, hidden (whether a name above says that it is one), shapes (look at texts alone, not at names). */}}
{{- define "specserve.secretsIn" -}}
{{- $value := .value -}}
{{- $path := .path -}}
{{- $hidden := .hidden -}}
{{- $shapes := .shapes -}}
{{- if kindIs "map" $value -}}
{{- range $key, $item := $value -}}
{{- $named := and (regexMatch (include "specserve.secretName" $) $key) (not (regexMatch "(?i)(file|path)$" $key)) -}}
{{- if and (eq $key "url") (has (get $value "type") (include "specserve.secretUrls" $ | fromJsonArray)) }}{{ $named = true }}{{ end -}}
{{- if and (regexMatch (include "specserve.countName" $) $key) (regexMatch "^[0-9.]+([eE][+]?[0-9]+)?[kKmMgGtT]?$" (toString $item)) }}{{ $named = false }}{{ end -}}
{{- include "specserve.secretsIn" (dict "value" $item "path" (printf "%s.%s" $path $key) "hidden" (and (not $shapes) (or $hidden $named)) "shapes" $shapes) -}}
{{- end -}}
{{- else if kindIs "slice" $value -}}
{{- range $i, $item := $value -}}
{{- include "specserve.secretsIn" (dict "value" $item "path" (printf "%s[%d]" $path $i) "hidden" $hidden "shapes" $shapes) -}}
{{- end -}}
{{- else if or (kindIs "string" $value) (and $hidden (not (kindIs "bool" $value)) (not (kindIs "invalid" $value))) -}}
{{- $text := toString $value -}}
{{- $found := and $hidden (not (regexMatch "^\\s*([$]([{]\\w+[}]|[(]\\w+[)]))?\\s*$" $text)) -}}
{{- if regexMatch (include "specserve.secretShape" .) $text }}{{ $found = true }}{{ end -}}
{{- /* A login in a URL, unless it is a variable; a parameter with a secret's name. */ -}}
{{- range regexFindAll "//[^/@\\s]+@" $text -1 }}{{ if not (contains "${" .) }}{{ $found = true }}{{ end }}{{ end -}}
{{- range regexFindAll "[?&;][\\w.-]+=[^\\s&;#'\"]+" $text -1 -}}
{{- $parts := splitn "=" 2 (substr 1 -1 .) -}}
{{- if and (regexMatch (include "specserve.secretName" $) $parts._0) (not (hasPrefix "$" $parts._1)) }}{{ $found = true }}{{ end -}}
{{- end -}}
{{- if and (not $found) (regexMatch "^\\s*[{\\[]" $text) -}}
{{- $inside := printf "{\"inside\":%s}" $text | fromJson -}}
{{- if hasKey $inside "inside" }}{{ include "specserve.secretsIn" (dict "value" $inside.inside "path" $path "hidden" $hidden "shapes" $shapes) }}{{ end -}}
{{- end -}}
{{- if $found }}{{ $path }}{{ "\n" }}{{ end -}}
{{- end -}}
{{- end }}

{{/* What is right by itself and wrong beside something else of the pod. */}}
{{- define "specserve.podChecks" -}}
{{- $v := .Values -}}
{{- range $label, $_ := $v.podLabels -}}
{{- if has $label (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component") -}}
{{- fail (printf "podLabels sets %s, by which Services and the Deployment find their pods; leave it out" $label) -}}
{{- end -}}
{{- end -}}
{{- if hasKey $v.podAnnotations "checksum/config" -}}
{{- fail "podAnnotations sets checksum/config, by which a changed config restarts the pods; leave it out" -}}
{{- end -}}
{{- $volumes := list -}}
{{- range $v.extraVolumes -}}
{{- if has .name (concat (list "config" "cache" "tmp" "shm" "models" "secret-api" "secret-tls" "secret-hub" "secret-metrics") $volumes) -}}
{{- fail (printf "extraVolumes has a volume named %s, and so has the pod; choose another name" .name) -}}
{{- end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- $taken := list "/cache" "/tmp" "/dev/shm" "/etc/specserve" "/etc/specserve/config" "/etc/specserve/secrets" -}}
{{- $system := "^(/|/(bin|boot|dev|etc|lib|lib64|proc|root|run|sbin|sys|usr|var)(/.*)?)$" -}}
{{- $models := include "specserve.mountPath" . -}}
{{- if or (has $models (append $taken "")) (regexMatch $system $models) -}}
{{- fail (printf "models.mountPath is %s, which the pod needs for itself; choose another folder, e.g. /models" $v.models.mountPath) -}}
{{- end -}}
{{- if or $v.models.existingClaim $v.models.size }}{{ $taken = append $taken $models }}{{ end -}}
{{- range $v.extraVolumeMounts -}}
{{- $place := trimSuffix "/" .mountPath -}}
{{- if not (has .name (concat (list "config" "cache" "tmp" "shm" "models") $volumes)) -}}
{{- fail (printf "extraVolumeMounts mounts %s, which is no volume of the pod; add it to extraVolumes" .name) -}}
{{- end -}}
{{- if or (has $place $taken) (has $place (list "" "/bin" "/dev" "/etc" "/lib" "/proc" "/sys" "/usr" "/usr/bin" "/usr/lib" "/usr/local")) -}}
{{- fail (printf "extraVolumeMounts mounts %s at %s, which the pod needs for itself or has already; choose another folder" .name .mountPath) -}}
{{- end -}}
{{- $taken = append $taken $place -}}
{{- end -}}
{{- $names := list -}}
{{- range $v.extraEnv -}}
{{- if has .name $names }}{{ fail (printf "extraEnv sets %s twice; keep one" .name) }}{{ end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- range $amount := list "memory" "cpu" -}}
{{- $asked := get (default dict $v.resources.requests) $amount -}}
{{- $limit := get (default dict $v.resources.limits) $amount -}}
{{- if eq $amount "memory" }}{{ $limit = include "specserve.memoryLimit" $ }}{{ end -}}
{{- if and $asked $limit (gt (include "specserve.milli" $asked | int64) (include "specserve.milli" $limit | int64)) -}}
{{- fail (printf "resources.requests.%s is %v, and resources.limits.%s %v; must be at most the limit" $amount $asked $amount $limit) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $v.strategy.type "Recreate") $v.strategy.rollingUpdate -}}
{{- fail "strategy.rollingUpdate goes with type RollingUpdate alone; set that, or leave it out" -}}
{{- end -}}
{{- $roll := default dict $v.strategy.rollingUpdate -}}
{{- if and (has (toString $roll.maxSurge) (list "0" "0%")) (has (toString $roll.maxUnavailable) (list "0" "0%")) -}}
{{- fail "strategy.rollingUpdate has maxSurge 0 and maxUnavailable 0, with which no pod could ever be replaced; set one of them to 1" -}}
{{- end -}}
{{- end }}

{{/* Thousandths of a quantity: CPU is as often written as 500m. */}}
{{- define "specserve.milli" -}}
{{- if regexMatch "m$" (toString .) }}{{ trimSuffix "m" (toString .) | float64 | int64 }}{{ else }}{{ mulf (regexFind "^[0-9.]+" (toString .) | float64) (include "specserve.bytes" (printf "1%s" (regexFind "[A-Za-z]*$" (toString .))) | float64) 1000 | int64 }}{{ end -}}
{{- end }}

{{/* Times and numbers of replicas that an autoscaler would take and never act on. */}}
{{- define "specserve.scalingChecks" -}}
{{- $keda := .Values.autoscaling.keda -}}
{{- $now := now -}}
{{- range $times := $keda.cron -}}
{{- if gt (int .replicas) (int $keda.maxReplicas) -}}
{{- fail (printf "autoscaling.keda.cron asks for %d replicas, and maxReplicas is %d; must be at most that" (int .replicas) (int $keda.maxReplicas)) -}}
{{- end -}}
{{- $fields := list "[0-5]?[0-9]" "2[0-3]|[01]?[0-9]" "3[01]|[12][0-9]|0?[1-9]" "1[0-2]|0?[1-9]|[A-Za-z]{3}" "[0-6]|[A-Za-z]{3}" -}}
{{- range $key := list "start" "end" -}}
{{- $said := get $times $key -}}
{{- $parts := regexSplit "\\s+" (trim $said) -1 -}}
{{- $right := eq (len $parts) 5 -}}
{{- if $right -}}
{{- range $i, $field := $fields -}}
{{- $one := printf "([*?]|(%s)(-(%s))?)(/[1-9][0-9]*)?" $field $field -}}
{{- if not (regexMatch (printf "^%s(,%s)*$" $one $one) (index $parts $i)) }}{{ $right = false }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if not $right -}}
{{- fail (printf "autoscaling.keda.cron has the %s '%s'; must be minute, hour, day, month and day of the week (0 to 6), e.g. 0 6 * * 1-5" $key $said) -}}
{{- end -}}
{{- end -}}
{{- /* An unknown zone is read as UTC; the first comparison tells whether this machine knows zones at all. */ -}}
{{- if and (ne (dateInZone "MST" $now "Asia/Tokyo") "UTC") (eq (dateInZone "MST" $now .timezone) "UTC") (not (regexMatch "^(Etc/)?(UTC|UCT|Universal|Zulu)$" .timezone)) -}}
{{- fail (printf "autoscaling.keda.cron has the timezone %s, which is unknown; write it as in Europe/Berlin" .timezone) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Hub ids that the engine itself would download, at every start, into a folder that cannot hold them. */}}
{{- define "specserve.modelChecks" -}}
{{- $v := .Values -}}
{{- $home := list -}}
{{- range $v.extraEnv }}{{ if has .name (list "HF_HOME" "HF_HUB_CACHE") }}{{ $home = append $home .name }}{{ end }}{{ end -}}
{{- if not (or $v.models.pull $v.models.download $v.cache.existingClaim $home) -}}
{{- range $role := list "target_model" "draft_model" -}}
{{- $path := include "specserve.config" (dict "root" $ "path" (list "models" $role "path") "default" "/") -}}
{{- if not (regexMatch "^[/.$~]" $path) -}}
{{- fail (printf "config.models.%s.path is the Hub id '%s', which every pod would download again into its own %s (cache.sizeLimit) and be evicted where that is too small; set models.pull with models.size or models.existingClaim, or cache.existingClaim, or models.download with a cache.sizeLimit that holds it" $role $path $v.cache.sizeLimit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
