{{/* Name of every object; fails early on what cannot work. */}}
{{- define "specserve.name" -}}
{{- $name := default (printf "%s-%s" .Release.Name (default .Chart.Name .Values.nameOverride)) .Values.fullnameOverride -}}
{{- if contains .Chart.Name .Release.Name }}{{ $name = default .Release.Name .Values.fullnameOverride }}{{ end -}}
{{- $name | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{/* Labels that selectors use; they never change. */}}
{{- define "specserve.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* Labels of every object. */}}
{{- define "specserve.labels" -}}
{{ include "specserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "_" | trunc 63 | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Where the pages of the alerts are. */}}
{{- define "specserve.runbooks" -}}
{{ include "specserve.config" (dict "root" . "path" (list "alerts" "runbook_base_url") "default" "docs/runbooks") | trimSuffix "/" }}
{{- end }}

{{/* Matchers of this release's series: the job is the Service's name under a ServiceMonitor, namespace/name under a PodMonitor. */}}
{{- define "specserve.series" -}}
{{- $name := include "specserve.name" . -}}
namespace="{{ .Release.Namespace }}"
{{- /* Whoever scrapes in another way names the job; the namespace is all that is sure then. */}}
{{- if or .Values.metrics.serviceMonitor.enabled .Values.metrics.podMonitor.enabled -}}
,job=~"{{ $name }}|{{ $name }}-canary|{{ .Release.Namespace }}/{{ $name }}"
{{- end }}
{{- end }}

{{- define "specserve.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end }}

{{- define "specserve.serviceAccount" -}}
{{ default (include "specserve.name" .) .Values.serviceAccount.name }}
{{- end }}

{{/* Text with what extraEnv says for ${NAME}, or its own default (${NAME:-x}). Others stay. Arguments: root, text, quoted. */}}
{{- define "specserve.expanded" -}}
{{- $env := dict -}}
{{- range .root.Values.extraEnv }}{{ if hasKey . "value" }}{{ $_ := set $env .name (toString .value) }}{{ end }}{{ end -}}
{{- $text := .text -}}
{{- $quoted := .quoted -}}
{{- range regexFindAll "\\$\\{[A-Za-z_][A-Za-z0-9_]*(:-[^}]*)?\\}" $text -1 | uniq -}}
{{- $parts := splitn ":-" 2 (trimSuffix "}" (trimPrefix "${" .)) -}}
{{- $value := ternary (get $env $parts._0) (ternary (default "" $parts._1) . (contains ":-" .)) (hasKey $env $parts._0) -}}
{{- $text = replace . (ternary (toJson $value | trimPrefix "\"" | trimSuffix "\"") $value $quoted) $text -}}
{{- end -}}
{{- $text -}}
{{- end }}

{{/* A value of the config by its path, as the pod reads it: SPECSERVE_* of extraEnv first, last the application's default. */}}
{{- define "specserve.config" -}}
{{- $value := .root.Values.config -}}
{{- $found := true -}}
{{- range .path -}}
{{- if and $found (kindIs "map" $value) (hasKey $value .) }}{{ $value = get $value . }}{{ else }}{{ $found = false }}{{ end -}}
{{- end -}}
{{- if not $found }}{{ $value = .default }}{{ end -}}
{{- $name := printf "SPECSERVE_%s" (join "__" .path | upper) -}}
{{- range .root.Values.extraEnv }}{{ if and (eq .name $name) (hasKey . "value") }}{{ $value = .value }}{{ end }}{{ end -}}
{{- if kindIs "invalid" $value }}{{ $value = .default }}{{ end -}}
{{ include "specserve.expanded" (dict "root" .root "text" (toString $value) "quoted" false) }}
{{- end }}

{{/* The same for a number that the pod's own description depends on. */}}
{{- define "specserve.number" -}}
{{- $value := include "specserve.config" . | trim -}}
{{- if not (regexMatch "^[0-9.]+([eE][+]?[0-9]+)?$" $value) -}}
{{- fail (printf "config.%s is '%s', and the pod's description needs the number; give the variable a value in extraEnv, or write the number" (join "." .path) $value) -}}
{{- end -}}
{{ $value }}
{{- end }}

{{/* Whether a switch of the config is on. */}}
{{- define "specserve.isOn" -}}
{{- if not (has (include "specserve.config" . | lower) (list "false" "no" "off" "n" "f" "0")) }}true{{ end -}}
{{- end }}

{{/* Whether clients must send a key. */}}
{{- define "specserve.keyed" -}}
{{- $names := list -}}
{{- range .Values.extraEnv }}{{ $names = append $names .name }}{{ end -}}
{{- if or .Values.auth.existingSecret (has "SPECSERVE_SERVER__API_KEY" $names) (has "SPECSERVE_SERVER__API_KEY_FILE" $names) (dig "server" "api_key" "" .Values.config) (dig "server" "api_key_file" "" .Values.config) }}true{{ end -}}
{{- end }}

{{- define "specserve.mountPath" -}}
{{ trimSuffix "/" .Values.models.mountPath }}
{{- end }}

{{/* Not the Service's name: the controller makes a headless Service of this name, in which pods that are not ready are found.
     Short, because StatefulSets and a label of theirs are named after it. */}}
{{- define "specserve.nodesName" -}}
{{ include "specserve.name" . | trunc 43 | trimSuffix "-" }}-nodes
{{- end }}

{{- define "specserve.apiPort" -}}
{{ include "specserve.number" (dict "root" . "path" (list "server" "port") "default" 8000) }}
{{- end }}
{{- define "specserve.metricsPort" -}}
{{ include "specserve.number" (dict "root" . "path" (list "sidecar" "port") "default" 9400) }}
{{- end }}
{{- define "specserve.drain" -}}
{{ include "specserve.number" (dict "root" . "path" (list "engine" "drain_timeout_seconds") "default" 60) | float64 | ceil | int }}
{{- end }}

{{/* GPUs of one copy of the model: tensor x pipeline parallelism. */}}
{{- define "specserve.copyGpus" -}}
{{- $tp := include "specserve.number" (dict "root" . "path" (list "models" "target_model" "tensor_parallel_size") "default" 1) | int -}}
{{- $pp := include "specserve.number" (dict "root" . "path" (list "models" "target_model" "pipeline_parallel_size") "default" 1) | int -}}
{{ mul $tp $pp }}
{{- end }}
{{/* GPUs of the engine: those of a copy x the data-parallel ranks that this engine runs itself. */}}
{{- define "specserve.modelGpus" -}}
{{- $flags := dict -}}
{{- range $key, $value := dig "engine" "extra_args" dict .Values.config -}}
{{- if not (kindIs "invalid" $value) }}{{ $_ := set $flags (regexReplaceAll "^-+" $key "" | replace "_" "-") (include "specserve.expanded" (dict "root" $ "text" (toString $value) "quoted" false)) }}{{ end -}}
{{- end -}}
{{- $ranks := get $flags "data-parallel-size-local" | default (get $flags "dpl") -}}
{{- if not $ranks }}{{ $ranks = ternary "1" (get $flags "data-parallel-size" | default (get $flags "dp") | default "1") (or (hasKey $flags "data-parallel-rank") (hasKey $flags "dpn")) }}{{ end -}}
{{- if not (regexMatch "^[1-9][0-9]*$" $ranks) -}}
{{- fail (printf "config.engine.extra_args has data-parallel-size %s, and the pod's GPUs depend on it; write the number" $ranks) -}}
{{- end -}}
{{ mul (include "specserve.copyGpus" . | int) (int $ranks) }}
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
{{- $units := dict "" 1 "k" 1000 "K" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "P" 1000000000000000 "E" 1000000000000000000 "m" 0.001 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{- $unit := regexFind "[A-Za-z]*$" (toString .) -}}
{{ mulf (trimSuffix $unit (toString .) | float64) (get $units $unit | default 1) | int64 }}
{{- end }}
