{{- /* Fixed: the NetworkPolicies that the operator makes let pods of this name in. */ -}}
{{- define "pd-operator.name" -}}
pd-operator
{{- end -}}

{{- define "pd-operator.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "pd-operator.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "pd-operator.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "pd-operator.selectorLabels" -}}
app.kubernetes.io/name: {{ include "pd-operator.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "pd-operator.labels" -}}
{{ include "pd-operator.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "pd-operator.image" -}}
{{- $repository := required "image.repository: set it to where you keep the operator's image, e.g. --set image.repository=example.com/pd-operator" .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" $repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- /* Namespaces that a namespaced install watches, as JSON: {"items": [...]}. */ -}}
{{- define "pd-operator.watchNamespaces" -}}
{{- dict "items" (default (list .Release.Namespace) .Values.watchNamespaces) | toJson -}}
{{- end -}}

{{- /* The Lease that decides who works. An install in another namespace has its own. */ -}}
{{- define "pd-operator.lease" -}}
{{- include "pd-operator.fullname" . -}}
{{- end -}}

{{- /*
What the operator does in a namespace that it watches; the list of kinds is operator/pd_operator/kube/kinds.py.
The spec of a PDDeployment is never written: no verb but get, list and watch on it.
*/ -}}
{{- define "pd-operator.rules" -}}
- apiGroups: [pdserve.dev]
  resources: [pddeployments]
  verbs: [get, list, watch]
- apiGroups: [pdserve.dev]
  resources: [pddeployments/status]
  verbs: [patch]
# Children name their owner with blockOwnerDeletion; the admission plugin OwnerReferencesPermissionEnforcement asks for this.
- apiGroups: [pdserve.dev]
  resources: [pddeployments/finalizers]
  verbs: [update]
- apiGroups: [pdserve.dev]
  resources: [pdpools]
  verbs: [get, list, watch, create, patch]
- apiGroups: [pdserve.dev]
  resources: [pdpools/status, pdpools/scale]
  verbs: [patch]
- apiGroups: [apps]
  resources: [deployments, controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [list, watch, create, delete]
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# Kinds of other projects: a cluster without their CRDs is fine.
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, list, watch, create, patch, delete]
# Two writers of one number are named; an HPA is never written.
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [list, watch]
# The router's Role holds list and watch on pods: nobody may grant what he does not hold.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
# Does what the spec names exist? Only metadata is asked for (PartialObjectMetadata); RBAC cannot express that.
- apiGroups: [""]
  resources: [secrets, configmaps, persistentvolumeclaims]
  verbs: [get]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{- /* The settings file, see operator/pd_operator/settings.py. Image components without a value are left out: "no entry". */ -}}
{{- define "pd-operator.settings" -}}
{{- $images := dict "canary" (include "pd-operator.image" .) -}}
{{- range $table := list .Values.images.engine .Values.images.router (dict "lmcache" .Values.images.lmcache) -}}
{{- range $component, $image := $table -}}
{{- if $image -}}
{{- $_ := set $images $component $image -}}
{{- end -}}
{{- end -}}
{{- end -}}
install: {{ printf "%s.%s" .Release.Namespace (include "pd-operator.fullname" .) | trunc 63 | trimSuffix "-" | trimSuffix "." | quote }}
{{- if eq .Values.scope "namespaced" }}
watchNamespaces: {{ (include "pd-operator.watchNamespaces" . | fromJson).items | toJson }}
{{- end }}
images: {{ toJson $images }}
pullPolicy: {{ .Values.images.pullPolicy }}
monitoringNamespace: {{ .Values.monitoring.namespace | quote }}
leaseName: {{ include "pd-operator.lease" . | quote }}
httpPort: 8081
logLevel: {{ .Values.log.level | upper }}
signals: {{ toJson .Values.signals }}
budgets: {{ toJson (.Values.budgets | default list) }}
decisionLog: {{ .Values.log.decisions | quote }}
{{- end -}}
