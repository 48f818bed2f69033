{{/* Name of every object; fails early on what cannot work. */}}
{{- define "specserve.name" -}}
{{- $name := default (printf "%s-%s" .Release.Name (default .Chart.Name .Values.nameOverride)) .Values.fullnameOverride -}}
{{- if contains .Chart.Name .Release.Name }}{{ $name = default .Release.Name .Values.fullnameOverride }}{{ end -}}
{{- $name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{/* Labels that selectors use; they never change. */}}
{{- define "specserve.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* Labels of every object. */}}
{{- define "specserve.labels" -}}
{{ include "specserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* Where the pages of the alerts are. */}}
{{- define "specserve.runbooks" -}}
{{ include "specserve.config" (dict "root" . "path" (list "alerts" "runbook_base_url") "default" "docs/runbooks") | trimSuffix "/" }}
{{- end }}

{{- define "specserve.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end }}

{{- define "specserve.serviceAccount" -}}
{{ default (include "specserve.name" .) .Values.serviceAccount.name }}
{{- end }}

{{/* A value of the config by its path, with the application's default. */}}
{{- define "specserve.config" -}}
{{- $value := .root.Values.config -}}
{{- $found := true -}}
{{- range .path -}}
{{- if and $found (kindIs "map" $value) (hasKey $value .) }}{{ $value = get $value . }}{{ else }}{{ $found = false }}{{ end -}}
{{- end -}}
{{- if and $found (not (kindIs "invalid" $value)) }}{{ $value }}{{ else }}{{ .default }}{{ end -}}
{{- end }}

{{- define "specserve.apiPort" -}}
{{ include "specserve.config" (dict "root" . "path" (list "server" "port") "default" 8000) }}
{{- end }}
{{- define "specserve.metricsPort" -}}
{{ include "specserve.config" (dict "root" . "path" (list "sidecar" "port") "default" 9400) }}
{{- end }}
{{- define "specserve.drain" -}}
{{ include "specserve.config" (dict "root" . "path" (list "engine" "drain_timeout_seconds") "default" 60) | float64 | ceil | int }}
{{- end }}

{{/* GPUs of the whole model: tensor x pipeline parallelism. */}}
{{- define "specserve.modelGpus" -}}
{{- $tp := include "specserve.config" (dict "root" . "path" (list "models" "target_model" "tensor_parallel_size") "default" 1) | int -}}
{{- $pp := include "specserve.config" (dict "root" . "path" (list "models" "target_model" "pipeline_parallel_size") "default" 1) | int -}}
{{ mul $tp $pp }}
{{- end }}
{{/* GPUs of one pod. */}}
{{- define "specserve.gpus" -}}
{{- $nodes := ternary (int .Values.leaderWorkerSet.size) 1 .Values.leaderWorkerSet.enabled -}}
{{ default (div (include "specserve.modelGpus" . | int) $nodes) .Values.gpu.count }}
{{- end }}

{{- define "specserve.grace" -}}
{{ default (add .Values.shutdown.preStopSeconds (include "specserve.drain" .) 45) .Values.shutdown.gracePeriodSeconds }}
{{- end }}

{{- define "specserve.sharedMemory" -}}
{{ default (printf "%dGi" (add 2 (include "specserve.gpus" . | int))) .Values.sharedMemory }}
{{- end }}

{{/* A quantity in bytes. */}}
{{- define "specserve.bytes" -}}
{{- $units := dict "" 1 "k" 1000 "K" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := regexFind "[A-Za-z]*$" (toString .) -}}
{{ mulf (trimSuffix $unit (toString .) | float64) (get $units $unit | default 1) | int64 }}
{{- end }}
