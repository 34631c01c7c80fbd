{{/* The environment of each process: what the chart knows, as TANDEM_* variables. `settings` adds the rest. */}}

{{/* Takes root, name, pool, hosts. */}}
{{- define "tandem.env" -}}
{{- include (printf "tandem.env.%s" (ternary "hosts" .name (default false .hosts))) . | trim }}
{{ include "tandem.clusterSecretEnv" .root }}
{{ include "tandem.tlsEnv" . }}
- name: TANDEM_LOG_LEVEL
  value: {{ .root.Values.log.level }}
- name: TANDEM_LOG_FORMAT
  value: {{ .root.Values.log.format }}
{{- if and .root.Values.otlpEndpoint (has .name (list "gateway" "prefill" "decode")) (not .hosts) }}
- name: TANDEM_OTLP_ENDPOINT
  value: {{ .root.Values.otlpEndpoint | quote }}
{{- end }}
{{- if not .hosts }}
{{- include "tandem.settingsEnv" (dict "settings" .pool.settings "prefix" "TANDEM_") }}
{{- end }}
- name: HOME
  value: /tmp
- name: TMPDIR
  value: /tmp
{{- if has .name (list "gateway" "prefill" "decode") }}
- name: HF_HOME
  value: /var/cache/tandem/huggingface
- name: XDG_CACHE_HOME
  value: /var/cache/tandem
{{- include "tandem.hubEnv" .root }}
{{- end }}
{{- if has .name (list "prefill" "decode") }}
- name: TRITON_CACHE_DIR
  value: /tmp/triton
{{- end }}
{{- with .pool.rdma.ucxTls }}
- name: UCX_TLS
  value: {{ . | quote }}
{{- end }}
{{- with .pool.rdma.ucxNetDevices }}
- name: UCX_NET_DEVICES
  value: {{ . | quote }}
{{- end }}
{{- end }}

{{/* camelCase settings to variables: maxModelLen is TANDEM_MAX_MODEL_LEN is --max-model-len. Takes settings, prefix. */}}
{{- define "tandem.settingsEnv" -}}
{{- range $key, $value := .settings }}
- name: {{ $.prefix }}{{ $key | snakecase | upper }}
  value: {{ include "tandem.scalar" $value | quote }}
{{- end }}
{{- end }}

{{- define "tandem.env.gateway" }}
- name: TANDEM_HOST
  value: {{ include "tandem.anyAddress" .root | quote }}
- name: TANDEM_PORT
  value: "8000"
- name: TANDEM_ROUTERS
  value: {{ include "tandem.routers" .root | quote }}
{{ include "tandem.modelEnv" .root }}
- name: TANDEM_DRAIN_TIMEOUT_S
  value: {{ int .pool.termination.drainSeconds | quote }}
- name: TANDEM_ADMIN_BIND
  value: "{{ include "tandem.anyBind" .root }}:8001"
{{- if .pool.allowAnonymous }}
- name: TANDEM_ALLOW_ANONYMOUS
  value: "true"
{{- if not (hasKey .pool.settings "allowedHosts") }}
- name: TANDEM_ALLOWED_HOSTS
  value: {{ include "tandem.gatewayHosts" .root | quote }}
{{- end }}
{{- end }}
{{- if and .root.Values.redis.enabled (not (hasKey .pool.settings "storedResponsesMib")) }}
- name: TANDEM_STORED_RESPONSES_MIB
  value: {{ div (int .root.Values.redis.maxMemoryMiB) 4 | quote }}
{{- end }}
{{- include "tandem.redisEnv" (dict "root" .root "role" "gateway" "variable" "TANDEM_REDIS") }}
{{- if eq (include "tandem.hasRedis" .root) "true" }}
- name: TANDEM_RESPONSES_KEY
  valueFrom:
    secretKeyRef:
      name: {{ default (include "tandem.secretName" .root) .pool.responsesKey.existingSecret | quote }}
      key: {{ .pool.responsesKey.key | quote }}
{{- end }}
{{- if eq (include "tandem.accountsAreInRedis" .root) "true" }}
{{- include "tandem.redisEnv" (dict "root" .root "role" "accounts" "variable" "TANDEM_ACCOUNTS") }}
{{- end }}
{{- end }}

{{/* Whether the chart says where accounts are: neither a setting nor a variable does, and somebody asks for keys. */}}
{{- define "tandem.accountsAreInRedis" -}}
{{- $gateway := .Values.gateway -}}
{{- $said := list -}}
{{- range $gateway.extraEnv -}}
{{- $said = append $said .name -}}
{{- end -}}
{{- and (not $gateway.allowAnonymous) (not $gateway.settings.accounts) (not (has "TANDEM_ACCOUNTS" $said)) (eq (include "tandem.hasRedis" .) "true") -}}
{{- end }}

{{/* Whether gateways ask for keys. */}}
{{- define "tandem.hasAccounts" -}}
{{- and .Values.gateway.enabled (not .Values.gateway.allowAnonymous) -}}
{{- end }}

{{/* The names by which gateways are called: of their Services, and of routes to them. */}}
{{- define "tandem.gatewayHosts" -}}
{{- $names := list -}}
{{- range $service := list "gateway" "gateway-headless" -}}
{{- $name := printf "%s-%s" (include "tandem.fullname" $) $service -}}
{{- $below := printf "%s.%s" $name $.Release.Namespace -}}
{{- $names = concat $names (list $name $below (printf "%s.svc" $below) (printf "%s.svc.cluster.local" $below)) -}}
{{- end -}}
{{- join "," (concat $names .Values.gatewayApi.hostnames) -}}
{{- end }}

{{- define "tandem.env.router" }}
- name: TANDEM_BIND
  value: "{{ include "tandem.anyBind" .root }}:7800"
- name: TANDEM_METRICS_PORT
  value: "7801"
- name: TANDEM_GRACE_S
  value: {{ int .pool.termination.drainSeconds | quote }}
- name: TANDEM_DISCOVERY
  value: {{ include "tandem.discovery" .root }}
{{- if eq (include "tandem.discovery" .root) "kubernetes" }}
- name: TANDEM_KUBERNETES_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: TANDEM_KUBERNETES_SELECTOR
  value: app.kubernetes.io/name=tandem,app.kubernetes.io/instance={{ .root.Release.Name }},tandem.dev/role
{{- end }}
{{- if and .root.Values.redis.enabled (not (hasKey .pool.settings "maxBlockReplicas")) }}
- name: TANDEM_MAX_BLOCK_REPLICAS
  value: {{ include "tandem.maxBlockReplicas" .root | quote }}
{{- end }}
{{- include "tandem.redisEnv" (dict "root" .root "role" "cluster" "variable" "TANDEM_REDIS") }}
{{- end }}

{{- define "tandem.env.prefill" }}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: TANDEM_WORKER_ID
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: TANDEM_BIND
  value: "{{ include "tandem.anyBind" .root }}:7900"
- name: TANDEM_ADVERTISE
  value: "{{ include "tandem.podHost" .root }}:7900"
- name: TANDEM_METRICS_PORT
  value: "7901"
- name: TANDEM_KV_PORT
  value: "7902"
{{- if gt (int .pool.ranks.tensor) 1 }}
- name: TANDEM_TP
  value: {{ int .pool.ranks.tensor | quote }}
{{- end }}
{{- if gt (int .pool.ranks.pipeline) 1 }}
- name: TANDEM_PP
  value: {{ int .pool.ranks.pipeline | quote }}
{{- end }}
{{- if gt (int .pool.ranks.context) 1 }}
- name: TANDEM_CP
  value: {{ int .pool.ranks.context | quote }}
{{- end }}
{{- if gt (int .pool.ranks.hosts) 1 }}
- name: TANDEM_HOSTS
  value: {{ int .pool.ranks.hosts | quote }}
- name: TANDEM_RANKS_BIND
  value: "{{ include "tandem.anyBind" .root }}:7903"
- name: TANDEM_JOIN_TIMEOUT_S
  value: {{ int .pool.probes.startupSeconds | quote }}
{{- end }}
{{ include "tandem.modelEnv" .root }}
- name: TANDEM_GRACE_S
  value: {{ int .pool.termination.drainSeconds | quote }}
{{- if eq (include "tandem.hasRedis" .root) "true" }}
{{- include "tandem.redisEnv" (dict "root" .root "role" "cluster" "variable" "TANDEM_REDIS") }}
{{- else }}
- name: TANDEM_ROUTERS
  value: {{ include "tandem.routers" .root | quote }}
{{- end }}
{{- end }}

{{- define "tandem.env.decode" }}
{{- include "tandem.env.prefill" . }}
{{- end }}

{{- define "tandem.env.planner" }}
{{- $values := .root.Values }}
- name: TANDEM_MODE
  value: {{ .pool.mode }}
- name: TANDEM_TTFT_MS
  value: {{ include "tandem.scalar" .pool.slo.ttftMs | quote }}
- name: TANDEM_TPOT_MS
  value: {{ include "tandem.scalar" .pool.slo.tpotMs | quote }}
{{- range $name := list "prefill" "decode" }}
{{- $limits := index $values.planner.limits $name }}
- name: TANDEM_MIN_{{ upper $name }}
  value: {{ int $limits.min | quote }}
- name: TANDEM_MAX_{{ upper $name }}
  value: {{ int $limits.max | quote }}
- name: TANDEM_{{ upper $name }}_ACCELERATORS
  value: {{ include "tandem.numAccelerators" (index $values $name) | quote }}
- name: TANDEM_{{ upper $name }}_DEPLOYMENT
  value: {{ include "tandem.fullname" $.root }}-{{ $name }}
- name: TANDEM_{{ upper $name }}_SELECTOR
  value: app.kubernetes.io/name=tandem,app.kubernetes.io/instance={{ $.root.Release.Name }},app.kubernetes.io/component={{ $name }}
{{- end }}
{{- with .pool.maxAccelerators }}
- name: TANDEM_MAX_ACCELERATORS
  value: {{ int . | quote }}
{{- end }}
{{- with $values.decode.settings.maxNumRunning }}
- name: TANDEM_MAX_NUM_RUNNING
  value: {{ int . | quote }}
{{- end }}
- name: TANDEM_SERVED_MODEL_NAME
  value: {{ include "tandem.servedName" .root | quote }}
- name: TANDEM_ROUTERS
  value: {{ include "tandem.routers" .root | quote }}
- name: TANDEM_GATEWAYS
  value: {{ include "tandem.fullname" .root }}-gateway-headless:8001
- name: TANDEM_KUBERNETES_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: TANDEM_LEASE_NAME
  value: {{ include "tandem.fullname" .root }}-planner
- name: TANDEM_PLANNER_ID
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: TANDEM_HOST
  value: {{ include "tandem.anyAddress" .root | quote }}
- name: TANDEM_METRICS_PORT
  value: "7951"
{{- end }}

{{- define "tandem.modelEnv" -}}
- name: TANDEM_MODEL
  value: {{ include "tandem.modelPath" . | quote }}
- name: TANDEM_SERVED_MODEL_NAME
  value: {{ include "tandem.servedName" . | quote }}
{{- end }}

{{/* The routers' addresses. Several: first the balanced one, then every pod's, so that one that hangs is passed over. */}}
{{- define "tandem.routers" -}}
{{- $router := .Values.router -}}
{{- $service := printf "%s-router" (include "tandem.fullname" .) -}}
{{- if not $router.enabled -}}
{{- $router.externalAddresses -}}
{{- else if eq (include "tandem.maxReplicas" (dict "root" . "name" "router" "pool" $router)) "1" -}}
{{- printf "%s:7800" $service -}}
{{- else -}}
{{- printf "%s:7800,%s-headless:7800" $service $service -}}
{{- end -}}
{{- end }}

{{/* The most replicas that a pool may have. */}}
{{- define "tandem.maxReplicas" -}}
{{- if .pool.autoscaling.hpa.enabled -}}
{{- int .pool.autoscaling.hpa.maxReplicas -}}
{{- else if .pool.autoscaling.keda.enabled -}}
{{- int .pool.autoscaling.keda.maxReplicas -}}
{{- else -}}
{{- int .pool.replicas -}}
{{- end -}}
{{- end }}

{{/* Accelerators of one replica as the planner counts them; a worker on CPUs counts as one. */}}
{{- define "tandem.numAccelerators" -}}
{{- if or (ne .accelerator.vendor "none") .accelerator.claims -}}
{{- max 1 (int .accelerator.count) -}}
{{- else -}}
1
{{- end -}}
{{- end }}
