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

{{/* Whether the chart's Redis speaks TLS: with certificates of the source that processes have theirs from. */}}
{{- define "tandem.redisHasTls" -}}
{{- $isGiven := and (eq (include "tandem.givesTlsSecrets" .) "true") (empty .Values.tls.existingSecrets.redis) -}}
{{- and .Values.redis.enabled .Values.tls.enabled (not $isGiven) -}}
{{- end }}

{{/* Name and key of the Secret with the authority of Redis' certificate; {}: there is none, or the system's are trusted. */}}
{{- define "tandem.redisCa" -}}
{{- if eq (include "tandem.redisHasTls" .) "true" -}}
{{- dict "name" (include "tandem.tlsSecretName" (dict "root" . "role" "redis")) "key" "ca.crt" | toJson -}}
{{- else if and (not .Values.redis.enabled) .Values.externalRedis.caSecret.name -}}
{{- .Values.externalRedis.caSecret | toJson -}}
{{- else -}}
{}
{{- end -}}
{{- end }}

{{- define "tandem.hasRedisCa" -}}
{{- ne (include "tandem.redisCa" .) "{}" -}}
{{- end }}

{{- define "tandem.redisCaQuery" -}}
{{- with include "tandem.redisCa" . | fromJson -}}
?ssl_ca_certs=/etc/tandem/redis-ca/{{ .key }}
{{- end -}}
{{- end }}

{{- define "tandem.redisCaMount" -}}
- name: redis-ca
  mountPath: /etc/tandem/redis-ca
  readOnly: true
{{- end }}

{{- define "tandem.redisCaVolume" -}}
{{- $ca := include "tandem.redisCa" . | fromJson -}}
- name: redis-ca
  secret:
    secretName: {{ $ca.name | quote }}
    {{- /* NOTE: beside the authority a Secret may have a key */}}
    items:
      - key: {{ $ca.key | quote }}
        path: {{ $ca.key | quote }}
{{- end }}

{{/* The most block replicas of the prefix index in the chart's Redis: 90 bytes each are 60 % of its memory. */}}
{{- define "tandem.maxBlockReplicas" -}}
{{- div (mul (int64 .Values.redis.maxMemoryMiB) 1048576 6) 900 -}}
{{- end }}

{{/* Whether the chart's Redis keeps what it is told: where accounts are in it, or a claim is named. Hints need no volume. */}}
{{- define "tandem.redisIsKept" -}}
{{- $redis := .Values.redis -}}
{{- $holdsAccounts := and .Values.gateway.enabled (eq (include "tandem.accountsAreInRedis" .) "true") -}}
{{- and $redis.enabled $redis.persistence.enabled (or $holdsAccounts (ne $redis.persistence.existingClaim "")) -}}
{{- end }}

{{/* Redis has a user for each role: cluster (who serves where, which prefix lies where), gateway (stored responses, cache
     pins) and accounts. files/redis-users.acl says what each may do. All of these take root, role. */}}

{{/* The URL as this variable, after the password that it refers to. Takes variable too. */}}
{{- define "tandem.redisEnv" -}}
{{- if .root.Values.redis.enabled }}
{{- $user := "" -}}
{{- if .root.Values.redis.auth.enabled }}
{{ include "tandem.redisPassword" . }}
{{- $user = printf "%s:$(%s)@" .role (include "tandem.redisPasswordName" .) }}
{{- end }}
- name: {{ .variable }}
  {{- $scheme := ternary "rediss" "redis" (eq (include "tandem.redisHasTls" .root) "true") }}
  value: {{ printf "%s://%s%s-redis:6379/0%s" $scheme $user (include "tandem.fullname" .root) (include "tandem.redisCaQuery" .root) }}
{{- else if eq (include "tandem.hasRedis" .root) "true" }}
{{- $credential := include "tandem.externalCredential" . | fromYaml }}
{{- if $credential.urlKey }}
- name: {{ .variable }}
  valueFrom:
    secretKeyRef:
      name: {{ $credential.existingSecret | quote }}
      key: {{ $credential.urlKey | quote }}
{{- else }}
{{- $password := include "tandem.redisPasswordName" . }}
{{- if $credential.existingSecret }}
- name: {{ $password }}
  valueFrom:
    secretKeyRef:
      name: {{ $credential.existingSecret | quote }}
      key: {{ $credential.passwordKey | quote }}
{{- end }}
{{- with .root.Values.externalRedis }}
{{- $user := printf "%s%s" $credential.username (ternary (printf ":$(%s)" $password) "" (ne $credential.existingSecret "")) }}
{{- $scheme := ternary "rediss" "redis" .tls }}
- name: {{ $.variable }}
  value: {{ printf "%s://%s%s:%d/%d%s" $scheme (ternary (printf "%s@" $user) "" (ne $user "")) .host (int .port) (int .database) (include "tandem.redisCaQuery" $.root) | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Of an external Redis: username, existingSecret, passwordKey, urlKey. What a role has none of its own is the cluster's. */}}
{{- define "tandem.externalCredential" -}}
{{- $external := .root.Values.externalRedis -}}
{{- $own := ternary dict (get $external .role) (eq .role "cluster") -}}
{{- $credential := dict -}}
{{- range $key := list "username" "existingSecret" "passwordKey" "urlKey" -}}
{{- $_ := set $credential $key (default (get $external $key) (get $own $key)) -}}
{{- end -}}
{{- toYaml $credential -}}
{{- end }}

{{- define "tandem.redisPasswordName" -}}
REDIS_{{ upper .role }}_PASSWORD
{{- end }}

{{/* The chart's own Redis: the password of a role. */}}
{{- define "tandem.redisPassword" -}}
- name: {{ include "tandem.redisPasswordName" . }}
  valueFrom:
    secretKeyRef:
      name: {{ default (include "tandem.secretName" .root) .root.Values.redis.auth.existingSecret | quote }}
      key: {{ include "tandem.redisPasswordKey" . | quote }}
{{- end }}

{{- define "tandem.redisPasswordKey" -}}
{{- get .root.Values.redis.auth (get (dict "cluster" "key" "gateway" "gatewayKey" "accounts" "accountsKey") .role) -}}
{{- end }}

{{/* redis-server's arguments for the users, a word each. Takes the root. */}}
{{- define "tandem.redisUsers" -}}
{{- $words := list -}}
{{- range $line := .Files.Lines "files/redis-users.acl" -}}
{{- if $line -}}
{{- $rule := rest (splitList " " $line) -}}
{{- $words = concat $words (list "--user") $rule -}}
{{- if ne (first $rule) "default" -}}
{{- $words = append $words (printf ">$(%s)" (include "tandem.redisPasswordName" (dict "root" $ "role" (first $rule)))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $words -}}
{{- end }}
