{{/* What pods may connect to. Ports of what is outside the release follow from values; extraEgress adds the rest. */}}

{{/* Egress rules of a pool but Redis. Takes root, name. */}}
{{- define "tandem.egress" -}}
{{- $values := .root.Values -}}
{{- /* NOTE: workers of other releases may serve this one's gateways, and take blocks from each other */}}
- to:
    - namespaceSelector: {}
      podSelector:
        matchLabels:
          app.kubernetes.io/name: tandem
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- $ports := include "tandem.egressPorts" . | fromJsonArray | uniq }}
{{- if $ports }}
- ports:
    {{- range $ports }}
    - port: {{ int . }}
      protocol: TCP
    {{- end }}
{{- end }}
{{- with $values.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* TCP ports outside the release: an external Redis, other routers, the hub, the collector, the Kubernetes API. */}}
{{- define "tandem.egressPorts" -}}
{{- $values := .root.Values -}}
{{- $ports := list -}}
{{- if and (not $values.redis.enabled) (eq (include "tandem.hasRedis" .root) "true") (ne .name "planner") -}}
{{- $ports = append $ports (int $values.externalRedis.port) -}}
{{- end -}}
{{- $accounts := default "" $values.gateway.settings.accounts -}}
{{- if and (eq .name "gateway") (regexMatch "^rediss?([+]sentinel)?://" $accounts) -}}
{{- $isSentinel := contains "+sentinel" $accounts -}}
{{- range splitList "," (regexReplaceAll ".*@" (regexReplaceAll "^[^/]*//|[/?].*$" $accounts "") "") -}}
{{- $ports = append $ports (int (default (ternary "26379" "6379" $isSentinel) (regexFind "[0-9]+$" (regexFind ":[0-9]+$" .)))) -}}
{{- end -}}
{{- if $isSentinel -}}
{{- $ports = append $ports 6379 -}}
{{- end -}}
{{- end -}}
{{- if not $values.router.enabled -}}
{{- range splitList "," $values.router.externalAddresses -}}
{{- $ports = append $ports (int (regexFind "[0-9]+$" (trim .))) -}}
{{- end -}}
{{- end -}}
{{- if and (hasPrefix "hf://" $values.model.uri) (has .name (list "gateway" "prefill" "decode")) -}}
{{- $ports = append $ports 443 -}}
{{- end -}}
{{- if and $values.otlpEndpoint (has .name (list "gateway" "prefill" "decode")) -}}
{{- $url := urlParse $values.otlpEndpoint -}}
{{- $ports = append $ports (int (default (ternary "443" "80" (eq $url.scheme "https")) (regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host)))) -}}
{{- end -}}
{{- if or (eq .name "planner") (and (eq .name "router") (eq (include "tandem.discovery" .root) "kubernetes")) -}}
{{- $ports = concat $ports (list 443 6443) -}}
{{- end -}}
{{- $ports | toJson -}}
{{- end }}
