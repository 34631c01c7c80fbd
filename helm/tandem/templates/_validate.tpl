{{/* What the schema cannot say. Each message names the values and the remedy. */}}

{{- define "tandem.validate" -}}
{{- $values := .Values -}}
{{- if not .Values.model.uri -}}
{{- fail "model.uri is required: hf://org/name, pvc://claim/path, host:///directory or /directory/in/the/image" -}}
{{- end -}}
{{- $fullname := include "tandem.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $fullname) -}}
{{- fail (printf "objects of this release would be called %s-gateway and so on, and a Service's name begins with a letter and has only a-z, 0-9 and -: set fullnameOverride, as fullnameOverride=tandem, or name the release otherwise" $fullname) -}}
{{- end -}}
{{- if not .Values.decode.enabled -}}
{{- fail "decode.enabled is false, and without decode workers nothing answers: set decode.enabled=true; prefill may be disabled, decode then computes prompts itself" -}}
{{- end -}}
{{- include "tandem.validateRedis" . -}}
{{- include "tandem.validateRouter" . -}}
{{- include "tandem.validateTls" . -}}
{{- range $name := list "gateway" "router" "prefill" "decode" "planner" -}}
{{- if (index $values $name).enabled -}}
{{- include "tandem.validatePool" (dict "root" $ "name" $name "pool" (index $values $name)) -}}
{{- end -}}
{{- end -}}
{{- range $key := list "blockSize" "dtype" -}}
{{- if and $values.prefill.enabled (ne (toString (get $values.prefill.settings $key)) (toString (get $values.decode.settings $key))) -}}
{{- fail (printf "prefill.settings.%s and decode.settings.%s differ, so their workers could not share blocks: set both to the same" $key $key) -}}
{{- end -}}
{{- end -}}
{{- include "tandem.validateAccounts" . -}}
{{- include "tandem.validatePlanner" . -}}
{{- include "tandem.validateTransport" . -}}
{{- if and .Values.gatewayApi.enabled (not .Values.gatewayApi.parentRefs) -}}
{{- fail "gatewayApi.enabled needs gatewayApi.parentRefs: name the Gateway, as [{name: my-gateway}]" -}}
{{- end -}}
{{- if and .Values.load.enabled (not .Values.gateway.enabled) (not .Values.load.url) -}}
{{- fail "load.enabled without a gateway in this release: set load.url" -}}
{{- end -}}
{{- end }}

{{- define "tandem.validateRedis" -}}
{{- $external := .Values.externalRedis -}}
{{- if and .Values.redis.enabled (or $external.host $external.urlKey) -}}
{{- fail "redis.enabled and externalRedis.host (or urlKey) are both set: there is one Redis; set redis.enabled=false to use the external one" -}}
{{- end -}}
{{- if and $external.urlKey (not $external.existingSecret) -}}
{{- fail "externalRedis.urlKey needs externalRedis.existingSecret, the Secret that has that key" -}}
{{- end -}}
{{- range $role := list "gateway" "accounts" -}}
{{- $own := get $external $role -}}
{{- if and (not (or $external.host $external.urlKey)) (or $own.username $own.existingSecret $own.urlKey) -}}
{{- fail (printf "externalRedis.%s has no effect without externalRedis.host or urlKey, which name the external Redis of this release; set one of them and redis.enabled=false%s" $role (ternary ", or for accounts elsewhere set gateway.settings.accounts" "" (eq $role "accounts"))) -}}
{{- end -}}
{{- if and $external.urlKey (not $own.urlKey) (or $own.username (ne $own.passwordKey "")) -}}
{{- fail (printf "externalRedis.%s.username and passwordKey have no effect beside externalRedis.urlKey, whose URL has a user: set externalRedis.%s.urlKey to the key of a URL with the user of this role" $role $role) -}}
{{- end -}}
{{- if and $own.urlKey (not $own.existingSecret) (not $external.existingSecret) -}}
{{- fail (printf "externalRedis.%s.urlKey needs externalRedis.%s.existingSecret or externalRedis.existingSecret, the Secret that has that key" $role $role) -}}
{{- end -}}
{{- end -}}
{{- $most := int64 (include "tandem.maxBlockReplicas" .) -}}
{{- $asked := int64 .Values.router.settings.maxBlockReplicas -}}
{{- if and .Values.redis.enabled (gt $asked $most) -}}
{{- fail (printf "router.settings.maxBlockReplicas=%d would fill Redis, and then no worker could announce itself: redis.maxMemoryMiB=%d has room for %d; lower it, or set redis.maxMemoryMiB=%d and redis.resources.limits.memory above it" $asked (int64 .Values.redis.maxMemoryMiB) $most (add1 (div (mul $asked 900) 6291456))) -}}
{{- end -}}
{{- $limit := dig "limits" "memory" "" .Values.redis.resources -}}
{{- $most := int64 .Values.redis.maxMemoryMiB -}}
{{- if and .Values.redis.enabled $limit (ge (mul $most 1048576) (int64 (include "tandem.bytes" $limit))) -}}
{{- fail (printf "redis.maxMemoryMiB=%d with redis.resources.limits.memory=%s: Redis would be killed before it is full; set redis.resources.limits.memory=%dMi or more, or lower redis.maxMemoryMiB" $most (include "tandem.scalar" $limit) (mul $most 2)) -}}
{{- end -}}
{{- end }}

{{- define "tandem.validateRouter" -}}
{{- $mode := .Values.discovery.mode -}}
{{- $hasRedis := eq (include "tandem.hasRedis" .) "true" -}}
{{- $router := .Values.router -}}
{{- if and (eq $mode "redis") (not $hasRedis) -}}
{{- fail "discovery.mode=redis needs a Redis: set redis.enabled=true or externalRedis.host, or discovery.mode=auto" -}}
{{- end -}}
{{- if and (eq $mode "announce") $hasRedis -}}
{{- fail "discovery.mode=announce is for fleets without Redis: set redis.enabled=false and no externalRedis, or discovery.mode=auto" -}}
{{- end -}}
{{- if and $router.enabled (not $hasRedis) (gt (int (include "tandem.maxReplicas" (dict "root" . "name" "router" "pool" $router))) 1) -}}
{{- fail "router.replicas above 1 needs Redis, where routers share which worker holds which prefix: set redis.enabled=true or externalRedis.host, or router.replicas=1 without autoscaling" -}}
{{- end -}}
{{- if and (not $router.enabled) (not $router.externalAddresses) -}}
{{- fail "router.enabled is false: set router.externalAddresses=host:7800 to the routers of another release, or router.enabled=true" -}}
{{- end -}}
{{- if and (not $router.enabled) (not .Values.clusterSecret.existingSecret) -}}
{{- fail "router.enabled is false, and routers of another release refuse a cluster secret that this one draws: set clusterSecret.existingSecret to the Secret with theirs, as other-tandem-secrets" -}}
{{- end -}}
{{- if and (not $router.enabled) .Values.redis.enabled -}}
{{- fail "router.enabled is false, and workers would announce themselves in a Redis of this release, which routers of another do not read: set redis.enabled=false, and externalRedis to the Redis of those routers if they have one" -}}
{{- end -}}
{{- end }}

{{/* A file of accounts is locked by the gateway that has it. What a Secret says cannot be known here. */}}
{{- define "tandem.validateAccounts" -}}
{{- $gateway := .Values.gateway -}}
{{- $where := default "" $gateway.settings.accounts -}}
{{- if and $gateway.enabled $gateway.allowAnonymous $where -}}
{{- fail "gateway.allowAnonymous=true and gateway.settings.accounts are both set: keys are asked for or they are not; remove one of them" -}}
{{- end -}}
{{- $named := list -}}
{{- $url := $where -}}
{{- $key := "gateway.settings.accounts" -}}
{{- range $gateway.extraEnv -}}
{{- $named = append $named .name -}}
{{- if eq .name "TANDEM_ACCOUNTS" -}}
{{- $url = default "" .value -}}
{{- $key = "gateway.extraEnv TANDEM_ACCOUNTS" -}}
{{- end -}}
{{- end -}}
{{- $isOwnRedis := and $gateway.enabled .Values.redis.enabled (hasPrefix "$(TANDEM_REDIS)" $url) -}}
{{- if and $isOwnRedis .Values.redis.auth.enabled -}}
{{- fail (printf "%s=$(TANDEM_REDIS) is the URL of the user gateway, which may not read accounts: remove it; without it they are in this release's Redis, asked for as the user accounts" $key) -}}
{{- end -}}
{{- if and $isOwnRedis (ne (include "tandem.redisIsKept" .) "true") -}}
{{- fail (printf "%s=$(TANDEM_REDIS) gives this release's Redis no volume, and all keys and budgets would be gone with its pod: remove it and have redis.persistence.enabled=true; without it accounts are in that Redis, on a volume" $key) -}}
{{- end -}}
{{- if and $gateway.enabled (not $gateway.allowAnonymous) (not $where) (not (has "TANDEM_ACCOUNTS" $named)) (ne (include "tandem.hasRedis" .) "true") -}}
{{- fail "gateways would ask for keys and have no place for them: set redis.enabled=true or externalRedis.host, or gateway.settings.accounts to a Redis of their own, or gateway.allowAnonymous=true where everybody who reaches them may use them" -}}
{{- end -}}
{{- if and $gateway.enabled .Values.redis.enabled (not .Values.redis.persistence.enabled) (eq (include "tandem.accountsAreInRedis" .) "true") -}}
{{- fail "redis.persistence.enabled=false, and all keys and budgets would be gone with Redis's pod: set it to true, or name another place for them in gateway.settings.accounts or set gateway.allowAnonymous=true" -}}
{{- end -}}
{{- $isFile := and $where (not (regexMatch "^((rediss?([+]sentinel)?|unix)://|[$][(])" $where)) -}}
{{- $isAlone := eq (include "tandem.maxReplicas" (dict "root" . "name" "gateway" "pool" $gateway)) "1" -}}
{{- $canSurge := not (has (toString $gateway.rollout.maxSurge) (list "0" "0%")) -}}
{{- if and $gateway.enabled $isFile (or (not $isAlone) $canSurge) -}}
{{- fail "gateway.settings.accounts is a file, and each gateway would have keys and budgets of its own or be refused by the one that locks it: name a Redis that all share, as redis://host:6379/0, or remove it to have them in the release's Redis, or set gateway.replicas=1 without autoscaling, gateway.rollout.maxSurge=0 and gateway.rollout.maxUnavailable=1" -}}
{{- end -}}
{{- end }}

{{/* Ranks are processes of one pod, or of several that are one worker. Takes root, name, pool. */}}
{{- define "tandem.validateRanks" -}}
{{- $tensor := int .pool.ranks.tensor -}}
{{- $hosts := int .pool.ranks.hosts -}}
{{- $pipeline := int .pool.ranks.pipeline -}}
{{- $context := int .pool.ranks.context -}}
{{- if and (eq $pipeline 1) (gt $hosts $tensor) -}}
{{- fail (printf "%s.ranks.hosts=%d with %s.ranks.tensor=%d: each pod needs a rank; set hosts to %d or fewer" .name $hosts .name $tensor $tensor) -}}
{{- end -}}
{{- if and (gt $hosts 1) .root.Values.planner.enabled -}}
{{- fail (printf "%s.ranks.hosts=%d with planner.enabled: the planner scales Deployments alone yet: set planner.enabled=false, and scale the LeaderWorkerSet by hand, HPA or KEDA" .name $hosts) -}}
{{- end -}}
{{- if and (gt $pipeline 1) (gt (mod $pipeline $hosts) 0) -}}
{{- fail (printf "%s.ranks.pipeline=%d with %s.ranks.hosts=%d: each pod has whole stages of layers; set as many stages as pods, or a multiple" .name $pipeline .name $hosts) -}}
{{- end -}}
{{- if and (gt $hosts 1) (gt $context 1) (eq $pipeline 1) -}}
{{- fail (printf "%s.ranks.context=%d with %s.ranks.hosts=%d: contexts of a stage are processes of one pod; set one of them to 1, or %s.ranks.pipeline=%d" .name $context .name $hosts .name $hosts) -}}
{{- end -}}
{{- if and (gt $context 1) (ne .name "prefill") -}}
{{- fail (printf "%s.ranks.context=%d: prompts are divided, and a decode step has one token of each request: set prefill.ranks.context, and %s.ranks.context=1" .name $context .name) -}}
{{- end -}}
{{- $ranks := mul $tensor $pipeline $context -}}
{{- $sizes := printf "%s.ranks.tensor=%d" .name $tensor -}}
{{- if or (gt $pipeline 1) (eq $context 1) -}}
{{- $sizes = printf "%s and %s.ranks.pipeline=%d" $sizes .name $pipeline -}}
{{- end -}}
{{- if gt $context 1 -}}
{{- $sizes = printf "%s and %s.ranks.context=%d" $sizes .name $context -}}
{{- end -}}
{{- if gt $ranks 16 -}}
{{- fail (printf "%s are %d ranks, and a worker has at most 16: lower one of them" $sizes $ranks) -}}
{{- end -}}
{{- if gt $ranks 1 -}}
{{- if ne .pool.accelerator.vendor "none" -}}
{{- fail (printf "%s with %s.accelerator.vendor=%s: ranks compute on CPUs alone yet; set the ranks to 1 or the vendor to none" $sizes .name .pool.accelerator.vendor) -}}
{{- end -}}
{{- $cpu := toString (dig "requests" "cpu" "0" .pool.resources) -}}
{{- $here := div $ranks $hosts -}}
{{- if or (and (hasSuffix "m" $cpu) (lt (int64 (trimSuffix "m" $cpu)) (mul 1000 $here))) (and (not (hasSuffix "m" $cpu)) (lt (float64 $cpu) (float64 $here))) -}}
{{- fail (printf "%s with %s.resources.requests.cpu=%s: ranks wait for each other, so each needs a CPU; ask for %d or more" $sizes .name $cpu $here) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "tandem.validatePool" -}}
{{- $name := .name -}}
{{- if has $name (list "prefill" "decode") -}}
{{- include "tandem.validateRanks" . -}}
{{- end -}}
{{- $scaling := .pool.autoscaling -}}
{{- if and $scaling.hpa.enabled $scaling.keda.enabled -}}
{{- fail (printf "%s.autoscaling.hpa and %s.autoscaling.keda would fight over its replicas: enable one of them" $name $name) -}}
{{- end -}}
{{- range $kind := list "hpa" "keda" -}}
{{- $own := index $scaling $kind -}}
{{- if and $own.enabled (eq $name "planner") -}}
{{- fail (printf "planner.autoscaling.%s: one planner leads, others only stand by; disable it and set planner.replicas" $kind) -}}
{{- end -}}
{{- if and $own.enabled (gt (int $own.minReplicas) (int $own.maxReplicas)) -}}
{{- fail (printf "%s.autoscaling.%s.minReplicas=%d is above maxReplicas=%d: lower one or raise the other" $name $kind (int $own.minReplicas) (int $own.maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- if and $scaling.hpa.enabled (not $scaling.hpa.metrics) -}}
{{- fail (printf "%s.autoscaling.hpa.metrics is empty: name a metric, or remove the line to get the default" $name) -}}
{{- end -}}
{{- if and $scaling.keda.enabled (not $scaling.keda.serverAddress) (not $scaling.keda.triggers) -}}
{{- fail (printf "%s.autoscaling.keda needs serverAddress (of Prometheus, as http://prometheus.monitoring:9090) or triggers of your own" $name) -}}
{{- end -}}
{{- $end := .pool.termination -}}
{{- $needed := add (int $end.preStopSeconds) (int $end.drainSeconds) 5 -}}
{{- if and (int $end.gracePeriodSeconds) (lt (int $end.gracePeriodSeconds) (int $needed)) -}}
{{- fail (printf "%s.termination.gracePeriodSeconds=%d would kill streams: preStopSeconds=%d and drainSeconds=%d need at least %d; raise it, lower those, or set 0 to have it computed" $name (int $end.gracePeriodSeconds) (int $end.preStopSeconds) (int $end.drainSeconds) (int $needed)) -}}
{{- end -}}
{{- if and (has (toString .pool.rollout.maxSurge) (list "0" "0%")) (has (toString .pool.rollout.maxUnavailable) (list "0" "0%")) -}}
{{- fail (printf "%s.rollout: maxSurge and maxUnavailable are both 0, so no pod could ever be replaced: set one of them to 1" $name) -}}
{{- end -}}
{{- if and (ne (toString .pool.pdb.minAvailable) "") (ne (toString .pool.pdb.maxUnavailable) "") (ne (toString .pool.pdb.maxUnavailable) "1") -}}
{{- fail (printf "%s.pdb: minAvailable and maxUnavailable are both set: keep one" $name) -}}
{{- end -}}
{{- include "tandem.validateDevices" . -}}
{{- include "tandem.validateExtraEnv" . -}}
{{- end }}

{{- define "tandem.validateDevices" -}}
{{- $accelerator := .pool.accelerator -}}
{{- if gt (int $accelerator.count) 1 -}}
{{- fail (printf "%s.accelerator.count=%d: a worker computes on one accelerator and the others would idle; set count=1, and more replicas" .name (int $accelerator.count)) -}}
{{- end -}}
{{- if and (ne $accelerator.vendor "none") $accelerator.claims -}}
{{- fail (printf "%s.accelerator: vendor=%s and claims would ask for accelerators twice: with claims set vendor=none" .name $accelerator.vendor) -}}
{{- end -}}
{{- if and (ne $accelerator.vendor "none") (not $accelerator.resource) (not (get .root.Values.acceleratorResources $accelerator.vendor)) -}}
{{- fail (printf "%s.accelerator.vendor=%s is unknown: use none or one of %s, add it to acceleratorResources, or set accelerator.resource" .name $accelerator.vendor (keys .root.Values.acceleratorResources | sortAlpha | join ", ")) -}}
{{- end -}}
{{- if and (eq $accelerator.vendor "none") $accelerator.resource -}}
{{- fail (printf "%s.accelerator.resource=%s is not asked for while vendor=none: set vendor" .name $accelerator.resource) -}}
{{- end -}}
{{- end }}

{{- define "tandem.validateExtraEnv" -}}
{{- $own := list -}}
{{- range include "tandem.env" . | fromYamlArray -}}
{{- $own = append $own .name -}}
{{- end -}}
{{- range .pool.extraEnv -}}
{{- if has .name $own -}}
{{- fail (printf "%s.extraEnv sets %s, which the chart sets too: use the value that it comes from, or %s.settings" $.name .name $.name) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* TCP carries CPU memory only. */}}
{{- define "tandem.validateTransport" -}}
{{- $prefill := .Values.prefill -}}
{{- $decode := .Values.decode -}}
{{- $onAccelerators := or (ne $prefill.accelerator.vendor "none") $prefill.accelerator.claims -}}
{{- $decodeOnAccelerators := or (ne $decode.accelerator.vendor "none") $decode.accelerator.claims -}}
{{- if and $prefill.enabled (ne (empty $onAccelerators) (empty $decodeOnAccelerators)) -}}
{{- fail "accelerators in one of prefill and decode: KV blocks do not move between a CPU and a GPU, so decode would compute every prompt itself: set accelerator in both, or prefill.enabled=false" -}}
{{- end -}}
{{- $overRdma := and $prefill.rdma.enabled $decode.rdma.enabled -}}
{{- $overCudaIpc := and $prefill.hostIPC $prefill.hostPID $decode.hostIPC $decode.hostPID -}}
{{- if and $prefill.enabled $onAccelerators (not (or $overRdma $overCudaIpc)) -}}
{{- fail "prefill.accelerator without a transport between GPUs, so decode would compute every prompt itself: set rdma.enabled=true in prefill and decode (and rdma.resource empty where pods have the devices without asking), or hostIPC=true and hostPID=true in both where they share nodes, or prefill.enabled=false" -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $values := index $.Values $role -}}
{{- if ne (empty $values.hostIPC) (empty $values.hostPID) -}}
{{- fail (printf "%s.hostIPC and hostPID are not both true, or both false: CUDA IPC between pods needs both, and nothing else needs either: set both, or none" $role) -}}
{{- end -}}
{{- end -}}
{{- $hostname := "kubernetes.io/hostname" -}}
{{- $isPlaced := or $prefill.affinity $decode.affinity (and (hasKey $prefill.nodeSelector $hostname) (hasKey $decode.nodeSelector $hostname)) -}}
{{- if and $prefill.enabled $onAccelerators $overCudaIpc (not $overRdma) (not $isPlaced) -}}
{{- fail "hostIPC and hostPID in prefill and decode without anything that puts their pods on one node, and CUDA IPC reaches no other: set decode.affinity to a podAffinity to prefill's pods (topologyKey kubernetes.io/hostname, as examples/values-nvlink.yaml has it), or nodeSelector with kubernetes.io/hostname in both, or rdma.enabled=true in both" -}}
{{- end -}}
{{- end }}

{{- define "tandem.validatePlanner" -}}
{{- $planner := .Values.planner -}}
{{- if $planner.enabled -}}
{{- if not (and .Values.prefill.enabled .Values.gateway.enabled) -}}
{{- fail "planner.enabled needs prefill.enabled and gateway.enabled: it weighs both pools by what the gateways count" -}}
{{- end -}}
{{- range $name := list "prefill" "decode" -}}
{{- $scaling := (index $.Values $name).autoscaling -}}
{{- if and (eq $planner.mode "act") (or $scaling.hpa.enabled $scaling.keda.enabled) -}}
{{- fail (printf "planner.mode=act and %s.autoscaling would fight over its replicas: disable the autoscaler, or set planner.mode=advise" $name) -}}
{{- end -}}
{{- $limits := index $planner.limits $name -}}
{{- if gt (int $limits.min) (int $limits.max) -}}
{{- fail (printf "planner.limits.%s.min=%d is above max=%d: lower one or raise the other" $name (int $limits.min) (int $limits.max)) -}}
{{- end -}}
{{- end -}}
{{- $fewest := add (mul (int $planner.limits.prefill.min) (int (include "tandem.numAccelerators" .Values.prefill))) (mul (int $planner.limits.decode.min) (int (include "tandem.numAccelerators" .Values.decode))) -}}
{{- if and (int $planner.maxAccelerators) (lt (int $planner.maxAccelerators) (int $fewest)) -}}
{{- fail (printf "planner.maxAccelerators=%d is too few: planner.limits need at least %d; raise it or lower the minimums" (int $planner.maxAccelerators) (int $fewest)) -}}
{{- end -}}
{{- end -}}
{{- end }}
