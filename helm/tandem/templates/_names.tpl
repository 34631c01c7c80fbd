{{/* Names, labels and references that every object shares. */}}

{{- define "tandem.fullname" -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $chart .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $chart | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* What selects every pod of this release. */}}
{{- define "tandem.releaseLabels" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* What selects the pods of one component. Takes root, name, and hosts: true for further hosts of its workers' ranks. */}}
{{- define "tandem.selector" -}}
{{ include "tandem.releaseLabels" .root }}
app.kubernetes.io/component: {{ .name }}{{ if .hosts }}-hosts{{ end }}
{{- end }}

{{/* Labels of every object; commonLabels add to them, for monitors find Services by these. Takes root, name. */}}
{{- define "tandem.labels" -}}
{{- $version := dict "app.kubernetes.io/version" .root.Chart.AppVersion "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $chart := dict "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- merge (include "tandem.selector" . | fromYaml) $version $chart .root.Values.commonLabels | toYaml -}}
{{- end }}

{{/* Labels of a pod: without versions, which would restart it for a new chart. Takes root, name, hosts, podLabels. */}}
{{- define "tandem.templateLabels" -}}
{{- merge (include "tandem.selector" . | fromYaml) .podLabels .root.Values.commonLabels | toYaml -}}
{{- end }}

{{/* Labels of a pool's pods. Takes root, name, pool, hosts. */}}
{{- define "tandem.podLabels" -}}
{{- $labels := include "tandem.selector" . | fromYaml -}}
{{- /* NOTE: routers look for workers by this label, and further hosts answer nobody */ -}}
{{- if and (has .name (list "prefill" "decode")) (not .hosts) -}}
{{- $_ := set $labels "tandem.dev/role" .name -}}
{{- end -}}
{{- if eq (include "tandem.hasHosts" .) "true" -}}
{{- $_ := set $labels "tandem.dev/group" .name -}}
{{- end -}}
{{- if has .name (list "prefill" "decode" "gateway") -}}
{{- $_ := set $labels "tandem.dev/model" (include "tandem.labelValue" (include "tandem.servedName" .root)) -}}
{{- with .root.Values.model.version -}}
{{- $_ := set $labels "tandem.dev/model-version" (include "tandem.labelValue" .) -}}
{{- end -}}
{{- end -}}
{{- if eq .name "gateway" -}}
{{- $labels = merge $labels .root.Values.gatewayApi.inferencePoolLabels -}}
{{- end -}}
{{- include "tandem.templateLabels" (dict "root" .root "name" .name "hosts" .hosts "podLabels" (merge $labels .pool.podLabels)) -}}
{{- end }}

{{- define "tandem.labelValue" -}}
{{- regexReplaceAll "[^A-Za-z0-9._-]" . "-" | trunc 63 | trimAll "-._" -}}
{{- end }}

{{/* A number, a truth value or a text as one word. Numbers of values files are floats, which print as 1e+06. */}}
{{- define "tandem.scalar" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ toJson . }}{{ end -}}
{{- end }}

{{/* A quantity such as 1.5Gi in whole units. */}}
{{- define "tandem.bytes" -}}
{{- $words := include "tandem.scalar" . -}}
{{- $unit := regexFind "[A-Za-z]*$" $words -}}
{{- $decimal := dict "" 1.0 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- $binary := dict "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 -}}
{{- int64 (mulf (float64 (trimSuffix $unit $words)) (get (merge $decimal $binary) $unit)) -}}
{{- end }}

{{/* An image reference. Takes image (may be partial), defaults, version. */}}
{{- define "tandem.imageName" -}}
{{- /* NOTE: a digest is of one image: it is no default for another repository or tag */ -}}
{{- $defaults := ternary .defaults (omit .defaults "digest") (empty (coalesce .image.repository .image.tag)) -}}
{{- $image := merge (deepCopy .image) $defaults -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default .version $image.tag) -}}
{{- end -}}
{{- end }}

{{/* image and imagePullPolicy of a container. Takes root, class (control or worker), image. */}}
{{- define "tandem.image" -}}
{{- $defaults := index .root.Values.images .class -}}
image: {{ include "tandem.imageName" (dict "image" .image "defaults" $defaults "version" .root.Chart.AppVersion) | quote }}
imagePullPolicy: {{ default $defaults.pullPolicy .image.pullPolicy }}
{{- end }}

{{- define "tandem.serviceAccount" -}}
{{- if .pool.serviceAccount.create -}}
{{- default (printf "%s-%s" (include "tandem.fullname" .root) .name) .pool.serviceAccount.name -}}
{{- else -}}
{{- default "default" .pool.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{/* "true" for pods that talk to the Kubernetes API. */}}
{{- define "tandem.needsApi" -}}
{{- if or (eq .name "planner") (and (eq .name "router") (eq (include "tandem.discovery" .root) "kubernetes")) -}}
true
{{- else -}}
false
{{- end -}}
{{- end }}

{{/* "true" for pools whose workers have ranks in several pods. Takes name, pool. */}}
{{- define "tandem.hasHosts" -}}
{{- and (has .name (list "prefill" "decode")) (gt (int (dig "ranks" "hosts" 1 .pool)) 1) -}}
{{- end }}

{{/* apiVersion and kind of what makes a pool's pods. Takes name, pool. */}}
{{- define "tandem.workload" -}}
{{- if eq (include "tandem.hasHosts" .) "true" -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: Deployment
{{- end -}}
{{- end }}

{{/* "true" where something else than the chart sets a pool's replicas. */}}
{{- define "tandem.isScaled" -}}
{{- $planned := and .root.Values.planner.enabled (eq .root.Values.planner.mode "act") (has .name (list "prefill" "decode")) -}}
{{- if or $planned .pool.autoscaling.hpa.enabled .pool.autoscaling.keda.enabled -}}
true
{{- else -}}
false
{{- end -}}
{{- end }}

{{/* Addresses to listen at and to be called at. */}}
{{- define "tandem.anyAddress" -}}
{{- if eq .Values.ipFamily "IPv6" }}::{{ else }}0.0.0.0{{ end -}}
{{- end }}
{{- define "tandem.anyBind" -}}
{{- if eq .Values.ipFamily "IPv6" }}[::]{{ else }}0.0.0.0{{ end -}}
{{- end }}
{{- define "tandem.podHost" -}}
{{- if eq .Values.ipFamily "IPv6" }}[$(POD_IP)]{{ else }}$(POD_IP){{ end -}}
{{- end }}
