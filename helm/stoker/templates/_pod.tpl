{{/* The control plane's pod, in whichever workload it is. Limits: the one place where embedded and pods differ. */}}
{{- define "stoker.podTemplate" -}}
{{- $pods := eq (include "stoker.pods" .) "true" -}}
{{- $several := eq (include "stoker.several" .) "true" -}}
metadata:
  labels:
    {{- include "stoker.controlPlane" . | nindent 4 }}
    app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
    {{- /* By which an endpoint picker of the Inference Extension knows the names of metrics: this key and its newer one. */}}
    {{- $picked := dict "inference.networking.k8s.io/engine-type" "vllm" "llm-d.ai/engine-type" "vllm" }}
    {{- with omit (merge (dict) .Values.podLabels .Values.commonLabels $picked) "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "app.kubernetes.io/version" }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $annotations := merge (dict) .Values.podAnnotations .Values.commonAnnotations }}
  {{- if $pods }}
  {{- /* Slot pools are read at the start: other ones are another start. */}}
  {{- $_ := set $annotations "stoker.dev/slot-pools" (include "stoker.slotPools" . | sha256sum | trunc 16) }}
  {{- end }}
  {{- with $annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "stoker.serviceAccount" . }}
  automountServiceAccountToken: {{ $pods }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add .Values.drainSeconds 15 (ternary .Values.preStopSeconds 0 $several | int) }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  securityContext: {{- include "stoker.podSecurity" . | nindent 4 }}
  containers:
    - name: stoker
      image: {{ include "stoker.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: ["up", "--data-dir", "/data", "--host", "0.0.0.0", "--port", "8080"]
      env: {{- include "stoker.env" . | nindent 8 }}
      {{- with .Values.extraEnvFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: http, containerPort: 8080}
      startupProbe:
        httpGet: {path: /health/live, port: http}
        periodSeconds: 1
        failureThreshold: 120
      livenessProbe:
        httpGet: {path: /health/live, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /health/ready, port: http}
        periodSeconds: 2
        timeoutSeconds: 2
      {{- if and $several .Values.preStopSeconds }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ .Values.preStopSeconds }}}
      {{- end }}
      securityContext: {{- include "stoker.containerSecurity" . | nindent 8 }}
      {{- if $pods }}
      resources: {{- toYaml .Values.resources | nindent 8 }}
      {{- else }}
      resources:
        requests: {{- merge (dict) .Values.slot.devices .Values.slot.resources.requests | toYaml | nindent 10 }}
        limits: {{- merge (dict) .Values.slot.devices .Values.slot.resources.limits | toYaml | nindent 10 }}
      {{- end }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        - {name: data, mountPath: /data}
        - {name: tmp, mountPath: /tmp}
        {{- if not $pods }}
        - {name: pool, mountPath: /dev/shm}
        {{- else }}
        - {name: agent-secret, mountPath: /secrets/agent, readOnly: true}
        - {name: slot-pools, mountPath: /config, readOnly: true}
        {{- end }}
        {{- if .Values.database.caSecret }}
        - {name: database-ca, mountPath: /secrets/database, readOnly: true}
        {{- end }}
        {{- if .Values.objectStore.existingClaim }}
        - {name: objects, mountPath: /objects}
        {{- end }}
        {{- if .Values.functionSecrets }}
        - {name: function-secrets, mountPath: /data/secrets, readOnly: true}
        {{- end }}
        {{- with .Values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: {{ .Values.scratch.size }}}
    {{- if $several }}
    - name: data
      emptyDir: {sizeLimit: {{ .Values.scratch.size }}}
    {{- end }}
    {{- if not $pods }}
    - name: pool
      emptyDir: {medium: Memory, sizeLimit: {{ .Values.slot.pool }}}
    {{- else }}
    - name: agent-secret
      secret: {secretName: {{ include "stoker.agentSecret" . }}, defaultMode: 0440, optional: true}
    - name: slot-pools
      configMap: {name: {{ include "stoker.derived" (list . "slot-pools") }}}
    {{- end }}
    {{- if .Values.database.caSecret }}
    - name: database-ca
      secret: {secretName: {{ .Values.database.caSecret }}, defaultMode: 0440, optional: true, items: [{key: {{ .Values.database.caKey }}, path: ca.crt}]}
    {{- end }}
    {{- if .Values.objectStore.existingClaim }}
    - name: objects
      persistentVolumeClaim: {claimName: {{ .Values.objectStore.existingClaim }}}
    {{- end }}
    {{- if .Values.functionSecrets }}
    - name: function-secrets
      projected:
        defaultMode: 0440
        sources:
          {{- range .Values.functionSecrets }}
          - secret: {name: {{ . }}, optional: true}
          {{- end }}
    {{- end }}
    {{- with .Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and $several (or .Values.topologySpread.host .Values.topologySpread.zone) }}
  topologySpreadConstraints:
    {{- range $key, $how := dict "kubernetes.io/hostname" .Values.topologySpread.host "topology.kubernetes.io/zone" .Values.topologySpread.zone }}
    {{- if $how }}
    - topologyKey: {{ $key }}
      maxSkew: 1
      whenUnsatisfiable: {{ $how }}
      matchLabelKeys: [pod-template-hash]
      labelSelector:
        matchLabels: {{- include "stoker.controlPlane" $ | nindent 10 }}
    {{- end }}
    {{- end }}
  {{- end }}
{{- end -}}

{{/*
The environment of the control plane. Secrets are optional on purpose: where one is missing the pod starts, is not
ready, and says which (STOKER_REQUIRED names each with where it should come from), instead of hanging before its start.
*/}}
{{- define "stoker.env" -}}
{{- $required := dict "STOKER_ADMIN_KEY" (printf "field admin-key of secret %s" (include "stoker.adminKeySecret" .)) -}}
- name: HOME
  value: /tmp
{{- /* For commands inside of the pod: kubectl exec POD -- stoker doctor. */}}
- name: STOKER_DATA_DIR
  value: /data
- name: STOKER_URL
  value: http://127.0.0.1:8080
- name: STOKER_DRAIN_S
  value: {{ .Values.drainSeconds | quote }}
- name: STOKER_WARM_WORKERS
  value: {{ .Values.warmWorkers | quote }}
{{- with .Values.tracing.endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
- name: STOKER_TRACE_SHARE
  value: {{ $.Values.tracing.share | quote }}
{{- end }}
- name: STOKER_ALLOWED_MODELS
  value: {{ append .Values.allowedModels .Values.test.model | uniq | join "," | quote }}
- name: STOKER_ADMIN_KEY
  valueFrom: {secretKeyRef: {name: {{ include "stoker.adminKeySecret" . }}, key: admin-key, optional: true}}
{{- with .Values.masterKeySecret }}
{{- $_ := set $required "STOKER_MASTER_KEY" (printf "field master-key of secret %s" .) }}
- name: STOKER_MASTER_KEY
  valueFrom: {secretKeyRef: {name: {{ . }}, key: master-key, optional: true}}
{{- end }}
{{- if .Values.database.url }}
- name: STOKER_DATABASE
  value: {{ .Values.database.url | quote }}
{{- with .Values.database.existingSecret }}
{{- $_ := set $required "PGPASSWORD" (printf "field %s of secret %s" $.Values.database.passwordKey .) }}
- name: PGPASSWORD
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.Values.database.passwordKey }}, optional: true}}
{{- end }}
{{- else if .Values.database.existingSecret }}
{{- $_ := set $required "STOKER_DATABASE" (printf "field %s of secret %s" .Values.database.urlKey .Values.database.existingSecret) }}
- name: STOKER_DATABASE
  valueFrom: {secretKeyRef: {name: {{ .Values.database.existingSecret }}, key: {{ .Values.database.urlKey }}, optional: true}}
{{- end }}
{{- if .Values.database.caSecret }}
- name: PGSSLROOTCERT
  value: /secrets/database/ca.crt
- name: PGSSLMODE
  value: verify-full
{{- end }}
{{- if .Values.objectStore.existingClaim }}
- name: STOKER_STORE
  value: file:///objects
{{- if include "stoker.pods" . }}
- name: STOKER_SLOT_STORE
  value: http+stoker://{{ include "stoker.fullname" . }}.{{ .Release.Namespace }}:{{ .Values.service.port }}
{{- end }}
{{- else if .Values.objectStore.uri }}
- name: STOKER_STORE
  value: {{ .Values.objectStore.uri | quote }}
{{- else if include "stoker.pods" . }}
- name: STOKER_STORE
  value: http+stoker://{{ include "stoker.fullname" . }}.{{ .Release.Namespace }}:{{ .Values.service.port }}
{{- end }}
{{- with .Values.objectStore.existingSecret }}
{{- range $variable, $key := dict "AWS_ACCESS_KEY_ID" $.Values.objectStore.accessKeyIdKey "AWS_SECRET_ACCESS_KEY" $.Values.objectStore.secretAccessKeyKey }}
{{- $_ := set $required $variable (printf "field %s of secret %s" $key $.Values.objectStore.existingSecret) }}
- name: {{ $variable }}
  valueFrom: {secretKeyRef: {name: {{ $.Values.objectStore.existingSecret }}, key: {{ $key }}, optional: true}}
{{- end }}
{{- end }}
{{- if include "stoker.pods" . }}
- name: STOKER_BACKEND
  value: kubernetes
- name: STOKER_RELEASE
  value: {{ .Release.Name | quote }}
- name: STOKER_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: STOKER_POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: STOKER_POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: STOKER_ADVERTISE_URL
  value: http://$(STOKER_POD_IP):8080
- name: STOKER_AGENT_SECRET_FILE
  value: /secrets/agent/agent-secret
- name: STOKER_SLOT_IMAGE
  value: {{ include "stoker.image" . }}
- name: STOKER_SLOT_POOLS_FILE
  value: /config/slot-pools.yaml
- name: STOKER_SLOT_POOLS_OWNER
  value: {{ include "stoker.derived" (list . "slot-pools") }}
- name: STOKER_SLOT_POOL
  value: {{ .Values.slots.defaultPool }}
- name: STOKER_FUNCTION_OBJECTS
  value: {{ .Values.slots.functionObjects }}
{{- end }}
- name: STOKER_REQUIRED
  value: {{ $required | toJson | quote }}
{{- range $name, $value := .Values.settings }}
- name: {{ $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}
