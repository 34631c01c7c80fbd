{{/* The pod of `tandem load`, and its environment. */}}

{{- define "tandem.loadTemplate" -}}
{{- $load := .Values.load -}}
{{- $context := dict "root" . "name" "load" "resources" $load.resources -}}
{{- $accounts := "" -}}
{{- if and (not $load.url) (ne (include "tandem.names" (dict "env" $load.extraEnv "names" (list "TANDEM_LOAD_API_KEY" "TANDEM_ACCOUNTS"))) "true") -}}
{{- $accounts = include "tandem.jobAccounts" . -}}
{{- end -}}
{{- $needsCa := eq (include "tandem.jobRedisCa" (dict "root" . "accounts" $accounts)) "true" -}}
metadata:
  labels:
    {{- include "tandem.templateLabels" (dict "root" . "name" "load" "podLabels" dict) | nindent 4 }}
spec:
  {{- include "tandem.jobPod" $context | nindent 2 }}
  {{- with $load.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $load.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: load
      {{- include "tandem.jobContainer" $context | nindent 6 }}
      {{- if $accounts }}
      command: [python3, -c]
      args:
        - |
          {{- .Files.Get "files/with_key.py" | nindent 10 }}
        - TANDEM_LOAD_API_KEY
        - --name
        - load
        - --admin
        - --
        - tandem
        - load
      {{- else }}
      command: [tandem, load]
      {{- if $load.args }}
      args:
      {{- end }}
      {{- end }}
        {{- with $load.args }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        {{- include "tandem.loadEnv" . | nindent 8 }}
        {{- if $accounts }}
        {{- $accounts | nindent 8 }}
        - name: TIMEOUT_S
          value: {{ include "tandem.scalar" (default 300 $load.settings.readyTimeoutS) | quote }}
        {{- end }}
        {{- with $load.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        - name: results
          mountPath: /results
        {{- if $needsCa }}
        {{- include "tandem.redisCaMount" . | nindent 8 }}
        {{- end }}
        {{- with $load.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: results
      {{- with $load.results.existingClaim }}
      persistentVolumeClaim:
        claimName: {{ . | quote }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    {{- if $needsCa }}
    {{- include "tandem.redisCaVolume" . | nindent 4 }}
    {{- end }}
    {{- with $load.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "tandem.loadEnv" -}}
- name: TANDEM_LOAD_URL
  value: {{ default (include "tandem.gatewayUrl" .) .Values.load.url | quote }}
{{- if and (not .Values.load.url) (not (hasKey .Values.load.settings "adminUrl")) }}
- name: TANDEM_LOAD_ADMIN_URL
  value: http://{{ include "tandem.fullname" . }}-gateway-headless:8001
{{- end }}
{{- include "tandem.settingsEnv" (dict "settings" .Values.load.settings "prefix" "TANDEM_LOAD_") }}
- name: HOME
  value: /tmp
- name: MPLCONFIGDIR
  value: /tmp/matplotlib
{{- end }}
