{{/* Which Redis, if any, and how processes are told of it. */}}

{{- define "tandem.hasRedis" -}}
{{- or .Values.redis.enabled (ne .Values.externalRedis.host "") (ne .Values.externalRedis.urlKey "") -}}
{{- end }}

{{/* How routers find workers: redis, announce or kubernetes. */}}
{{- define "tandem.discovery" -}}
{{- if ne .Values.discovery.mode "auto" -}}
{{- .Values.discovery.mode -}}
{{- else if eq (include "tandem.hasRedis" .) "true" -}}
redis
{{- else -}}
announce
{{- end -}}
{{- end }}

{{/* The most block replicas of the prefix index in the chart's Redis: 90 bytes each are 60 % of its memory. */}}
{{- define "tandem.maxBlockReplicas" -}}
{{- div (mul (int64 .Values.redis.maxMemoryMiB) 1048576 6) 900 -}}
{{- end }}

{{/* TANDEM_REDIS, after the password it refers to. */}}
{{- define "tandem.redisEnv" -}}
{{- if .Values.redis.enabled }}
{{- if .Values.redis.auth.enabled }}
{{ include "tandem.redisPassword" . }}
{{- end }}
- name: TANDEM_REDIS
  value: redis://{{ if .Values.redis.auth.enabled }}:$(REDIS_PASSWORD)@{{ end }}{{ include "tandem.fullname" . }}-redis:6379/0
{{- else }}
{{- with .Values.externalRedis }}
{{- if .urlKey }}
- name: TANDEM_REDIS
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .urlKey }}
{{- else if .host }}
{{- if .existingSecret }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .passwordKey }}
{{- end }}
{{- $user := printf "%s%s" .username (ternary ":$(REDIS_PASSWORD)" "" (ne .existingSecret "")) }}
{{- $scheme := ternary "rediss" "redis" .tls }}
{{- $query := ternary (printf "?ssl_ca_certs=/etc/tandem/redis-ca/%s" .caSecret.key) "" (ne .caSecret.name "") }}
- name: TANDEM_REDIS
  value: {{ printf "%s://%s%s:%d/%d%s" $scheme (ternary (printf "%s@" $user) "" (ne $user "")) .host (int .port) (int .database) $query | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tandem.redisPassword" -}}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ default (include "tandem.secretName" .) .Values.redis.auth.existingSecret }}
      key: {{ .Values.redis.auth.key }}
{{- end }}
