{{/* The pod of `tandem load`, and its environment. */}}

{{- define "tandem.loadTemplate" -}}
{{- $load := .Values.load -}}
{{- $context := dict "root" . "name" "load" "resources" $load.resources -}}
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
      command: [tandem, load]
      {{- with $load.args }}
      args:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      env:
        {{- include "tandem.loadEnv" . | nindent 8 }}
        {{- with $load.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        - name: results
          mountPath: /results
        {{- with $load.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: results
      {{- with $load.results.existingClaim }}
      persistentVolumeClaim:
        claimName: {{ . }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    {{- with $load.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "tandem.loadEnv" -}}
- name: TANDEM_LOAD_URL
  value: {{ default (include "tandem.gatewayUrl" .) .Values.load.url | quote }}
{{- include "tandem.settingsEnv" (dict "settings" .Values.load.settings "prefix" "TANDEM_LOAD_") }}
- name: HOME
  value: /tmp
- name: MPLCONFIGDIR
  value: /tmp/matplotlib
{{- end }}
