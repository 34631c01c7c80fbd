{{/* The pod of every pool. All of these take root, name, pool, and hosts: true for further hosts of its workers' ranks. */}}

{{- define "tandem.pod" -}}
metadata:
  labels:
    {{- include "tandem.podLabels" . | nindent 4 }}
  annotations:
    checksum/config: {{ include "tandem.secretData" .root | sha256sum }}
    {{- with .pool.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "tandem.serviceAccount" . | quote }}
  automountServiceAccountToken: {{ include "tandem.needsApi" . }}
  {{- /* NOTE: a Service named tandem-… would else set TANDEM_…_PORT in every pod */}}
  enableServiceLinks: false
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "tandem.overlay" (list .root.Values.podSecurityContext .pool.podSecurityContext) | nindent 4 }}
  terminationGracePeriodSeconds: {{ include "tandem.gracePeriod" . }}
  {{- if .pool.hostIPC }}
  hostIPC: true
  {{- end }}
  {{- if .pool.hostPID }}
  hostPID: true
  {{- end }}
  {{- with .pool.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with .pool.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with .pool.readinessGates }}
  readinessGates:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pool.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pool.affinity }}
  affinity:
    {{- tpl (toYaml .) $.root | nindent 4 }}
  {{- end }}
  {{- with .pool.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- include "tandem.topologySpread" . | nindent 2 }}
  {{- with .pool.accelerator.claims }}
  resourceClaims:
    {{- range . }}
    - {{ omit . "request" | toYaml | nindent 6 | trim }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .name }}
      {{- $class := ternary "worker" "control" (has .name (list "prefill" "decode")) }}
      {{- include "tandem.image" (dict "root" .root "class" $class "image" .pool.image) | nindent 6 }}
      command: [python3, -m, services.{{ ternary "rank_host" .name (default false .hosts) }}]
      {{- if and .pool.args (not .hosts) }}
      args:
        {{- toYaml .pool.args | nindent 8 }}
      {{- end }}
      securityContext:
        {{- include "tandem.containerSecurity" . | nindent 8 }}
      env:
        {{- include "tandem.env" . | trim | nindent 8 }}
        {{- with .pool.extraEnv }}
        {{- tpl (toYaml .) $.root | nindent 8 }}
        {{- end }}
      {{- with .pool.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        {{- range $port, $number := include "tandem.ports" . | fromYaml }}
        - name: {{ $port }}
          containerPort: {{ $number }}
        {{- end }}
      {{- include "tandem.probes" . | nindent 6 }}
      {{- if int .pool.termination.preStopSeconds }}
      lifecycle:
        preStop:
          exec:
            command: [sleep, {{ int .pool.termination.preStopSeconds | quote }}]
      {{- end }}
      resources:
        {{- include "tandem.resources" . | nindent 8 }}
      volumeMounts:
        {{- include "tandem.mounts" . | trim | nindent 8 }}
  volumes:
    {{- include "tandem.volumes" . | trim | nindent 4 }}
{{- end }}

{{/* Ports by name. Takes name, pool, hosts. */}}
{{- define "tandem.ports" -}}
{{- if eq .name "gateway" -}}
http: 8000
metrics: 8001
{{- else if eq .name "router" -}}
grpc: 7800
metrics: 7801
{{- else if eq .name "planner" -}}
metrics: 7951
{{- else if .hosts -}}
metrics: 7901
kv: 7902
{{- else -}}
grpc: 7900
metrics: 7901
kv: 7902
{{- if eq (include "tandem.hasHosts" .) "true" }}
ranks: 7903
{{- end }}
{{- end -}}
{{- end }}

{{/* preStop, then draining, then a margin, unless a longer time is given. */}}
{{- define "tandem.gracePeriod" -}}
{{- $end := .pool.termination -}}
{{- default (add (int $end.preStopSeconds) (int $end.drainSeconds) 15) (int $end.gracePeriodSeconds) -}}
{{- end }}

{{- define "tandem.containerSecurity" -}}
{{- $security := include "tandem.overlay" (list .root.Values.securityContext .pool.securityContext) | fromYaml -}}
{{- if .pool.rdma.ipcLock -}}
{{- $capabilities := $security.capabilities | default dict -}}
{{- $added := append ($capabilities.add | default list) "IPC_LOCK" | uniq -}}
{{- $_ := set $security "capabilities" (set $capabilities "add" $added) -}}
{{- end -}}
{{- toYaml $security -}}
{{- end }}

{{/* The first map with the second's entries over it. NOTE: `merge` would take a false for nothing said. */}}
{{- define "tandem.overlay" -}}
{{- $all := dict -}}
{{- range . -}}
{{- range $key, $value := . -}}
{{- $_ := set $all $key $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $all -}}
{{- end }}

{{- define "tandem.topologySpread" -}}
{{- if .pool.topologySpreadConstraints -}}
topologySpreadConstraints:
{{- range .pool.topologySpreadConstraints }}
{{- $own := dict "labelSelector" (dict "matchLabels" (include "tandem.selector" $ | fromYaml)) }}
  - {{ merge (deepCopy .) $own | toYaml | nindent 4 | trim }}
{{- end }}
{{- end -}}
{{- end }}

{{- define "tandem.probe" -}}
httpGet:
  path: {{ .path }}
  port: {{ .port }}
periodSeconds: {{ int .probes.periodSeconds }}
timeoutSeconds: {{ int .probes.timeoutSeconds }}
{{- end }}

{{/* A worker's /health answers once its model is loaded, that of a further host once it has joined; /live while the
process does, also while it drains. */}}
{{- define "tandem.probes" -}}
{{- $isGateway := eq .name "gateway" -}}
{{- $port := ternary "http" "metrics" $isGateway -}}
{{- $probes := .pool.probes -}}
startupProbe:
  {{- include "tandem.probe" (dict "path" "/health" "port" $port "probes" $probes) | nindent 2 }}
  failureThreshold: {{ div (add (int $probes.startupSeconds) (int $probes.periodSeconds) -1) (int $probes.periodSeconds) }}
readinessProbe:
  {{- include "tandem.probe" (dict "path" (ternary "/ready" "/health" $isGateway) "port" $port "probes" $probes) | nindent 2 }}
  failureThreshold: {{ int $probes.failureThreshold }}
livenessProbe:
  {{- include "tandem.probe" (dict "path" (ternary "/health" "/live" $isGateway) "port" $port "probes" $probes) | nindent 2 }}
  failureThreshold: {{ int $probes.failureThreshold }}
{{- end }}

{{/* Resources as texts; extended ones requested as they are limited. */}}
{{- define "tandem.resources" -}}
{{- $devices := dict -}}
{{- with .pool.accelerator -}}
{{- if ne .vendor "none" -}}
{{- $_ := set $devices (default (get $.root.Values.acceleratorResources .vendor) .resource) .count -}}
{{- end -}}
{{- end -}}
{{- with .pool.rdma -}}
{{- if and .enabled .resource -}}
{{- $_ := set $devices .resource .count -}}
{{- end -}}
{{- end -}}
{{- range $kind := list "requests" "limits" }}
{{- $all := merge (deepCopy $devices) (get $.pool.resources $kind | default dict) }}
{{- if $all }}
{{ $kind }}:
  {{- range $name, $quantity := $all }}
  {{ $name }}: {{ include "tandem.scalar" $quantity | quote }}
  {{- end }}
{{- end }}
{{- end }}
{{- with .pool.accelerator.claims }}
claims:
  {{- range . }}
  - {{ pick . "name" "request" | toYaml | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "tandem.usesRedisCa" -}}
{{- and (eq (include "tandem.hasRedisCa" .root) "true") (has .name (list "gateway" "router" "prefill" "decode")) -}}
{{- end }}

{{- define "tandem.mounts" -}}
- name: tmp
  mountPath: /tmp
{{- if has .name (list "gateway" "prefill" "decode") }}
- name: cache
  mountPath: /var/cache/tandem
{{- include "tandem.modelMount" .root }}
{{- end }}
{{- if .pool.shm.sizeLimit }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  mountPath: /etc/tandem/tls
  readOnly: true
{{- end }}
{{- if eq (include "tandem.usesRedisCa" .) "true" }}
{{ include "tandem.redisCaMount" .root }}
{{- end }}
{{- with .pool.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "tandem.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if has .name (list "gateway" "prefill" "decode") }}
{{ include "tandem.cacheVolume" .root }}
{{- include "tandem.modelVolume" .root }}
{{- end }}
{{- with .pool.shm.sizeLimit }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ . | quote }}
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "tandem.tlsSecretName" (dict "root" .root "role" (include "tandem.tlsRole" .name)) | quote }}
{{- end }}
{{- if eq (include "tandem.usesRedisCa" .) "true" }}
{{ include "tandem.redisCaVolume" .root }}
{{- end }}
{{- with .pool.volumes }}
{{ tpl (toYaml .) $.root }}
{{- end }}
{{- end }}
