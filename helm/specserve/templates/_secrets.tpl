{{/* What a secret is called and looks like; written by scripts/docs from specserve/log.py. */}}
{{- define "specserve.secretName" -}}
(?i)(^|[._-])((TOKEN|(API)?KEY|PAT|DSN)\d*|CRED(ENTIAL)?S?|PWD|AUTH|JWT|SALT|COOKIES?)$|(^|[._-])(TOKENS|(API)?KEYS|HEADERS|WEBHOOK(_URL)?)$|(^|[._-])(AUTH|PWD|JWT)[._-]|PASS$|PASSW|PASSPHRASE|ACCESS_KEY|PRIVATE_KEY|SECRET|AUTHORIZATION|COOKIE|CREDENTIAL
{{- end }}
{{- define "specserve.countName" -}}
(?i)(TOKENS|KEYS)$
{{- end }}
{{- define "specserve.secretShape" -}}
\b(hf_[A-Za-z0-9]{10,}|sk-[A-Za-z0-9_-]{10,})|(?i:(bearer\s+)\S+)
{{- end }}
{{/* Kinds of receivers whose URL is the secret. */}}
{{- define "specserve.secretUrls" -}}
["slack"]
{{- end }}
