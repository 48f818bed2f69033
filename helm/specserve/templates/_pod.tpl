{{/* The pod of the engine. Arguments: root, component (engine, worker, canary), env (further variables). */}}
{{- define "specserve.podTemplate" -}}
{{- $root := .root -}}
metadata:
  labels:
    {{- /* No version of the chart: a new chart alone must not restart an engine. */}}
    {{- include "specserve.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- with $root.Values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    {{- /* Alerts are read again while it runs. */}}
    checksum/config: {{ omit $root.Values.config "alerts" | toYaml | sha256sum }}
    {{- with $root.Values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  {{- include "specserve.podSpec" . | nindent 2 }}
{{- end }}

{{- define "specserve.podSpec" -}}
{{- $root := .root -}}
{{- $v := .root.Values -}}
serviceAccountName: {{ include "specserve.serviceAccount" $root }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "specserve.grace" $root }}
securityContext: {{- toYaml $v.podSecurityContext | nindent 2 }}
{{- with $v.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $v.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $v.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  {{- with $v.topologySpreadConstraints }}
  {{- toYaml . | nindent 2 }}
  {{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "specserve.selector" $root | nindent 8 }}
  {{- end }}
{{- if $v.models.pull }}
initContainers:
  - name: pull-models
    image: {{ include "specserve.image" $root }}
    imagePullPolicy: {{ $v.image.pullPolicy }}
    command: [specserve, models, pull, /etc/specserve/config/config.yaml]
    terminationMessagePolicy: FallbackToLogsOnError
    env:
      {{- include "specserve.env" (merge (dict "pulls" true) .) | nindent 6 }}
    securityContext: {{- include "specserve.securityContext" (dict "root" $root "readOnly" true) | nindent 6 }}
    resources:
      requests: {cpu: "1", memory: 2Gi}
      limits: {memory: 4Gi}
    volumeMounts: {{- include "specserve.mounts" (dict "root" $root "writable" true) | nindent 6 }}
{{- end }}
containers:
  - name: engine
    image: {{ include "specserve.image" $root }}
    imagePullPolicy: {{ $v.image.pullPolicy }}
    # The engine's lines go to the container's log as well.
    command: {{ concat (list "specserve" "launch" "/etc/specserve/config/config.yaml" "--engine-log" "-") $v.launch.extraArgs | toJson }}
    # What it said last, such as the sentence of a refused start, is in `kubectl describe pod`.
    terminationMessagePolicy: FallbackToLogsOnError
    env:
      {{- include "specserve.env" . | nindent 6 }}
    {{- if ne .component "worker" }}
    ports:
      - name: api
        containerPort: {{ include "specserve.apiPort" $root }}
      - name: metrics
        containerPort: {{ include "specserve.metricsPort" $root }}
    startupProbe:
      httpGet: {path: /startupz, port: metrics}
      periodSeconds: {{ $v.probes.startup.periodSeconds }}
      timeoutSeconds: 5
      failureThreshold: {{ include "specserve.startupFailures" $root }}
    readinessProbe:
      httpGet: {path: /readyz, port: metrics}
      periodSeconds: {{ $v.probes.readiness.periodSeconds }}
      timeoutSeconds: 5
      failureThreshold: {{ $v.probes.readiness.failureThreshold }}
    livenessProbe:
      httpGet: {path: /livez, port: metrics}
      periodSeconds: {{ $v.probes.liveness.periodSeconds }}
      timeoutSeconds: 5
      failureThreshold: {{ $v.probes.liveness.failureThreshold }}
    {{- end }}
    lifecycle:
      preStop:
        exec:
          # A worker stays until the leader has answered what runs.
          command: [sleep, {{ ternary (add $v.shutdown.preStopSeconds (include "specserve.drain" $root)) $v.shutdown.preStopSeconds (eq .component "worker") | quote }}]
    securityContext: {{- include "specserve.securityContext" (dict "root" $root "readOnly" (empty $v.gpu.resource)) | nindent 6 }}
    resources: {{- include "specserve.resources" $root | nindent 6 }}
    volumeMounts: {{- include "specserve.mounts" (dict "root" $root "writable" false) | nindent 6 }}
volumes: {{- include "specserve.volumes" $root | nindent 2 }}
{{- end }}

{{/* Probes until preflight and the engine's own start time-out have passed. */}}
{{- define "specserve.startupFailures" -}}
{{- $timeout := include "specserve.number" (dict "root" . "path" (list "engine" "startup_timeout_seconds") "default" 1800) | float64 -}}
{{- $models := default dict .Values.config.models -}}
{{- $hashes := or (default dict $models.target_model).sha256 (default dict $models.draft_model).sha256 -}}
{{- $extra := ternary 1800 120 (not (empty $hashes)) -}}
{{- if not (kindIs "invalid" .Values.probes.startup.extraSeconds) }}{{ $extra = .Values.probes.startup.extraSeconds }}{{ end -}}
{{ divf (addf $timeout $extra) .Values.probes.startup.periodSeconds | ceil }}
{{- end }}

{{/* The chart's variables and those of extraEnv, which take the place of the chart's. Arguments: as the pod, pulls. */}}
{{- define "specserve.env" -}}
{{- $own := concat (include "specserve.ownEnv" . | fromYamlArray) (default list .env) -}}
{{- range .root.Values.extraEnv -}}
{{- $name := .name -}}
{{- $kept := list -}}
{{- range $own }}{{ if ne .name $name }}{{ $kept = append $kept . }}{{ end }}{{ end -}}
{{- $own = $kept -}}
{{- end -}}
{{ toYaml (concat $own .root.Values.extraEnv) }}
{{- end }}

{{- define "specserve.ownEnv" -}}
{{- $host := include "specserve.config" (dict "root" .root "path" (list "server" "host") "default" "") -}}
{{- /* Every address of IPv4, or of both families where the config says so: an IPv6-only cluster has no other. */}}
{{- $every := ternary "'::'" "0.0.0.0" (eq $host "::") }}
- name: SPECSERVE_SERVER__HOST
  value: {{ $every }}
- name: SPECSERVE_SIDECAR__HOST
  value: {{ $every }}
- name: SPECSERVE_SIDECAR__STATE_DIR
  value: /cache/state
{{- if .root.Values.auth.existingSecret }}
- name: SPECSERVE_SERVER__API_KEY_FILE
  value: /etc/specserve/secrets/api/{{ .root.Values.auth.key }}
{{- else if not (include "specserve.keyed" .root) }}
- name: SPECSERVE_SERVER__ALLOW_UNAUTHENTICATED
  value: "true"
{{- end }}
{{- if .root.Values.tls.existingSecret }}
- name: SPECSERVE_SERVER__TLS__CERT_FILE
  value: /etc/specserve/secrets/tls/tls.crt
- name: SPECSERVE_SERVER__TLS__KEY_FILE
  value: /etc/specserve/secrets/tls/tls.key
{{- end }}
{{- if .root.Values.metrics.token.existingSecret }}
- name: SPECSERVE_SIDECAR__TOKEN_FILE
  value: /etc/specserve/secrets/metrics/{{ .root.Values.metrics.token.key }}
{{- end }}
{{- if .root.Values.hub.existingSecret }}
- name: SPECSERVE_MODELS__HUB_TOKEN_FILE
  value: /etc/specserve/secrets/hub/{{ .root.Values.hub.key }}
{{- end }}
- name: HOME
  value: /cache
- name: USER # a user id without a name, as on OpenShift, has none to look up
  value: specserve
- name: XDG_STATE_HOME # records and the engine's log: of this pod alone, also on a shared cache
  value: /tmp/state
- name: XDG_CACHE_HOME
  value: /cache
- name: HF_HOME
  value: /cache/huggingface
{{- if .root.Values.models.pull }}
- name: HF_HUB_CACHE
  value: {{ include "specserve.mountPath" .root }}/huggingface
{{- if not .pulls }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- end }}
{{- if .pulls }}
{{- with .root.Values.models.sources }}
{{- if or .target .draft }}
- name: SPECSERVE_MODELS__STORE
  value: {{ include "specserve.mountPath" $.root }}
{{- end }}
{{- range $role, $url := . }}
{{- if $url }}
- name: SPECSERVE_MODELS__{{ upper $role }}_MODEL__PATH
  value: {{ $url }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
- name: VLLM_CACHE_ROOT
  value: /cache/vllm
- name: TORCHINDUCTOR_CACHE_DIR # else below TMPDIR, which a restart empties
  value: /cache/torchinductor
- name: TRITON_CACHE_DIR
  value: /cache/triton
- name: TMPDIR
  value: /tmp
{{- if .root.Values.leaderWorkerSet.enabled }}
- name: SPECSERVE_ENGINE__NODE_COUNT
  value: {{ .root.Values.leaderWorkerSet.size | quote }}
- name: SPECSERVE_ENGINE__NODE_RANK
  value: $(LWS_WORKER_INDEX)
- name: SPECSERVE_ENGINE__LEADER_ADDRESS
  value: $(LWS_LEADER_ADDRESS)
{{- end }}
{{- end }}

{{/* Hooks of the NVIDIA runtime (CDI) write into a GPU container's root and fail where it is read-only: there it is writable
     unless the values say otherwise. Arguments: root, readOnly. */}}
{{- define "specserve.securityContext" -}}
{{- $context := deepCopy .root.Values.securityContext -}}
{{- if not (hasKey $context "readOnlyRootFilesystem") }}{{ $_ := set $context "readOnlyRootFilesystem" .readOnly }}{{ end -}}
{{ toYaml $context }}
{{- end }}

{{/* Memory that the values leave out grows with the GPUs, each of which has a worker. */}}
{{- define "specserve.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- $limits := default dict $resources.limits -}}
{{- $requests := default dict $resources.requests -}}
{{- if not $limits.memory }}{{ $_ := set $limits "memory" (include "specserve.memoryLimit" .) }}{{ end -}}
{{- if not $requests.memory -}}
{{- $asked := printf "%dGi" (mul 8 (add 1 (include "specserve.gpus" . | int))) -}}
{{- if gt (include "specserve.bytes" $asked | int64) (include "specserve.bytes" $limits.memory | int64) }}{{ $asked = $limits.memory }}{{ end -}}
{{- $_ := set $requests "memory" $asked -}}
{{- end -}}
{{- $resources = merge (dict "limits" $limits "requests" $requests) $resources -}}
{{- if .Values.gpu.resource -}}
{{- $gpus := dict .Values.gpu.resource (include "specserve.gpus" .) -}}
{{- $resources = mustMergeOverwrite $resources (dict "limits" (mustMergeOverwrite (default dict $resources.limits) $gpus)) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end }}

{{- define "specserve.mounts" -}}
- name: config
  # The folder, not the file by subPath, which would never show a change.
  mountPath: /etc/specserve/config
  readOnly: true
- name: cache
  mountPath: /cache
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
{{- range $name, $secret := dict "api" .root.Values.auth.existingSecret "tls" .root.Values.tls.existingSecret "hub" .root.Values.hub.existingSecret "metrics" .root.Values.metrics.token.existingSecret }}
{{- if $secret }}
- name: secret-{{ $name }}
  mountPath: /etc/specserve/secrets/{{ $name }}
  readOnly: true
{{- end }}
{{- end }}
{{- if or .root.Values.models.existingClaim .root.Values.models.size }}
- name: models
  mountPath: {{ include "specserve.mountPath" .root }}
  readOnly: {{ not .writable }}
{{- end }}
{{- with .root.Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "specserve.volumes" -}}
- name: config
  configMap:
    name: {{ include "specserve.name" . }}
- name: cache
  {{- if .Values.cache.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .Values.cache.existingClaim }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.cache.sizeLimit }}
  {{- end }}
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.tmp.sizeLimit }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ include "specserve.sharedMemory" . }}
{{- range $name, $secret := dict "api" .Values.auth.existingSecret "tls" .Values.tls.existingSecret "hub" .Values.hub.existingSecret "metrics" .Values.metrics.token.existingSecret }}
{{- if $secret }}
- name: secret-{{ $name }}
  secret:
    secretName: {{ $secret }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- if or .Values.models.existingClaim .Values.models.size }}
- name: models
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-models" (include "specserve.name" .)) .Values.models.existingClaim }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}
