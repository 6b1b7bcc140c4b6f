{{/* Part of selectors: cut as the first release of the chart cut it, for ever. */}}
{{- define "stoker.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/*
Beginning of all names, at most 40 characters, so that what Kubernetes appends to it stays under 63. A longer one is cut
and gets a hash, so that two releases whose names begin alike do not meet. The first release of the chart cut without a
hash: where it left a StatefulSet of this release, that name and its volume are kept.
*/}}
{{- define "stoker.fullname" -}}
{{- $long := .Release.Name -}}
{{- if .Values.fullnameOverride -}}
{{- $long = .Values.fullnameOverride -}}
{{- else if not (contains (include "stoker.name" .) .Release.Name) -}}
{{- $long = printf "%s-%s" .Release.Name (include "stoker.name" .) -}}
{{- end -}}
{{- $long = $long | replace "." "-" -}}
{{- $cut := $long | trunc 40 | trimSuffix "-" -}}
{{- if le (len $long) 40 -}}
{{- $cut -}}
{{- else -}}
{{- $old := lookup "apps/v1" "StatefulSet" .Release.Namespace $cut -}}
{{- if eq (dig "metadata" "annotations" "meta.helm.sh/release-name" "" ($old | default dict)) .Release.Name -}}
{{- $cut -}}
{{- else -}}
{{- printf "%s-%s" ($long | trunc 31 | trimSuffix "-") (sha256sum $long | trunc 8) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (list . "suffix"): a name after the release's, at most 63 characters. */}}
{{- define "stoker.derived" -}}
{{- $long := printf "%s-%s" (include "stoker.fullname" (first .)) (last .) -}}
{{- if le (len $long) 63 -}}
{{- $long -}}
{{- else -}}
{{- printf "%s-%s" ($long | trunc 54 | trimSuffix "-") (sha256sum $long | trunc 8) -}}
{{- end -}}
{{- end -}}

{{/* The immutable part: never anything that an upgrade changes. */}}
{{- define "stoker.selector" -}}
app.kubernetes.io/name: {{ include "stoker.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* Pods of the control plane and not those of slots, which carry the same name and instance. */}}
{{- define "stoker.controlPlane" -}}
{{ include "stoker.selector" . }}
app.kubernetes.io/component: control-plane
{{- end -}}

{{/* Pods of slots: their labels are the control plane's doing, and do not follow nameOverride. */}}
{{- define "stoker.slots" -}}
app.kubernetes.io/name: stoker
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: slot
{{- end -}}

{{- define "stoker.labels" -}}
{{- $own := fromYaml (include "stoker.selector" .) -}}
{{- $_ := set $own "app.kubernetes.io/version" .Chart.AppVersion -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .Release.Service -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version) -}}
{{- toYaml (merge $own .Values.commonLabels) -}}
{{- end -}}

{{/* (list . name [annotations [labels]]): the metadata that every object begins with. */}}
{{- define "stoker.metadata" -}}
{{- $root := index . 0 -}}
{{- $more := dict -}}
{{- $labels := dict -}}
{{- if gt (len .) 2 }}{{ $more = index . 2 }}{{ end -}}
{{- if gt (len .) 3 }}{{ $labels = index . 3 }}{{ end -}}
name: {{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels: {{- merge (fromYaml (include "stoker.labels" $root)) $labels | toYaml | nindent 2 }}
{{- with merge (dict) $more $root.Values.commonAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "stoker.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{/*
Every template begins with `stoker.check`, which begins with this: `auto` becomes what it means here. A release whose slot
is in its control plane's pod, as it was in the first release of the chart, stays what it is.
*/}}
{{- define "stoker.settleMode" -}}
{{- if eq .Values.slots.mode "auto" -}}
{{- $set := lookup "apps/v1" "StatefulSet" .Release.Namespace (include "stoker.fullname" .) | default dict -}}
{{- $mode := "pods" -}}
{{- range dig "spec" "template" "spec" "volumes" list $set -}}
{{- if eq .name "pool" }}{{ $mode = "embedded" }}{{ end -}}
{{- end -}}
{{- $_ := set .Values.slots "mode" $mode -}}
{{- end -}}
{{- end -}}

{{/* Whether something is so: "true" or nothing. */}}
{{- define "stoker.pods" -}}{{- if eq .Values.slots.mode "pods" }}true{{ end -}}{{- end -}}
{{- define "stoker.postgresql" -}}
{{- if or .Values.database.url .Values.database.existingSecret }}true{{ end -}}
{{- end -}}
{{/* A Deployment, whose copies share everything by PostgreSQL; otherwise a StatefulSet of one with a volume. */}}
{{- define "stoker.several" -}}
{{- if and (include "stoker.pods" .) (include "stoker.postgresql" .) }}true{{ end -}}
{{- end -}}

{{- define "stoker.replicas" -}}
{{- if .Values.replicas -}}{{ .Values.replicas | int }}
{{- else -}}{{ ternary 2 1 (eq (include "stoker.several" .) "true") }}
{{- end -}}
{{- end -}}

{{- define "stoker.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}{{ default (include "stoker.fullname" .) .Values.serviceAccount.name }}
{{- else -}}{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}
{{- define "stoker.slotServiceAccount" -}}
{{- if .Values.slots.serviceAccount.create -}}
{{ default (include "stoker.derived" (list . "slot")) .Values.slots.serviceAccount.name }}
{{- else -}}{{ .Values.slots.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{/*
(list . name): who has installed this definition, if not this release. It is theirs to upgrade; Helm would refuse the
whole release over it.
*/}}
{{- define "stoker.foreignOwner" -}}
{{- $root := first . -}}
{{- $found := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" (last .) | default dict -}}
{{- if $found -}}
{{- $name := dig "metadata" "annotations" "meta.helm.sh/release-name" "" $found -}}
{{- $namespace := dig "metadata" "annotations" "meta.helm.sh/release-namespace" "" $found -}}
{{- if not $name -}}somebody without Helm
{{- else if or (ne $name $root.Release.Name) (ne $namespace $root.Release.Namespace) -}}release {{ $name }} of namespace {{ $namespace }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Slot pools by name, with what all of them need. */}}
{{- define "stoker.slotPools" -}}
{{- $pools := dict -}}
{{- $shared := dict -}}
{{- with include "stoker.slotServiceAccount" . }}{{ $_ := set $shared "serviceAccountName" . }}{{ end -}}
{{- with .Values.image.pullSecrets }}{{ $_ := set $shared "imagePullSecrets" . }}{{ end -}}
{{- with .Values.objectStore.existingSecret -}}
{{- $_ := set $shared "secretEnv" (dict "AWS_ACCESS_KEY_ID" (dict "name" . "key" $.Values.objectStore.accessKeyIdKey) "AWS_SECRET_ACCESS_KEY" (dict "name" . "key" $.Values.objectStore.secretAccessKeyKey)) -}}
{{- end -}}
{{- range $name, $spec := .Values.slots.pools -}}
{{- $whole := merge (dict) $spec $shared -}}
{{- with $.Values.objectStore.existingClaim -}}
{{- $_ := set $whole "volumes" (append ($spec.volumes | default list) (dict "name" "objects" "persistentVolumeClaim" (dict "claimName" .))) -}}
{{- $_ := set $whole "volumeMounts" (append ($spec.volumeMounts | default list) (dict "name" "objects" "mountPath" "/objects")) -}}
{{- end -}}
{{- $_ := set $pools $name $whole -}}
{{- end -}}
{{- toYaml $pools -}}
{{- end -}}

{{- define "stoker.adminKeySecret" -}}
{{ default (include "stoker.derived" (list . "admin")) .Values.adminKeySecret }}
{{- end -}}
{{- define "stoker.agentSecret" -}}
{{ default (include "stoker.derived" (list . "agent")) .Values.agentSecret }}
{{- end -}}

{{/* (list . secret field): a value that was made once stays what it is. */}}
{{- define "stoker.kept" -}}
{{- $root := index . 0 -}}
{{- $field := index . 2 -}}
{{- $found := lookup "v1" "Secret" $root.Release.Namespace (index . 1) | default dict -}}
{{- dig "data" $field "" $found | default (randAlphaNum 48 | b64enc) -}}
{{- end -}}

{{- define "stoker.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}
{{- define "stoker.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}
