{{/* The environment of `tandem load`. */}}

{{- define "tandem.loadEnv" -}}
- name: TANDEM_LOAD_URL
  value: {{ default (include "tandem.gatewayUrl" .) .Values.load.url | quote }}
{{- include "tandem.settingsEnv" (dict "settings" .Values.load.settings "prefix" "TANDEM_LOAD_") }}
- name: HOME
  value: /tmp
- name: MPLCONFIGDIR
  value: /tmp/matplotlib
{{- end }}
