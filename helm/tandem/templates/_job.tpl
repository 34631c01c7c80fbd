{{/* The pod of a one-off job of the control image. Takes root, name, resources. The rest is its container. */}}

{{- define "tandem.jobPod" -}}
serviceAccountName: default
automountServiceAccountToken: false
enableServiceLinks: false
restartPolicy: Never
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- end }}

{{- define "tandem.jobContainer" -}}
{{- include "tandem.image" (dict "root" .root "class" "control" "image" dict) }}
securityContext:
  {{- toYaml .root.Values.securityContext | nindent 2 }}
resources:
  {{- toYaml .resources | nindent 2 }}
{{- end }}

{{/* Where a job draws a key of its own, as TANDEM_ACCOUNTS; empty: gateways ask for none, or it cannot be known here. */}}
{{- define "tandem.jobAccounts" -}}
{{- $where := default "" .Values.gateway.settings.accounts -}}
{{- if eq (include "tandem.hasAccounts" .) "true" -}}
{{- if eq (include "tandem.accountsAreInRedis" .) "true" -}}
{{ include "tandem.redisEnv" (dict "root" . "role" "accounts" "variable" "TANDEM_ACCOUNTS") | trim }}
{{- else if regexMatch "^rediss?([+]sentinel)?://[^$]*$" $where -}}
- name: TANDEM_ACCOUNTS
  value: {{ $where | quote }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Whether a job's own environment names this variable. Takes env, names. */}}
{{- define "tandem.names" -}}
{{- $found := false -}}
{{- range .env -}}
{{- $found = or $found (has .name $.names) -}}
{{- end -}}
{{- $found -}}
{{- end }}

{{/* Whether a job needs the authority of Redis' certificate, to draw a key. Takes root, accounts. */}}
{{- define "tandem.jobRedisCa" -}}
{{- and (ne .accounts "") (eq (include "tandem.hasRedisCa" .root) "true") -}}
{{- end }}

{{- define "tandem.gatewayUrl" -}}
http://{{ include "tandem.fullname" . }}-gateway:{{ int .Values.gateway.service.port }}
{{- end }}
