{{- define "headway.labels" -}}
app.kubernetes.io/name: headway
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: headway
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "headway.image" -}}
{{ .repository }}@{{ .digest }}
{{- end -}}

{{- define "headway.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "headway.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "headway.databaseEnv" -}}
- name: HEADWAY_DATABASE_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.catalog.secret }}, key: {{ .Values.catalog.key }}}}
- name: HEADWAY_ONLINE_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.onlineStore.secret }}, key: {{ .Values.onlineStore.key }}}}
{{- end -}}

{{- define "headway.pullSecrets" -}}
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end -}}
