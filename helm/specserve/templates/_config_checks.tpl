{{/* Rules between keys of the config, which a schema cannot state. The application says the same, with more detail. */}}
{{- define "specserve.configChecks" -}}
{{- $c := include "specserve.expanded" (dict "root" . "text" (toJson .Values.config) "quoted" true) | fromJson -}}
{{- $target := default dict (dig "models" "target_model" dict $c) -}}
{{- if not $target.path -}}
{{- fail "config.models.target_model.path is missing; paste your specserve config under `config:`" -}}
{{- end -}}
{{- $engine := default dict $c.engine -}}
{{- $server := default dict $c.server -}}
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
{{- $tls := default dict $server.tls -}}
{{- if ne (empty $tls.cert_file) (empty $tls.key_file) -}}
{{- fail "config.server.tls has one of cert_file and key_file; TLS needs both, or tls.existingSecret" -}}
{{- end -}}
{{- $rate := default dict (dig "alerts" "acceptance_rate" dict $c) -}}
{{- if and (not (contains "${" (toJson $rate))) (lt (default 0.55 $rate.resolve_above | float64) (default 0.5 $rate.fire_below | float64)) -}}
{{- fail "config.alerts.acceptance_rate.resolve_above is less than fire_below; it must not be, or the alert would flap" -}}
{{- end -}}
{{- $spec := default dict $c.speculative_decoding -}}
{{- $draft := default dict (default dict $c.models).draft_model -}}
{{- $unknown := toJson (list $spec $engine.max_num_seqs (omit $target "path" "revision") (omit $draft "path" "revision")) | contains "${" -}}
{{- if and (include "specserve.isOn" (dict "root" . "path" (list "speculative_decoding" "enabled") "default" true)) (not $unknown) -}}
{{- include "specserve.methodChecks" (dict "spec" $spec "target" $target "draft" $draft) -}}
{{- include "specserve.scheduleChecks" (dict "spec" $spec "engine" $engine) -}}
{{- end -}}
{{- end }}

{{- define "specserve.methodChecks" -}}
{{- $spec := .spec -}}
{{- $draft := .draft -}}
{{- $method := default (ternary "draft_model" "" (hasKey $draft "path")) $spec.method -}}
{{- if not $method -}}
{{- fail "config.speculative_decoding is enabled with neither a method nor a draft model; give one, or set enabled: false" -}}
{{- end -}}
{{- if and (has $method (list "draft_model" "eagle" "eagle3" "medusa" "mlp_speculator" "dflash")) (not $draft.path) -}}
{{- fail (printf "config.speculative_decoding.method %s needs a draft checkpoint; set config.models.draft_model.path" $method) -}}
{{- end -}}
{{- range $key, $methods := dict "prompt_lookup_min" (list "ngram" "ngram_gpu") "prompt_lookup_max" (list "ngram" "ngram_gpu") "use_heterogeneous_vocab" (list "draft_model") "suffix_decoding_max_tree_depth" (list "suffix") "suffix_decoding_max_cached_requests" (list "suffix") "suffix_decoding_max_spec_factor" (list "suffix") "suffix_decoding_min_token_prob" (list "suffix") -}}
{{- if and (hasKey $spec $key) (not (kindIs "invalid" (get $spec $key))) (not (has $method $methods)) -}}
{{- fail (printf "config.speculative_decoding.%s is read by method %s only; the method is %s" $key (join " and " $methods) $method) -}}
{{- end -}}
{{- end -}}
{{- if and $spec.prompt_lookup_min $spec.prompt_lookup_max (gt (int $spec.prompt_lookup_min) (int $spec.prompt_lookup_max)) -}}
{{- fail (printf "config.speculative_decoding.prompt_lookup_min is %d; must be at most prompt_lookup_max (%d)" (int $spec.prompt_lookup_min) (int $spec.prompt_lookup_max)) -}}
{{- end -}}
{{- if and $spec.use_heterogeneous_vocab (eq (default "greedy" $spec.draft_sample_method) "probabilistic") -}}
{{- fail "config.speculative_decoding.use_heterogeneous_vocab drafts greedily; draft_sample_method must be greedy" -}}
{{- end -}}
{{- if and $draft.path (not (has $method (list "ngram" "ngram_gpu" "suffix"))) -}}
{{- include "specserve.draftChecks" (dict "target" .target "draft" $draft "method" $method) -}}
{{- end -}}
{{- end }}

{{- define "specserve.draftChecks" -}}
{{- $needs := not (has .method (list "mtp" "dspark")) -}}
{{- if and $needs (eq (trimSuffix "/" .draft.path) (trimSuffix "/" (default "" .target.path))) (eq (default "" .draft.revision) (default "" .target.revision)) -}}
{{- fail "config.models.draft_model.path is the target itself; must be another checkpoint" -}}
{{- end -}}
{{- $alias := dict "half" "float16" "float" "float32" -}}
{{- $one := default "auto" .draft.dtype -}}
{{- $other := default "auto" .target.dtype -}}
{{- if and (ne $one "auto") (ne $other "auto") (ne (default $one (get $alias $one)) (default $other (get $alias $other))) -}}
{{- fail (printf "config.models.draft_model.dtype is %s and the target's %s; must be the same, remove the draft's" $one $other) -}}
{{- end -}}
{{- $tp := default 1 .target.tensor_parallel_size | int -}}
{{- $of := default $tp .draft.tensor_parallel_size | int -}}
{{- if and (ne $of $tp) (ne $of 1) -}}
{{- fail (printf "config.models.draft_model.tensor_parallel_size is %d; must be the target's (%d), remove it" $of $tp) -}}
{{- end -}}
{{- end }}

{{- define "specserve.scheduleChecks" -}}
{{- $spec := .spec -}}
{{- $rows := $spec.schedule -}}
{{- if and (kindIs "slice" $rows) $spec.max_batch_size -}}
{{- fail "config.speculative_decoding has schedule and max_batch_size; keep one, the schedule says more" -}}
{{- end -}}
{{- if and $spec.max_batch_size .engine.max_num_seqs (gt (int $spec.max_batch_size) (int .engine.max_num_seqs)) -}}
{{- fail (printf "config.speculative_decoding.max_batch_size is %d; no step holds more than engine.max_num_seqs (%d)" (int $spec.max_batch_size) (int .engine.max_num_seqs)) -}}
{{- end -}}
{{- if and (kindIs "slice" $rows) (not $rows) -}}
{{- fail "config.speculative_decoding.schedule is empty; must have rows [first, last, tokens], or be removed" -}}
{{- end -}}
{{- $last := 0 -}}
{{- $limit := default 5 $spec.num_speculative_tokens | int -}}
{{- range $rows -}}
{{- $first := index . 0 | int -}}
{{- $final := index . 1 | int -}}
{{- if ne $first (int (add $last 1)) -}}
{{- fail (printf "config.speculative_decoding.schedule: row %s starts at %d; must start at %d, right after the row before" (toJson .) $first (add $last 1)) -}}
{{- end -}}
{{- if or (lt $final $first) (lt (index . 2 | int) 0) (gt (index . 2 | int) $limit) -}}
{{- fail (printf "config.speculative_decoding.schedule: row %s must be [first, last, tokens] with tokens from 0 to num_speculative_tokens (%d)" (toJson .) $limit) -}}
{{- end -}}
{{- $last = $final -}}
{{- end -}}
{{- end }}
