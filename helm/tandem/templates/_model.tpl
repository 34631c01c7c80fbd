{{/* Where the model comes from, by the form of model.uri:
     hf://org/name[@rev]     downloaded from the Hugging Face hub into the cache
     pvc://claim/path        a volume, mounted read only at /models
     host:///path            a directory of the node, mounted read only at /models
     /path                   a directory of the image, or of what `volumes` mounts */}}

{{- define "tandem.modelPath" -}}
{{- $uri := .Values.model.uri | trimSuffix "/" -}}
{{- if hasPrefix "hf://" $uri -}}
{{- trimPrefix "hf://" $uri -}}
{{- else if hasPrefix "pvc://" $uri -}}
{{- $path := regexReplaceAll "^pvc://[^/]+/?" $uri "" -}}
{{- list "/models" $path | compact | join "/" -}}
{{- else if hasPrefix "host://" $uri -}}
{{- printf "/models/%s" (base $uri) -}}
{{- else -}}
{{- $uri -}}
{{- end -}}
{{- end }}

{{- define "tandem.servedName" -}}
{{- if .Values.model.servedName -}}
{{- .Values.model.servedName -}}
{{- else if hasPrefix "hf://" .Values.model.uri -}}
{{- regexReplaceAll "@.*$" (include "tandem.modelPath" .) "" -}}
{{- else -}}
{{- base (trimSuffix "/" (regexReplaceAll "^(pvc|host)://" .Values.model.uri "")) -}}
{{- end -}}
{{- end }}

{{- define "tandem.modelVolume" -}}
{{- $uri := .Values.model.uri | trimSuffix "/" -}}
{{- if hasPrefix "pvc://" $uri }}
- name: model
  persistentVolumeClaim:
    claimName: {{ regexFind "^[^/]+" (trimPrefix "pvc://" $uri) | quote }}
    readOnly: true
{{- else if hasPrefix "host://" $uri }}
- name: model
  hostPath:
    path: {{ trimPrefix "host://" $uri | quote }}
    type: Directory
{{- end }}
{{- end }}

{{- define "tandem.modelMount" -}}
{{- $uri := .Values.model.uri -}}
{{- if hasPrefix "pvc://" $uri }}
- name: model
  mountPath: /models
  readOnly: true
{{- else if hasPrefix "host://" $uri }}
- name: model
  mountPath: {{ include "tandem.modelPath" . | quote }}
  readOnly: true
{{- end }}
{{- end }}

{{/* What downloading needs. */}}
{{- define "tandem.hubEnv" -}}
{{- if hasPrefix "hf://" .Values.model.uri }}
- name: HF_HUB_DISABLE_TELEMETRY
  value: "1"
{{- with .Values.model.authSecret.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . | quote }}
      key: {{ $.Values.model.authSecret.key | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Writable room for downloads and compiled kernels. */}}
{{- define "tandem.cacheVolume" -}}
- name: cache
{{- with .Values.model.cache.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ . | quote }}
{{- else }}
  emptyDir:
    {{- with .Values.model.cache.sizeLimit }}
    sizeLimit: {{ . | quote }}
    {{- else }}
    {}
    {{- end }}
{{- end }}
{{- end }}
