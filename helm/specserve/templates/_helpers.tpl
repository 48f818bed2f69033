{{/* Name of every object; fails early on what cannot work. */}}
{{- define "specserve.name" -}}
{{- $name := default (printf "%s-%s" .Release.Name (default .Chart.Name .Values.nameOverride)) .Values.fullnameOverride -}}
{{- if contains .Chart.Name .Release.Name }}{{ $name = default .Release.Name .Values.fullnameOverride }}{{ end -}}
{{- /* Two long names that differ at their ends must not become one. */}}
{{- if gt (len $name) 50 }}{{ $name = printf "%s-%s" ($name | trunc 41 | trimSuffix "-") (sha256sum $name | trunc 8) }}{{ end -}}
{{- $name -}}
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
,job=~"{{ $name }}-metrics|{{ $name }}-canary-metrics|{{ .Release.Namespace }}/{{ $name }}"
{{- end }}
{{- end }}

{{- define "specserve.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{/* What a monitor sends where metrics ask for a token. */}}
{{- define "specserve.scrapeToken" -}}
{{- with .Values.metrics.token.existingSecret -}}
authorization:
  type: Bearer
  credentials:
    name: {{ . }}
    key: {{ $.Values.metrics.token.key }}
{{- end -}}
{{- end }}

{{/* The Service of metrics and page: of its own, so that no type of the API's makes them public. Arguments: root, name, component. */}}
{{- define "specserve.metricsService" }}
apiVersion: v1
kind: Service
metadata:
  name: {{ .name }}-metrics
  labels:
    {{- include "specserve.labels" .root | nindent 4 }}
    app.kubernetes.io/component: metrics
spec:
  type: ClusterIP
  selector:
    {{- include "specserve.selector" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
  ports:
    - name: metrics
      port: {{ include "specserve.metricsPort" .root }}
      targetPort: metrics
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

{{/* Flags of engine.extra_args by their names without dashes, as JSON. */}}
{{- define "specserve.flags" -}}
{{- $flags := dict -}}
{{- $long := dict "dp" "data-parallel-size" "dpl" "data-parallel-size-local" "dpn" "data-parallel-rank" "pcp" "prefill-context-parallel-size" -}}
{{- range $key, $value := dig "engine" "extra_args" dict .Values.config -}}
{{- $name := regexReplaceAll "^-+" $key "" | replace "_" "-" -}}
{{- if contains "=" $name }}{{ $parts := splitn "=" 2 $name }}{{ $name = $parts._0 }}{{ if kindIs "invalid" $value }}{{ $value = $parts._1 }}{{ end }}{{ end -}}
{{- if not (kindIs "invalid" $value) }}{{ $_ := set $flags (get $long $name | default $name) (include "specserve.expanded" (dict "root" $ "text" (toString $value) "quoted" false)) }}{{ end -}}
{{- end -}}
{{ toJson $flags }}
{{- end }}
{{/* A flag that is a number of GPUs or ranks. Arguments: root, flag. */}}
{{- define "specserve.ranks" -}}
{{- $value := get (include "specserve.flags" .root | fromJson) .flag | default "1" -}}
{{- if not (regexMatch "^[1-9][0-9]*$" $value) -}}
{{- fail (printf "config.engine.extra_args has %s %s, and the pod's GPUs depend on it; write the number" .flag $value) -}}
{{- end -}}
{{ $value }}
{{- end }}
{{/* GPUs of one copy of the model: tensor x pipeline parallelism, and prefill's context parallelism. */}}
{{- define "specserve.copyGpus" -}}
{{- $tp := include "specserve.number" (dict "root" . "path" (list "models" "target_model" "tensor_parallel_size") "default" 1) | int -}}
{{- $pp := include "specserve.number" (dict "root" . "path" (list "models" "target_model" "pipeline_parallel_size") "default" 1) | int -}}
{{ mul $tp $pp (include "specserve.ranks" (dict "root" . "flag" "prefill-context-parallel-size") | int) }}
{{- end }}
{{- define "specserve.nodes" -}}
{{ ternary (int .Values.leaderWorkerSet.size) 1 .Values.leaderWorkerSet.enabled }}
{{- end }}
{{/* GPUs of the engine over all nodes: those of a copy x the data-parallel ranks. Over several nodes vLLM runs all ranks
     itself; on one node -local and -rank leave some to other engines. As Settings.all_gpus of the application. */}}
{{- define "specserve.modelGpus" -}}
{{- $flags := include "specserve.flags" . | fromJson -}}
{{- $flag := "data-parallel-size" -}}
{{- if eq (include "specserve.nodes" .) "1" -}}
{{- if hasKey $flags "data-parallel-rank" }}{{ $flag = "one rank" }}{{ end -}}
{{- if hasKey $flags "data-parallel-size-local" }}{{ $flag = "data-parallel-size-local" }}{{ end -}}
{{- end -}}
{{ mul (include "specserve.copyGpus" . | int) (include "specserve.ranks" (dict "root" . "flag" $flag) | int) }}
{{- end }}
{{/* GPUs of one pod. */}}
{{- define "specserve.gpus" -}}
{{ default (div (include "specserve.modelGpus" . | int) (include "specserve.nodes" . | int)) .Values.gpu.count }}
{{- end }}

{{- define "specserve.grace" -}}
{{ default (add .Values.shutdown.preStopSeconds (include "specserve.drain" .) 45) .Values.shutdown.gracePeriodSeconds }}
{{- end }}

{{- define "specserve.memoryLimit" -}}
{{- $given := (.Values.resources.limits).memory -}}
{{ default (printf "%dGi" (mul 16 (add 1 (include "specserve.gpus" . | int)))) $given }}
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
