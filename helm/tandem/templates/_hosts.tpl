{{/* Workers whose ranks are in several pods: each is a group of a LeaderWorkerSet, made, replaced and drained as one. */}}

{{/* Takes root, name, pool. */}}
{{- define "tandem.leaderWorkerSet" -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ include "tandem.fullname" .root }}-{{ .name }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- include "tandem.labels" . | nindent 4 }}
spec:
  {{- if eq (include "tandem.isScaled" .) "false" }}
  replicas: {{ int .pool.replicas }}
  {{- end }}
  {{- /* NOTE: a leader is ready once its hosts have joined, so they do not wait for that */}}
  startupPolicy: LeaderCreated
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration:
      maxSurge: {{ .pool.rollout.maxSurge }}
      maxUnavailable: {{ .pool.rollout.maxUnavailable }}
  networkConfig:
    subdomainPolicy: Shared
  leaderWorkerTemplate:
    size: {{ int .pool.ranks.hosts }}
    {{- /* NOTE: KV of ranks is lost with their host, so all begin anew */}}
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate:
      {{- include "tandem.pod" . | nindent 6 }}
    workerTemplate:
      {{- include "tandem.pod" (set (omit . "hosts") "hosts" true) | nindent 6 }}
{{- end }}

{{/* Environment of a further host. LeaderWorkerSet's variables come before a container's own. */}}
{{- define "tandem.env.hosts" }}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: TANDEM_LEADER
  value: $(LWS_LEADER_ADDRESS):7903
- name: TANDEM_KV_BIND
  value: "{{ include "tandem.anyBind" .root }}:7902"
- name: TANDEM_ADVERTISE_HOST
  value: $(POD_IP)
- name: TANDEM_HOST
  value: {{ include "tandem.anyAddress" .root | quote }}
- name: TANDEM_METRICS_PORT
  value: "7901"
{{- end }}

{{/* Workers read KV of further hosts, which join their leaders. Takes root, name, policy. */}}
{{- define "tandem.hostsPolicy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "tandem.fullname" .root }}-{{ .name }}-hosts
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- include "tandem.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "tandem.selector" . | nindent 6 }}
  policyTypes: [Ingress{{ if .policy.egress }}, Egress{{ end }}]
  ingress:
    - from:
        - podSelector:
            matchExpressions:
              - key: app.kubernetes.io/component
                operator: In
                values: [prefill, prefill-hosts, decode, decode-hosts]
            matchLabels:
              {{- include "tandem.releaseLabels" .root | nindent 14 }}
        {{- with .policy.extraFrom }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - port: kv
    {{- if and .root.Values.monitoring.enabled .policy.metricsFrom }}
    - from:
        {{- toYaml .policy.metricsFrom | nindent 8 }}
      ports:
        - port: metrics
    {{- end }}
  {{- if .policy.egress }}
  egress:
    {{- include "tandem.egress" . | nindent 4 }}
  {{- end }}
{{- end }}
