{{/* Certificates of the processes. Each names its role and this deployment, ROLE.DEPLOYMENT.tandem.internal, and is in a
     Secret of its own, so that a pod has no key but its role's. They are from Secrets that exist, from cert-manager, or
     drawn by the chart: then by a CA whose key is kept nowhere, and found again by `lookup`. */}}

{{- define "tandem.tlsRoles" -}}
{{- list "gateway" "router" "worker" "planner" | toJson -}}
{{- end }}

{{/* Takes the name of a pool. */}}
{{- define "tandem.tlsRole" -}}
{{- ternary "worker" . (has . (list "prefill" "decode")) -}}
{{- end }}

{{- define "tandem.tlsDeployment" -}}
{{- default (printf "%s.%s" .Release.Name .Release.Namespace) .Values.tls.deployment -}}
{{- end }}

{{/* Takes root, role. */}}
{{- define "tandem.tlsName" -}}
{{- printf "%s.%s.tandem.internal" .role (include "tandem.tlsDeployment" .root) -}}
{{- end }}

{{/* Takes root, role. Each source has names of its own: what cert-manager made must not be found again as drawn, nor be
     deleted by Helm as what it drew before. */}}
{{- define "tandem.tlsSecretName" -}}
{{- $source := ternary "certificate" "tls" .root.Values.tls.certManager.enabled -}}
{{- default (printf "%s-%s-%s" (include "tandem.fullname" .root) $source .role) (get .root.Values.tls.existingSecrets .role) -}}
{{- end }}

{{- define "tandem.givesTlsSecrets" -}}
{{- $tls := .Values.tls.existingSecrets -}}
{{- not (empty (coalesce $tls.gateway $tls.router $tls.worker $tls.planner)) -}}
{{- end }}

{{- define "tandem.drawsTls" -}}
{{- and .Values.tls.enabled (not .Values.tls.certManager.enabled) (ne (include "tandem.givesTlsSecrets" .) "true") -}}
{{- end }}

{{/* By role, the data of the Secrets that the chart draws. All or none are found again: their CA is the same. */}}
{{- define "tandem.tlsData" -}}
{{- if not (hasKey .Values "_drawnTls") -}}
{{- $all := dict -}}
{{- range $role := include "tandem.tlsRoles" . | fromJsonArray -}}
{{- $found := lookup "v1" "Secret" $.Release.Namespace (include "tandem.tlsSecretName" (dict "root" $ "role" $role)) | default dict -}}
{{- with $found.data -}}
{{- $_ := set $all $role (pick . "tls.crt" "tls.key" "ca.crt") -}}
{{- end -}}
{{- end -}}
{{- if lt (len $all) (len (include "tandem.tlsRoles" . | fromJsonArray)) -}}
{{- $days := int .Values.tls.days -}}
{{- $ca := genCAWithKey (printf "tandem %s" (include "tandem.tlsDeployment" .) | trunc 64) $days (genPrivateKey "ecdsa") -}}
{{- range $role := include "tandem.tlsRoles" . | fromJsonArray -}}
{{- $names := list (include "tandem.tlsName" (dict "root" $ "role" $role)) -}}
{{- $own := genSignedCertWithKey (printf "tandem %s" $role) nil $names $days $ca (genPrivateKey "ecdsa") -}}
{{- $_ := set $all $role (dict "tls.crt" ($own.Cert | b64enc) "tls.key" ($own.Key | b64enc) "ca.crt" ($ca.Cert | b64enc)) -}}
{{- end -}}
{{- end -}}
{{- $_ := set .Values "_drawnTls" $all -}}
{{- end -}}
{{- .Values._drawnTls | toYaml -}}
{{- end }}

{{/* Takes root, name. */}}
{{- define "tandem.tlsEnv" -}}
{{- if .root.Values.tls.enabled -}}
- name: TANDEM_TLS_DIR
  value: /etc/tandem/tls
{{- else -}}
- name: TANDEM_INSECURE
  value: "true"
{{- end }}
{{- end }}

{{- define "tandem.validateTls" -}}
{{- $tls := .Values.tls -}}
{{- if $tls.enabled -}}
{{- $given := eq (include "tandem.givesTlsSecrets" .) "true" -}}
{{- if and $tls.certManager.enabled $given -}}
{{- fail "tls.certManager.enabled and tls.existingSecrets are both set: certificates come from one of them; remove the other" -}}
{{- end -}}
{{- if and $tls.certManager.enabled (not $tls.certManager.issuerRef.name) -}}
{{- fail "tls.certManager.enabled needs tls.certManager.issuerRef.name, of an Issuer or ClusterIssuer whose certificates have a ca.crt, as one of kind CA" -}}
{{- end -}}
{{- range $pool := list "gateway" "router" "prefill" "decode" "planner" -}}
{{- $role := include "tandem.tlsRole" $pool -}}
{{- if and $given (index $.Values $pool).enabled (not (get $tls.existingSecrets $role)) -}}
{{- fail (printf "tls.existingSecrets.%s is missing: with one of them given each role needs one, with tls.crt for %s, tls.key and ca.crt" $role (include "tandem.tlsName" (dict "root" $ "role" $role))) -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.router.enabled) (eq (include "tandem.drawsTls" .) "true") -}}
{{- fail "router.enabled is false, and routers of another release refuse certificates that this one draws: set tls.existingSecrets to that release's, as other-tandem-tls-worker, or tls.certManager with its issuer and tls.deployment, or tls.enabled=false in both" -}}
{{- end -}}
{{- if and (not .Values.router.enabled) $tls.certManager.enabled (not $tls.deployment) -}}
{{- fail "router.enabled is false, and routers of another release refuse certificates for this one: set tls.deployment to theirs, which is RELEASE.NAMESPACE unless that release sets it" -}}
{{- end -}}
{{- end -}}
{{- end }}
