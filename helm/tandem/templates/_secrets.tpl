{{/* Secrets that the chart draws itself, once: an upgrade finds them again by `lookup`. Where nothing can be looked up
     (helm template, GitOps controllers) every render draws new ones: name existing secrets there. */}}

{{- define "tandem.secretName" -}}
{{- printf "%s-secrets" (include "tandem.fullname" .) -}}
{{- end }}

{{- define "tandem.drawsRedisPasswords" -}}
{{- and .Values.redis.enabled .Values.redis.auth.enabled (not .Values.redis.auth.existingSecret) -}}
{{- end }}

{{/* The Secret's data as YAML, the same wherever it is asked for within one render. */}}
{{- define "tandem.secretData" -}}
{{- if not (hasKey .Values "_drawn") -}}
{{- $found := lookup "v1" "Secret" .Release.Namespace (include "tandem.secretName" .) | default dict -}}
{{- $old := get $found "data" | default dict -}}
{{- $data := dict -}}
{{- if not .Values.clusterSecret.existingSecret -}}
{{- $_ := set $data .Values.clusterSecret.key (default (randAlphaNum 48 | b64enc) (get $old .Values.clusterSecret.key)) -}}
{{- end -}}
{{- if and .Values.gateway.enabled (eq (include "tandem.hasRedis" .) "true") (not .Values.gateway.responsesKey.existingSecret) -}}
{{- $_ := set $data .Values.gateway.responsesKey.key (default (randAlphaNum 48 | b64enc) (get $old .Values.gateway.responsesKey.key)) -}}
{{- end -}}
{{- if eq (include "tandem.drawsRedisPasswords" .) "true" -}}
{{- range $role := list "cluster" "gateway" "accounts" -}}
{{- $key := include "tandem.redisPasswordKey" (dict "root" $ "role" $role) -}}
{{- $_ := set $data $key (default (randAlphaNum 32 | b64enc) (get $old $key)) -}}
{{- end -}}
{{- end -}}
{{- $_ := set .Values "_drawn" $data -}}
{{- end -}}
{{- .Values._drawn | toYaml -}}
{{- end }}

{{- define "tandem.clusterSecretEnv" -}}
- name: TANDEM_CLUSTER_SECRET
  valueFrom:
    secretKeyRef:
      name: {{ default (include "tandem.secretName" .) .Values.clusterSecret.existingSecret | quote }}
      key: {{ .Values.clusterSecret.key | quote }}
{{- end }}
