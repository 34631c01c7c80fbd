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

{{- define "tandem.gatewayUrl" -}}
http://{{ include "tandem.fullname" . }}-gateway:{{ int .Values.gateway.service.port }}
{{- end }}
