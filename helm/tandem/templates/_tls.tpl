{{/* Certificates of the processes. Each names its role and this deployment, ROLE.DEPLOYMENT.tandem.internal, and is in a
     Secret of its own, so that a pod has no key but its role's. They are from Secrets that exist, from cert-manager, or
     drawn by the chart: then by a CA whose key is kept nowhere, found again by `lookup`, and renewed by upgrades. The
     chart's Redis has one too, for its service's name. It is drawn by CAs of its own: what was drawn for the processes
     before Redis had one cannot sign it. */}}

{{/* Takes a group: "" (the processes) or "redis". */}}
{{- define "tandem.tlsRoles" -}}
{{- ternary (list "redis") (list "gateway" "router" "worker" "planner") (eq . "redis") | toJson -}}
{{- end }}

{{/* The groups whose certificates the chart draws. */}}
{{- define "tandem.tlsGroups" -}}
{{- $groups := list "" -}}
{{- if eq (include "tandem.makesRedisTls" .) "true" -}}
{{- $groups = append $groups "redis" -}}
{{- end -}}
{{- $groups | toJson -}}
{{- end }}

{{/* Whether the chart or cert-manager makes the certificate of the chart's Redis: it has one, and no Secret is given. */}}
{{- define "tandem.makesRedisTls" -}}
{{- and (eq (include "tandem.redisHasTls" .) "true") (empty .Values.tls.existingSecrets.redis) -}}
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

{{/* The names in a role's certificate. Takes root, role. */}}
{{- define "tandem.tlsNames" -}}
{{- if eq .role "redis" -}}
{{- $service := printf "%s-redis" (include "tandem.fullname" .root) -}}
{{- $inNamespace := printf "%s.%s" $service .root.Release.Namespace -}}
{{- list $service $inNamespace (printf "%s.svc" $inNamespace) | toJson -}}
{{- else -}}
{{- list (include "tandem.tlsName" .) | toJson -}}
{{- end -}}
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

{{/* Takes root, group, days. A CA whose key is kept nowhere, and by role what it signed; drawn now. */}}
{{- define "tandem.tlsDraw" -}}
{{- $ca := genCAWithKey (printf "tandem %s" (include "tandem.tlsDeployment" .root) | trunc 64) .days (genPrivateKey "ecdsa") -}}
{{- $data := dict "ca.crt" $ca.Cert -}}
{{- range $role := include "tandem.tlsRoles" .group | fromJsonArray -}}
{{- $names := include "tandem.tlsNames" (dict "root" $.root "role" $role) | fromJsonArray -}}
{{- $own := genSignedCertWithKey (printf "tandem %s" $role) nil $names $.days $ca (genPrivateKey "ecdsa") -}}
{{- $_ := set $data (printf "%s.crt" $role) $own.Cert -}}
{{- $_ := set $data (printf "%s.key" $role) $own.Key -}}
{{- end -}}
{{- $now := now | unixEpoch | int64 -}}
{{- dict "data" $data "drawn" $now "ends" (add $now (mul .days 86400)) | toJson -}}
{{- end }}

{{/* Takes root, name: of a Secret. What `tandem.tlsDraw` made and that Secret keeps, without its role's; empty if there is
     none. Earlier charts wrote no dates. */}}
{{- define "tandem.tlsFound" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .name | default dict -}}
{{- with $found.data -}}
{{- $layout := "2006-01-02T15:04:05Z07:00" -}}
{{- $dates := $found.metadata.annotations | default dict -}}
{{- $drawn := toDate $layout (get $dates "tandem.dev/drawn" | default $found.metadata.creationTimestamp) | unixEpoch | int64 -}}
{{- $ends := add $drawn (mul (int $.root.Values.tls.days) 86400) -}}
{{- with get $dates "tandem.dev/ends" -}}
{{- $ends = toDate $layout . | unixEpoch | int64 -}}
{{- end -}}
{{- $data := dict -}}
{{- range $key, $value := . -}}
{{- $_ := set $data $key ($value | b64dec) -}}
{{- end -}}
{{- dict "data" $data "drawn" $drawn "ends" $ends | toJson -}}
{{- end -}}
{{- end }}

{{/* Takes root, group. What the pods use (`used`), what follows it (`next`), and the CAs that all trust (`trusted`, the used one first).

     A renewal takes what was drawn as next, whose CA all pods trust since then, and draws what follows. So a pod that has
     the new Secret and one that has the old accept each other, and one upgrade is enough. A Secret that was deleted is a
     wish for one. */}}
{{- define "tandem.tlsGenerations" -}}
{{- $values := .root.Values -}}
{{- $key := printf "_drawnTls%s" .group -}}
{{- if not (hasKey $values $key) -}}
{{- $used := dict -}}
{{- range $role := include "tandem.tlsRoles" .group | fromJsonArray -}}
{{- $found := include "tandem.tlsFound" (dict "root" $.root "name" (include "tandem.tlsSecretName" (dict "root" $.root "role" $role))) -}}
{{- if $found -}}
{{- $_ := set $used $role ($found | fromJson) -}}
{{- end -}}
{{- end -}}
{{- $now := now | unixEpoch | int64 -}}
{{- $draw := dict "root" .root "group" .group "days" (int $values.tls.days) -}}
{{- $found := include "tandem.tlsFound" (dict "root" .root "name" (include "tandem.tlsNextName" .)) -}}
{{- $next := ternary (include "tandem.tlsDraw" $draw) $found (empty $found) | fromJson -}}
{{- $isFound := eq (len $used) (len (include "tandem.tlsRoles" .group | fromJsonArray)) -}}
{{- $current := dict "data" dict "drawn" 0 "ends" 0 -}}
{{- $former := "" -}}
{{- range $role, $secret := $used -}}
{{- $_ := set $current "drawn" $secret.drawn -}}
{{- $_ := set $current "ends" $secret.ends -}}
{{- $_ := set $current.data (printf "%s.crt" $role) (get $secret.data "tls.crt") -}}
{{- $_ := set $current.data (printf "%s.key" $role) (get $secret.data "tls.key") -}}
{{- $cas := regexFindAll "(?s)-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----\n?" (get $secret.data "ca.crt") -1 -}}
{{- $_ := set $current.data "ca.crt" (first $cas) -}}
{{- $former = last $cas -}}
{{- end -}}
{{- if or (not $used) (le (int64 $next.ends) $now) -}}
{{- $current = include "tandem.tlsDraw" $draw | fromJson -}}
{{- $next = include "tandem.tlsDraw" $draw | fromJson -}}
{{- $former = "" -}}
{{- else if or (not $isFound) (eq (include "tandem.tlsIsDue" (dict "now" $now "used" $current "next" $next)) "true") -}}
{{- $former = index $current.data "ca.crt" -}}
{{- $current = $next -}}
{{- $next = include "tandem.tlsDraw" $draw | fromJson -}}
{{- end -}}
{{- $trusted := list (index $current.data "ca.crt") (index $next.data "ca.crt") $former | compact | uniq | join "" -}}
{{- $_ := set $values $key (dict "used" $current "next" $next "trusted" $trusted) -}}
{{- end -}}
{{- get $values $key | toJson -}}
{{- end }}

{{/* Takes now, used, next. Whether what was drawn as next takes over: after a third of its time, or when a third of the used one's is left. Not before the kubelets have brought its CA to all pods, unless the used one
     is of no use any more. */}}
{{- define "tandem.tlsIsDue" -}}
{{- $age := sub .now (int64 .next.drawn) -}}
{{- $left := sub (int64 .used.ends) .now -}}
{{- $isOld := ge $age (div (sub (int64 .next.ends) (int64 .next.drawn)) 3) -}}
{{- $endsSoon := le $left (div (sub (int64 .used.ends) (int64 .used.drawn)) 3) -}}
{{- or $isOld (and $endsSoon (or (ge $age 3600) (le $left 0))) -}}
{{- end }}

{{/* Takes used, next. When an upgrade renews, and by when one must. */}}
{{- define "tandem.tlsRenewal" -}}
{{- $third := div (sub (int64 .next.ends) (int64 .next.drawn)) 3 -}}
{{- $from := min (add (int64 .next.drawn) $third) (sub (int64 .used.ends) (div (sub (int64 .used.ends) (int64 .used.drawn)) 3)) -}}
{{- printf "from %s on, and must by %s" (dateInZone "2006-01-02" $from "UTC") (dateInZone "2006-01-02" (int64 .used.ends) "UTC") -}}
{{- end }}

{{/* Takes drawn, ends. */}}
{{- define "tandem.tlsDates" -}}
tandem.dev/drawn: {{ dateInZone "2006-01-02T15:04:05Z" (int64 .drawn) "UTC" | quote }}
tandem.dev/ends: {{ dateInZone "2006-01-02T15:04:05Z" (int64 .ends) "UTC" | quote }}
{{- end }}

{{/* Takes root, group. */}}
{{- define "tandem.tlsNextName" -}}
{{- list (include "tandem.fullname" .root) "tls" .group "next" | compact | join "-" -}}
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
