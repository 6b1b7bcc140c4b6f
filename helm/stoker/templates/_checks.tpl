{{/* Values that contradict one another: all of them at once, each with what to do. */}}
{{- define "stoker.check" -}}
{{- if not (and .Values.slots .Values.database .Values.test) -}}
{{- fail "\n\nThe values are those of an earlier release of this chart (--reuse-values): upgrade with --reset-then-reuse-values, which adds the values that are new.\n" -}}
{{- end -}}
{{- include "stoker.settleMode" . -}}
{{- $pods := eq (include "stoker.pods" .) "true" -}}
{{- $sql := eq (include "stoker.postgresql" .) "true" -}}
{{- $several := or (gt (int .Values.replicas) 1) .Values.autoscaling.enabled -}}
{{- $wrong := list -}}
{{- if and $several (not $sql) -}}
{{- $wrong = append $wrong "several copies of the control plane (replicas, autoscaling) need PostgreSQL: give database.url or database.existingSecret, or replicas: 1" -}}
{{- end -}}
{{- if and $several (not $pods) -}}
{{- $wrong = append $wrong "several copies need slots of their own: set slots.mode to pods, or replicas to 1" -}}
{{- end -}}
{{- if and $pods $sql (not .Values.objectStore.uri) (not .Values.objectStore.existingClaim) -}}
{{- $wrong = append $wrong "with PostgreSQL the control plane has no volume of its own, so KV and prepared checkpoints need a place: give objectStore.uri (s3://BUCKET/PREFIX) or objectStore.existingClaim" -}}
{{- end -}}
{{- if and .Values.objectStore.uri .Values.objectStore.existingClaim -}}
{{- $wrong = append $wrong "objectStore.uri and objectStore.existingClaim are two places for the same: give one" -}}
{{- end -}}
{{- if and .Values.objectStore.existingSecret (not .Values.objectStore.uri) -}}
{{- $wrong = append $wrong "objectStore.existingSecret has the credentials of a bucket, and objectStore.uri names none" -}}
{{- end -}}
{{- if and .Values.database.url (regexMatch "^[a-z]+://[^/@]*:[^/@]*@" .Values.database.url) -}}
{{- $wrong = append $wrong "database.url holds a password: put that into a secret (field password), name it in database.existingSecret, and leave user and host in the URL" -}}
{{- end -}}
{{- if and .Values.database.caSecret (not $sql) -}}
{{- $wrong = append $wrong "database.caSecret is about PostgreSQL, and neither database.url nor database.existingSecret names one" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- $wrong = append $wrong "autoscaling.minReplicas is above autoscaling.maxReplicas" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled .Values.replicas -}}
{{- $wrong = append $wrong "replicas and autoscaling would fight over the number of copies: leave replicas at 0" -}}
{{- end -}}
{{- if and .Values.monitoring.serviceMonitor.enabled .Values.monitoring.podMonitor.enabled -}}
{{- $wrong = append $wrong "monitoring.serviceMonitor and monitoring.podMonitor would both scrape every copy, and every figure count twice: enable one" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- $wrong = append $wrong "ingress.enabled without ingress.hosts: name the hosts under which Stoker is reached" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- $wrong = append $wrong "httpRoute.enabled without httpRoute.parentRefs: name the gateway that the route belongs to" -}}
{{- end -}}
{{- if and $pods (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) -}}
{{- $wrong = append $wrong "serviceAccount.create is false and serviceAccount.name empty: rights on pods would go to the namespace's default account, which others use too; name one" -}}
{{- end -}}
{{- if and (not $pods) .Values.slots.podDisruptionBudget.enabled -}}
{{- $wrong = append $wrong "slots.podDisruptionBudget needs slots.mode: pods; the one pod of mode embedded has no budget, which would hinder every drain of its node" -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "stoker.fullname" .)) -}}
{{- $wrong = append $wrong (printf "%s cannot be the name of a Service, which begins with a letter: give fullnameOverride" (include "stoker.fullname" .)) -}}
{{- end -}}
{{- range $name, $value := .Values.settings -}}
{{- if has $name (list "STOKER_DATABASE" "STOKER_STORE" "STOKER_SLOT_STORE" "STOKER_HOST" "STOKER_PORT" "STOKER_DATA_DIR" "STOKER_DRAIN_S" "STOKER_WARM_WORKERS" "STOKER_ALLOWED_MODELS" "STOKER_ADVERTISE_URL" "STOKER_BACKEND" "STOKER_NAMESPACE" "STOKER_RELEASE" "STOKER_POD_NAME" "STOKER_POD_IP" "STOKER_AGENT_SECRET_FILE" "STOKER_SLOT_IMAGE" "STOKER_SLOT_POOLS_FILE" "STOKER_SLOT_POOLS_OWNER" "STOKER_SLOT_POOL" "STOKER_FUNCTION_OBJECTS" "STOKER_REQUIRED" "STOKER_TRACE_SHARE") -}}
{{- $wrong = append $wrong (printf "settings.%s is what other values say (database, objectStore, slots, drainSeconds, warmWorkers, allowedModels, tracing): set those" $name) -}}
{{- end -}}
{{- if has $name (list "STOKER_ADMIN_KEY" "STOKER_MASTER_KEY") -}}
{{- $wrong = append $wrong (printf "settings.%s would put a secret into the release's values: name an existing secret instead (adminKeySecret, masterKeySecret)" $name) -}}
{{- end -}}
{{- end -}}
{{- if not $sql -}}
{{- $set := lookup "apps/v1" "StatefulSet" .Release.Namespace (include "stoker.fullname" .) | default dict -}}
{{- range dig "spec" "volumeClaimTemplates" list $set -}}
{{- $size := dig "spec" "resources" "requests" "storage" "" . -}}
{{- if and (eq .metadata.name "data") $size (ne $size $.Values.persistence.size) -}}
{{- $wrong = append $wrong (printf "persistence.size is fixed by the first installation (%s): keep it there; to have more, raise the claim itself: kubectl -n %s patch pvc data-%s-0 -p '{\"spec\":{\"resources\":{\"requests\":{\"storage\":\"%s\"}}}}'" $size $.Release.Namespace (include "stoker.fullname" $) $.Values.persistence.size) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $wrong -}}
{{- fail (printf "\n\nThese values do not go together:\n  - %s\n" (join "\n  - " $wrong)) -}}
{{- end -}}
{{- end -}}
